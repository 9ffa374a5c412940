// Segments and, through one Policy per tier, the order in which blocks are given up.
//
// A segment is the maximal run of blocks, over all groups, last touched by one request. Its entries form one
// list in increasing position = (end in base blocks, group). Per tier and group the segment knows its deepest
// entry that has a slot there (`tail`); victims are always such tails, so a prefix never loses its head
// first. An id is used again only after the segment is closed and empty. One segment, kSuperseded, is
// nobody's: no request opens, touches or closes it, no policy sees it, and what is in it goes before all
// else. Thread: owned by the Index.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "entry_pool.h"
#include "lineage.h"
#include "policy.h"

namespace kvoffload {

constexpr std::uint32_t kSuperseded = 0;  // the segment of what goes first
constexpr std::uint32_t kLooks = 64;      // at so many of its blocks, per victim

// The keys of one sequence: block j of a group with multiple k has the key keys[(j + 1) * k - 1].
struct Chain {
    const std::uint8_t* keys = nullptr;
    std::uint64_t blocks = 0;  // base blocks

    const std::uint8_t* at(std::uint32_t multiple, std::uint32_t block) const {
        const std::uint64_t i = (static_cast<std::uint64_t>(block) + 1) * multiple - 1;
        return i < blocks ? keys + i * 16 : nullptr;
    }
};

// A block that asks for room: victims must not be of its own prefix.
struct Newcomer {
    std::uint32_t segment;
    std::uint32_t end;  // base blocks
    std::uint32_t group;
};

struct Segment {
    std::uint64_t order = 0;  // rises with every touch over the whole index; the copies' seq
    std::uint32_t head = kNone, tail = kNone;
    std::uint32_t size = 0;
    std::uint32_t resident[kTiers] = {0, 0};
    bool live = false;  // the id is in use
    bool open = false;
    bool refused = false;  // a block of it was refused for good in host
};

class Order {
  public:
    Order(EntryPool& pool, std::vector<std::uint32_t> multiples, std::unique_ptr<Policy> host,
          std::unique_ptr<Policy> disk, std::uint64_t most_ghosts);

    // `stream`: a name of the request's stream, 0 = unknown.
    std::uint32_t open(std::uint64_t stream, double now);
    // The head of an open request's path: a second segment that lives and is touched with it, as the more
    // recent one.
    std::uint32_t open_head(std::uint32_t segment);
    // As `open` and `close` for a segment found on disk; `order` must rise from call to call.
    std::uint32_t restore(std::uint64_t order);
    void close(std::uint32_t segment, int reason, double now);
    bool is_open(std::uint32_t segment) const {
        return segment < segments_.size() && segments_[segment].open;
    }

    // The segment becomes the most recent one in every tier.
    void touch(std::uint32_t segment, std::uint32_t blocks);
    // Into the list, by position. `hint`: kNone, or an entry of the segment; moves to the new entry, so that
    // a batch in increasing positions walks the list once at most.
    void link(std::uint32_t segment, std::uint32_t id, std::uint32_t& hint);
    void unlink(std::uint32_t id);
    // Moves a linked entry to kSuperseded, unless two streams have used its segment. `hint` as in `link`.
    bool supersede(std::uint32_t id, std::uint32_t& hint);
    // The entry is going out of use; the lineage goes on knowing its block, unless it was superseded.
    void bury(std::uint32_t id);
    // Gives the id back if the segment is closed and has nothing left, not even ghosts.
    void erase_if_done(std::uint32_t segment);
    // A linked entry got or lost its slot in the tier.
    void gained(std::uint32_t id, int tier) {
        const Entry& e = pool_[id];
        Tail& t = tails_[cell(e.segment, e.group, tier)];
        if (t.count++ == 0 || goes_before(t.tail, id)) t.tail = id;
        ++resident_[tier];
        if (segments_[e.segment].resident[tier]++ == 0 && e.segment != kSuperseded) {
            policies_[tier]->on_resident(e.segment, true);
            if (lineage_) lineage_->resident(e.segment, tier, true);
        }
    }
    // REQUIRES: the entry is still linked; its slot number may be gone already.
    void lost(std::uint32_t id, int tier) {
        const Entry& e = pool_[id];
        Tail& t = tails_[cell(e.segment, e.group, tier)];
        if (--t.count == 0) {
            t.tail = kNone;
        } else if (t.tail == id) {
            t.tail = next_tail(id, tier);
        }
        --resident_[tier];
        if (--segments_[e.segment].resident[tier] == 0) leave(e.segment, tier);
    }

