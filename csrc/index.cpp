#include "index.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "index_inline.h"

namespace kvoffload {

namespace {

std::vector<std::uint32_t> multiples(const IndexOptions& o) {
    std::vector<std::uint32_t> out;
    for (const GroupSpec& g : o.groups) out.push_back(g.multiple);
    return out;
}

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument(message); }

void require(bool ok, const std::string& message) {
    if (!ok) refuse(message);
}

IndexOptions checked(IndexOptions o) {
    const std::size_t n = o.groups.size();
    require(n >= 1 && n < kFreeGroup, "an index has 1 to 254 groups, not " + std::to_string(n));
    require(o.base_tokens >= 1, "base_tokens must be at least 1");
    require(o.slots_per_slab.size() == n, "slots_per_slab needs one number per group");
    for (std::size_t g = 0; g < n; ++g) {
        const std::string name = "group " + std::to_string(g);
        require(o.groups[g].kind >= kFull && o.groups[g].kind <= kTransient,
                name + ": kind is none of 0, 1, 2, 3");
        require(o.groups[g].multiple >= 1, name + ": a block has at least 1 base block");
        require(o.slots_per_slab[g] <= 0x10000, name + ": more than 65536 slots per slab");
    }
    require(std::uint64_t{o.host_slabs} + o.transit_slabs <= 0x8000 && o.disk_slabs <= 0x8000,
            "a tier has at most 32768 slabs; use larger slabs");
    return o;
}

// Blocks known without being in any tier: 4 times what host holds, at least a quarter of a million (8 MiB).
std::uint64_t most_ghosts(const IndexOptions& o) {
    std::uint64_t slots = 0;
    for (const std::uint32_t n : o.slots_per_slab) slots = std::max<std::uint64_t>(slots, n);
    return std::max<std::uint64_t>(std::uint64_t{1} << 18, 4 * slots * o.host_slabs);
}

}  // namespace

Index::Index(IndexOptions options)
    : options_(checked(std::move(options))),
      order_(pool_, multiples(options_), make_policy(options_.host_policy), make_policy(options_.disk_policy),
             most_ghosts(options_)),
      arenas_{SlabArena(0, options_.host_slabs, options_.slots_per_slab, options_.host_slots),
              SlabArena(0, options_.disk_slabs, options_.slots_per_slab, options_.disk_slots)},
      transit_(options_.host_slabs, options_.transit_slabs, options_.slots_per_slab, options_.transit_slots),
      log_(slots()) {
    for (std::uint32_t g = 0; g < groups(); ++g) {
        tables_.emplace_back(pool_, (arenas_[kHost].capacity(g) + arenas_[kDisk].capacity(g)) / groups());
    }
    for (int t = 0; t < kTiers; ++t) {
        pinned_[t].assign(groups(), 0);
        busy_[t].assign(groups(), 0);
        slab_blocked_[t].assign(arenas_[t].slabs().size(), 0);
    }
    std::uint64_t host = 0;
    for (std::uint32_t g = 0; g < groups(); ++g) host = std::max(host, arenas_[kHost].capacity(g));
    max_writing_ = options_.max_pending_writes >= 0 ? static_cast<std::uint64_t>(options_.max_pending_writes)
                                                    : std::max<std::uint64_t>(host / 4, 1);
}

std::uint64_t Index::slots() const {
    std::uint64_t most = 0;
    for (std::uint32_t g = 0; g < groups(); ++g)
        most = std::max(most, arenas_[kHost].capacity(g) + arenas_[kDisk].capacity(g));
    return most;
}

void Index::close_segment(std::uint32_t segment, int reason, double now) {
    if (!order_.is_open(segment)) refuse("segment " + std::to_string(segment) + " is not open");
    order_.close(segment, reason, now);
}

// ---- batches

