// Who used what before: what a learning policy needs beyond order and slots. Kept only if a policy learns.
//
// Every block that a request touched has one segment, also when no tier holds it any more (a ghost), until it
// is forgotten. A request's path falls into at most two segments: the head, up to the last block that a
// second stream has used, and its own end; Order makes the head when the first such block is found, and it
// closes with the request. Blocks before the split that the request has put into its own segment already stay
// there. Streams are given by name, or inferred: a request without one goes on with the stream whose last
// request ended within one block of this one's known prefix, or at least half of which it covers. Segments
// hang below each other: the rest of a segment whose start another request took hangs where it was cut.
// Thread: owned by the Order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "branches.h"
#include "ghosts.h"
#include "policy.h"
#include "recency.h"
#include "streams.h"

namespace kvoffload {

class Order;

// One block of a batch, in ascending end.
struct Touched {
    std::uint64_t ghost;   // Ghosts::name
    std::uint32_t before;  // base blocks before it
    std::uint32_t end;
    std::uint32_t segment;  // of its entry, kNone = it has none
};

class Lineage {
  public:
    static constexpr std::uint32_t kGhostSegments = 4096;  // or 4 times those with entries, if that is more

    Lineage(Order& order, std::vector<Policy*> learners, std::uint64_t most_ghosts);

    void opened(std::uint32_t segment, std::uint64_t stream);
    bool begun(std::uint32_t segment) const { return nodes_[segment].begun; }
    // The request begins. `blocks`: of its prompt; `known`: base blocks of its known prefix, the last of
    // which is in segment `last`.
    void begin(std::uint32_t segment, std::uint64_t blocks, std::uint64_t known, std::uint32_t last,
               double now);
    // The request touches these blocks. REQUIRES: begun.
    void relate(std::uint32_t segment, const std::vector<Touched>& touched, double now);
    void touched(std::uint32_t segment) { recency_.touch(segment); }
    void closed(std::uint32_t segment, double now);
    void erased(std::uint32_t segment);
    // `count` blocks of unknown past.
    void restored(std::uint32_t segment, std::uint32_t count, double now);

    // The last entry of the block is gone; it is known as a ghost from now on, or, if another ghost has its
    // name, not at all.
    void buried(std::uint32_t segment, std::uint64_t ghost, double now);
    // Whether two streams have used the segment.
    bool shared(std::uint32_t segment) const { return nodes_[segment].kind == Kind::kShared; }
    // A block goes from the segment to kSuperseded, of which nothing is learned, or out of that.
    void superseded(std::uint32_t segment, double now);
    void left_superseded();
    // A block that the request touched gets an entry in the segment: its ghost there ends.
    void revived(std::uint32_t segment, std::uint64_t ghost, double now);
    // The segment of a ghost, kNone if it is unknown.
    std::uint32_t find(std::uint64_t ghost) const;
    std::uint32_t ghosts(std::uint32_t segment) const { return nodes_[segment].ghosts.count; }

    // Where a block of the request goes: to its head or to its own segment.
    std::uint32_t target(std::uint32_t segment, std::uint32_t end) const {
        return end <= nodes_[segment].split ? nodes_[segment].head : segment;
    }
    std::uint32_t head(std::uint32_t segment) const { return nodes_[segment].head; }
    // Something that the tier holds hangs below the block of the segment that ends at `end`.
    bool blocked(std::uint32_t segment, int tier, std::uint32_t end) const {
        return branches_.blocked(segment, tier, end);
    }
    // The segment's first block came to the tier (true) or its last one left (false).
    void resident(std::uint32_t segment, int tier, bool there) { branches_.resident(segment, tier, there); }

    // Blocks used since the block of the segment that ends at `end` was, itself included: an LRU that holds
    // at least so many holds it. Exact in layouts of one group.
    std::uint64_t distance(std::uint32_t segment, std::uint32_t end) const {
        const Node& n = nodes_[segment];
        return recency_.above(segment) + std::min(n.blocks, end > n.low ? end - n.low : 1);
    }

    std::uint64_t ghost_blocks() const { return ghosts_.size(); }
    std::uint32_t streams() const { return streams_.size(); }
    std::size_t memory_bytes() const;
    // Throws std::runtime_error naming what does not hold.
    void check() const;

  private:
    struct Node {
        std::uint64_t name = 0;  // of the stream, as given
        std::uint32_t stream = kNone;
        std::uint32_t blocks = 0;  // known ones: entries and ghosts
        std::uint32_t low = 0;     // base blocks before the first of them
        std::uint32_t head = kNone, split = 0;
        std::uint32_t previous =
            kNone;  // the stream's tail before this request, while `serial` is that one's
        std::uint64_t serial = 0, previous_serial = 0;
        Ghosts::List ghosts;
        Kind kind = Kind::kOwn;
        Pace pace = Pace::kUnknown;
        bool begun = false;
    };
    struct Cut {
        std::uint32_t segment, end;  // the request took its blocks up to here
    };

    bool foreign(std::uint32_t segment, std::uint32_t mine) const;
    void find_split(std::uint32_t segment, const std::vector<Touched>& touched, double now);
    bool follow(const Touched& touched, std::uint32_t from, std::uint32_t to);
    void use(std::uint32_t from, std::uint32_t to, const Touched& first, std::uint32_t end,
             std::uint32_t blocks, double now);
    void rehang(std::uint32_t segment);
    void leave_previous(std::uint32_t segment, std::uint32_t walked, double now);
    void set_class(std::uint32_t segment, Kind kind, Pace pace, double now);
    void forget_one(std::uint32_t segment, double now);
    void trim(double now);
    void forget(std::uint32_t segment, double now);
    void check_recency(std::vector<std::uint32_t> live) const;

    Order& order_;
    const std::vector<Policy*> learners_;
    const std::uint64_t most_ghosts_;
    Streams streams_;
    Ghosts ghosts_;
    Branches branches_;
    Recency recency_;
    std::vector<Node> nodes_;  // by segment
    std::uint64_t requests_ = 0, serial_ = 0;
    std::vector<std::uint32_t> from_;  // of the running batch
    std::vector<Cut> cuts_;
};

}  // namespace kvoffload
