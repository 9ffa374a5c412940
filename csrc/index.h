// Which key lies in which slot, for all groups and tiers, and in which order slots are given up.
//
// Thread: none; one thread owns an Index with its Matchers. Lifetime: Matchers must not outlive it. Calls
// with wrong arguments throw std::invalid_argument and change nothing; std::runtime_error comes from
// check_integrity only.
//
// A key belongs to one depth: where a chain names it at another depth than its entry's, nothing is found and
// nothing stored.
//
// Pins. Every in-flight job pins the entries of its copies, from the call that made the copies to the
// complete_* call that ends them; each such call is made exactly once per job, with the same copies. A pinned
// entry is no victim.
//
// Room in a tier, for a block x of segment S (order.h has the scan for victims): a free slot of the group,
// else an unowned slab, else one eviction in that tier; never more than one per block, and none for a block
// that fits. With several groups, a slab of another group whose last use is older than the victim's segment
// is emptied whole instead and changes owner. A block that gets no room is refused.
//
// offer. All groups together, in ascending end position. A block found joins S. Resident in host: counted as
// already resident (valid) or in flight (busy, or on its way to disk by transit). Others with a page are
// candidates; without a page they are passed over. A candidate with room in host is stored there. One refused
// by host, if
//   - on disk: is passed over;
//   - absent, and disk cannot be written: is counted as refused and ends the walk;
//   - absent, disk can be written: takes a free transit slot and room on disk (a copy with kCopyTransit). No
//   transit
//     slot ends the walk; no room on disk counts as refused.
// Cursors: the span's end, or where the walk ended the group's first block that ends at or beyond that
// position. If the walk ends with its very first block, nothing is touched: a saturated offer costs no more
// than its scan. Where host has a policy that learns, a block it finds of less value than all others is
// refused for good: the walk goes on, and no later block of the request displaces others in host.
// complete_store. Of a copy without kCopyTransit: the block is visible in host and, if disk is online and
// admits it, queued for disk; or its slot is given back. Of a copy with kCopyTransit: kOk changes nothing,
// the same copy goes on as a write and ends with complete_write; otherwise its slots are given back.
//
// The end of a full group drops the windows and states beyond it. When room is made by giving up a block of a
// full group that no tier holds then, its segment loses, in each tier, the blocks of windows and states that
// end beyond that block's start: no boundary there can be restored. From the deepest one up to the first that
// may not go (pinned, spared or of x's own prefix); later ones age.
//
// Room that a load makes in host never costs a block that waits for its write to disk.
// begin_load. All groups together, in ascending end position. Blocks without a page are passed over. The
// others must be valid in host, or on disk and online, or on disk and on their way to host (kCopyWait); the
// first that is not ends the load for all groups at its position. Disk-only blocks get room in host
// (kCopyRead), else a transit slot (kCopyRead | kCopyTransit); all transit slots of the call are at most
// max_transit, shared evenly by the groups asked for, and used again in turn; a group without any ends the
// load. begin_read: the disk-only blocks up to the first one that is neither in host, on its way there, nor
// on disk, or that host refuses.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "block_copy.h"
#include "change_log.h"
#include "entry_pool.h"
#include "key_table.h"
#include "order.h"
#include "slab_arena.h"

