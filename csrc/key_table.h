// Open addressing from key to entry id: (tag, id) pairs, linear probing, a power of two of places, at most
// 3/4 full, deletion by shifting back (no tombstones). The tag is the key's whole 32-bit hash, so growing and
// shifting never look at an entry. Thread: owned by the Index.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "entry_pool.h"

namespace kvoffload {

// Keys may be small integers at either end (traces), so every bit is mixed.
inline std::uint32_t hash_key(const std::uint8_t* key) {
    std::uint64_t a, b;
    std::memcpy(&a, key, 8);
    std::memcpy(&b, key + 8, 8);
    __extension__ using Wide = unsigned __int128;
    const Wide m = static_cast<Wide>(a ^ 0x9E3779B97F4A7C15ull) * (b ^ 0xD6E8FEB86659FD93ull);
    const std::uint64_t h = static_cast<std::uint64_t>(m) ^ static_cast<std::uint64_t>(m >> 64);
    return static_cast<std::uint32_t>((h * 0xC2B2AE3D27D4EB4Full) >> 32);
}

class KeyTable {
  public:
    // Starts with room for `expected` keys, within bounds: growing later stops the caller for a moment.
    KeyTable(const EntryPool& pool, std::uint64_t expected) : pool_(&pool) {
        std::size_t places = kLeast;
        while (places < kMost && expected * 4 > places * 3) places *= 2;
        places_.assign(places, Place{0, kNone});
    }

    std::uint32_t size() const { return size_; }
    std::size_t memory_bytes() const { return places_.capacity() * sizeof(Place); }
    void prefetch(std::uint32_t hash) const { __builtin_prefetch(&places_[hash & mask()]); }

    // The first entry whose tag is `hash`, likely but not surely the key's; kNone = the key is absent.
    std::uint32_t guess(std::uint32_t hash) const {
        for (std::size_t i = hash & mask();; i = (i + 1) & mask()) {
            const Place& p = places_[i];
            if (p.id == kNone || p.tag == hash) return p.id;
        }
    }

    std::uint32_t find(std::uint32_t hash, const std::uint8_t* key) const {
        for (std::size_t i = hash & mask();; i = (i + 1) & mask()) {
            const Place& p = places_[i];
            if (p.id == kNone) return kNone;
            if (p.tag == hash && equal(p.id, key)) return p.id;
        }
    }

    // REQUIRES: the key is absent.
    void insert(std::uint32_t hash, std::uint32_t id) {
        if ((static_cast<std::uint64_t>(size_) + 1) * 4 > places_.size() * 3) grow();
        put(hash, id);
        ++size_;
    }

    // REQUIRES: `id` is in the table under `hash`.
    void erase(std::uint32_t hash, std::uint32_t id) {
        std::size_t hole = hash & mask();
        while (places_[hole].id != id) hole = (hole + 1) & mask();
        for (std::size_t i = (hole + 1) & mask(); places_[i].id != kNone; i = (i + 1) & mask()) {
            const std::size_t home = places_[i].tag & mask();
            if (((i - home) & mask()) < ((i - hole) & mask())) continue;  // home lies in (hole, i]: stays
            places_[hole] = places_[i];
            hole = i;
        }
        places_[hole].id = kNone;
        --size_;
    }

    void prefetch_entry(std::uint32_t id) const { pool_->prefetch(id); }

    bool equal(std::uint32_t id, const std::uint8_t* key) const {
        return std::memcmp((*pool_)[id].key, key, 16) == 0;
    }

  private:
    struct Place {
        std::uint32_t tag;
        std::uint32_t id;
    };
    static constexpr std::size_t kLeast = 1 << 10, kMost = 1 << 20;  // at the start

    std::size_t mask() const { return places_.size() - 1; }

    void put(std::uint32_t hash, std::uint32_t id) {
        std::size_t i = hash & mask();
        while (places_[i].id != kNone) i = (i + 1) & mask();
        places_[i] = Place{hash, id};
    }

    void grow() {
        std::vector<Place> old(places_.size() * 2, Place{0, kNone});
        old.swap(places_);
        for (const Place& p : old) {
            if (p.id != kNone) put(p.tag, p.id);
        }
    }

    const EntryPool* pool_;
    std::vector<Place> places_;
    std::uint32_t size_ = 0;
};

// Calls found(i, id) for each of n keys, kNone for an absent one, in stages of 32, so that the cache misses
// of a stage overlap: place in the table, then entry, then comparison.
template <class TableOf, class KeyOf, class Found>
void find_staged(std::size_t n, TableOf table, KeyOf key, Found found) {
    constexpr std::size_t kStage = 32;
    std::uint32_t hashes[kStage], ids[kStage];
    for (std::size_t first = 0; first < n; first += kStage) {
        const std::size_t count = n - first < kStage ? n - first : kStage;
        for (std::size_t i = 0; i < count; ++i) {
            hashes[i] = hash_key(key(first + i));
            table(first + i).prefetch(hashes[i]);
        }
        for (std::size_t i = 0; i < count; ++i) {
            const KeyTable& t = table(first + i);
            ids[i] = t.guess(hashes[i]);
            if (ids[i] != kNone) t.prefetch_entry(ids[i]);
        }
        for (std::size_t i = 0; i < count; ++i) {
            const KeyTable& t = table(first + i);
            if (ids[i] != kNone && !t.equal(ids[i], key(first + i)))
                ids[i] = t.find(hashes[i], key(first + i));
            found(first + i, ids[i]);
        }
    }
}

}  // namespace kvoffload
