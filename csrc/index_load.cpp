// Load: host -> device, disk -> host -> device, disk -> host. The rules are in index.h.
#include <algorithm>

#include "index_inline.h"

namespace kvoffload {

// The transit slots of one load, by group; copies use them in turn.
struct Index::TransitRing {
    std::uint32_t left;       // slots that may still be taken
    std::uint32_t per_group;  // at most
    std::vector<std::vector<std::int32_t>> slots;
    std::vector<std::uint32_t> users;

    // Takes a slot for one more copy of the group, or has it share; false when there is none.
    bool use(SlabArena& arena, std::uint32_t group, std::uint32_t entry) {
        std::vector<std::int32_t>& mine = slots[group];
        if (left > 0 && mine.size() < per_group && arena.promise(group)) {
            mine.push_back(arena.take(group, entry));
            --left;
        }
        users[group] += mine.empty() ? 0 : 1;
        return !mine.empty();
    }

    // Gives back what no copy uses, after copies at the end were cut.
    void trim(SlabArena& arena) {
        for (std::size_t g = 0; g < slots.size(); ++g) {
            for (; slots[g].size() > users[g]; slots[g].pop_back()) arena.release(slots[g].back());
            users[g] = 0;
        }
    }

    std::int32_t next(std::uint32_t group) { return slots[group][users[group]++ % slots[group].size()]; }
};

LoadResult Index::begin_load(std::uint32_t segment, const Chain& chain, const std::vector<Span>& spans,
                             std::uint32_t max_transit) {
    LoadResult result;
    start(segment, chain, spans);
    spare_unwritten_ = disk_writable();
    std::uint32_t asked = 0;
    for (const Span& s : spans) asked += s.begin < s.end ? 1 : 0;
    TransitRing ring{max_transit, std::max(max_transit / std::max(asked, 1u), 1u), {}, {}};
    ring.slots.resize(groups());
    ring.users.assign(groups(), 0);
    const std::size_t n = place_reads(segment, chain, available(chain, spans, true), &ring);
    result.copies = emit_loads(spans, n, &ring);
    for (std::uint32_t g = 0; g < groups(); ++g) {
        std::uint32_t end = std::max(spans[g].begin, spans[g].end);
        if (n < items_.size()) end = std::clamp((items_[n].end - 1) / group(g).multiple, spans[g].begin, end);
        result.ends.push_back(end);
    }
    return result;
}

CopyList Index::begin_read(std::uint32_t segment, const Chain& chain, const std::vector<Span>& spans) {
    start(segment, chain, spans);
    spare_unwritten_ = disk_writable();
    const std::size_t n = place_reads(segment, chain, available(chain, spans, false), nullptr);
    return emit_loads(spans, n, nullptr);
}

// Finds every block and what it needs; the number of those before the position of the first that cannot be
// had.
std::size_t Index::available(const Chain& chain, const std::vector<Span>& spans, bool to_device) {
    find_all(chain, [&](Item& item) {
        if (to_device && page(spans, item) == nullptr) return;
        item.action = item.entry == kNone ? kMissing : need(pool_[item.entry], to_device);
    });
    for (std::size_t i = 0; i < items_.size(); ++i) {
        if (items_[i].action == kMissing) return rewind(i);
    }
    return items_.size();
}

Index::Action Index::need(const Entry& e, bool to_device) const {
    if (e.pins == kMaxPins) return kMissing;
    if (!to_device && e.has(kHostValid | kHostBusy)) return kSkip;
    if (e.has(kHostValid)) return kPlain;
    if (e.has(kHostBusy) && e.has(kDiskValid) && e.has(kPending)) return kWaiting;
    if (!on_disk(e)) return kMissing;
    return e.has(kHostBusy) ? kToDevice : kCandidate;
}

// The first item at the position of item n.
std::size_t Index::rewind(std::size_t n) {
    while (n > 0 && items_[n - 1].end == items_[n].end) --n;
    return n;
}

// Touches and pins the first n items and finds places for those on disk only; the number that stays.
std::size_t Index::place_reads(std::uint32_t segment, const Chain& chain, std::size_t n, TransitRing* ring) {
    if (n > 0) order_.touch(segment, static_cast<std::uint32_t>(n));
    relate(segment, chain, n);
    std::uint32_t hint = kNone;
    for (std::size_t i = 0; i < n; ++i) {
        Item& item = items_[i];
        if (item.entry == kNone) continue;
        join(segment, item, hint);
        if (item.action == kSkip) continue;
        pin(pool_[item.entry]);
    }
    std::size_t failed = 0;
    for (; failed < n; ++failed) {
        Item& item = items_[failed];
        if (item.action != kCandidate && item.action != kToDevice) continue;
        if (item.action == kCandidate && make_room(kHost, newcomer(segment, item), chain)) {
            item.action = kToHost;
        } else if (ring != nullptr && ring->use(transit_, item.group, item.entry)) {
            item.action = kToDevice;
        } else {
            break;
        }
    }
    return failed == n ? n : cut(failed, n, ring);
}

// Block `failed` found no place: the load ends at its position. What the blocks from there to n hold goes
// back.
std::size_t Index::cut(std::size_t failed, std::size_t n, TransitRing* ring) {
    const std::size_t kept = rewind(failed);
    for (std::size_t i = kept; i < n; ++i) {
        const Item& item = items_[i];
        if (item.action == kSkip) continue;
        unpin(pool_[item.entry]);
        if (i >= failed) continue;
        if (item.action == kToHost) arenas_[kHost].withdraw(item.group);
        if (item.action == kToDevice) --ring->users[item.group];
    }
    return kept;
}

CopyList Index::emit_loads(const std::vector<Span>& spans, std::size_t n, TransitRing* ring) {
    CopyList out;
    const auto end = items_.begin() + static_cast<std::ptrdiff_t>(n);
    const auto copied = [](const Item& item) { return item.action != kSkip; };
    out.data.reset(new BlockCopy[static_cast<std::size_t>(std::count_if(items_.begin(), end, copied))]);
    if (ring != nullptr) ring->trim(transit_);
    for (auto item = items_.begin(); item != end; ++item) {
        if (!copied(*item)) continue;
        const std::uint32_t id = item->entry;
        Entry& e = pool_[id];
        const std::uint8_t was = code(e);
        std::int32_t disk = -1, host = e.slot[kHost];
        std::uint16_t flags = item->action == kWaiting ? kCopyWait : 0;
        if (item->action == kToHost) {
            take_slot(id, kHost, kHostBusy);
            set_bits(e, kPending, 0);
            host = e.slot[kHost];
            disk = e.slot[kDisk];
            flags = kCopyRead;
        } else if (item->action == kToDevice) {
            host = ring->next(item->group);
            disk = e.slot[kDisk];
            flags = kCopyRead | kCopyTransit;
        }
        if (ring != nullptr) set_bits(e, kLoading, 0);
        if (code(e) != was) log(e, kMarked, kHost);
        out.data[out.size++] = copy_of(id, ring == nullptr ? -1 : *page(spans, *item), host, disk, flags);
    }
    return out;
}

void Index::complete_load(const BlockCopy* copies, std::size_t n, const std::uint8_t* status) {
    check_copies(copies, n, kEndsLoad);
    for (std::size_t i = 0; i < n; ++i) {
        if (copies[i].flags & kCopyTransit && transit_.holds(copies[i].host))
            transit_.release(copies[i].host);
        end_load(copies[i], status == nullptr ? static_cast<std::uint8_t>(kOk) : status[i]);
    }
}

void Index::end_load(const BlockCopy& c, std::uint8_t status) {
    Entry& e = pool_[c.entry];
    const bool promoted = (c.flags & kCopyRead) != 0 && (c.flags & kCopyTransit) == 0;
    const bool lost = (c.flags & kCopyRead) != 0 && status == kReadFailed;
    if (!e.has(kDoomed)) {
        const std::uint8_t was = code(e);
        const bool stored = promoted && (status == kOk || status == kCopyFailed);
        if (c.page >= 0) set_bits(e, 0, kLoading);
        if (stored) {
            set_bits(e, kHostValid, kHostBusy | kPending);
            ++counters_.promoted;
        } else if (promoted) {
            set_bits(e, 0, kPending);
            clear_slot(c.entry, kHost);
        }
        if (code(e) != was) log(e, stored ? kStored : kMarked, kHost);
    }
    unpin(e);
    if (lost) lose_disk(c.entry);
    settle(c.entry);
}

// Disk has no good bytes of the block. Another job may be reading them, so that then the whole block goes.
void Index::lose_disk(std::uint32_t id) {
    Entry& e = pool_[id];
    ++counters_.read_failed;
    if (e.has(kDoomed) || !e.has(kDiskValid)) return;
    if (e.pins != 0) {
        doom(id);
        return;
    }
    clear_slot(id, kDisk);
    log(e, kRemoved, kDisk);
}

bool Index::ready(BlockCopy* copies, std::size_t n) {
    check_copies(copies, n, kEndsLoad);
    bool waits = false;
    for (std::size_t i = 0; i < n; ++i) {
        if (copies[i].flags & kCopyWait) waits |= settle_wait(copies[i]);
    }
    return !waits;
}

// True when the copy goes on waiting.
bool Index::settle_wait(BlockCopy& c) {
    Entry& e = pool_[c.entry];
    const bool busy = !e.has(kDoomed) && e.has(kHostBusy);
    if (!e.has(kDoomed) && (busy || e.has(kHostValid))) c.host = e.slot[kHost];
    if (busy && (e.has(kPending) || !on_disk(e))) return true;
    if (!e.has(kDoomed) && !e.has(kHostValid) && on_disk(e)) {
        restart_batch();
        spare_unwritten_ = disk_writable();
        if (!busy && make_room(kHost, Newcomer{e.segment, order_.end(e), e.group}, Chain{})) {
            take_slot(c.entry, kHost, kHostBusy);
            set_bits(e, kPending, 0);
            c.host = e.slot[kHost];
            c.flags = kCopyRead;
        } else if (transit_.promise(e.group)) {
            c.host = transit_.take(e.group, c.entry);
            c.flags = kCopyRead | kCopyTransit;
        } else {
            return true;
        }
        c.disk = e.slot[kDisk];
        log(e, kMarked, kHost);
        return false;
    }
    c.flags = 0;
    if (e.has(kDoomed) || !e.has(kHostValid)) c.host = -1;
    return false;
}

void Index::expire(const BlockCopy* copies, std::size_t n) {
    check_copies(copies, n, kEndsNothing);
    for (std::size_t i = 0; i < n; ++i) {
        Entry& e = pool_[copies[i].entry];
        const std::uint8_t was = code(e);
        set_bits(e, 0, kPending | kLoading);
        if (code(e) != was) log(e, kMarked, kHost);
    }
}

}  // namespace kvoffload
