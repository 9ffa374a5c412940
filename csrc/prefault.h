// First touch of memory that was mapped and not used.
#pragma once

#include <cstdint>

namespace kvoffload {

// Backs [base, base + bytes) with memory without changing its content, on `threads` threads (first touch
// decides the memory node, so call it where the memory is to lie). False where the kernel has no memory left
// for it.
bool prefault(std::uintptr_t base, std::int64_t bytes, int threads);

}  // namespace kvoffload
