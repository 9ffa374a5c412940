// Entries of the index, in chunks that never move: ids are stable, references stay valid while the entry
// lives. Thread: owned by the Index. Lifetime: an id is valid from `make` to `free`.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

namespace kvoffload {

constexpr std::uint32_t kNone = 0xFFFFFFFFu;
constexpr std::uint8_t kFreeGroup = 0xFF;  // group of an entry that is not in use

enum Tier : int { kHost = 0, kDisk = 1 };
constexpr int kTiers = 2;

// State bits. Visible = kHostValid or kDiskValid. A slot is held exactly while its tier's valid or busy bit
// is set; a doomed entry holds its slots until its pins drop to 0.
enum EntryFlag : std::uint8_t {
    kHostValid = 1,
    kHostBusy = 2,  // bytes are on the way into the host slot
    kDiskValid = 4,
    kDiskBusy = 8,   // a write into the disk slot is on its way
    kPending = 16,   // an in-flight job, not past its deadline, will make the block available
    kLoading = 32,   // on its way to the device by a job that is not past its deadline
    kWantDisk = 64,  // has one place in the write queue, which outlives the entry
    kDoomed = 128,   // out of table and segment; freed when the last pin goes
};

constexpr unsigned kMaxPins = 0xFFF;
constexpr unsigned kMaxTouches = 0xF;

constexpr std::uint8_t valid_bit(int tier) { return tier == kHost ? kHostValid : kDiskValid; }
constexpr std::uint8_t busy_bit(int tier) { return tier == kHost ? kHostBusy : kDiskBusy; }

struct Entry {
    std::uint8_t key[16];
    std::uint16_t pins : 12;    // at most kMaxPins
    std::uint16_t touches : 4;  // requests that used the block, at most kMaxTouches
    std::uint8_t group;
    std::uint8_t flags;
    std::uint32_t depth;   // index of the block within its group
    std::int32_t slot[2];  // by tier, -1 = none
    std::uint32_t prev, next;
    std::uint32_t segment;
    std::uint32_t parent;  // first 4 key bytes of the block before it, 0 at depth 0

    bool has(std::uint8_t bits) const { return (flags & bits) != 0; }
    bool in_use() const { return group != kFreeGroup; }
};
static_assert(sizeof(Entry) == 48, "the memory bound of the index rests on this");

class EntryPool {
  public:
    Entry& operator[](std::uint32_t id) { return chunks_[id >> kBits][id & kMask]; }
    const Entry& operator[](std::uint32_t id) const { return chunks_[id >> kBits][id & kMask]; }
    void prefetch(std::uint32_t id) const { __builtin_prefetch(&(*this)[id]); }

    // Ids ever handed out are [0, size()).
    std::uint32_t size() const { return size_; }
    std::uint32_t used() const { return used_; }
    std::size_t memory_bytes() const { return chunks_.size() * sizeof(Entry) << kBits; }

    std::uint32_t make(const std::uint8_t* key, std::uint8_t group, std::uint32_t depth) {
        const std::uint32_t id = free_ != kNone ? free_ : grow();
        Entry& e = (*this)[id];
        if (id == free_) free_ = e.next;
        std::memcpy(e.key, key, 16);
        e.pins = 0;
        e.touches = 1;
        e.group = group;
        e.flags = 0;
        e.depth = depth;
        e.slot[kHost] = e.slot[kDisk] = -1;
        e.prev = e.next = e.segment = kNone;
        e.parent = 0;
        ++used_;
        return id;
    }

    // The entry is out of use; its id comes back with `recycle`.
    void retire(std::uint32_t id) {
        (*this)[id].group = kFreeGroup;
        --used_;
    }
    void recycle(std::uint32_t id) {
        (*this)[id].next = free_;
        free_ = id;
    }

  private:
    static constexpr int kBits = 12;
    static constexpr std::uint32_t kMask = (1u << kBits) - 1;

    std::uint32_t grow() {
        if ((size_ & kMask) == 0) chunks_.emplace_back(new Entry[std::size_t{1} << kBits]);
        return size_++;
    }

    std::vector<std::unique_ptr<Entry[]>> chunks_;
    std::uint32_t size_ = 0;
    std::uint32_t used_ = 0;
    std::uint32_t free_ = kNone;
};

}  // namespace kvoffload
