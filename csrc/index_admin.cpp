// Whole-index calls: start from disk, reset, numbers, and the walk that checks every invariant.
#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <unordered_map>
#include <unordered_set>

#include "index_inline.h"

namespace kvoffload {

namespace {

[[noreturn]] void broken(const std::string& what) { throw std::runtime_error("index: " + what); }

void expect(bool ok, const char* what, std::uint64_t where) {
    if (!ok) broken(std::string(what) + " (" + std::to_string(where) + ")");
}

std::uint32_t first_bytes(const std::uint8_t* p) {
    return p[0] | p[1] << 8 | p[2] << 16 | static_cast<std::uint32_t>(p[3]) << 24;
}

// Effective order of each record: its own seq, or that of the most recent record below it in its group.
std::vector<std::uint64_t> effective_order(const std::vector<Record>& records) {
    std::vector<std::size_t> by_depth(records.size());
    std::iota(by_depth.begin(), by_depth.end(), std::size_t{0});
    std::sort(by_depth.begin(), by_depth.end(), [&](std::size_t a, std::size_t b) {
        if (records[a].group != records[b].group) return records[a].group < records[b].group;
        return records[a].depth > records[b].depth;
    });
    std::vector<std::uint64_t> order(records.size());
    std::unordered_map<std::uint32_t, std::uint64_t> children,
        parents;  // first key bytes -> order, of two depths
    for (std::size_t i = 0; i < by_depth.size(); ++i) {
        const Record& r = records[by_depth[i]];
        const Record* before = i == 0 ? nullptr : &records[by_depth[i - 1]];
        if (before == nullptr || before->group != r.group || before->depth != r.depth) {
            children.swap(parents);
            parents.clear();
            if (before != nullptr && (before->group != r.group || before->depth != r.depth + 1))
                children.clear();
        }
        const auto child = children.find(first_bytes(r.key));
        order[by_depth[i]] = std::max(r.seq, child == children.end() ? 0 : child->second);
        std::uint64_t& parent = parents[r.parent];
        parent = std::max(parent, order[by_depth[i]]);
    }
    return order;
}

}  // namespace

std::uint64_t Index::restore(const Record* records, std::size_t n) {
    if (pool_.used() != 0) throw std::invalid_argument("restore: blocks were stored already");
    std::vector<std::size_t> newest(n);
    std::iota(newest.begin(), newest.end(), std::size_t{0});
    std::stable_sort(newest.begin(), newest.end(),
                     [&](std::size_t a, std::size_t b) { return records[a].seq > records[b].seq; });
    std::vector<Record> taken;
    std::vector<std::uint32_t> ids;
    for (const std::size_t i : newest) {
        const Record& r = records[i];
        if (r.group >= groups() || r.depth < 0) continue;
        const std::uint32_t hash = hash_key(r.key);
        KeyTable& table = tables_[r.group];
        if (table.find(hash, r.key) != kNone) continue;
        const std::uint32_t id =
            pool_.make(r.key, static_cast<std::uint8_t>(r.group), static_cast<std::uint32_t>(r.depth));
        if (!arenas_[kDisk].claim(r.group, r.slot, id)) {
            pool_.retire(id);
            pool_.recycle(id);
            continue;
        }
        table.insert(hash, id);
        pool_[id].parent = r.parent;
        pool_[id].slot[kDisk] = r.slot;
        pool_[id].flags = kDiskValid;
        taken.push_back(r);
        ids.push_back(id);
    }
    link_restored(effective_order(taken), ids);
    log_.invalidate();
    return taken.size();
}

// One closed segment per distinct order, oldest first.
void Index::link_restored(const std::vector<std::uint64_t>& order, const std::vector<std::uint32_t>& ids) {
    std::vector<std::size_t> sorted(ids.size());
    std::iota(sorted.begin(), sorted.end(), std::size_t{0});
    std::sort(sorted.begin(), sorted.end(), [&](std::size_t a, std::size_t b) {
        if (order[a] != order[b]) return order[a] < order[b];
        return order_.goes_before(ids[a], ids[b]);
    });
    std::uint32_t segment = kNone, hint = kNone;
    for (std::size_t i = 0; i < sorted.size(); ++i) {
        if (i == 0 || order[sorted[i]] != order[sorted[i - 1]]) segment = order_.restore(order[sorted[i]]);
        const std::uint32_t id = ids[sorted[i]];
        order_.link(segment, id, hint);
        if (order_.lineage() != nullptr) order_.lineage()->restored(segment, 1, order_.now());
        if (groups() > 1) arenas_[kDisk].touch(pool_[id].slot[kDisk], order[sorted[i]]);
    }
}

void Index::reset(int tier) {
    std::vector<std::uint32_t> ids;
    for (const SlabArena::Slab& s : arenas_[tier].slabs()) {
        for (std::uint32_t i = 0; s.owner >= 0 && i < s.slots; ++i) {
            if (!s.free.test(i)) ids.push_back(s.entries[i]);
        }
    }
    for (const std::uint32_t id : ids) {
        if (pool_[id].has(kDoomed)) continue;
        if (pool_[id].pins != 0) {
            doom(id);
        } else {
            clear_slot(id, tier);
            settle(id);
        }
    }
    log_.invalidate();
}

void Index::set_disk_online(bool online) {
    if (disk_online_ == online) return;
    disk_online_ = online;
    log_.invalidate();
}

TierUsage Index::usage(int tier, std::uint32_t g) const {
    const SlabArena& a = arenas_[tier];
    return TierUsage{a.capacity(g), a.used(g), pinned_[tier][g], busy_[tier][g], a.free(g), a.owned(g)};
}

std::size_t Index::memory_bytes() const {
    std::size_t sum = sizeof(*this) + pool_.memory_bytes() + order_.memory_bytes() + transit_.memory_bytes() +
                      log_.memory_bytes() + items_.capacity() * sizeof(Item) +
                      queue_.size() * sizeof(std::uint32_t);
    for (const KeyTable& t : tables_) sum += t.memory_bytes();
    for (const SlabArena& a : arenas_) sum += a.memory_bytes();
    return sum;
}

std::vector<EntryView> Index::entries() const {
    std::vector<std::uint32_t> segments;
    for (std::uint32_t s = 0; s < order_.segments(); ++s) {
        if (order_.segment(s).live) segments.push_back(s);
    }
    std::sort(segments.begin(), segments.end(), [&](std::uint32_t a, std::uint32_t b) {
        return order_.segment(a).order < order_.segment(b).order;
    });
    std::vector<EntryView> out;
    for (const std::uint32_t s : segments) {
        for (std::uint32_t id = order_.segment(s).tail; id != kNone; id = pool_[id].prev) {
            const Entry& e = pool_[id];
            EntryView v{};
            std::memcpy(v.key, e.key, 16);
            v.order = order_.segment(s).order;
            v.host = e.slot[kHost];
            v.disk = e.slot[kDisk];
            v.segment = s;
            v.depth = e.depth;
            v.group = e.group;
            v.pins = e.pins;
            v.flags = e.flags;
            out.push_back(v);
        }
    }
    return out;
}

void Index::check_integrity() const {
    check_entries();
    check_segments();
    if (order_.lineage() != nullptr) order_.lineage()->check();
    for (int t = 0; t < kTiers; ++t) check_slots(t);
    transit_.check("transit");
    check_counts();
}

// Tables and entries name each other; state bits say what the slots say.
void Index::check_entries() const {
    std::uint64_t used = 0, tabled = 0;
    for (std::uint32_t id = 0; id < pool_.size(); ++id) {
        const Entry& e = pool_[id];
        if (!e.in_use()) continue;
        ++used;
        expect(e.group < groups(), "entry of an unknown group", id);
        const bool doomed = e.has(kDoomed);
        expect(!doomed || e.pins != 0, "doomed entry without pins", id);
        expect(doomed == (e.segment == kNone), "entry is linked and doomed, or neither", id);
        const std::uint32_t found = tables_[e.group].find(hash_key(e.key), e.key);
        expect((found == id) == !doomed, "entry and table disagree", id);
        tabled += doomed ? 0 : 1;
        if (doomed) continue;
        expect(e.slot[kHost] >= 0 || e.slot[kDisk] >= 0, "entry without a slot", id);
        for (int t = 0; t < kTiers; ++t) {
            const bool valid = e.has(valid_bit(t)), busy = e.has(busy_bit(t));
            expect(!(valid && busy), "tier is valid and busy", id);
            expect((valid || busy) == (e.slot[t] >= 0), "state and slot disagree", id);
        }
        expect(!e.has(kHostBusy | kDiskBusy | kLoading | kPending) || e.pins != 0, "in flight without a pin",
               id);
        expect(!e.has(kWantDisk) || (e.has(kHostValid) && e.slot[kDisk] < 0), "wants disk without reason",
               id);
    }
    expect(used == pool_.used(), "entries in use are miscounted", used);
    std::uint64_t places = 0;
    for (const KeyTable& t : tables_) places += t.size();
    expect(places == tabled, "a table names more or fewer entries than there are", places);
}

// Lists run in increasing positions; tails, counts and the policies' orders follow from them.
void Index::check_segments() const {
    std::uint64_t resident_segments[kTiers] = {0, 0};
    for (std::uint32_t s = 0; s < order_.segments(); ++s) {
        const Segment& seg = order_.segment(s);
        if (!seg.live) continue;
        expect(seg.open || seg.size != 0 || s == kSuperseded ||
                   (order_.lineage() && order_.lineage()->ghosts(s) != 0),
               "segment is closed, empty and alive", s);
        std::vector<std::uint32_t> tails(groups() * kTiers, kNone), counts(groups() * kTiers, 0);
        std::uint32_t size = 0, before = kNone, sum[kTiers] = {0, 0};
        for (std::uint32_t id = seg.head; id != kNone; before = id, id = pool_[id].next, ++size) {
            const Entry& e = pool_[id];
            expect(e.in_use() && e.segment == s && e.prev == before, "segment list is broken", s);
            expect(before == kNone || order_.goes_before(before, id), "list out of order", s);
            for (std::uint32_t t = 0; t < kTiers; ++t) {
                if (e.slot[t] < 0) continue;
                tails[e.group * kTiers + t] = id;
                ++counts[e.group * kTiers + t];
                ++sum[t];
            }
        }
        expect(size == seg.size && before == seg.tail, "segment size or tail is wrong", s);
        for (std::uint32_t t = 0; t < kTiers; ++t) {
            expect(sum[t] == seg.resident[t], "resident blocks are miscounted", s);
            resident_segments[t] += sum[t] > 0 && s != kSuperseded ? 1 : 0;
            for (std::uint32_t g = 0; g < groups(); ++g) {
                expect(order_.tail(s, g, static_cast<int>(t)) == tails[g * kTiers + t],
                       "wrong tail of a tier", s);
                expect(order_.count(s, g, static_cast<int>(t)) == counts[g * kTiers + t],
                       "wrong count of a tier", s);
            }
        }
    }
    for (int t = 0; t < kTiers; ++t) {
        std::unordered_set<std::uint32_t> seen;
        for (std::uint32_t s = kNone; (s = order_.policy(t).next_victim(s)) != kNone;) {
            expect(s != kSuperseded && seen.insert(s).second && order_.segment(s).live &&
                       order_.segment(s).resident[t] > 0,
                   "policy orders a segment twice or without blocks", s);
        }
        expect(seen.size() == resident_segments[t], "policy misses a segment", seen.size());
    }
}

// Every slot in use belongs to the one entry that names it.
void Index::check_slots(int tier) const {
    const SlabArena& a = arenas_[tier];
    a.check(tier == kHost ? "host" : "disk");
    std::uint64_t named = 0, used = 0;
    for (std::uint32_t id = 0; id < pool_.size(); ++id) {
        const Entry& e = pool_[id];
        if (!e.in_use() || e.slot[tier] < 0) continue;
        ++named;
        expect(a.holds(e.slot[tier]) && a.entry(e.slot[tier]) == id, "slot and entry disagree", id);
        const SlabArena::Slab& s = a.slabs()[static_cast<std::uint32_t>(e.slot[tier]) >> 16];
        expect(s.owner == static_cast<std::int32_t>(e.group), "slot lies in another group's slab", id);
    }
    for (std::uint32_t g = 0; g < groups(); ++g) used += a.used(g);
    expect(named == used, "a slot is in use by nobody, or by two", used - named);
}

void Index::check_counts() const {
    std::vector<std::uint64_t> pinned[kTiers], busy[kTiers];
    for (int t = 0; t < kTiers; ++t) {
        pinned[t].assign(groups(), 0);
        busy[t].assign(groups(), 0);
    }
    std::uint64_t wanted = 0, writing = 0;
    for (std::uint32_t id = 0; id < pool_.size(); ++id) {
        const Entry& e = pool_[id];
        if (!e.in_use()) continue;
        for (int t = 0; t < kTiers; ++t) {
            pinned[t][e.group] += e.pins != 0 && e.slot[t] >= 0 ? 1 : 0;
            busy[t][e.group] += e.has(busy_bit(t)) ? 1 : 0;
        }
        wanted += e.has(kWantDisk) && !e.has(kDoomed) ? 1 : 0;
        writing += e.has(kDiskBusy) ? 1 : 0;
    }
    for (int t = 0; t < kTiers; ++t) {
        expect(pinned[t] == pinned_[t], "pinned slots are miscounted in tier", static_cast<std::uint64_t>(t));
        expect(busy[t] == busy_[t], "busy slots are miscounted in tier", static_cast<std::uint64_t>(t));
    }
    expect(wanted == wanted_ && writing == writing_, "writes are miscounted", wanted);
    std::uint64_t places = 0;
    for (const std::uint32_t id : queue_) {
        const Entry& e = pool_[id];
        expect(e.has(kWantDisk), "an entry in the write queue does not want disk", id);
        places += e.in_use() && !e.has(kDoomed) ? 1 : 0;
    }
    expect(places == wanted, "the write queue misses an entry or has it twice", places);
}

}  // namespace kvoffload
