// What the index is measured against: key -> slot and a pin count, and nothing else that an index has to do.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvoffload {

// Open addressing over 32-byte places, linear probing, at most half full. Thread: one.
class PlainTable {
  public:
    // keys: n times 16 bytes, each once.
    PlainTable(const std::uint8_t* keys, std::size_t n);

    // How many of the keys are here.
    std::size_t find(const std::uint8_t* keys, std::size_t n) const;

    // Looks each key up twice: to pin it, then to unpin it. How many pins are left: 0.
    std::int64_t pin_unpin(const std::uint8_t* keys, std::size_t n);

  private:
    struct Place {
        std::uint8_t key[16];
        std::uint32_t slot;
        std::int32_t pins;
        std::uint64_t used;
    };

    std::size_t at(const std::uint8_t* key) const;

    std::vector<Place> places_;
};

}  // namespace kvoffload
