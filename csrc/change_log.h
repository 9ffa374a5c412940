// The last changes of what is visible or pending, as a ring with a running stamp. Readers keep the stamp up
// to which they have read. Mirrored by kvoffload/index.py CHANGE_DTYPE. Thread: owned by the Index.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

namespace kvoffload {

// What a block is, as seen from outside; or-ed.
enum Code : std::uint8_t { kCodeHost = 1, kCodeDisk = 2, kCodePending = 4, kCodeLoading = 8 };

enum ChangeKind : std::uint8_t {
    kStored = 0,
    kRemoved = 1,
    kMarked = 2
};  // kMarked: only pending or loading

struct Change {
    std::uint8_t key[16];
    std::uint64_t seq;  // order number of the block's segment
    std::int32_t depth;
    std::uint8_t group;
    std::uint8_t kind;
    std::uint8_t tier;  // of kStored and kRemoved
    std::uint8_t code;  // of the block after the change
};
static_assert(sizeof(Change) == 32, "mirrored by CHANGE_DTYPE in index.py");

class ChangeLog {
  public:
    // slots: of the index; what changes between two steps of a reader is a small part of them.
    explicit ChangeLog(std::uint64_t slots) {
        while (capacity_ < kMost && capacity_ < slots / 8) capacity_ *= 2;
    }

    // Changes ever made; the stamp of a reader that has seen all.
    std::uint64_t stamp() const { return total_; }
    // True when every change since `stamp` is still there.
    bool covers(std::uint64_t stamp) const { return stamp >= oldest() && stamp <= total_; }
    const Change& at(std::uint64_t stamp) const { return ring_[stamp & (capacity_ - 1)]; }
    std::size_t memory_bytes() const { return ring_.capacity() * sizeof(Change); }

    Change& add() {
        if (total_ >= ring_.size() && ring_.size() < capacity_) ring_.emplace_back();
        return ring_[total_++ & (capacity_ - 1)];
    }
    // Too much changed to be listed: every reader starts anew.
    void invalidate() {
        add();
        floor_ = total_;
    }

  private:
    std::uint64_t oldest() const {
        const std::uint64_t ring = total_ > capacity_ ? total_ - capacity_ : 0;
        return ring > floor_ ? ring : floor_;
    }

    static constexpr std::uint64_t kLeast = 1 << 13, kMost = 1 << 16;

    std::uint64_t capacity_ = kLeast;  // a power of two
    std::vector<Change> ring_;         // grows up to it
    std::uint64_t total_ = 0;
    std::uint64_t floor_ = 0;
};

}  // namespace kvoffload
