// How many blocks were used more recently than a segment: what an LRU of any size would hold, without one.
// A Fenwick tree over places; every touch takes the next place, and when they run out those in use are
// numbered anew. Thread: owned by the Lineage.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "entry_pool.h"

namespace kvoffload {

class Recency {
  public:
    // The segment becomes the most recent one; unknown ones begin without blocks.
    void touch(std::uint32_t segment);
    // REQUIRES: touched since it was erased.
    void add(std::uint32_t segment, std::int64_t blocks);
    void erase(std::uint32_t segment);
    // Blocks of all segments touched after this one.
    std::uint64_t above(std::uint32_t segment) const;
    std::size_t memory_bytes() const;

  private:
    static constexpr std::size_t kLeast = 1024;

    struct Seat {
        std::uint32_t place = kNone;
        std::uint32_t blocks = 0;
    };

    void update(std::size_t place, std::int64_t blocks);
    void renumber();

    std::vector<Seat> seats_;              // by segment
    std::vector<std::uint32_t> segments_;  // by place, kNone = left
    std::vector<std::int64_t> tree_;
    std::size_t next_ = 0;
    std::int64_t total_ = 0;
};

}  // namespace kvoffload
