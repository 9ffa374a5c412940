// A ring of bytes given out and taken back first in, first out.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>

namespace kvoffload {

// A piece of the ring in use. The events are the owner's: when `copied` has completed the bytes are free.
struct RingSpan {
    std::int64_t begin = 0, bytes = 0;
    std::uintptr_t gathered = 0, copied = 0;
};

class StagingRing {
  public:
    explicit StagingRing(std::int64_t bytes) : bytes_(bytes) {}

    std::int64_t bytes() const { return bytes_; }
    std::deque<std::shared_ptr<RingSpan>>& spans() { return spans_; }

    // A span of a whole number of `unit`s, at least one and at most `most`; null when there is no room for
    // one.
    std::shared_ptr<RingSpan> take(std::int64_t unit, std::int64_t most) {
        std::int64_t begin = 0, room = bytes_;
        if (!spans_.empty()) {
            const std::int64_t head = spans_.back()->begin + spans_.back()->bytes,
                               tail = spans_.front()->begin;
            const bool wrapped = spans_.back()->begin < tail;
            begin = head;
            room = (wrapped ? tail : bytes_) - head;
            if (!wrapped && room < unit) {
                begin = 0;
                room = tail;
            }
        }
        const std::int64_t count = std::min(room / unit, most);
        if (count < 1) return nullptr;
        auto span = std::make_shared<RingSpan>();
        span->begin = begin;
        span->bytes = count * unit;
        spans_.push_back(span);
        return span;
    }

  private:
    std::int64_t bytes_;
    std::deque<std::shared_ptr<RingSpan>> spans_;  // oldest first; disjoint
};

}  // namespace kvoffload