// Fills items_ with the blocks of all spans in ascending (end, group) and finds their entries.
void Index::start(std::uint32_t segment, const Chain& chain, const std::vector<Span>& spans) {
    if (!order_.is_open(segment)) refuse("segment " + std::to_string(segment) + " is not open");
    if (spans.size() != groups()) refuse("one span per group is needed, not " + std::to_string(spans.size()));
    for (std::uint32_t g = 0; g < groups(); ++g) {
        const std::uint64_t needed = std::uint64_t{spans[g].end} * group(g).multiple;
        if (needed <= chain.blocks) continue;
        refuse("group " + std::to_string(g) + ": end " + std::to_string(spans[g].end) + " needs " +
               std::to_string(needed) + " keys, there are " + std::to_string(chain.blocks));
    }
    restart_batch();
    items_.clear();
    append_merged(spans);
}

// Within a batch pins are only added, so what a scan passed once it need not look at again.
void Index::restart_batch() {
    order_.begin_batch();
    ++batch_;
    for (auto& from : slab_from_) from.assign(groups(), SlabUse{0, 0});
    spare_unwritten_ = false;
}

void Index::append_merged(const std::vector<Span>& spans) {
    std::size_t total = 0, active = 0;
    std::vector<std::uint32_t> at;
    at.reserve(spans.size());
    for (const Span& s : spans) {
        at.push_back(s.begin);
        total += s.begin < s.end ? s.end - s.begin : 0;
        active += s.begin < s.end ? 1 : 0;
    }
    items_.reserve(total);
    while (active > 0) {
        std::uint32_t best = kNone, best_end = kNone;
        for (std::uint32_t g = 0; g < groups(); ++g) {
            const std::uint32_t end = (at[g] + 1) * group(g).multiple;
            if (at[g] < spans[g].end && end < best_end) {
                best = g;
                best_end = end;
            }
        }
        do {  // all the rest if the other groups are done
            items_.push_back(Item{at[best], kNone, best_end, static_cast<std::uint8_t>(best), kSkip});
            best_end += group(best).multiple;
        } while (++at[best] < spans[best].end && active == 1);
        active -= at[best] == spans[best].end ? 1 : 0;
    }
}

void Index::find_all(const Chain& chain) {
    find_all(chain, [](const Item&) {});
}

void Index::probe(const Chain& chain, std::uint32_t g, std::uint32_t begin, std::uint32_t end,
                  std::uint8_t* codes) const {
    const std::uint32_t multiple = group(g).multiple;
    find_staged(
        end - begin, [&](std::size_t) -> const KeyTable& { return tables_[g]; },
        [&](std::size_t i) { return chain.at(multiple, begin + static_cast<std::uint32_t>(i)); },
        [&](std::size_t i, std::uint32_t id) {
            codes[i] = at_depth(id, begin + static_cast<std::uint32_t>(i)) == kNone ? 0 : code(pool_[id]);
        });
}

// ---- room

bool Index::make_room(int tier, const Newcomer& x, const Chain& chain) {
    SlabArena& arena = arenas_[tier];
    if (arena.promise(x.group)) return true;
    const std::uint32_t victim = order_.victim(tier, x, chain, spared(tier));
    if (victim == kNone && order_.refuses(tier, x.group)) return false;
    const std::uint32_t slab = idle_slab(tier, x, chain, victim);
    if (slab == kNone && victim == kNone) return false;
    if (slab != kNone) {
        empty_slab(tier, slab, x, chain);
    } else {
        evict(victim, tier, x, chain);
    }
    return arena.promise(x.group);
}

bool Index::could_make_room(int tier, const Newcomer& x, const Chain& chain) {
    if (arenas_[tier].could_promise(x.group)) return true;
    const std::uint32_t victim = order_.victim(tier, x, chain, spared(tier));
    return victim != kNone || idle_slab(tier, x, chain, victim) != kNone;
}

// The slab of another group that was used longest ago, if that was before the victim's segment (without a
// victim: before x's own); kNone if there is none.
std::uint32_t Index::idle_slab(int tier, const Newcomer& x, const Chain& chain, std::uint32_t victim) {
    if (groups() == 1 || options_.slots_per_slab[x.group] == 0) return kNone;
    const std::uint64_t limit = order_.segment(victim == kNone ? x.segment : pool_[victim].segment).order;
    for (;;) {
        SlabUse best{limit, 0};
        for (std::uint32_t g = 0; g < groups(); ++g) {
            if (g != x.group) best = std::min(best, oldest_slab(tier, g, best));
        }
        if (best.first == limit) return kNone;
        if (slab_is_free_to_go(tier, best.second, x, chain)) return best.second;
        slab_blocked_[tier][best.second] = batch_;
    }
}

