// Streams: one agent of one session, and how fast each comes back. Bounded: the longest silent ones are
// forgotten, and a number may then name another stream. Thread: owned by the Lineage.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "entry_pool.h"
#include "policy.h"

namespace kvoffload {

class Streams {
  public:
    static constexpr std::uint32_t kMost = 1 << 16;

    // The stream of this name, 0 = a new one without a name.
    std::uint32_t get(std::uint64_t name);
    // A request of `blocks` base blocks begins.
    void begin(std::uint32_t stream, std::uint64_t blocks, double now);
    // The stream's mean log gap against all: apart by more than half a standard deviation is quick or slow.
    Pace pace(std::uint32_t stream) const;
    std::uint64_t blocks(std::uint32_t stream) const { return streams_[stream].blocks; }
    // The segment of the end of its last request; kNone if there is none.
    std::uint32_t& tail(std::uint32_t stream) { return streams_[stream].tail; }
    std::uint32_t size() const { return static_cast<std::uint32_t>(streams_.size() - free_.size()); }
    std::size_t memory_bytes() const;

  private:
    struct Stream {
        std::uint64_t name = 0;
        double last = 0;
        double mean = 0;  // of the log gap
        std::uint64_t blocks = 0;
        std::uint32_t gaps = 0;
        std::uint32_t tail = kNone;
        bool begun = false;
    };

    void forget_oldest();

    std::vector<Stream> streams_;
    std::vector<std::uint32_t> free_;
    std::unordered_map<std::uint64_t, std::uint32_t> names_;  // looked up only, never walked
    double count_ = 0, sum_ = 0, squares_ = 0;                // of all log gaps, the last few thousand
};

}  // namespace kvoffload
