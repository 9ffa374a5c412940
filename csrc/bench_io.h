// What the copy and disk benchmarks are measured against: the same bytes moved with nothing else done.
#pragma once

#include <cstdint>
#include <vector>

namespace kvoffload {

// Seconds to move whole blocks between memory and a file at the given offsets, on `threads` threads, a block
// per system call and nothing else. Memory block i lies at base + i * bytes. Negative: errno of the first
// failure, negated.
double raw_file_loop(int file, bool write, std::uintptr_t base, std::int64_t bytes,
                     const std::vector<std::int64_t>& offsets, int threads);

// Seconds to copy `count` fragments in order on `threads` threads, each a contiguous share: fragment i from
// source + i * bytes to target + i * bytes. count = 1 per thread is the large memcpy.
double memcpy_loop(std::uintptr_t target, std::uintptr_t source, std::int64_t bytes, std::int64_t count,
                   int threads);

}  // namespace kvoffload