namespace kvoffload {

// kTransient: never stored, and nothing that a boundary needs. Its spans are empty.
enum GroupKind : int { kFull = 0, kSliding = 1, kState = 2, kTransient = 3 };

struct GroupSpec {
    int kind;
    std::uint32_t multiple;  // base blocks per block
    std::uint32_t lookback;  // tokens
};

struct IndexOptions {
    std::vector<GroupSpec> groups;
    std::uint32_t base_tokens = 1;
    std::vector<std::uint32_t> slots_per_slab;  // by group
    std::uint32_t host_slabs = 0, transit_slabs = 0, disk_slabs = 0;
    std::int64_t host_slots = -1, transit_slots = -1, disk_slots = -1;  // exact numbers, -1 = all
    std::string host_policy = "lru", disk_policy = "lru";
    // A block is queued for disk once so many requests have used it while it was in host; 0 = never.
    std::uint32_t disk_admission = 1;
    std::int64_t max_pending_writes = -1;  // -1 = a quarter of the host slots
};

// By group: blocks [begin, end), and the pages of block i at [i], absent where -1 or beyond `count`.
struct Span {
    std::uint32_t begin = 0, end = 0;
    const std::int32_t* pages = nullptr;
    std::uint64_t count = 0;
};

// Copies are made once, in place, and handed over without another copy.
struct CopyList {
    std::unique_ptr<BlockCopy[]> data;
    std::size_t size = 0;
};

struct OfferResult {
    CopyList copies;
    std::vector<std::uint32_t> cursors;
    std::uint64_t resident = 0, in_flight = 0, refused = 0;
};

struct LoadResult {
    CopyList copies;
    std::vector<std::uint32_t> ends;
};

struct Counters {
    std::uint64_t evicted[kTiers] = {0, 0};  // slots taken from blocks to make room
    std::uint64_t orphaned = 0;              // slots taken from windows and states beyond evicted blocks
    std::uint64_t stored[kTiers] = {0, 0};   // blocks that became valid by a store or a write
    std::uint64_t promoted = 0;              // blocks that became valid in host by a read
    std::uint64_t dropped_disk_backlog = 0;  // evicted from host before they were written
    std::uint64_t dropped_disk_full = 0;     // not written: disk refused them
    std::uint64_t store_failed = 0, write_failed = 0, read_failed = 0;
    std::uint64_t slabs_moved = 0;  // slabs that changed owner by being emptied
};

struct TierUsage {
    std::uint64_t capacity, used, pinned, pending, free;
    std::uint32_t slabs_owned;
};

// A row of entries(), mirrored by kvoffload/index.py ENTRY_DTYPE.
struct EntryView {
    std::uint8_t key[16];
    std::uint64_t order;
    std::int32_t host, disk;
    std::uint32_t segment, depth;
    std::uint16_t group, pins, flags, reserved;
};
static_assert(sizeof(EntryView) == 48, "mirrored by ENTRY_DTYPE in index.py");

// A block found on disk, mirrored by kvoffload/messages.py RECORD_DTYPE.
struct Record {
    std::uint8_t key[16];
    std::uint64_t seq;
    std::int32_t slot, depth;
    std::uint32_t parent;
    std::uint16_t group, reserved;
};
static_assert(sizeof(Record) == 40, "mirrored by RECORD_DTYPE in messages.py");

class Index {
  public:
    explicit Index(IndexOptions options);
    Index(const Index&) = delete;
    Index& operator=(const Index&) = delete;

    // `stream`: a name of the agent that asks, the same for each of its requests; 0 = unknown.
    std::uint32_t open_segment(double now, std::uint64_t stream) { return order_.open(stream, now); }
    void close_segment(std::uint32_t segment, int reason, double now);

    OfferResult offer(std::uint32_t segment, const Chain& chain, const std::vector<Span>& spans);
    void complete_store(const BlockCopy* copies, std::size_t n, const std::uint8_t* status);

    // Blocks from the write queue, oldest first, each with room on disk; those refused leave the queue.
    CopyList next_writes(std::uint64_t limit);
    void complete_write(const BlockCopy* copies, std::size_t n, const std::uint8_t* status);

    LoadResult begin_load(std::uint32_t segment, const Chain& chain, const std::vector<Span>& spans,
                          std::uint32_t max_transit);
    CopyList begin_read(std::uint32_t segment, const Chain& chain, const std::vector<Span>& spans);
    // kReadFailed takes the block from disk, and everywhere if another job holds it; kCopyFailed of a read
    // leaves good bytes in host.
    void complete_load(const BlockCopy* copies, std::size_t n, const std::uint8_t* status);
    // Of copies with kCopyWait: where the bytes came the flag goes; where they did not and disk has them, a
    // slot is found and kCopyRead set; else host becomes -1. True when none waits any longer.
    bool ready(BlockCopy* copies, std::size_t n);
    // The blocks count no longer as pending or loading. REQUIRES: the job has not ended.
    void expire(const BlockCopy* copies, std::size_t n);

    // Blocks of the spans that are in `segment` go for good: what a job holds is invisible from now on and
    // ends with the job. How many.
    std::uint64_t retire(std::uint32_t segment, const Chain& chain, const std::vector<Span>& spans);
    // Blocks of the spans that are in `segment` or in closed segments are the first to go from now on, until
    // a request touches them; where a policy learns, not those that two streams have used. How many.
    std::uint64_t supersede(std::uint32_t segment, const Chain& chain, const std::vector<Span>& spans);

