// Ghosts: blocks that no tier holds, each with the segment of the request that used it last. A block is named
// by 8 bytes of its key and its group: two of the same name are taken for one, which costs a wrong count and
// nothing else. Thread: owned by the Lineage.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "entry_pool.h"

namespace kvoffload {

class Ghosts {
  public:
    // The ghosts of one segment, a list.
    struct List {
        std::uint32_t head = kNone;
        std::uint32_t count = 0;
    };

    static std::uint64_t name(const std::uint8_t* key, std::uint32_t group) {
        std::uint64_t n = 0;
        std::memcpy(&n, key + 8, 8);
        return n ^ group * 0x9E3779B97F4A7C15u;
    }

    std::uint64_t size() const { return used_; }
    // Its id, or kNone.
    std::uint32_t find(std::uint64_t name) const;
    std::uint32_t segment(std::uint32_t ghost) const { return nodes_[ghost].segment; }
    // REQUIRES: not there.
    void add(std::uint64_t name, std::uint32_t segment, List& list);
    // Out of `from` and into `to`, the list of `segment`.
    void move(std::uint32_t ghost, List& from, std::uint32_t segment, List& to);
    void erase(std::uint32_t ghost, List& list);
    void clear(List& list);
    std::size_t memory_bytes() const { return nodes_.capacity() * sizeof(Node) + buckets_.capacity() * 4; }

  private:
    struct Node {
        std::uint64_t name;
        std::uint32_t segment, prev, next;
    };

    std::size_t home(std::uint64_t name) const {
        return static_cast<std::size_t>(name) & (buckets_.size() - 1);
    }
    void link(std::uint32_t ghost, List& list);
    void unlink(std::uint32_t ghost, List& list);
    void grow();

    std::vector<Node> nodes_;
    std::vector<std::uint32_t> buckets_ =
        std::vector<std::uint32_t>(1024, kNone);  // linear probing, half full at most
    std::uint32_t free_ = kNone;                  // list over Node::next
    std::uint64_t used_ = 0;
};

}  // namespace kvoffload
