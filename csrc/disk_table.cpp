#include "disk_table.h"

#include <cstring>

namespace kvoffload {

std::uint64_t record_check(const DiskRecord& record, std::uint64_t epoch) {
    unsigned char bytes[sizeof(DiskRecord)];
    std::memcpy(bytes, &epoch, sizeof epoch);
    std::memcpy(bytes + sizeof epoch, &record, sizeof(DiskRecord) - sizeof(record.check));
    const Checksum sum = checksum(bytes, sizeof bytes);
    return (sum.lane[0] ^ sum.lane[2]) | static_cast<std::uint64_t>(sum.lane[1] ^ sum.lane[3]) << 32;
}

DiskRecord make_record(const BlockCopy& copy, std::uint32_t length, const Checksum& payload,
                       std::uint64_t epoch) {
    DiskRecord record{};
    record.magic = kRecordMagic;
    record.group = copy.group;
    record.parent = copy.parent;
    record.depth = static_cast<std::uint32_t>(copy.depth);
    record.length = length;
    record.seq = copy.seq;
    std::memcpy(record.key, copy.key, sizeof record.key);
    record.payload = payload;
    record.check = record_check(record, epoch);
    return record;
}

bool record_valid(const DiskRecord& record, std::uint64_t epoch) {
    return record.magic == kRecordMagic && record.check == record_check(record, epoch);
}

FoundBlock found_block(const DiskRecord& record, std::int32_t slot) {
    FoundBlock block{};
    std::memcpy(block.key, record.key, sizeof block.key);
    block.seq = record.seq;
    block.slot = slot;
    block.depth = static_cast<std::int32_t>(record.depth);
    block.parent = record.parent;
    block.group = record.group;
    return block;
}

}  // namespace kvoffload