    // Start of a batch: scans for victims begin anew. Within a batch pins are only added, so a segment once
    // passed stays passed.
    void begin_batch();
    void set_refused(std::uint32_t segment) { segments_[segment].refused = true; }
    // The entry to give up for x in its group, or kNone: x is the least valuable itself, or nothing may go.
    // Goes through the tier's segments, kSuperseded and then from the least valuable one: x's own segment
    // gives its tail if that lies deeper than x, else x loses; another gives its tail unless this is pinned
    // or of x's own prefix. Superseded blocks continue nothing, so there one that stays keeps none of the
    // others: the deepest that may go does, of the kLooks deepest.
    // Where the policy learns, x also loses against the first segment that it may not displace, and a tail
    // with something below it stays.
    // Entries with a flag of `spared` count as pinned; it does not change within a batch.
    std::uint32_t victim(int tier, const Newcomer& x, const Chain& chain, std::uint8_t spared);
    // In this batch the policy found a newcomer of the group to be of less value than all that could go.
    bool refuses(int tier, std::uint32_t group) const { return scans_[tier][group].refused; }

    // Whether the policy lets a new block of one segment displace a block of the other, resident one.
    bool displaces(int tier, std::uint32_t newcomer, std::uint32_t victim) const {
        return victim == kSuperseded || !policies_[tier]->learns() ||
               policies_[tier]->displaces(newcomer, victim);
    }

    const Segment& segment(std::uint32_t id) const { return segments_[id]; }
    std::uint32_t segments() const { return static_cast<std::uint32_t>(segments_.size()); }
    std::uint32_t tail(std::uint32_t segment, std::uint32_t group, int tier) const {
        return tails_[cell(segment, group, tier)].tail;
    }
    std::uint32_t count(std::uint32_t segment, std::uint32_t group, int tier) const {
        return tails_[cell(segment, group, tier)].count;
    }
    // Where a block of the request that ends at `end` goes: to its head or to its own segment.
    std::uint32_t target(std::uint32_t segment, std::uint32_t end) const {
        return lineage_ ? lineage_->target(segment, end) : segment;
    }
    // Null if no policy learns.
    Lineage* lineage() { return lineage_.get(); }
    const Lineage* lineage() const { return lineage_.get(); }
    // Linked blocks that have a slot in the tier.
    std::uint64_t resident(int tier) const { return resident_[tier]; }
    // See Policy::on_compared.
    void compared(int tier, std::uint64_t own, std::uint64_t lru, std::uint64_t blocks) {
        policies_[tier]->on_compared(own, lru, blocks);
    }
    double now() const { return now_; }
    const Policy& policy(int tier) const { return *policies_[tier]; }
    std::uint32_t end(const Entry& e) const { return (e.depth + 1) * multiples_[e.group]; }
    std::uint64_t position(const Entry& e) const { return static_cast<std::uint64_t>(end(e)) << 8 | e.group; }
    // The order of a segment's list: by position, then by id (a request whose tokens changed has two blocks
    // at one).
    bool goes_before(std::uint32_t a, std::uint32_t b) const {
        const std::uint64_t pa = position(pool_[a]), pb = position(pool_[b]);
        return pa != pb ? pa < pb : a < b;
    }
    // There is one, no job holds it, and it has no flag of `spared`.
    bool may_go(std::uint32_t id, std::uint8_t spared) const {
        return id != kNone && pool_[id].pins == 0 && !pool_[id].has(spared);
    }
    // Block lies on the chain and ends at or before x: dropping it would cut x off from its start.
    bool own_prefix(const Entry& e, const Newcomer& x, const Chain& chain) const;
    std::size_t memory_bytes() const;

  private:
    struct Tail {
        std::uint32_t tail = kNone;
        std::uint32_t count = 0;
    };
    struct Scan {
        std::uint32_t at = kNone;
        bool started = false;
        bool refused = false;
    };

    std::size_t cell(std::uint32_t segment, std::uint32_t group, int tier) const {
        return (static_cast<std::size_t>(segment) * multiples_.size() + group) * kTiers +
               static_cast<std::size_t>(tier);
    }
    std::uint32_t make(std::uint64_t stream, std::uint64_t order, double now);
    void close_one(std::uint32_t segment, int reason);
    std::uint32_t next_tail(std::uint32_t id, int tier) const;
    std::uint32_t deepest_superseded(int tier, const Newcomer& x, const Chain& chain,
                                     std::uint8_t spared) const;
    std::uint32_t next_victim(int tier, std::uint32_t after) const;
    void leave(std::uint32_t segment, int tier);

    EntryPool& pool_;
    const std::vector<std::uint32_t> multiples_;
    std::unique_ptr<Policy> policies_[kTiers];
    std::unique_ptr<Lineage> lineage_;
    std::vector<Segment> segments_;
    std::vector<Tail> tails_;  // by segment, group, tier
    std::vector<std::uint32_t> free_;
    std::vector<Scan> scans_[kTiers];  // by group
    std::uint64_t order_ = 0;
    std::uint64_t resident_[kTiers] = {0, 0};
    double now_ = 0;
};

}  // namespace kvoffload
