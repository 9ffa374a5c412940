#include "chunks.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

namespace kvoffload {
namespace {

bool in_transit(const BlockCopy& copy) { return (copy.flags & kCopyTransit) != 0; }

std::uint64_t place(const BlockCopy& copy) {
    return std::uint64_t{copy.group} << 32 | static_cast<std::uint32_t>(copy.host);
}

}  // namespace

std::vector<std::int64_t> load_chunks(const BlockCopy* copies, std::int64_t count, std::int64_t size) {
    std::unordered_map<std::uint64_t, std::int64_t>
        last;  // by transit slot: where it stood last, -1 = nowhere
    for (std::int64_t i = 0; i < count; ++i) {
        if (in_transit(copies[i])) last.emplace(place(copies[i]), -1);
    }
    if (!last.empty()) {
        size = std::clamp<std::int64_t>(static_cast<std::int64_t>(last.size()) / 2, 1, size);
    }
    std::vector<std::int64_t> ends;
    std::int64_t begin = 0;
    for (std::int64_t i = 0; i < count; ++i) {
        std::int64_t* const before = in_transit(copies[i]) ? &last[place(copies[i])] : nullptr;
        if (i - begin == size || (before != nullptr && *before >= begin)) {
            ends.push_back(i);
            begin = i;
        }
        if (before != nullptr) *before = i;
    }
    if (begin < count) ends.push_back(count);
    return ends;
}

bool share_slots(const BlockCopy* a, std::int64_t a_count, const BlockCopy* b, std::int64_t b_count) {
    std::unordered_set<std::uint64_t> places;
    for (std::int64_t i = 0; i < a_count; ++i) {
        if (in_transit(a[i])) places.insert(place(a[i]));
    }
    return !places.empty() && std::any_of(b, b + b_count, [&](const BlockCopy& copy) {
        return in_transit(copy) && places.count(place(copy)) != 0;
    });
}

}  // namespace kvoffload
