#include "plain_table.h"

#include <chrono>
#include <cstring>

#include "key_table.h"

namespace kvoffload {

namespace {

class PlainTable {
  public:
    explicit PlainTable(std::size_t n) {
        std::size_t places = 16;
        while (places * 3 < n * 4) places *= 2;
        places_.resize(places);
    }

    void insert(const std::uint8_t* key) {
        Place& p = places_[find(key)];
        std::memcpy(p.key, key, 16);
        p.used = 1;
    }

    std::int32_t& counter(const std::uint8_t* key) { return places_[find(key)].counter; }

  private:
    struct Place {
        std::uint8_t key[16];
        std::int32_t counter;
        std::uint32_t used;
    };

    std::size_t find(const std::uint8_t* key) const {
        std::size_t i = hash_key(key) & (places_.size() - 1);
        while (places_[i].used && std::memcmp(places_[i].key, key, 16) != 0) i = (i + 1) & (places_.size() - 1);
        return i;
    }

    std::vector<Place> places_;
};

template <class Step>
double per_key(std::size_t n, Step step) {
    const auto start = std::chrono::steady_clock::now();
    for (std::size_t i = 0; i < n; ++i) step(i);
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - start;
    return took.count() / static_cast<double>(n);
}

}  // namespace

PlainTableTimes time_plain_table(const std::uint8_t* keys, std::size_t n, int repeats) {
    PlainTableTimes out;
    std::int64_t sum = 0;
    for (int r = 0; r < repeats; ++r) {
        PlainTable table(n);
        out.insert.push_back(per_key(n, [&](std::size_t i) { table.insert(keys + i * 16); }));
        out.find.push_back(per_key(n, [&](std::size_t i) { sum += table.counter(keys + i * 16); }));
        const double up = per_key(n, [&](std::size_t i) { ++table.counter(keys + i * 16); });
        out.pin.push_back(up + per_key(n, [&](std::size_t i) { sum += --table.counter(keys + i * 16); }));
    }
    if (sum != 0) out.find.clear();  // the sums are 0; using them keeps the loops
    return out;
}

}  // namespace kvoffload
