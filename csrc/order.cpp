#include "order.h"

#include <algorithm>
#include <utility>

namespace kvoffload {

Order::Order(EntryPool& pool, std::vector<std::uint32_t> multiples, std::unique_ptr<Policy> host,
             std::unique_ptr<Policy> disk, std::uint64_t most_ghosts)
    : pool_(pool), multiples_(std::move(multiples)) {
    policies_[kHost] = std::move(host);
    policies_[kDisk] = std::move(disk);
    std::vector<Policy*> learners;
    for (auto& p : policies_) {
        if (p->learns()) learners.push_back(p.get());
    }
    if (!learners.empty()) lineage_ = std::make_unique<Lineage>(*this, learners, most_ghosts);
    segments_.emplace_back().live = true;  // kSuperseded
    tails_.resize(multiples_.size() * kTiers);
    if (lineage_) lineage_->opened(kSuperseded, 0);
    begin_batch();
}

std::uint32_t Order::make(std::uint64_t stream, std::uint64_t order, double now) {
    std::uint32_t id = static_cast<std::uint32_t>(segments_.size());
    if (free_.empty()) {
        segments_.emplace_back();
        tails_.resize(tails_.size() + multiples_.size() * kTiers);
    } else {
        id = free_.back();
        free_.pop_back();
    }
    segments_[id] = Segment{};
    segments_[id].order = order;
    segments_[id].live = true;
    for (auto& p : policies_) p->on_open(id, order, now);
    if (lineage_) lineage_->opened(id, stream);
    return id;
}

std::uint32_t Order::open(std::uint64_t stream, double now) {
    now_ = std::max(now_, now);
    const std::uint32_t id = make(stream, ++order_, now_);
    segments_[id].open = true;
    return id;
}

std::uint32_t Order::restore(std::uint64_t order) {
    order_ = std::max(order_, order);
    return make(0, order, now_);
}

std::uint32_t Order::open_head(std::uint32_t segment) {
    const std::uint32_t id = make(0, ++order_, now_);
    segments_[id].open = segments_[segment].open;
    return id;
}

void Order::close(std::uint32_t segment, int reason, double now) {
    now_ = std::max(now_, now);
    const std::uint32_t head = lineage_ ? lineage_->head(segment) : kNone;
    if (lineage_) lineage_->closed(segment, now_);
    close_one(segment, reason);
    if (head != kNone) close_one(head, reason);
}

void Order::close_one(std::uint32_t segment, int reason) {
    segments_[segment].open = false;
    for (auto& p : policies_) p->on_close(segment, reason, now_);
    erase_if_done(segment);
}

void Order::erase_if_done(std::uint32_t segment) {
    Segment& s = segments_[segment];
    if (!s.live || s.open || s.size != 0 || segment == kSuperseded ||
        (lineage_ && lineage_->ghosts(segment) != 0))
        return;
    s.live = false;
    if (lineage_) lineage_->erased(segment);
    for (auto& p : policies_) p->on_erase(segment);
    free_.push_back(segment);
}

void Order::touch(std::uint32_t segment, std::uint32_t blocks) {
    segments_[segment].order = ++order_;
    for (auto& p : policies_) p->on_touch(segment, order_, now_, blocks);
    if (lineage_) lineage_->touched(segment);
    if (lineage_ && lineage_->head(segment) != kNone) touch(lineage_->head(segment), blocks);
}

void Order::link(std::uint32_t segment, std::uint32_t id, std::uint32_t& hint) {
    Segment& s = segments_[segment];
    Entry& e = pool_[id];
    std::uint32_t before = s.tail;
    if (before != kNone && goes_before(id, before)) {
        before = hint != kNone && goes_before(hint, id) ? hint : kNone;
        std::uint32_t next = before == kNone ? s.head : pool_[before].next;
        while (next != kNone && goes_before(next, id)) {
            before = next;
            next = pool_[next].next;
        }
    }
    const std::uint32_t after = before == kNone ? s.head : pool_[before].next;
    e.segment = segment;
    e.prev = before;
    e.next = after;
    (before == kNone ? s.head : pool_[before].next) = id;
    (after == kNone ? s.tail : pool_[after].prev) = id;
    ++s.size;
    hint = id;
    for (int t = 0; t < kTiers; ++t) {
        if (e.slot[t] >= 0) gained(id, t);
    }
}

void Order::unlink(std::uint32_t id) {
    Entry& e = pool_[id];
    for (int t = 0; t < kTiers; ++t) {
        if (e.slot[t] >= 0) lost(id, t);
    }
    Segment& s = segments_[e.segment];
    (e.prev == kNone ? s.head : pool_[e.prev].next) = e.next;
    (e.next == kNone ? s.tail : pool_[e.next].prev) = e.prev;
    --s.size;
    const std::uint32_t segment = e.segment;
    e.prev = e.next = e.segment = kNone;
    erase_if_done(segment);
}

bool Order::supersede(std::uint32_t id, std::uint32_t& hint) {
    const std::uint32_t from = pool_[id].segment;
    if (lineage_) {
        if (lineage_->shared(from)) return false;
        lineage_->superseded(from, now_);
    }
    unlink(id);
    link(kSuperseded, id, hint);
    return true;
}

void Order::bury(std::uint32_t id) {
    const Entry& e = pool_[id];
    if (lineage_ && e.segment == kSuperseded) {
        lineage_->left_superseded();
    } else if (lineage_) {
        lineage_->buried(e.segment, Ghosts::name(e.key, e.group), now_);
    }
    unlink(id);
}

// The deepest entry but `id` of its group in the tier. REQUIRES: there is one.
std::uint32_t Order::next_tail(std::uint32_t id, int tier) const {
    const Entry& e = pool_[id];
    std::uint32_t back = e.prev;
    while (pool_[back].group != e.group || pool_[back].slot[tier] < 0) back = pool_[back].prev;
    return back;
}

std::uint32_t Order::deepest_superseded(int tier, const Newcomer& x, const Chain& chain,
                                        std::uint8_t spared) const {
    std::uint32_t id = tail(kSuperseded, x.group, tier);
    for (std::uint32_t left = std::min(count(kSuperseded, x.group, tier), kLooks); left != 0; --left) {
        if (may_go(id, spared) && !own_prefix(pool_[id], x, chain)) return id;
        if (left > 1) id = next_tail(id, tier);
    }
    return kNone;
}

void Order::leave(std::uint32_t segment, int tier) {
    for (Scan& scan : scans_[tier]) {
        if (scan.at == segment) scan.at = next_victim(tier, segment);
        if (policies_[tier]->learns()) scan.started = false;  // what it hung below may go now
    }
    if (segment == kSuperseded) return;
    policies_[tier]->on_resident(segment, false);
    if (lineage_) lineage_->resident(segment, tier, false);
}

// As Policy::next_victim, with kSuperseded before all others.
std::uint32_t Order::next_victim(int tier, std::uint32_t after) const {
    if (after == kNone && segments_[kSuperseded].resident[tier] > 0) return kSuperseded;
    return policies_[tier]->next_victim(after == kSuperseded ? kNone : after);
}

void Order::begin_batch() {
    for (auto& scans : scans_) scans.assign(multiples_.size(), Scan{});
}

bool Order::own_prefix(const Entry& e, const Newcomer& x, const Chain& chain) const {
    if (end(e) > x.end) return false;
    const std::uint8_t* key = chain.at(multiples_[e.group], e.depth);
    return key != nullptr && std::memcmp(key, e.key, 16) == 0;
}

std::uint32_t Order::victim(int tier, const Newcomer& x, const Chain& chain, std::uint8_t spared) {
    Scan& scan = scans_[tier][x.group];
    const bool learns = policies_[tier]->learns();
    if (scan.refused) return kNone;
    if (!scan.started) {
        scan.started = true;
        scan.at = next_victim(tier, kNone);
    }
    for (; scan.at != kNone; scan.at = next_victim(tier, scan.at)) {
        if (scan.at == kSuperseded) {
            const std::uint32_t left = deepest_superseded(tier, x, chain, spared);
            if (left != kNone) return left;
            continue;
        }
        const std::uint32_t last = tail(scan.at, x.group, tier);
        if (scan.at == x.segment && may_go(last, spared) && end(pool_[last]) > x.end) return last;
        scan.refused = learns && !policies_[tier]->displaces(x.segment, scan.at);
        if (scan.refused || (scan.at == x.segment && !learns)) return kNone;
        if (scan.at == x.segment || !may_go(last, spared) || own_prefix(pool_[last], x, chain)) continue;
        if (!learns || !lineage_->blocked(scan.at, tier, end(pool_[last]))) return last;
    }
    return kNone;
}

std::size_t Order::memory_bytes() const {
    std::size_t sum =
        segments_.capacity() * sizeof(Segment) + tails_.capacity() * sizeof(Tail) + free_.capacity() * 4;
    for (const auto& p : policies_) sum += p->memory_bytes();
    return sum + (lineage_ ? lineage_->memory_bytes() : 0);
}

}  // namespace kvoffload
