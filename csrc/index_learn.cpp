// What a learning policy is told of a request: its stream, where its path was before, and which blocks it
// used again.
#include "index.h"

namespace kvoffload {

std::uint64_t Index::ghost(const Chain& chain, const Item& item) const {
    return Ghosts::name(chain.at(group(item.group).multiple, item.block), item.group);
}

std::size_t Index::policy_memory_bytes(int tier) const {
    const Policy& p = order_.policy(tier);
    return p.memory_bytes() + (p.learns() ? order_.lineage()->memory_bytes() : 0);
}

// The first n items are touched by the request. REQUIRES: find_all.
void Index::relate(std::uint32_t segment, const Chain& chain, std::size_t n) {
    Lineage* const lineage = order_.lineage();
    if (lineage == nullptr || n == 0) return;
    if (!lineage->begun(segment)) begin_request(segment, chain);
    touched_.clear();
    for (std::size_t i = 0; i < n; ++i) {
        const Item& item = items_[i];
        const std::uint32_t from = item.entry == kNone ? kNone : pool_[item.entry].segment;
        touched_.push_back(
            Touched{ghost(chain, item), item.end - group(item.group).multiple, item.end, from});
    }
    lineage->relate(segment, touched_, order_.now());
}

namespace {

// The first block of [0, end) for which `there` is false, if it is so for all behind it.
template <class There>
std::uint32_t bisect(std::uint32_t end, There there) {
    std::uint32_t low = 0;
    while (low < end) {
        const std::uint32_t middle = low + (end - low) / 2;
        there(middle) ? low = middle + 1 : end = middle;
    }
    return low;
}

}  // namespace

// The known prefix, looked for in the first full group, else in the first one: what is known has no holes but
// for failed copies and forgotten ghosts, so that bisection finds its end or one before it.
void Index::begin_request(std::uint32_t segment, const Chain& chain) {
    std::uint32_t g = 0;
    while (g + 1 < groups() && group(g).kind != kFull) ++g;
    if (group(g).kind != kFull) g = 0;
    std::uint32_t last = kNone;
    const auto blocks = static_cast<std::uint32_t>(chain.blocks / group(g).multiple);
    const std::uint32_t known = bisect(blocks, [&](std::uint32_t block) {
        const std::uint32_t found = known_segment(chain, g, block);
        last = found == kNone ? last : found;
        return found != kNone;
    });
    order_.lineage()->begin(segment, chain.blocks, std::uint64_t{known} * group(g).multiple, last,
                            order_.now());
    for (int t = 0; t < kTiers; ++t) {
        if (order_.policy(t).learns()) compare_with_lru(t, chain, g, known);
    }
}

// What the tier holds of the known prefix, and what an LRU would hold that has as many blocks: both hold a
// path from its start.
void Index::compare_with_lru(int tier, const Chain& chain, std::uint32_t g, std::uint32_t known) {
    const std::uint32_t multiple = group(g).multiple;
    const std::uint32_t own = bisect(known, [&](std::uint32_t block) {
        const std::uint8_t* const key = chain.at(multiple, block);
        const std::uint32_t id = tables_[g].find(hash_key(key), key);
        return id != kNone && pool_[id].slot[tier] >= 0;
    });
    const std::uint64_t room = order_.resident(tier);
    const std::uint32_t lru = bisect(known, [&](std::uint32_t block) {
        const std::uint32_t at = known_segment(chain, g, block);
        return at != kNone && order_.lineage()->distance(at, (block + 1) * multiple) <= room;
    });
    order_.compared(tier, std::uint64_t{own} * multiple, std::uint64_t{lru} * multiple, chain.blocks);
}

std::uint32_t Index::known_segment(const Chain& chain, std::uint32_t g, std::uint32_t block) const {
    const std::uint8_t* const key = chain.at(group(g).multiple, block);
    const std::uint32_t id = tables_[g].find(hash_key(key), key);
    return id != kNone ? pool_[id].segment : order_.lineage()->find(Ghosts::name(key, g));
}

}  // namespace kvoffload
