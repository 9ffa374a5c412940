// What is least valuable in a tier: one Policy per tier orders the segments that have blocks there. It never
// sees slots, keys or pins; the index asks for victims and skips those that it may not touch. Thread: owned
// by the Index. A policy is a pure function of the calls it gets (times are handed in).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace kvoffload {

class Policy {
  public:
    virtual ~Policy() = default;

    // `order` rises with every open and touch over the whole index; `now` is in seconds, on the caller's
    // clock.
    virtual void on_open(std::uint32_t segment, std::uint64_t order, double now) = 0;
    // The request behind the segment used `blocks` blocks, resident or not.
    virtual void on_touch(std::uint32_t segment, std::uint64_t order, double now, std::uint32_t blocks) = 0;
    virtual void on_close(std::uint32_t segment, int reason, double now) = 0;
    // The segment's first block came to the tier (true) or its last one left (false).
    virtual void on_resident(std::uint32_t segment, bool resident) = 0;
    // The id is out of use; a later on_open may bring it back. REQUIRES: nothing resident.
    virtual void on_erase(std::uint32_t segment) = 0;

    // Resident segments from the least valuable one upwards: kNone gives the first, the last gives kNone.
    // REQUIRES: `after` is resident or kNone.
    virtual std::uint32_t next_victim(std::uint32_t after) const = 0;
    // How many of `wanted` new blocks of the segment may displace others, when `room` fit without.
    virtual std::uint64_t admit(std::uint32_t segment, std::uint64_t wanted, std::uint64_t room) = 0;
};

// Throws std::invalid_argument naming the known policies.
std::unique_ptr<Policy> make_policy(const std::string& name);

// Least recently touched first. With victims taken from a segment's end this is tail-first LRU.
class LruPolicy final : public Policy {
  public:
    void on_open(std::uint32_t segment, std::uint64_t order, double now) override;
    void on_touch(std::uint32_t segment, std::uint64_t order, double now, std::uint32_t blocks) override;
    void on_close(std::uint32_t, int, double) override {}
    void on_resident(std::uint32_t segment, bool resident) override;
    void on_erase(std::uint32_t) override {}
    std::uint32_t next_victim(std::uint32_t after) const override;
    std::uint64_t admit(std::uint32_t, std::uint64_t wanted, std::uint64_t) override { return wanted; }

  private:
    struct Link {
        std::uint64_t order;
        std::uint32_t prev, next;
        bool resident;
    };

    void insert(std::uint32_t segment);
    void remove(std::uint32_t segment);

    std::vector<Link> links_;  // by segment; the resident ones form a list of increasing order
    std::uint32_t head_ = 0xFFFFFFFFu, tail_ = 0xFFFFFFFFu;
};

}  // namespace kvoffload
