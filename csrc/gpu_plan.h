// What a device copy consists of, worked out without a device: pieces of pages, placed copies, host parts.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "block_copy.h"
#include "copy_cpu.h"
#include "kernels.h"
#include "slots.h"

namespace kvoffload {

constexpr std::int32_t kMaxPiece = 16 << 10;  // bytes: one team copies a piece, so large pages are cut

// One group: its pieces in region order. Immutable after construction.
struct GroupPlan {
    std::vector<PageRegion> regions;
    std::vector<std::int64_t> region_offsets;  // where each region's page lies in the slot
    std::vector<std::pair<std::int32_t, std::int32_t>> pieces_of;  // by region: [first, last) of `pieces`
    std::vector<Piece> pieces;
    std::int64_t block_bytes = 0;
    std::int64_t slot_bytes = 0;
    std::int32_t pages = 0;  // pages that every region has
    bool narrow = false;     // some piece is copied in words of less than 16 bytes: correct, but slower

    GroupPlan(std::vector<PageRegion> regions, std::int64_t slot_bytes);
};

// A copy that can be done: index in the job, device page, byte offset of the slot in host memory.
struct Placed {
    std::int32_t index;
    std::int32_t page;
    std::int64_t offset;
};

// Copies of one group in the order of host offsets, so that neighbouring slots can go in one DMA.
struct PlacedGroup {
    std::int32_t group;
    std::vector<Placed> copies;
};

// Sorts out what can be copied. A copy whose group, page or slot does not exist, that waits for another job,
// or that has the destination of one before it gets kCopyFailed in `status`.
std::vector<PlacedGroup> place(const std::vector<GroupPlan>& groups, const SlotSpace& host,
                               const BlockCopy* copies, std::int64_t count, bool to_device,
                               std::uint8_t* status);

// Page-locked ranges of host memory. Thread: any.
class PinnedRanges {
  public:
    void add(std::uintptr_t begin, std::int64_t bytes);
    // Covers nothing from now on; parts are still cut at the borders, for the memory is page-locked still.
    void withdraw();
    void clear();
    bool covers(std::uintptr_t begin, std::int64_t bytes) const;

    // [begin, begin + bytes) cut at the borders of the ranges; each part lies in one of them or in none.
    std::vector<std::pair<std::uintptr_t, std::int64_t>> parts(std::uintptr_t begin,
                                                               std::int64_t bytes) const;

  private:
    mutable std::mutex mutex_;
    std::map<std::uintptr_t, std::uintptr_t> ranges_;  // begin -> end, disjoint; protected by mutex_
    bool withdrawn_ = false;                           // protected by mutex_
};

// A copy of one stretch of bytes between host and device.
struct Descriptor {
    std::uintptr_t host;
    std::uintptr_t device;
    std::int64_t bytes;
};

// The stretches of the copies, merged where both sides continue, cut at the borders of pinned ranges.
std::vector<Descriptor> descriptors(const GroupPlan& group, const Placed* copies, std::int64_t count,
                                    std::uintptr_t host_base, const PinnedRanges& pinned);

}  // namespace kvoffload
