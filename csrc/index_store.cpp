// Store: device -> host, device -> transit -> disk, host -> disk. The rules are in index.h.
#include <algorithm>

#include "index_inline.h"

namespace kvoffload {

namespace {

// The first block of a group that ends at or beyond `position` base blocks, within the span.
std::uint32_t block_at(std::uint32_t position, std::uint32_t multiple, const Span& span) {
    return std::clamp((position + multiple - 1) / multiple - 1, span.begin, std::max(span.begin, span.end));
}

}  // namespace

OfferResult Index::offer(std::uint32_t segment, const Chain& chain, const std::vector<Span>& spans) {
    OfferResult result;
    start(segment, chain, spans);
    for (const Span& s : spans) result.cursors.push_back(std::max(s.begin, s.end));
    if (items_.empty() || stuck(segment, chain, spans, result)) return result;
    find_all(chain);
    order_.touch(segment, static_cast<std::uint32_t>(items_.size()));
    relate(segment, chain, items_.size());
    classify(segment, spans, result);
    place(segment, chain, spans, result);
    emit_stores(segment, chain, spans, result);
    return result;
}

// True when the walk would end with its first block. Changes nothing.
bool Index::stuck(std::uint32_t segment, const Chain& chain, const std::vector<Span>& spans,
                  OfferResult& result) {
    if (order_.policy(kHost).learns()) return false;
    const Item& first = items_.front();
    const std::uint8_t* key = chain.at(group(first.group).multiple, first.block);
    if (page(spans, first) == nullptr || tables_[first.group].find(hash_key(key), key) != kNone) return false;
    const Newcomer x = newcomer(segment, first);
    const bool fits =
        could_make_room(kHost, x, chain) || (disk_takes_new() && transit_.could_promise(x.group));
    restart_batch();
    if (fits) return false;
    result.refused = disk_takes_new() ? 0 : 1;
    for (std::uint32_t g = 0; g < groups(); ++g) {
        result.cursors[g] = block_at(first.end, group(g).multiple, spans[g]);
    }
    return true;
}

// Pass 1: blocks that are there join the segment; the rest, and those only on disk, become candidates.
void Index::classify(std::uint32_t segment, const std::vector<Span>& spans, OfferResult& result) {
    std::uint32_t hint = kNone;
    for (Item& item : items_) {
        item.action = page(spans, item) == nullptr ? kSkip : kCandidate;
        if (item.entry == kNone) continue;
        join(segment, item, hint);
        const Entry& e = pool_[item.entry];
        if (!e.has(kHostValid | kHostBusy | kDiskBusy)) continue;
        item.action = kSkip;
        ++(e.has(kHostValid) ? result.resident : result.in_flight);
    }
}

// Pass 2: room for the candidates. Nothing is made or linked yet, so an entry evicted here is merely out of
// use.
void Index::place(std::uint32_t segment, const Chain& chain, const std::vector<Span>& spans,
                  OfferResult& result) {
    bool stop = false;
    for (std::size_t i = 0; i < items_.size() && !stop; ++i) {
        Item& item = items_[i];
        if (item.action != kCandidate) continue;
        if (item.entry != kNone && !pool_[item.entry].in_use()) item.entry = kNone;
        const Newcomer x = newcomer(segment, item);
        if (!order_.segment(segment).refused && make_room(kHost, x, chain)) {
            item.action = kToHost;
            continue;
        }
        if (order_.refuses(kHost, x.group)) order_.set_refused(segment);
        item.action = kSkip;
        if (item.entry == kNone || !on_disk(pool_[item.entry])) {
            item.action = place_below(segment, x, item, chain, result, stop) ? kToTransit : kSkip;
        }
        if (!stop) continue;
        for (std::uint32_t g = 0; g < groups(); ++g) {
            result.cursors[g] = block_at(item.end, group(g).multiple, spans[g]);
        }
    }
}

// A block that host refused and no tier has: straight to disk, through a transit slot.
bool Index::place_below(std::uint32_t segment, const Newcomer& x, Item& item, const Chain& chain,
                        OfferResult& result, bool& stop) {
    if (!disk_takes_new() || item.entry != kNone) {
        ++result.refused;
        stop = !order_.segment(segment).refused;
        return false;
    }
    if (!transit_.promise(x.group)) {
        stop = true;
        return false;
    }
    if (make_room(kDisk, x, chain)) return true;
    transit_.withdraw(x.group);
    ++result.refused;
    ++counters_.dropped_disk_full;
    return false;
}

// Pass 3: slots, entries and copies, in ascending positions.
void Index::emit_stores(std::uint32_t segment, const Chain& chain, const std::vector<Span>& spans,
                        OfferResult& result) {
    const auto stored = [](const Item& item) { return item.action == kToHost || item.action == kToTransit; };
    const auto n = static_cast<std::size_t>(std::count_if(items_.begin(), items_.end(), stored));
    result.copies.data.reset(new BlockCopy[n]);
    std::uint32_t hint = kNone;
    for (Item& item : items_) {
        if (!stored(item)) continue;
        const bool transit = item.action == kToTransit;
        if (item.entry == kNone) {
            item.entry = make_entry(chain, item);
            if (item.entry == kNone) {  // the chain names a key twice
                arenas_[transit ? kDisk : kHost].withdraw(item.group);
                if (transit) transit_.withdraw(item.group);
                continue;
            }
            const std::uint32_t target = order_.target(segment, item.end);
            if (order_.lineage() != nullptr)
                order_.lineage()->revived(target, ghost(chain, item), order_.now());
            if (hint != kNone && pool_[hint].segment != target) hint = kNone;
            order_.link(target, item.entry, hint);
        }
        const std::uint32_t id = item.entry;
        Entry& e = pool_[id];
        std::int32_t host = -1;
        if (transit) {
            host = transit_.take(item.group, id);
            take_slot(id, kDisk, kDiskBusy);
        } else {
            take_slot(id, kHost, kHostBusy);
            host = e.slot[kHost];
        }
        set_bits(e, kPending, 0);
        pin(e);
        log(e, kMarked, kHost);
        result.copies.data[result.copies.size++] =
            copy_of(id, *page(spans, item), host, transit ? e.slot[kDisk] : -1, transit ? kCopyTransit : 0);
    }
}

void Index::complete_store(const BlockCopy* copies, std::size_t n, const std::uint8_t* status) {
    check_copies(copies, n, kEndsStore);
    for (std::size_t i = 0; i < n; ++i) {
        const std::uint8_t s = status == nullptr ? static_cast<std::uint8_t>(kOk) : status[i];
        if ((copies[i].flags & kCopyTransit) == 0) {
            end_store(copies[i], s);
        } else if (s != kOk) {
            ++counters_.store_failed;
            end_write(copies[i], s);
        }
    }
}

void Index::end_store(const BlockCopy& c, std::uint8_t status) {
    Entry& e = pool_[c.entry];
    counters_.store_failed += status == kOk ? 0 : 1;
    if (!e.has(kDoomed)) {
        set_bits(e, 0, kPending);
        if (status == kOk) {
            set_bits(e, kHostValid, kHostBusy);
            ++counters_.stored[kHost];
            log(e, kStored, kHost);
            queue_write(c.entry);
        } else {
            clear_slot(c.entry, kHost);
            log(e, kMarked, kHost);
        }
    }
    unpin(e);
    settle(c.entry);
}

void Index::queue_write(std::uint32_t id) {
    Entry& e = pool_[id];
    if (!disk_writable() || e.touches < options_.disk_admission) return;
    if (e.has(kDiskValid | kDiskBusy | kWantDisk)) return;
    e.flags |= kWantDisk;
    queue_.push_back(id);
    ++wanted_;
    if (queue_.size() > 2 * wanted_ + 1024) compact_queue();
}

// Places of entries that are out of use give their ids back.
void Index::compact_queue() {
    std::deque<std::uint32_t> kept;
    for (const std::uint32_t id : queue_) {
        if (pool_[id].in_use()) {
            kept.push_back(id);
        } else {
            pool_.recycle(id);
        }
    }
    queue_.swap(kept);
}

// The next entry that still wants a disk copy, out of the queue; kNone when there is none.
std::uint32_t Index::pop_write() {
    while (!queue_.empty()) {
        const std::uint32_t id = queue_.front();
        queue_.pop_front();
        Entry& e = pool_[id];
        if (!e.in_use()) {
            pool_.recycle(id);
            continue;
        }
        e.flags &= static_cast<std::uint8_t>(~kWantDisk);
        if (e.has(kDoomed)) continue;
        --wanted_;
        return id;
    }
    return kNone;
}

CopyList Index::next_writes(std::uint64_t limit) {
    CopyList out;
    if (!disk_writable() || writing_ >= max_writing_) return out;
    limit = std::min(limit, max_writing_ - writing_);
    restart_batch();
    std::vector<std::uint32_t> chosen;
    std::uint32_t segment = kNone;
    while (chosen.size() < limit) {
        const std::uint32_t id = pop_write();
        if (id == kNone) break;
        Entry& e = pool_[id];
        if (e.pins == kMaxPins) {  // back in its place, for the next call
            e.flags |= kWantDisk;
            ++wanted_;
            queue_.push_front(id);
            break;
        }
        if (e.segment != segment) restart_batch();  // a scan holds for one segment's newcomers
        segment = e.segment;
        if (make_room(kDisk, Newcomer{segment, order_.end(e), e.group}, Chain{})) {
            chosen.push_back(id);
            pin(e);  // before the next one makes room
        } else {
            ++counters_.dropped_disk_full;
        }
    }
    out.data.reset(new BlockCopy[chosen.size()]);
    for (const std::uint32_t id : chosen) {
        take_slot(id, kDisk, kDiskBusy);
        const Entry& e = pool_[id];
        out.data[out.size++] = copy_of(id, -1, e.slot[kHost], e.slot[kDisk], 0);
    }
    return out;
}

void Index::complete_write(const BlockCopy* copies, std::size_t n, const std::uint8_t* status) {
    check_copies(copies, n, kEndsWrite);
    for (std::size_t i = 0; i < n; ++i) {
        const std::uint8_t s = status == nullptr ? static_cast<std::uint8_t>(kOk) : status[i];
        counters_.write_failed += s == kOk ? 0 : 1;
        end_write(copies[i], s);
    }
}

void Index::end_write(const BlockCopy& c, std::uint8_t status) {
    Entry& e = pool_[c.entry];
    if (c.flags & kCopyTransit) transit_.release(c.host);
    if (!e.has(kDoomed)) {
        if (c.flags & kCopyTransit) set_bits(e, 0, kPending);
        if (status == kOk) {
            set_bits(e, kDiskValid, kDiskBusy);
            ++counters_.stored[kDisk];
            log(e, kStored, kDisk);
        } else {
            clear_slot(c.entry, kDisk);
            log(e, kMarked, kDisk);
        }
    }
    unpin(e);
    settle(c.entry);
}

}  // namespace kvoffload
