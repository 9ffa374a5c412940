// The payload checksum: four interleaved CRC32C lanes (docs/block-format.md, "Checksum").
//
// The bytes, padded with zeros to a multiple of 32, are little-endian 8-byte words; word i belongs to lane i
// mod 4. Each lane is the CRC32C (Castagnoli, reflected, start and end inverted) of its words in order. Four
// chains keep the CPU's crc instruction busy; one would wait for its own result.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvoffload {

struct Checksum {
    std::uint32_t lane[4];
};
static_assert(sizeof(Checksum) == 16, "part of the disk format");

// Uses the CPU's instruction where it has one. Thread-safe, touches only the bytes given.
Checksum checksum(const void* data, std::size_t bytes);

// The same value without the instruction: the fallback, and the oracle of the tests.
Checksum checksum_portable(const void* data, std::size_t bytes);

// True where `checksum` uses an instruction.
bool checksum_has_instruction();

}  // namespace kvoffload
