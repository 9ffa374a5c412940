#include "slab_arena.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace kvoffload {

void FreeBits::assign(std::uint32_t size, bool value) {
    size_ = size;
    words_.assign((size + 63) / 64, 0);
    summary_.assign((words_.size() + 63) / 64, 0);
    if (!value) return;
    for (std::uint32_t i = 0; i < size; ++i) set(i);
}

std::uint32_t FreeBits::first() const {
    for (std::size_t s = 0; s < summary_.size(); ++s) {
        if (summary_[s] == 0) continue;
        const std::size_t w = s * 64 + static_cast<std::size_t>(__builtin_ctzll(summary_[s]));
        return static_cast<std::uint32_t>(w * 64 + static_cast<std::size_t>(__builtin_ctzll(words_[w])));
    }
    return size_;
}

SlabArena::SlabArena(std::uint32_t first_slab, std::uint32_t slabs, std::vector<std::uint32_t> slots_per_slab,
                     std::int64_t cap)
    : first_slab_(first_slab), slots_per_slab_(std::move(slots_per_slab)), cap_(cap), slabs_(slabs) {
    const std::size_t groups = slots_per_slab_.size();
    if (cap >= 0) {
        const std::uint64_t all = static_cast<std::uint64_t>(slabs) * slots_per_slab_[0];
        if (groups != 1 || static_cast<std::uint64_t>(cap) > all) {
            throw std::invalid_argument(
                "an exact number of " + std::to_string(cap) + " slots needs one group and " +
                "at least as many slots in its slabs; there are " + std::to_string(groups) + " groups and " +
                std::to_string(all) + " slots");
        }
    }
    unowned_.assign(slabs, false);
    for (std::uint32_t s = 0; s < slabs; ++s) {
        if (cap >= 0 && slots_in(s, 0) == 0) continue;
        unowned_.set(s);
        ++unowned_count_;
    }
    by_use_.resize(groups);
    open_.resize(groups);
    for (FreeBits& bits : open_) bits.assign(slabs, false);
    used_.assign(groups, 0);
    free_.assign(groups, 0);
    promised_.assign(groups, 0);
}

std::uint32_t SlabArena::slots_in(std::uint32_t slab_index, std::uint32_t group) const {
    const std::uint32_t full = slots_per_slab_[group];
    if (cap_ < 0) return full;
    const std::int64_t left = cap_ - static_cast<std::int64_t>(slab_index) * full;
    return static_cast<std::uint32_t>(std::clamp<std::int64_t>(left, 0, full));
}

void SlabArena::own(std::uint32_t slab_index, std::uint32_t group) {
    Slab& s = slabs_[slab_index];
    const std::uint32_t slots = slots_in(slab_index, group);
    if (s.slots != slots) {  // an empty slab's bits are all set already
        s.slots = slots;
        s.free.assign(slots, true);
        s.entries.assign(slots, 0);
        s.entries.shrink_to_fit();
    }
    s.owner = static_cast<std::int32_t>(group);
    free_[group] += slots;
    open_[group].set(slab_index);
    unowned_.clear(slab_index);
    --unowned_count_;
}

void SlabArena::disown(std::uint32_t slab_index) {
    Slab& s = slabs_[slab_index];
    const auto group = static_cast<std::uint32_t>(s.owner);
    free_[group] -= s.slots;
    open_[group].clear(slab_index);
    s.owner = -1;
    unowned_.set(slab_index);
    ++unowned_count_;
}

bool SlabArena::could_promise(std::uint32_t group) const {
    return free_[group] > promised_[group] || (unowned_count_ != 0 && slots_per_slab_[group] != 0);
}

bool SlabArena::promise(std::uint32_t group) {
    if (free_[group] <= promised_[group]) {
        if (unowned_count_ == 0 || slots_per_slab_[group] == 0) return false;
        const std::uint32_t s = unowned_.first();
        own(s, group);
        empty_.push_back(s);
    }
    ++promised_[group];
    return true;
}

void SlabArena::withdraw(std::uint32_t group) {
    --promised_[group];
    if (promised_[group] == 0) {
        sweep();
    } else if (!empty_.empty() && idle(empty_.back())) {  // the slab that this very promise brought
        disown(empty_.back());
        empty_.pop_back();
    }
}

std::int32_t SlabArena::take(std::uint32_t group, std::uint32_t entry) {
    const std::uint32_t s = open_[group].first();
    const std::int32_t taken = slot(s, slabs_[s].free.first());
    mark(taken, entry);
    if (--promised_[group] == 0) sweep();
    return taken;
}

void SlabArena::mark(std::int32_t slot, std::uint32_t entry) {
    Slab& s = slabs_[index(slot)];
    const auto group = static_cast<std::uint32_t>(s.owner);
    s.free.clear(slot & 0xFFFF);
    s.entries[slot & 0xFFFF] = entry;
    ++used_[group];
    --free_[group];
    if (s.used++ == 0) by_use_[group].emplace(s.last_use, index(slot));
    if (s.used == s.slots) open_[group].clear(index(slot));
}

void SlabArena::move_up(std::uint32_t slab_index, std::uint64_t order) {
    Slab& s = slabs_[slab_index];
    ByUse& by_use = by_use_[static_cast<std::uint32_t>(s.owner)];
    auto node = by_use.extract({s.last_use, slab_index});
    s.last_use = node.value().first = order;
    by_use.insert(by_use.end(), std::move(node));
}

bool SlabArena::claim(std::uint32_t group, std::int32_t slot, std::uint32_t entry) {
    if (slot < 0) return false;
    const std::uint32_t s = index(slot);
    if (s >= slabs_.size() || static_cast<std::uint32_t>(slot & 0xFFFF) >= slots_in(s, group)) return false;
    if (slabs_[s].owner < 0) own(s, group);
    if (slabs_[s].owner != static_cast<std::int32_t>(group) || !slabs_[s].free.test(slot & 0xFFFF))
        return false;
    mark(slot, entry);
    return true;
}

