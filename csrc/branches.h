// Which segments hang below which, and where: a block with something below it is no victim of a policy that
// learns. Segments that hang below one block share a fork, so that a whole bundle moves at once when another
// request takes the block; where two forks meet, the smaller one joins the larger. There are no rings.
// Thread: owned by the Lineage.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "entry_pool.h"

namespace kvoffload {

class Branches {
  public:
    // The id is new: it hangs nowhere and nothing hangs on it.
    void open(std::uint32_t segment);
    // REQUIRES: nothing resident. What hung on the segment hangs where it hung, if it did.
    void erase(std::uint32_t segment);
    // Hangs the segment, with all below it, under the parent's block that ends at `at` base blocks. If the
    // parent hangs below the segment itself, it is cut off first. REQUIRES: hangs nowhere.
    void attach(std::uint32_t segment, std::uint32_t parent, std::uint32_t at);
    void detach(std::uint32_t segment);
    // The segment's first block came to the tier (true) or its last one left (false).
    void resident(std::uint32_t segment, int tier, bool there);
    // What hangs on blocks of `from` that end at or before `end` hangs on the same blocks of target(at).
    template <class Target>
    void move(std::uint32_t from, std::uint32_t end, Target target) {
        for (std::uint32_t f = twigs_[from].forks; f != kNone;) {
            const std::uint32_t next = forks_[f].next;
            if (forks_[f].at <= end) move_fork(f, target(forks_[f].at));
            f = next;
        }
    }

    std::uint32_t parent(std::uint32_t segment) const {
        const std::uint32_t f = twigs_[segment].fork;
        return f == kNone ? kNone : forks_[f].parent;
    }
    // Something that the tier holds hangs directly below a block that ends at or behind `end`.
    bool blocked(std::uint32_t segment, int tier, std::uint32_t end) const;
    std::size_t memory_bytes() const;
    // The counts of forks are those of their segments; throws std::runtime_error otherwise.
    void check() const;

  private:
    struct Twig {
        std::uint32_t fork = kNone, prev = kNone, next = kNone;  // hangs there, among its siblings
        std::uint32_t forks = kNone;                             // list of those on its own blocks
        bool resident[kTiers] = {};
    };
    struct Fork {
        std::uint32_t parent = kNone, at = 0;  // parent kNone: hangs nowhere any more
        std::uint32_t prev = kNone, next = kNone;
        std::uint32_t first = kNone, count = 0;
        std::uint32_t resident[kTiers] = {};  // segments of it
    };

    std::uint32_t find(std::uint32_t parent, std::uint32_t at) const;
    std::uint32_t fork_at(std::uint32_t parent, std::uint32_t at);
    void join(std::uint32_t segment, std::uint32_t fork);
    void leave(std::uint32_t segment);
    void hang(std::uint32_t fork, std::uint32_t parent, std::uint32_t at);
    void unhang(std::uint32_t fork);
    void move_fork(std::uint32_t fork, std::uint32_t parent);

    std::vector<Twig> twigs_;  // by segment
    std::vector<Fork> forks_;
    std::vector<std::uint32_t> free_;
};

}  // namespace kvoffload
