// The table of the disk tier: one 64-byte record per slot, at a place that follows from the slot alone
// (docs/block-format.md, "Table"). A record vouches for its payload; without a valid record a slot is free.
#pragma once

#include <cstdint>

#include "block_copy.h"
#include "crc32c.h"

namespace kvoffload {

constexpr std::uint16_t kRecordMagic = 0x564B;  // "KV" on disk

struct DiskRecord {
    std::uint16_t magic;
    std::uint16_t group;
    std::uint32_t parent;  // BlockCopy.parent, all 32 bits
    std::uint32_t depth;
    std::uint32_t length;  // payload bytes
    std::uint64_t seq;
    std::uint8_t key[16];
    Checksum payload;     // zero where the tier was opened without checksums
    std::uint64_t check;  // over the manifest's epoch and the 56 bytes before
};
static_assert(sizeof(DiskRecord) == 64, "part of the disk format");

// A block found in the table. Mirrored by RECORD_DTYPE in messages.py.
struct FoundBlock {
    std::uint8_t key[16];
    std::uint64_t seq;
    std::int32_t slot;
    std::int32_t depth;
    std::uint32_t parent;
    std::uint16_t group;
    std::uint16_t reserved;
};
static_assert(sizeof(FoundBlock) == 40, "mirrored by RECORD_DTYPE in messages.py");

// The value of `check` for a record of this epoch: the four lanes over epoch and record, folded in two.
std::uint64_t record_check(const DiskRecord& record, std::uint64_t epoch);

// The record of a payload of `length` bytes, sealed for the epoch.
DiskRecord make_record(const BlockCopy& copy, std::uint32_t length, const Checksum& payload,
                       std::uint64_t epoch);

// True where the record was sealed for this epoch. Says nothing about the payload.
bool record_valid(const DiskRecord& record, std::uint64_t epoch);

// The record, which lies at this slot's place, as the inventory lists it.
FoundBlock found_block(const DiskRecord& record, std::int32_t slot);

}  // namespace kvoffload
