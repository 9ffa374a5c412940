// What is least valuable in a tier: one Policy per tier orders the segments that have blocks there. It never
// sees slots, keys or pins; the index asks for victims and skips those that it may not touch. Thread: owned
// by the Index. A policy is a pure function of the calls it gets (times are handed in).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace kvoffload {

// What a segment is to its stream (a stream = one agent of one session, lineage.h).
enum class Kind : std::uint8_t {
    kOwn,     // the end of the stream's last request
    kLeft,    // the stream went on elsewhere
    kShared,  // used by two streams or more
};

// How fast a stream comes back, against all streams.
enum class Pace : std::uint8_t { kUnknown, kQuick, kMiddle, kSlow };

// One row of what a policy has learned, for reports.
struct PolicyRow {
    Kind kind;
    Pace pace;
    int finish;                        // 0 unknown, 1 tool call, 2 end of turn
    double at_risk, reused, censored;  // weights over all ages, decayed
    double index;                      // reuses per second and block held, at age 0
    std::uint32_t resident;            // segments
    std::vector<double> by_age;        // the index by bin of ages
};

struct PolicyTable {
    std::vector<PolicyRow> rows;
    std::uint64_t requests = 0, rebuilds = 0;
    std::uint64_t held = 0, lru = 0;                // sums of on_compared
    std::uint64_t fallbacks = 0, lru_requests = 0;  // times that LRU took over, requests under it
    double rebuild_seconds = 0;                     // all together
};

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
    // Those that become resident later may be missing until the next call with kNone. REQUIRES: `after` is
    // resident or kNone; the first call of a batch is with kNone.
    virtual std::uint32_t next_victim(std::uint32_t after) const = 0;
    virtual std::size_t memory_bytes() const = 0;

    // Whether the policy wants what follows; the index keeps a lineage if one of its policies does. Of a
    // policy that learns a block with others below it is no victim, and a block it refuses is not offered
    // again.
    virtual bool learns() const { return false; }
    // A request of `blocks` base blocks begins with its first touch.
    virtual void on_request(std::uint64_t blocks, double now) {}
    // When the request began the tier held the first `own` of its base blocks; an LRU of the same size would
    // have held the first `lru`. Between on_request and its first touch of blocks.
    virtual void on_compared(std::uint64_t own, std::uint64_t lru, std::uint64_t blocks) {}
    virtual void on_class(std::uint32_t segment, Kind kind, Pace pace, double now) {}
    // `to` used `blocks` blocks that were last used by `from`; kNone: by nobody as far as is known.
    virtual void on_use(std::uint32_t from, std::uint32_t to, std::uint32_t blocks, double now) {}
    // Blocks of the segment are no longer followed.
    virtual void on_forget(std::uint32_t segment, std::uint32_t blocks, double now) {}
    // Whether a new block of one segment may displace the other's; asked from the least valuable one upwards.
    virtual bool displaces(std::uint32_t newcomer, std::uint32_t victim) const { return true; }
    virtual PolicyTable table() const { return {}; }
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
    std::size_t memory_bytes() const override { return links_.capacity() * sizeof(Link); }

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
