#include "bench_table.h"

#include <cstring>

#include "key_table.h"

namespace kvoffload {

PlainTable::PlainTable(const std::uint8_t* keys, std::size_t n) {
    std::size_t places = 16;
    while (places < 2 * n) places *= 2;
    places_.resize(places);
    for (std::size_t i = 0; i < n; ++i) {
        Place& p = places_[at(keys + 16 * i)];
        std::memcpy(p.key, keys + 16 * i, 16);
        p.slot = static_cast<std::uint32_t>(i);
        p.used = 1;
    }
}

// The place of the key, or the free one where it would go.
std::size_t PlainTable::at(const std::uint8_t* key) const {
    const std::size_t mask = places_.size() - 1;
    std::size_t i = hash_key(key) & mask;
    while (places_[i].used != 0 && std::memcmp(places_[i].key, key, 16) != 0) i = (i + 1) & mask;
    return i;
}

std::size_t PlainTable::find(const std::uint8_t* keys, std::size_t n) const {
    std::size_t found = 0;
    for (std::size_t i = 0; i < n; ++i) found += places_[at(keys + 16 * i)].used;
    return found;
}

std::int64_t PlainTable::pin_unpin(const std::uint8_t* keys, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) ++places_[at(keys + 16 * i)].pins;
    std::int64_t left = 0;
    for (std::size_t i = 0; i < n; ++i) left += --places_[at(keys + 16 * i)].pins;
    return left;
}

}  // namespace kvoffload
