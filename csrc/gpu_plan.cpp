#include "gpu_plan.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string>

namespace kvoffload {
namespace {

std::int32_t word_bytes(const PageRegion& region, std::int64_t slot_offset) {
    const std::uint64_t all =
        region.base | static_cast<std::uint64_t>(region.stride) | static_cast<std::uint64_t>(slot_offset);
    for (const std::int32_t word : {16, 8, 4}) {
        if (all % static_cast<std::uint64_t>(word) == 0) return word;
    }
    return 1;
}

// Later ones of equal destinations fail. REQUIRES: sorted by `less` with equal destinations side by side.
template <class Same>
void drop_repeated(std::vector<Placed>* copies, std::uint8_t* status, Same same) {
    auto kept = copies->begin();
    for (auto it = copies->begin(); it != copies->end(); ++it) {
        if (kept != copies->begin() && same(*(kept - 1), *it)) {
            status[it->index] = kCopyFailed;
        } else {
            *kept++ = *it;
        }
    }
    copies->erase(kept, copies->end());
}

void order(std::vector<Placed>* copies, bool to_device, std::uint8_t* status) {
    if (to_device) {
        const auto by_page = [](const Placed& a, const Placed& b) {
            return std::pair(a.page, a.index) < std::pair(b.page, b.index);
        };
        if (!std::is_sorted(copies->begin(), copies->end(), by_page)) {
            std::sort(copies->begin(), copies->end(), by_page);
        }
        drop_repeated(copies, status, [](const Placed& a, const Placed& b) { return a.page == b.page; });
    }
    const auto by_slot = [](const Placed& a, const Placed& b) {
        return std::pair(a.offset, a.index) < std::pair(b.offset, b.index);
    };
    if (!std::is_sorted(copies->begin(), copies->end(), by_slot))
        std::sort(copies->begin(), copies->end(), by_slot);
    if (!to_device) {
        drop_repeated(copies, status, [](const Placed& a, const Placed& b) { return a.offset == b.offset; });
    }
}

}  // namespace

GroupPlan::GroupPlan(std::vector<PageRegion> given, std::int64_t slot)
    : regions(std::move(given)), slot_bytes(slot) {
    std::int64_t most = regions.empty() ? 0 : INT32_MAX;
    for (const PageRegion& region : regions) {
        region_offsets.push_back(block_bytes);
        const auto first = static_cast<std::int32_t>(pieces.size());
        const std::int32_t word = word_bytes(region, block_bytes);
        narrow = narrow || word < 16;
        for (std::int64_t at = 0; at < region.page_bytes; at += kMaxPiece) {
            const auto bytes =
                static_cast<std::int32_t>(std::min<std::int64_t>(kMaxPiece, region.page_bytes - at));
            pieces.push_back(
                {region.base + static_cast<std::uint64_t>(at), region.stride, block_bytes + at, bytes, word});
        }
        pieces_of.emplace_back(first, static_cast<std::int32_t>(pieces.size()));
        block_bytes += region.page_bytes;
        most = std::min(most, region.pages);
    }
    pages = static_cast<std::int32_t>(most);
    if (block_bytes > slot_bytes) {
        throw std::invalid_argument("the pages of a block are " + std::to_string(block_bytes) +
                                    " bytes, its slot has " + std::to_string(slot_bytes));
    }
}

std::vector<PlacedGroup> place(const std::vector<GroupPlan>& groups, const SlotSpace& host,
                               const BlockCopy* copies, std::int64_t count, bool to_device,
                               std::uint8_t* status) {
    std::vector<PlacedGroup> placed(groups.size());
    for (std::int64_t i = 0; i < count; ++i) {
        const BlockCopy& copy = copies[i];
        const std::int64_t offset = host.offset(copy.group, copy.host);
        const bool good = offset >= 0 && (copy.flags & kCopyWait) == 0 && copy.page >= 0 &&
                          copy.page < groups[copy.group].pages;
        if (good) {
            placed[copy.group].copies.push_back({static_cast<std::int32_t>(i), copy.page, offset});
        } else {
            status[i] = kCopyFailed;
        }
    }
    std::vector<PlacedGroup> used;
    for (std::size_t g = 0; g < placed.size(); ++g) {
        if (placed[g].copies.empty()) continue;
        placed[g].group = static_cast<std::int32_t>(g);
        order(&placed[g].copies, to_device, status);
        used.push_back(std::move(placed[g]));
    }
    return used;
}

void PinnedRanges::add(std::uintptr_t begin, std::int64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    ranges_[begin] = begin + static_cast<std::uintptr_t>(bytes);
}

void PinnedRanges::withdraw() {
    std::lock_guard<std::mutex> lock(mutex_);
    withdrawn_ = true;
}

void PinnedRanges::clear() {
    std::lock_guard<std::mutex> lock(mutex_);
    ranges_.clear();
    withdrawn_ = false;
}

bool PinnedRanges::covers(std::uintptr_t begin, std::int64_t bytes) const {
    std::lock_guard<std::mutex> lock(mutex_);
    if (withdrawn_) return false;
    const std::uintptr_t end = begin + static_cast<std::uintptr_t>(bytes);
    while (begin < end) {
        const auto after = ranges_.upper_bound(begin);
        if (after == ranges_.begin() || std::prev(after)->second <= begin) return false;
        begin = std::prev(after)->second;
    }
    return true;
}

std::vector<std::pair<std::uintptr_t, std::int64_t>> PinnedRanges::parts(std::uintptr_t begin,
                                                                         std::int64_t bytes) const {
    std::vector<std::pair<std::uintptr_t, std::int64_t>> cut;
    std::lock_guard<std::mutex> lock(mutex_);
    const std::uintptr_t end = begin + static_cast<std::uintptr_t>(bytes);
    while (begin < end) {
        const auto after = ranges_.upper_bound(begin);
        std::uintptr_t stop = after == ranges_.end() ? end : std::min(end, after->first);
        if (after != ranges_.begin() && std::prev(after)->second > begin) {
            stop = std::min(stop, std::prev(after)->second);
        }
        cut.emplace_back(begin, static_cast<std::int64_t>(stop - begin));
        begin = stop;
    }
    return cut;
}

std::vector<Descriptor> descriptors(const GroupPlan& group, const Placed* copies, std::int64_t count,
                                    std::uintptr_t host_base, const PinnedRanges& pinned) {
    std::vector<Descriptor> merged;
    for (std::int64_t i = 0; i < count; ++i) {
        for (std::size_t r = 0; r < group.regions.size(); ++r) {
            const PageRegion& region = group.regions[r];
            const auto host =
                host_base + static_cast<std::uintptr_t>(copies[i].offset + group.region_offsets[r]);
            const auto device = region.base + static_cast<std::uintptr_t>(copies[i].page * region.stride);
            if (!merged.empty()) {
                Descriptor& last = merged.back();
                const auto bytes = static_cast<std::uintptr_t>(last.bytes);
                if (last.host + bytes == host && last.device + bytes == device) {
                    last.bytes += region.page_bytes;
                    continue;
                }
            }
            merged.push_back({host, device, region.page_bytes});
        }
    }
    std::vector<Descriptor> cut;
    for (const Descriptor& whole : merged) {
        for (const auto& [host, bytes] : pinned.parts(whole.host, whole.bytes)) {
            cut.push_back({host, whole.device + (host - whole.host), bytes});
        }
    }
    return cut;
}

}  // namespace kvoffload
