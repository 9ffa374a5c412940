#include "recency.h"

#include <algorithm>

namespace kvoffload {

void Recency::touch(std::uint32_t segment) {
    if (segment >= seats_.size()) seats_.resize(segment + 1);
    Seat& seat = seats_[segment];
    if (seat.place != kNone) {
        update(seat.place, -std::int64_t{seat.blocks});
        segments_[seat.place] = kNone;
    }
    if (next_ == segments_.size()) renumber();
    seat.place = static_cast<std::uint32_t>(next_++);
    segments_[seat.place] = segment;
    update(seat.place, seat.blocks);
}

void Recency::add(std::uint32_t segment, std::int64_t blocks) {
    Seat& seat = seats_[segment];
    seat.blocks = static_cast<std::uint32_t>(seat.blocks + blocks);
    update(seat.place, blocks);
}

void Recency::erase(std::uint32_t segment) {
    if (segment >= seats_.size() || seats_[segment].place == kNone) return;
    Seat& seat = seats_[segment];
    update(seat.place, -std::int64_t{seat.blocks});
    segments_[seat.place] = kNone;
    seat = Seat{};
}

std::uint64_t Recency::above(std::uint32_t segment) const {
    std::int64_t upto = 0;
    for (std::size_t i = std::size_t{seats_[segment].place} + 1; i > 0; i &= i - 1) upto += tree_[i - 1];
    return static_cast<std::uint64_t>(total_ - upto);
}

void Recency::update(std::size_t place, std::int64_t blocks) {
    total_ += blocks;
    for (std::size_t i = place + 1; i <= tree_.size(); i += i & (~i + 1)) tree_[i - 1] += blocks;
}

// Into the same order without gaps; at least as many places again are free afterwards.
void Recency::renumber() {
    const std::vector<std::uint32_t> old = std::move(segments_);
    const auto used = static_cast<std::size_t>(
        std::count_if(old.begin(), old.end(), [](std::uint32_t s) { return s != kNone; }));
    std::size_t places = kLeast;
    while (places < 2 * used + 1) places *= 2;
    segments_.assign(places, kNone);
    tree_.assign(places, 0);
    next_ = 0;
    total_ = 0;
    for (const std::uint32_t s : old) {
        if (s == kNone) continue;
        seats_[s].place = static_cast<std::uint32_t>(next_);
        segments_[next_++] = s;
        update(seats_[s].place, seats_[s].blocks);
    }
}

std::size_t Recency::memory_bytes() const {
    return seats_.capacity() * sizeof(Seat) + segments_.capacity() * sizeof(std::uint32_t) +
           tree_.capacity() * sizeof(std::int64_t);
}

}  // namespace kvoffload
