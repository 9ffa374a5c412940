// Whether a learned order may be followed: its hits against those of an LRU of the same size, request by
// request. The loss counts over about the last 4,096 requests, gains at most up to a limit, so that a change
// of traffic shows. Once it exceeds a thousandth of the blocks asked for and a few prompts, LRU goes on until
// half of that is forgotten. Thread: owned by a Policy.
#pragma once

#include <algorithm>
#include <cstdint>

namespace kvoffload {

class Regret {
  public:
    // Of `blocks` base blocks of a request the tier held `own` from the start on, an LRU would have held
    // `lru`.
    void count(std::uint64_t own, std::uint64_t lru, std::uint64_t blocks) {
        const double asked = static_cast<double>(blocks);
        own_ += own;
        lru_ += lru;
        requests_ = requests_ * kMemory + 1;
        asked_ = asked_ * kMemory + asked;
        loss_ = loss_ * kMemory + static_cast<double>(lru) - static_cast<double>(own);
        loss_ = std::max(loss_, -kMostCredit * asked_);
        const double limit = kShare * asked_ + kPrompts * asked_ / requests_;
        const bool before = lost_;
        lost_ = loss_ > (lost_ ? limit / 2 : limit);
        times_ += lost_ && !before ? 1 : 0;
        waited_ += lost_ ? 1 : 0;
    }

    bool lost() const { return lost_; }
    std::uint64_t own() const { return own_; }  // sums
    std::uint64_t lru() const { return lru_; }
    std::uint64_t times() const { return times_; }
    std::uint64_t waited() const { return waited_; }  // requests under LRU

  private:
    static constexpr double kMemory = 1 - 1.0 / 4096;
    static constexpr double kShare = 0.001;
    static constexpr double kPrompts = 4;
    static constexpr double kMostCredit = 0.02;

    double requests_ = 0, asked_ = 0, loss_ = 0;
    bool lost_ = false;
    std::uint64_t own_ = 0, lru_ = 0, times_ = 0, waited_ = 0;
};

}  // namespace kvoffload
