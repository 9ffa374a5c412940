#include "branches.h"

#include <stdexcept>
#include <string>

namespace kvoffload {

void Branches::open(std::uint32_t segment) {
    if (segment >= twigs_.size()) twigs_.resize(segment + 1);
    twigs_[segment] = Twig{};
}

void Branches::erase(std::uint32_t segment) {
    while (twigs_[segment].forks != kNone) {
        const std::uint32_t f = twigs_[segment].forks, own = twigs_[segment].fork;
        unhang(f);
        if (own != kNone && forks_[own].parent != kNone) hang(f, forks_[own].parent, forks_[own].at);
    }
    detach(segment);
}

void Branches::attach(std::uint32_t segment, std::uint32_t above, std::uint32_t at) {
    if (above == segment) return;
    for (std::uint32_t up = parent(above); up != kNone; up = parent(up)) {
        if (up != segment) continue;
        detach(above);
        break;
    }
    join(segment, fork_at(above, at));
}

void Branches::detach(std::uint32_t segment) {
    const std::uint32_t f = twigs_[segment].fork;
    if (f == kNone) return;
    leave(segment);
    if (forks_[f].count > 0) return;
    unhang(f);
    free_.push_back(f);
}

void Branches::join(std::uint32_t segment, std::uint32_t fork) {
    Twig& t = twigs_[segment];
    Fork& f = forks_[fork];
    t.fork = fork;
    t.prev = kNone;
    t.next = f.first;
    if (t.next != kNone) twigs_[t.next].prev = segment;
    f.first = segment;
    ++f.count;
    for (int tier = 0; tier < kTiers; ++tier) f.resident[tier] += t.resident[tier] ? 1 : 0;
}

void Branches::leave(std::uint32_t segment) {
    Twig& t = twigs_[segment];
    Fork& f = forks_[t.fork];
    (t.prev == kNone ? f.first : twigs_[t.prev].next) = t.next;
    if (t.next != kNone) twigs_[t.next].prev = t.prev;
    t.fork = t.prev = t.next = kNone;
    --f.count;
    for (int tier = 0; tier < kTiers; ++tier) f.resident[tier] -= t.resident[tier] ? 1 : 0;
}

void Branches::resident(std::uint32_t segment, int tier, bool there) {
    Twig& t = twigs_[segment];
    t.resident[tier] = there;
    if (t.fork == kNone) return;
    std::uint32_t& count = forks_[t.fork].resident[tier];
    there ? ++count : --count;
}

std::uint32_t Branches::find(std::uint32_t parent, std::uint32_t at) const {
    std::uint32_t f = twigs_[parent].forks;
    while (f != kNone && forks_[f].at != at) f = forks_[f].next;
    return f;
}

std::uint32_t Branches::fork_at(std::uint32_t parent, std::uint32_t at) {
    std::uint32_t f = find(parent, at);
    if (f != kNone) return f;
    f = static_cast<std::uint32_t>(forks_.size());
    if (free_.empty()) {
        forks_.emplace_back();
    } else {
        f = free_.back();
        free_.pop_back();
        forks_[f] = Fork{};
    }
    hang(f, parent, at);
    return f;
}

// REQUIRES: the fork hangs nowhere. Its id may be out of use afterwards.
void Branches::hang(std::uint32_t fork, std::uint32_t parent, std::uint32_t at) {
    const std::uint32_t there = find(parent, at);
    if (there != kNone && forks_[fork].count <= forks_[there].count) {
        while (forks_[fork].first != kNone) {
            const std::uint32_t segment = forks_[fork].first;
            leave(segment);
            join(segment, there);
        }
        free_.push_back(fork);
        return;
    }
    Fork& f = forks_[fork];
    f.parent = parent;
    f.at = at;
    f.prev = kNone;
    f.next = twigs_[parent].forks;
    if (f.next != kNone) forks_[f.next].prev = fork;
    twigs_[parent].forks = fork;
    if (there == kNone) return;
    unhang(there);
    hang(there, parent, at);
}

void Branches::unhang(std::uint32_t fork) {
    Fork& f = forks_[fork];
    if (f.parent == kNone) return;
    (f.prev == kNone ? twigs_[f.parent].forks : forks_[f.prev].next) = f.next;
    if (f.next != kNone) forks_[f.next].prev = f.prev;
    f.parent = f.prev = f.next = kNone;
}

void Branches::move_fork(std::uint32_t fork, std::uint32_t parent) {
    if (forks_[fork].parent == parent) return;
    for (std::uint32_t up = parent; up != kNone; up = this->parent(up)) {
        if (twigs_[up].fork != fork) continue;
        detach(parent);
        break;
    }
    if (forks_[fork].count == 0) return;  // the parent was all that hung there
    const std::uint32_t at = forks_[fork].at;
    unhang(fork);
    hang(fork, parent, at);
}

bool Branches::blocked(std::uint32_t segment, int tier, std::uint32_t end) const {
    for (std::uint32_t f = twigs_[segment].forks; f != kNone; f = forks_[f].next) {
        if (forks_[f].at >= end && forks_[f].resident[tier] > 0) return true;
    }
    return false;
}

std::size_t Branches::memory_bytes() const {
    return twigs_.capacity() * sizeof(Twig) + forks_.capacity() * sizeof(Fork) +
           free_.capacity() * sizeof(std::uint32_t);
}

void Branches::check() const {
    std::size_t hung = 0, found = 0;
    for (const Twig& t : twigs_) hung += t.fork != kNone ? 1 : 0;
    for (std::uint32_t f = 0; f < forks_.size(); ++f) {
        std::uint32_t counts[kTiers] = {};
        for (std::uint32_t s = forks_[f].first; s != kNone; s = twigs_[s].next, ++found) {
            for (int tier = 0; tier < kTiers; ++tier) counts[tier] += twigs_[s].resident[tier] ? 1 : 0;
            if (twigs_[s].fork == f) continue;
            throw std::runtime_error("index: segment " + std::to_string(s) + " hangs at two forks");
        }
        for (int tier = 0; tier < kTiers; ++tier) {
            if (counts[tier] == forks_[f].resident[tier]) continue;
            throw std::runtime_error("index: fork " + std::to_string(f) + " counts " +
                                     std::to_string(forks_[f].resident[tier]) + " resident segments, has " +
                                     std::to_string(counts[tier]));
        }
    }
    if (hung != found) throw std::runtime_error("index: a segment hangs at a fork that does not know it");
}

}  // namespace kvoffload
