// Windows and states that lose their use: pruned, superseded, or beyond the end of the full groups.
#include "index_inline.h"

namespace kvoffload {

std::uint64_t Index::retire(std::uint32_t segment, const Chain& chain, const std::vector<Span>& spans) {
    start(segment, chain, spans);
    find_all(chain);
    std::uint64_t count = 0;
    for (const Item& item : items_) {
        const std::uint32_t id = item.entry;
        if (id == kNone || !pool_[id].in_use() || pool_[id].segment != segment) continue;
        ++count;
        if (pool_[id].pins != 0) {
            doom(id);
            continue;
        }
        for (int t = 0; t < kTiers; ++t) {
            if (pool_[id].slot[t] < 0) continue;
            clear_slot(id, t);
            log(pool_[id], kRemoved, t);
        }
        settle(id);
    }
    return count;
}

std::uint64_t Index::supersede(std::uint32_t segment, const Chain& chain, const std::vector<Span>& spans) {
    start(segment, chain, spans);
    find_all(chain);
    std::uint64_t count = 0;
    std::uint32_t hint = kNone;
    for (const Item& item : items_) {
        if (item.entry == kNone) continue;
        const std::uint32_t from = pool_[item.entry].segment;
        if (from == kSuperseded || (from != segment && order_.is_open(from))) continue;
        count += order_.supersede(item.entry, hint) ? 1 : 0;
    }
    return count;
}

// The block gives its slot in the tier to x. REQUIRES: no pins, linked.
void Index::evict(std::uint32_t id, int tier, const Newcomer& x, const Chain& chain) {
    const Entry& e = pool_[id];
    const std::uint32_t segment = e.segment, end = order_.end(e);
    const GroupSpec& mine = group(e.group);
    ++counters_.evicted[tier];
    drop(id, tier);
    if (mine.kind == kFull && !e.in_use()) drop_beyond(segment, end - mine.multiple, x, chain);
}

// What may go shrinks within a batch only by what goes here: a tail that a scan passed stays.
void Index::drop_beyond(std::uint32_t segment, std::uint32_t start, const Newcomer& x, const Chain& chain) {
    for (std::uint32_t g = 0; g < groups(); ++g) {
        if (group(g).kind != kSliding && group(g).kind != kState) continue;
        for (int t = 0; t < kTiers; ++t) {
            for (;;) {
                const std::uint32_t id = order_.tail(segment, g, t);
                if (!order_.may_go(id, spared(kHost)) || order_.end(pool_[id]) <= start) break;
                if (order_.own_prefix(pool_[id], x, chain)) break;
                ++counters_.orphaned;
                drop(id, t);
            }
        }
    }
}

}  // namespace kvoffload
