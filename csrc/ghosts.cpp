#include "ghosts.h"

namespace kvoffload {

std::uint32_t Ghosts::find(std::uint64_t name) const {
    const std::size_t mask = buckets_.size() - 1;
    for (std::size_t i = home(name);; i = (i + 1) & mask) {
        const std::uint32_t id = buckets_[i];
        if (id == kNone || nodes_[id].name == name) return id;
    }
}

void Ghosts::add(std::uint64_t name, std::uint32_t segment, List& list) {
    if (2 * (used_ + 1) > buckets_.size()) grow();
    std::uint32_t id = free_;
    if (id == kNone) {
        id = static_cast<std::uint32_t>(nodes_.size());
        nodes_.emplace_back();
    } else {
        free_ = nodes_[id].next;
    }
    nodes_[id] = Node{name, segment, kNone, kNone};
    link(id, list);
    ++used_;
    const std::size_t mask = buckets_.size() - 1;
    std::size_t i = home(name);
    while (buckets_[i] != kNone) i = (i + 1) & mask;
    buckets_[i] = id;
}

void Ghosts::grow() {
    std::vector<std::uint32_t> old(buckets_.size() * 2, kNone);
    old.swap(buckets_);
    const std::size_t mask = buckets_.size() - 1;
    for (const std::uint32_t id : old) {
        if (id == kNone) continue;
        std::size_t i = home(nodes_[id].name);
        while (buckets_[i] != kNone) i = (i + 1) & mask;
        buckets_[i] = id;
    }
}

void Ghosts::move(std::uint32_t ghost, List& from, std::uint32_t segment, List& to) {
    unlink(ghost, from);
    nodes_[ghost].segment = segment;
    link(ghost, to);
}

// Shifts the rest of the run back, so that no bucket marks a gap.
void Ghosts::erase(std::uint32_t ghost, List& list) {
    const std::size_t mask = buckets_.size() - 1;
    std::size_t hole = home(nodes_[ghost].name);
    while (buckets_[hole] != ghost) hole = (hole + 1) & mask;
    for (std::size_t i = (hole + 1) & mask; buckets_[i] != kNone; i = (i + 1) & mask) {
        const std::size_t want = home(nodes_[buckets_[i]].name);
        if (((i - want) & mask) < ((i - hole) & mask)) continue;
        buckets_[hole] = buckets_[i];
        hole = i;
    }
    buckets_[hole] = kNone;
    unlink(ghost, list);
    nodes_[ghost].next = free_;
    free_ = ghost;
    --used_;
}

void Ghosts::clear(List& list) {
    while (list.head != kNone) erase(list.head, list);
}

void Ghosts::link(std::uint32_t ghost, List& list) {
    nodes_[ghost].prev = kNone;
    nodes_[ghost].next = list.head;
    if (list.head != kNone) nodes_[list.head].prev = ghost;
    list.head = ghost;
    ++list.count;
}

void Ghosts::unlink(std::uint32_t ghost, List& list) {
    const Node& n = nodes_[ghost];
    (n.prev == kNone ? list.head : nodes_[n.prev].next) = n.next;
    if (n.next != kNone) nodes_[n.next].prev = n.prev;
    --list.count;
}

}  // namespace kvoffload
