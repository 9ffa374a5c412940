#include "copy_cpu.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace kvoffload {
namespace {

// Begins to fetch a page while the one before it is copied: pages are scattered, so the hardware prefetcher
// starts anew on each. Never faults.
void prefetch(const std::uint8_t* page, bool to_write) {
    constexpr int kLines = 8, kLineBytes = 64;
    for (int line = 0; line < kLines; ++line) {
        if (to_write) {
            __builtin_prefetch(page + line * kLineBytes, 1);
        } else {
            __builtin_prefetch(page + line * kLineBytes, 0);
        }
    }
}

}  // namespace

CpuCopier::CpuCopier(std::uintptr_t host_base, SlotSpace host, std::vector<std::vector<PageRegion>> regions,
                     int threads)
    : host_base_(host_base), host_(std::move(host)), regions_(std::move(regions)), pool_(threads) {}

CpuCopier::~CpuCopier() { close(); }

std::int64_t CpuCopier::submit(const BlockCopy* copies, std::int64_t count, bool to_device) {
    auto job = std::make_unique<Job>();
    job->status.assign(count, kNotDone);
    std::uint8_t* status = job->status.data();
    // Eight ranges per thread: small enough that threads end together, large enough that taking one costs
    // nothing.
    const std::int64_t grain = std::clamp<std::int64_t>(count / (8 * std::max(pool_.threads(), 1)), 1, 4096);
    job->batch = pool_.start(count, grain, [=](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) status[i] = copy(copies[i], to_device);
    });
    const std::lock_guard<std::mutex> lock(mutex_);
    jobs_.emplace(next_, std::move(job));
    return next_++;
}

bool CpuCopier::known(std::int64_t handle) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return jobs_.count(handle) != 0;
}

bool CpuCopier::query(std::int64_t handle, std::vector<std::uint8_t>* status) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = jobs_.find(handle);
    if (!pool_.done(found->second->batch)) return false;
    *status = std::move(found->second->status);
    jobs_.erase(found);
    return true;
}

bool CpuCopier::wait(std::int64_t handle, double seconds) {
    ThreadPool::Handle batch;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        batch = jobs_.at(handle)->batch;
    }
    return pool_.help(batch, seconds);
}

std::uint8_t CpuCopier::copy(const BlockCopy& copy, bool to_device) const {
    const std::int64_t offset = host_.offset(copy.group, copy.host);
    if (offset < 0 || copy.page < 0 || (copy.flags & kCopyWait) != 0) return kCopyFailed;
    const std::vector<PageRegion>& regions = regions_[copy.group];
    if (regions.empty()) return kCopyFailed;
    for (const PageRegion& region : regions) {
        if (copy.page >= region.pages) return kCopyFailed;
    }
    auto* slot = reinterpret_cast<std::uint8_t*>(host_base_ + offset);
    const auto page_of = [&](const PageRegion& region) {
        return reinterpret_cast<std::uint8_t*>(region.base + copy.page * region.stride);
    };
    for (std::size_t i = 0; i < regions.size(); ++i) {
        if (i + 1 < regions.size()) prefetch(page_of(regions[i + 1]), to_device);
        std::uint8_t* page = page_of(regions[i]);
        std::memcpy(to_device ? page : slot, to_device ? slot : page, regions[i].page_bytes);
        slot += regions[i].page_bytes;
    }
    return kOk;
}

}  // namespace kvoffload