// The group's slab used longest ago that was before `limit`, is not blocked and may be emptied; else `limit`.
Index::SlabUse Index::oldest_slab(int tier, std::uint32_t g, SlabUse limit) {
    const SlabArena& arena = arenas_[tier];
    const std::vector<std::uint64_t>& blocked = slab_blocked_[tier];
    SlabUse& from = slab_from_[tier][g];
    auto at = arena.by_use(g).lower_bound(from);
    for (; at != arena.by_use(g).end() && *at < limit && blocked[at->second] == batch_; ++at) from = *at;
    for (; at != arena.by_use(g).end() && *at < limit; ++at) {
        if (blocked[at->second] != batch_ && arena.can_empty(at->second)) return *at;
    }
    return limit;
}

void Index::empty_slab(int tier, std::uint32_t slab, const Newcomer& x, const Chain& chain) {
    const SlabArena::Slab& s = arenas_[tier].slabs()[slab];
    ++counters_.slabs_moved;
    for (std::uint32_t i = 0; i < s.slots && s.owner >= 0; ++i) {
        if (!s.free.test(i)) evict(s.entries[i], tier, x, chain);
    }
}

bool Index::slab_is_free_to_go(int tier, std::uint32_t slab, const Newcomer& x, const Chain& chain) const {
    const SlabArena::Slab& s = arenas_[tier].slabs()[slab];
    for (std::uint32_t i = 0; i < s.slots; ++i) {
        if (s.free.test(i)) continue;
        const Entry& e = pool_[s.entries[i]];
        if (e.pins != 0 || e.has(spared(tier)) || e.segment == x.segment || order_.own_prefix(e, x, chain))
            return false;
        if (!order_.displaces(tier, x.segment, e.segment)) return false;
    }
    return true;
}

// ---- entries

void Index::join(std::uint32_t request, Item& item, std::uint32_t& hint) {
    Entry& e = pool_[item.entry];
    const std::uint32_t segment = order_.target(request, item.end);
    if (hint != kNone && pool_[hint].segment != segment) hint = kNone;
    if (e.segment == segment) {
        hint = item.entry;
    } else {
        order_.unlink(item.entry);
        order_.link(segment, item.entry, hint);
        if (e.touches < kMaxTouches) ++e.touches;
        if (e.has(kHostValid)) queue_write(item.entry);
    }
    if (groups() == 1) return;
    for (int t = 0; t < kTiers; ++t) {
        if (e.slot[t] >= 0) arenas_[t].touch(e.slot[t], order_.segment(segment).order);
    }
}

// A new entry in its table; kNone if the key has one already.
std::uint32_t Index::make_entry(const Chain& chain, const Item& item) {
    const std::uint32_t multiple = group(item.group).multiple;
    const std::uint8_t* key = chain.at(multiple, item.block);
    const std::uint32_t hash = hash_key(key);
    if (tables_[item.group].find(hash, key) != kNone) return kNone;
    const std::uint32_t id = pool_.make(key, item.group, item.block);
    if (item.block > 0) {
        const std::uint8_t* p = chain.at(multiple, item.block - 1);
        pool_[id].parent = p[0] | p[1] << 8 | p[2] << 16 | static_cast<std::uint32_t>(p[3]) << 24;
    }
    tables_[item.group].insert(hash, id);
    return id;
}

// The block loses its slot in the tier. REQUIRES: no pins, linked.
void Index::drop(std::uint32_t id, int tier) {
    const Entry& e = pool_[id];
    if (e.prev != kNone)
        tables_[pool_[e.prev].group].prefetch(hash_key(pool_[e.prev].key));  // likely the next victim
    if (tier == kHost && e.has(kWantDisk)) ++counters_.dropped_disk_backlog;
    clear_slot(id, tier);
    log(e, kRemoved, tier);
    settle(id);
}

