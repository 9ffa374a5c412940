// Positioned transfers that are whole or an error. Thread-safe; no state.
#pragma once

#include <cstdint>
#include <vector>

namespace kvoffload {

enum class Way { kRead, kWrite };

// errno values, and besides:
constexpr int kWhole = 0;   // every byte was moved
constexpr int kShort = -1;  // the file ended, or took no more

// Moves `bytes` at `offset`; after an error the target's content is undefined.
int transfer(Way way, int file, void* data, std::int64_t bytes, std::int64_t offset);

struct Part {
    std::uint8_t* data;
    std::int64_t bytes;
};

// Moves parts that follow each other in the file from `offset` on, in one system call if all goes well; else
// part by part, so that one bad place fails alone. errors: per part, as `transfer` returns. REQUIRES: at most
// 1024 parts.
void transfer_parts(Way way, int file, const std::vector<Part>& parts, std::int64_t offset, int* errors);

}  // namespace kvoffload