    // Highest seq wins per key; slots out of range or used twice are passed over. A block is as recent as the
    // most recent of its children. REQUIRES: nothing was stored before.
    std::uint64_t restore(const Record* records, std::size_t n);
    // Entries of the tier that a job holds become invisible everywhere; the others lose the tier.
    void reset(int tier);
    void set_disk_online(bool online);
    // Whether blocks that host refuses may go to disk by transit; at first they may.
    void set_direct_writes(bool allowed) { direct_writes_ = allowed; }

    const GroupSpec& group(std::uint32_t g) const { return options_.groups[g]; }
    std::uint32_t groups() const { return static_cast<std::uint32_t>(options_.groups.size()); }
    std::uint32_t base_tokens() const { return options_.base_tokens; }
    // Codes of blocks [begin, end) of a group. REQUIRES: the chain has their keys.
    void probe(const Chain& chain, std::uint32_t group, std::uint32_t begin, std::uint32_t end,
               std::uint8_t* codes) const;
    const ChangeLog& log() const { return log_; }

    TierUsage usage(int tier, std::uint32_t group) const;
    std::uint32_t slabs_unowned(int tier) const { return arenas_[tier].unowned(); }
    std::uint64_t transit_free() const { return transit_.room(); }
    std::uint64_t queued_writes() const { return wanted_; }
    std::uint64_t pinned_writes() const { return writing_; }
    const Counters& counters() const { return counters_; }
    PolicyTable policy_table(int tier) const { return order_.policy(tier).table(); }
    const Lineage* lineage() const { return order_.lineage(); }
    // Of the tier's policy and, if it learns, of the lineage, which policies share.
    std::size_t policy_memory_bytes(int tier) const;
    std::size_t memory_bytes() const;
    std::vector<EntryView> entries() const;
    void check_integrity() const;

  private:
    enum Action : std::uint8_t {
        kSkip,
        kMissing,
        kCandidate,
        kToHost,
        kToTransit,
        kPlain,
        kWaiting,
        kToDevice
    };

    struct Item {  // one block of a batch call
        std::uint32_t block;
        std::uint32_t entry;
        std::uint32_t end;  // base blocks
        std::uint8_t group;
        Action action;
    };

    // index.cpp: batches, room, entries
    void start(std::uint32_t segment, const Chain& chain, const std::vector<Span>& spans);
    void restart_batch();
    void append_merged(const std::vector<Span>& spans);
    std::uint64_t slots() const;
    // Sets the entry of every item, and calls found(item) while the entry is at hand.
    template <class Found>
    void find_all(const Chain& chain, Found found);
    void find_all(const Chain& chain);
    std::uint32_t at_depth(std::uint32_t id, std::uint32_t depth) const {
        return id != kNone && pool_[id].depth == depth ? id : kNone;
    }
    bool make_room(int tier, const Newcomer& x, const Chain& chain);
    bool could_make_room(int tier, const Newcomer& x, const Chain& chain);
    using SlabUse = SlabArena::ByUse::value_type;
    SlabUse oldest_slab(int tier, std::uint32_t group, SlabUse limit);
    std::uint32_t idle_slab(int tier, const Newcomer& x, const Chain& chain, std::uint32_t victim);
    void empty_slab(int tier, std::uint32_t slab, const Newcomer& x, const Chain& chain);
    bool slab_is_free_to_go(int tier, std::uint32_t slab, const Newcomer& x, const Chain& chain) const;
    void join(std::uint32_t request, Item& item, std::uint32_t& hint);
    std::uint32_t make_entry(const Chain& chain, const Item& item);
    void drop(std::uint32_t id, int tier);
    void doom(std::uint32_t id);
    void settle(std::uint32_t id);
    void release_entry(std::uint32_t id);
    void set_slot(std::uint32_t id, int tier, std::int32_t slot, std::uint8_t bit);
    void clear_slot(std::uint32_t id, int tier);
    void take_slot(std::uint32_t id, int tier, std::uint8_t bit);
    void set_bits(Entry& e, std::uint8_t set, std::uint8_t clear);
    void pin(Entry& e);
    void unpin(Entry& e);
    void log(const Entry& e, ChangeKind kind, int tier);
    std::uint8_t code(const Entry& e) const;
    bool on_disk(const Entry& e) const { return disk_online_ && e.has(kDiskValid); }
    bool disk_writable() const {
        return disk_online_ && options_.disk_admission > 0 && options_.disk_slabs > 0;
    }
    // Whether a block that only its own request has used may go to disk.
    bool disk_takes_new() const { return disk_writable() && options_.disk_admission == 1 && direct_writes_; }
    // The flag that keeps an unpinned block from being a victim in the running call, 0 = none.
    std::uint8_t spared(int tier) const { return tier == kHost && spare_unwritten_ ? kWantDisk : 0; }
    Newcomer newcomer(std::uint32_t segment, const Item& item) const {
        return {order_.target(segment, item.end), item.end, item.group};
    }
    const std::int32_t* page(const std::vector<Span>& spans, const Item& item) const;
    BlockCopy copy_of(std::uint32_t id, std::int32_t page, std::int32_t host, std::int32_t disk,
                      std::uint16_t flags) const;
    // What a call ends: decides which state the entries of its copies must be in.
    enum Ending : std::uint8_t { kEndsNothing, kEndsStore, kEndsWrite, kEndsLoad };
    void check_copies(const BlockCopy* copies, std::size_t n, Ending ending) const;

