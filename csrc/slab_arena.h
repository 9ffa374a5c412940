// Which slots of a tier are free: slot = slab << 16 | index, index < slots per slab of the slab's owner
// group. A slab is owned by one group at a time and comes back unowned when its last slot is released.
//
// Allocation has two steps, so that a batch makes all its room first and then takes neighbouring slots:
// `promise` sets one slot aside for a group (its own free slots, else an unowned slab), `take` hands out the
// lowest free slot of the lowest slab. Between batches nothing is promised and every owned slab holds at
// least one slot in use. Thread: owned by the Index.
#pragma once

#include <cstdint>
#include <set>
#include <utility>
#include <vector>

namespace kvoffload {

// A set of small integers with a fast minimum.
class FreeBits {
  public:
    void assign(std::uint32_t size, bool value);
    std::uint32_t size() const { return size_; }
    bool test(std::uint32_t i) const { return (words_[i >> 6] >> (i & 63)) & 1; }
    void set(std::uint32_t i) {
        words_[i >> 6] |= std::uint64_t{1} << (i & 63);
        summary_[i >> 12] |= std::uint64_t{1} << ((i >> 6) & 63);
    }
    void clear(std::uint32_t i) {
        words_[i >> 6] &= ~(std::uint64_t{1} << (i & 63));
        if (words_[i >> 6] == 0) summary_[i >> 12] &= ~(std::uint64_t{1} << ((i >> 6) & 63));
    }
    // The smallest member, or size() when empty.
    std::uint32_t first() const;
    std::size_t memory_bytes() const { return (words_.capacity() + summary_.capacity()) * 8; }

  private:
    std::uint32_t size_ = 0;
    std::vector<std::uint64_t> words_;    // 64 members a word
    std::vector<std::uint64_t> summary_;  // one bit per word that is not zero
};

class SlabArena {
  public:
    struct Slab {
        std::int32_t owner = -1;     // group, -1 = unowned
        std::uint32_t slots = 0;     // of the owner, in this slab
        std::uint32_t used = 0;      // slots in use
        std::uint64_t last_use = 0;  // order number of the last touch of a block in it; 0 when empty
        FreeBits free;
        std::vector<std::uint32_t> entries;  // by slot index; meaningful where the slot is in use
    };

    // Slabs are numbered from `first_slab`. cap >= 0: exactly that many slots over all slabs (one group
    // only); the last slab is short. Throws std::invalid_argument when cap does not fit.
    SlabArena(std::uint32_t first_slab, std::uint32_t slabs, std::vector<std::uint32_t> slots_per_slab,
              std::int64_t cap);

    bool promise(std::uint32_t group);
    bool could_promise(std::uint32_t group) const;
    void withdraw(std::uint32_t group);
    // REQUIRES: one promise to the group, which this uses up.
    std::int32_t take(std::uint32_t group, std::uint32_t entry);
    // Takes that very slot, without promise; false when out of range, in use or in another group's slab.
    bool claim(std::uint32_t group, std::int32_t slot, std::uint32_t entry);
    // REQUIRES: the slot is in use.
    void release(std::int32_t slot);

    bool holds(std::int32_t slot) const;  // in range and in use
    std::uint32_t entry(std::int32_t slot) const { return slab(slot).entries[slot & 0xFFFF]; }
    // REQUIRES: the slot is in use.
    void touch(std::int32_t slot, std::uint64_t order) {
        if (slab(slot).last_use < order) move_up(index(slot), order);
    }
    // (last use, slab) of each slab of the group with a slot in use.
    using ByUse = std::set<std::pair<std::uint64_t, std::uint32_t>>;
    const ByUse& by_use(std::uint32_t group) const { return by_use_[group]; }

    std::uint32_t groups() const { return static_cast<std::uint32_t>(used_.size()); }
    std::uint32_t used(std::uint32_t group) const { return used_[group]; }
    std::uint32_t free(std::uint32_t group) const { return free_[group]; }
    std::uint32_t promised(std::uint32_t group) const { return promised_[group]; }
    std::uint32_t unowned() const { return unowned_count_; }
    std::uint32_t owned(std::uint32_t group) const;
    // Slots the group could have if it owned every slab.
    std::uint64_t capacity(std::uint32_t group) const;
    // Slots that can be taken without eviction, whichever group asks.
    std::uint64_t room() const;

    const std::vector<Slab>& slabs() const { return slabs_; }
    std::int32_t slot(std::uint32_t slab_index, std::uint32_t i) const {
        return static_cast<std::int32_t>((first_slab_ + slab_index) << 16 | i);
    }
    // True when emptying the slab keeps every promise.
    bool can_empty(std::uint32_t slab_index) const;

    std::size_t memory_bytes() const;
    // Throws std::runtime_error naming the first rule that does not hold.
    void check(const char* name) const;

  private:
    std::uint32_t index(std::int32_t slot) const {
        return (static_cast<std::uint32_t>(slot) >> 16) - first_slab_;
    }
    const Slab& slab(std::int32_t slot) const { return slabs_[index(slot)]; }
    std::uint32_t slots_in(std::uint32_t slab_index, std::uint32_t group) const;
    void own(std::uint32_t slab_index, std::uint32_t group);
    void disown(std::uint32_t slab_index);
    void mark(std::int32_t slot, std::uint32_t entry);
    void move_up(std::uint32_t slab_index, std::uint64_t order);
    bool idle(std::uint32_t slab_index) const;
    void sweep();

    const std::uint32_t first_slab_;
    const std::vector<std::uint32_t> slots_per_slab_;
    const std::int64_t cap_;
    std::vector<Slab> slabs_;
    FreeBits unowned_;
    std::uint32_t unowned_count_ = 0;
    std::vector<FreeBits> open_;  // by group: its slabs with a free slot
    std::vector<ByUse> by_use_;
    std::vector<std::uint32_t> used_, free_, promised_;
    std::vector<std::uint32_t> empty_;  // slabs that may be owned and empty because of promises
};

}  // namespace kvoffload
