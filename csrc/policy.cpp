#include "policy.h"

#include <stdexcept>

#include "entry_pool.h"
#include "rri.h"

namespace kvoffload {

std::unique_ptr<Policy> make_policy(const std::string& name) {
    if (name == "lru") return std::make_unique<LruPolicy>();
    if (name == "rri" || name == "rri-keep") return std::make_unique<RriPolicy>(name == "rri-keep");
    throw std::invalid_argument("no policy is called '" + name + "'; there are: lru, rri, rri-keep");
}

void LruPolicy::on_open(std::uint32_t segment, std::uint64_t order, double) {
    if (segment >= links_.size()) links_.resize(segment + 1);
    links_[segment] = Link{order, kNone, kNone, false};
}

void LruPolicy::on_touch(std::uint32_t segment, std::uint64_t order, double, std::uint32_t) {
    links_[segment].order = order;
    if (!links_[segment].resident || tail_ == segment) return;
    remove(segment);
    insert(segment);
}

void LruPolicy::on_resident(std::uint32_t segment, bool resident) {
    links_[segment].resident = resident;
    resident ? insert(segment) : remove(segment);
}

std::uint32_t LruPolicy::next_victim(std::uint32_t after) const {
    return after == kNone ? head_ : links_[after].next;
}

// Walks from the most recent end: whoever gains its first block was touched lately.
void LruPolicy::insert(std::uint32_t segment) {
    std::uint32_t before = tail_;
    while (before != kNone && links_[before].order > links_[segment].order) before = links_[before].prev;
    const std::uint32_t after = before == kNone ? head_ : links_[before].next;
    links_[segment].prev = before;
    links_[segment].next = after;
    (before == kNone ? head_ : links_[before].next) = segment;
    (after == kNone ? tail_ : links_[after].prev) = segment;
}

void LruPolicy::remove(std::uint32_t segment) {
    const Link& l = links_[segment];
    (l.prev == kNone ? head_ : links_[l.prev].next) = l.next;
    (l.next == kNone ? tail_ : links_[l.next].prev) = l.prev;
}

}  // namespace kvoffload