void SlabArena::release(std::int32_t slot) {
    const std::uint32_t i = index(slot);
    Slab& s = slabs_[i];
    const auto group = static_cast<std::uint32_t>(s.owner);
    s.free.set(slot & 0xFFFF);
    open_[group].set(i);
    --used_[group];
    ++free_[group];
    if (--s.used != 0) return;
    by_use_[group].erase({s.last_use, i});
    s.last_use = 0;
    if (idle(i)) {
        disown(i);
    } else {
        empty_.push_back(i);
    }
}

// An owned slab that is empty and that no promise needs.
bool SlabArena::idle(std::uint32_t slab_index) const {
    const Slab& s = slabs_[slab_index];
    if (s.owner < 0 || s.used != 0) return false;
    const auto group = static_cast<std::uint32_t>(s.owner);
    return free_[group] - s.slots >= promised_[group];
}

// Gives back the slabs that only promises kept.
void SlabArena::sweep() {
    std::size_t kept = 0;
    for (const std::uint32_t i : empty_) {
        if (slabs_[i].owner < 0 || slabs_[i].used != 0) continue;
        if (idle(i)) {
            disown(i);
        } else {
            empty_[kept++] = i;
        }
    }
    empty_.resize(kept);
}

bool SlabArena::holds(std::int32_t slot) const {
    if (slot < 0 || index(slot) >= slabs_.size()) return false;
    const Slab& s = slabs_[index(slot)];
    const auto i = static_cast<std::uint32_t>(slot & 0xFFFF);
    return s.owner >= 0 && i < s.slots && !s.free.test(i);
}

bool SlabArena::can_empty(std::uint32_t slab_index) const {
    const Slab& s = slabs_[slab_index];
    const auto group = static_cast<std::uint32_t>(s.owner);
    return free_[group] - (s.slots - s.used) >= promised_[group];
}

std::uint32_t SlabArena::owned(std::uint32_t group) const {
    return static_cast<std::uint32_t>(std::count_if(slabs_.begin(), slabs_.end(), [&](const Slab& s) {
        return s.owner == static_cast<std::int32_t>(group);
    }));
}

std::uint64_t SlabArena::capacity(std::uint32_t group) const {
    if (cap_ >= 0) return static_cast<std::uint64_t>(cap_);
    return static_cast<std::uint64_t>(slabs_.size()) * slots_per_slab_[group];
}

std::uint64_t SlabArena::room() const {
    std::uint64_t sum = 0;
    std::uint32_t least = 0xFFFF + 1;
    for (std::uint32_t g = 0; g < groups(); ++g) {
        sum += free_[g];
        if (slots_per_slab_[g] != 0) least = std::min(least, slots_per_slab_[g]);
    }
    if (cap_ >= 0) return static_cast<std::uint64_t>(cap_) - used_[0];
    return sum + static_cast<std::uint64_t>(unowned_count_) * least;
}

std::size_t SlabArena::memory_bytes() const {
    std::size_t sum = slabs_.capacity() * sizeof(Slab) + unowned_.memory_bytes();
    for (const FreeBits& bits : open_) sum += bits.memory_bytes();
    for (const ByUse& by_use : by_use_)
        sum += by_use.size() * (sizeof(ByUse::value_type) + 4 * sizeof(void*));
    for (const Slab& s : slabs_) sum += s.free.memory_bytes() + s.entries.capacity() * 4;
    return sum;
}

void SlabArena::check(const char* name) const {
    const auto fail = [&](const std::string& what) {
        throw std::runtime_error(std::string(name) + ": " + what);
    };
    std::vector<std::uint32_t> used(groups(), 0), free(groups(), 0);
    std::uint32_t unowned = 0;
    std::vector<std::size_t> ordered(groups(), 0);
    for (std::uint32_t i = 0; i < slabs_.size(); ++i) {
        const Slab& s = slabs_[i];
        if (unowned_.test(i) && s.owner >= 0) fail("slab " + std::to_string(i) + " is owned and unowned");
        if (s.owner < 0) {
            unowned += unowned_.test(i) ? 1 : 0;
            continue;
        }
        std::uint32_t set = 0;
        for (std::uint32_t j = 0; j < s.slots; ++j) set += s.free.test(j) ? 1 : 0;
        if (s.used == 0) fail("slab " + std::to_string(i) + " is empty and owned");
        ++ordered[static_cast<std::uint32_t>(s.owner)];
        if (by_use_[static_cast<std::uint32_t>(s.owner)].count({s.last_use, i}) == 0)
            fail("slab " + std::to_string(i) + " is not where its last use puts it");
        if (set + s.used != s.slots) fail("slab " + std::to_string(i) + ": free + used is not its slots");
        const auto g = static_cast<std::uint32_t>(s.owner);
        if (open_[g].test(i) != (set > 0)) fail("slab " + std::to_string(i) + ": wrong open bit");
        used[g] += s.used;
        free[g] += set;
    }
    if (unowned != unowned_count_) fail("unowned slabs are miscounted");
    for (std::uint32_t g = 0; g < groups(); ++g) {
        if (used[g] != used_[g] || free[g] != free_[g])
            fail("group " + std::to_string(g) + ": slots miscounted");
        if (ordered[g] != by_use_[g].size()) fail("group " + std::to_string(g) + ": slabs out of order");
        if (promised_[g] != 0) fail("group " + std::to_string(g) + ": a promise is left over");
    }
}

}  // namespace kvoffload
