// How a load is cut into what is read and copied at once. Thread: any.
#pragma once

#include <cstdint>
#include <vector>

#include "block_copy.h"

namespace kvoffload {

// Ends of parts of at most `size` copies, in order, in which no transit slot stands twice. Where there are
// transit slots a part is at most half as long as there are of them, for two parts are under way at once.
// REQUIRES: size > 0.
std::vector<std::int64_t> load_chunks(const BlockCopy* copies, std::int64_t count, std::int64_t size);

// Whether some transit slot stands in both.
bool share_slots(const BlockCopy* a, std::int64_t a_count, const BlockCopy* b, std::int64_t b_count);

}  // namespace kvoffload
