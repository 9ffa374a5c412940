// Where slots lie: slot (slab << 16 | index) of group g begins at slab * slab_bytes + index * slot_bytes[g].
// The same arithmetic places host slots and disk slots. Immutable after construction, so free to share.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace kvoffload {

constexpr std::int64_t kSlotAlign = 4096;
constexpr std::int64_t kMaxSlotsPerSlab = 1 << 16;

class SlotSpace {
  public:
    // slot_bytes: by group, 0 where the rank lacks the group.
    SlotSpace(std::int64_t slab_bytes, std::int64_t slabs, std::vector<std::int64_t> slot_bytes)
        : slab_bytes_(slab_bytes), slabs_(slabs), slot_bytes_(std::move(slot_bytes)) {}

    std::int64_t slab_bytes() const { return slab_bytes_; }
    std::int64_t slabs() const { return slabs_; }
    std::int64_t groups() const { return static_cast<std::int64_t>(slot_bytes_.size()); }
    std::int64_t slot_bytes(std::int64_t group) const { return slot_bytes_[group]; }

    // Byte offset of a slot, or -1 where no such slot exists.
    std::int64_t offset(std::int64_t group, std::int32_t slot) const {
        if (group < 0 || group >= groups() || slot < 0 || slot_bytes_[group] <= 0) return -1;
        const std::int64_t slab = slot >> 16, index = slot & 0xFFFF;
        if (slab >= slabs_ || (index + 1) * slot_bytes_[group] > slab_bytes_) return -1;
        return slab * slab_bytes_ + index * slot_bytes_[group];
    }

    // Slots per slab of the group with the smallest slots; 0 without any group.
    std::int64_t most_slots_per_slab() const {
        std::int64_t most = 0;
        for (const std::int64_t bytes : slot_bytes_) {
            if (bytes > 0) most = std::max(most, std::min(slab_bytes_ / bytes, kMaxSlotsPerSlab));
        }
        return most;
    }

  private:
    std::int64_t slab_bytes_, slabs_;
    std::vector<std::int64_t> slot_bytes_;
};

}  // namespace kvoffload
