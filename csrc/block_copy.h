// One block on its way between two places. The same record crosses every native call: the index makes
// it, the copy engine and the disk I/O read it. Mirrored by kvoffload/messages.py COPY_DTYPE.
#pragma once

#include <cstdint>

namespace kvoffload {

enum CopyFlags : std::uint16_t {
    kCopyRead = 1,     // read `disk` into `host` before anything else
    kCopyTransit = 2,  // `host` is a transit slot: not part of the index
    kCopyWait = 4,     // `host` is being filled by another job: do not submit before it has ended
};

// What became of one copy; a job's outcome is an array of these.
enum CopyStatus : std::uint8_t {
    kOk = 0,
    kReadFailed = 1,  // the tier below has no good bytes for this key
    kCopyFailed = 2,  // the device copy or the write failed; the source is still good
    kNotDone = 3,     // cancelled or expired before it was tried
};

struct BlockCopy {
    std::uint8_t key[16];
    std::uint64_t seq;     // order number of the segment, restores the order of the disk tier
    std::uint32_t entry;   // handle of the planner's index; movers do not look at it
    std::int32_t page;     // device page, -1 = none
    std::int32_t host;     // host slot (slab << 16 | index), -1 = none
    std::int32_t disk;     // disk slot, -1 = none
    std::int32_t depth;    // index of the block within its group
    std::uint32_t parent;  // first 4 bytes of the key of the block before it, little-endian; 0 at depth 0
    std::uint16_t group;
    std::uint16_t flags;
    std::uint32_t reserved;
};
static_assert(sizeof(BlockCopy) == 56, "mirrored by COPY_DTYPE in messages.py");

}  // namespace kvoffload