// Invisible from now on; the slots stay with the jobs that hold pins. REQUIRES: pins.
void Index::doom(std::uint32_t id) {
    Entry& e = pool_[id];
    if (e.has(kDoomed)) return;
    tables_[e.group].erase(hash_key(e.key), id);
    const std::uint8_t was = e.flags;
    e.flags = static_cast<std::uint8_t>((was & (kHostBusy | kDiskBusy | kWantDisk)) | kDoomed);
    for (int t = 0; t < kTiers; ++t) {
        if (was & valid_bit(t)) log(e, kRemoved, t);
    }
    if ((was & (kHostValid | kDiskValid)) == 0) log(e, kMarked, kHost);
    if (was & kWantDisk) --wanted_;
    order_.bury(id);
}

// Ends an entry that nothing holds any more.
void Index::settle(std::uint32_t id) {
    const Entry& e = pool_[id];
    if (e.pins != 0) return;
    if (!e.has(kDoomed) && (e.slot[kHost] >= 0 || e.slot[kDisk] >= 0)) return;
    release_entry(id);
}

void Index::release_entry(std::uint32_t id) {
    Entry& e = pool_[id];
    for (int t = 0; t < kTiers; ++t) {
        if (e.slot[t] >= 0) clear_slot(id, t);
    }
    if (!e.has(kDoomed)) {
        tables_[e.group].erase(hash_key(e.key), id);
        order_.bury(id);
    }
    pool_.retire(id);
    if (e.has(kWantDisk)) {  // its place in the queue gives the id back
        wanted_ -= e.has(kDoomed) ? 0 : 1;
    } else {
        pool_.recycle(id);
    }
}

void Index::set_slot(std::uint32_t id, int tier, std::int32_t slot, std::uint8_t bit) {
    Entry& e = pool_[id];
    e.slot[tier] = slot;
    set_bits(e, bit, 0);
    if (e.pins != 0) ++pinned_[tier][e.group];
    if (e.segment == kNone) return;
    order_.gained(id, tier);
    if (groups() > 1) arenas_[tier].touch(slot, order_.segment(e.segment).order);
}

void Index::clear_slot(std::uint32_t id, int tier) {
    Entry& e = pool_[id];
    arenas_[tier].release(e.slot[tier]);
    e.slot[tier] = -1;
    set_bits(e, 0, static_cast<std::uint8_t>(valid_bit(tier) | busy_bit(tier)));
    if (e.pins != 0) --pinned_[tier][e.group];
    if (e.segment != kNone) order_.lost(id, tier);
}

// REQUIRES: a promise to the entry's group.
void Index::take_slot(std::uint32_t id, int tier, std::uint8_t bit) {
    set_slot(id, tier, arenas_[tier].take(pool_[id].group, id), bit);
}

// ---- copies

// A job that ended twice, or copies that were changed, must not touch somebody else's pins.
void Index::check_copies(const BlockCopy* copies, std::size_t n, Ending ending) const {
    for (std::size_t i = 0; i < n; ++i) {
        const BlockCopy& c = copies[i];
        bool good = c.entry < pool_.size() && pool_[c.entry].in_use() && pool_[c.entry].pins != 0 &&
                    pool_[c.entry].group == c.group && std::memcmp(pool_[c.entry].key, c.key, 16) == 0;
        const bool transit = (c.flags & kCopyTransit) != 0;
        const bool into_host =
            !transit && (ending == kEndsStore || (ending == kEndsLoad && c.flags & kCopyRead));
        const bool into_disk = ending == kEndsWrite || (ending == kEndsStore && transit);
        if (good && into_host) good = pool_[c.entry].has(kHostBusy) && pool_[c.entry].slot[kHost] == c.host;
        if (good && into_disk) good = pool_[c.entry].has(kDiskBusy) && pool_[c.entry].slot[kDisk] == c.disk;
        if (good) continue;
        refuse("copy " + std::to_string(i) + " names entry " + std::to_string(c.entry) +
               ", which no such job holds; a job ends once, with the copies it was given");
    }
}

}  // namespace kvoffload
