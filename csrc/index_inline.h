// Small functions of Index that run once per block in several files.
#pragma once

#include "index.h"

namespace kvoffload {

template <class Found>
void Index::find_all(const Chain& chain, Found found) {
    find_staged(
        items_.size(), [&](std::size_t i) -> const KeyTable& { return tables_[items_[i].group]; },
        [&](std::size_t i) { return chain.keys + std::size_t{items_[i].end - 1} * 16; },
        [&](std::size_t i, std::uint32_t id) {
            items_[i].entry = at_depth(id, items_[i].block);
            found(items_[i]);
        });
}

inline const std::int32_t* Index::page(const std::vector<Span>& spans, const Item& item) const {
    const Span& s = spans[item.group];
    return item.block < s.count && s.pages[item.block] >= 0 ? s.pages + item.block : nullptr;
}

inline void Index::set_bits(Entry& e, std::uint8_t set, std::uint8_t clear) {
    const std::uint8_t was = e.flags;
    e.flags = static_cast<std::uint8_t>((was & ~clear) | set);
    const std::uint8_t changed = was ^ e.flags;
    if ((changed & (kHostBusy | kDiskBusy)) == 0) return;
    for (int t = 0; t < kTiers; ++t) {
        if (changed & busy_bit(t)) e.has(busy_bit(t)) ? ++busy_[t][e.group] : --busy_[t][e.group];
    }
    if (changed & kDiskBusy) e.has(kDiskBusy) ? ++writing_ : --writing_;
}

inline void Index::pin(Entry& e) {
    if (e.pins++ != 0) return;
    for (int t = 0; t < kTiers; ++t) pinned_[t][e.group] += e.slot[t] >= 0 ? 1 : 0;
}

inline void Index::unpin(Entry& e) {
    if (--e.pins != 0) return;
    for (int t = 0; t < kTiers; ++t) pinned_[t][e.group] -= e.slot[t] >= 0 ? 1 : 0;
}

inline std::uint8_t Index::code(const Entry& e) const {
    if (e.has(kDoomed)) return 0;
    return static_cast<std::uint8_t>((e.has(kHostValid) ? kCodeHost : 0) | (on_disk(e) ? kCodeDisk : 0) |
                                     (e.has(kPending) ? kCodePending : 0) |
                                     (e.has(kLoading) ? kCodeLoading : 0));
}

inline void Index::log(const Entry& e, ChangeKind kind, int tier) {
    Change& c = log_.add();
    std::memcpy(c.key, e.key, 16);
    c.seq = e.segment == kNone ? 0 : order_.segment(e.segment).order;
    c.depth = static_cast<std::int32_t>(e.depth);
    c.group = e.group;
    c.kind = kind;
    c.tier = static_cast<std::uint8_t>(tier);
    c.code = code(e);
}

inline BlockCopy Index::copy_of(std::uint32_t id, std::int32_t page, std::int32_t host, std::int32_t disk,
                                std::uint16_t flags) const {
    const Entry& e = pool_[id];
    BlockCopy c;
    std::memcpy(c.key, e.key, 16);
    c.seq = order_.segment(e.segment).order;
    c.entry = id;
    c.page = page;
    c.host = host;
    c.disk = disk;
    c.depth = static_cast<std::int32_t>(e.depth);
    c.parent = e.parent;
    c.group = e.group;
    c.flags = flags;
    c.reserved = 0;
    return c;
}

}  // namespace kvoffload
