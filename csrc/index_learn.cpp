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

// The known prefix, looked for in the first full group, else in the first one: what is known has no holes but
// for failed copies and forgotten ghosts, so that bisection finds its end or one before it.
void Index::begin_request(std::uint32_t segment, const Chain& chain) {
    std::uint32_t g = 0;
    while (g + 1 < groups() && group(g).kind != kFull) ++g;
    if (group(g).kind != kFull) g = 0;
    std::uint32_t low = 0, high = static_cast<std::uint32_t>(chain.blocks / group(g).multiple);
    std::uint32_t last = kNone;
    while (low < high) {
        const std::uint32_t middle = low + (high - low) / 2;
        const std::uint32_t found = known_segment(chain, g, middle);
        if (found == kNone) {
            high = middle;
        } else {
            last = found;
            low = middle + 1;
        }
    }
    const std::uint64_t known = std::uint64_t{low} * group(g).multiple;
    order_.lineage()->begin(segment, chain.blocks, known, last, order_.now());
}

std::uint32_t Index::known_segment(const Chain& chain, std::uint32_t g, std::uint32_t block) const {
    const std::uint8_t* const key = chain.at(group(g).multiple, block);
    const std::uint32_t id = tables_[g].find(hash_key(key), key);
    return id != kNone ? pool_[id].segment : order_.lineage()->find(Ghosts::name(key, g));
}

}  // namespace kvoffload