    // index_tails.cpp
    void evict(std::uint32_t id, int tier, const Newcomer& x, const Chain& chain);
    void drop_beyond(std::uint32_t segment, std::uint32_t start, const Newcomer& x, const Chain& chain);

    // index_learn.cpp
    void relate(std::uint32_t segment, const Chain& chain, std::size_t n);
    std::uint64_t ghost(const Chain& chain, const Item& item) const;
    void begin_request(std::uint32_t segment, const Chain& chain);
    void compare_with_lru(int tier, const Chain& chain, std::uint32_t group, std::uint32_t known);
    std::uint32_t known_segment(const Chain& chain, std::uint32_t group, std::uint32_t block) const;

    // index_store.cpp
    bool stuck(std::uint32_t segment, const Chain& chain, const std::vector<Span>& spans,
               OfferResult& result);
    void classify(std::uint32_t segment, const std::vector<Span>& spans, OfferResult& result);
    void place(std::uint32_t segment, const Chain& chain, const std::vector<Span>& spans,
               OfferResult& result);
    bool place_below(std::uint32_t segment, const Newcomer& x, Item& item, const Chain& chain,
                     OfferResult& result, bool& stop);
    void emit_stores(std::uint32_t segment, const Chain& chain, const std::vector<Span>& spans,
                     OfferResult& result);
    void end_store(const BlockCopy& c, std::uint8_t status);
    void end_write(const BlockCopy& c, std::uint8_t status);
    void queue_write(std::uint32_t id);
    std::uint32_t pop_write();
    void compact_queue();

    // index_load.cpp
    struct TransitRing;
    std::size_t available(const Chain& chain, const std::vector<Span>& spans, bool to_device);
    Action need(const Entry& e, bool to_device) const;
    std::size_t place_reads(std::uint32_t segment, const Chain& chain, std::size_t n, TransitRing* ring);
    std::size_t cut(std::size_t failed, std::size_t n, TransitRing* ring);
    std::size_t rewind(std::size_t n);
    CopyList emit_loads(const std::vector<Span>& spans, std::size_t n, TransitRing* ring);
    void end_load(const BlockCopy& c, std::uint8_t status);
    void lose_disk(std::uint32_t id);
    bool settle_wait(BlockCopy& c);

    // index_admin.cpp
    void link_restored(const std::vector<std::uint64_t>& order, const std::vector<std::uint32_t>& ids);
    void check_entries() const;
    void check_segments() const;
    void check_slots(int tier) const;
    void check_counts() const;

    const IndexOptions options_;
    EntryPool pool_;
    std::vector<KeyTable> tables_;  // by group
    Order order_;
    SlabArena arenas_[kTiers];
    SlabArena transit_;
    ChangeLog log_;
    Counters counters_;
    std::vector<std::uint64_t> pinned_[kTiers], busy_[kTiers];  // slots, by group
    std::deque<std::uint32_t>
        queue_;                  // entries that want a disk copy; those no longer in use are passed over
    std::uint64_t wanted_ = 0;   // entries in the queue that still want it
    std::uint64_t writing_ = 0;  // entries with kDiskBusy
    std::uint64_t max_writing_ = 0;
    bool disk_online_ = true;
    bool direct_writes_ = true;

    // Of the batch call that runs.
    std::vector<Item> items_;
    std::uint64_t batch_ = 0;
    std::vector<std::uint64_t> slab_blocked_[kTiers];  // by slab: the last batch that could not empty it
    std::vector<SlabUse> slab_from_[kTiers];           // by group: all before it are blocked
    bool spare_unwritten_ = false;
    std::vector<Touched> touched_;
};

}  // namespace kvoffload
