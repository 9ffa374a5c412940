// Page-locked host memory as the copier uses it, and how it stops using it.
#include <algorithm>

#include "gpu.h"
#include "gpu_copier.h"

namespace kvoffload {

void GpuCopier::withdraw_pinned() {
    {
        // Later submits of the calling threads take the ways that need no page-locked memory.
        const std::lock_guard<std::mutex> one(submit_mutex_);
        if (closed_) return;
        pinned_.withdraw();
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            holding_ = true;
            held_ = 0;
        }
        for (ThreadPool* thread : {&storing_, &loading_})
            thread->start(1, 1, [this](std::int64_t, std::int64_t) { hold(); });
    }
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return held_ == 2 || closed_; });
}

void GpuCopier::forget_pinned() {
    pinned_.clear();
    const std::lock_guard<std::mutex> lock(mutex_);
    holding_ = false;
    changed_.notify_all();
}

// An issuing thread waits until its copies have ended, and then for forget_pinned.
void GpuCopier::hold() {
    const gpu::DeviceScope device(options_.device);
    for (const std::uintptr_t stream : {store_stream_, load_stream_, scatter_stream_})
        gpu::stream_synchronize(stream);
    std::unique_lock<std::mutex> lock(mutex_);
    ++held_;
    changed_.notify_all();
    changed_.wait(lock, [this] { return !holding_ || closing_; });
}

bool GpuCopier::all_pinned(const PlacedGroup& placed) const {
    const std::int64_t bytes = groups_[placed.group].block_bytes;
    return std::all_of(placed.copies.begin(), placed.copies.end(), [&](const Placed& copy) {
        return pinned_.covers(host_base_ + static_cast<std::uintptr_t>(copy.offset), bytes);
    });
}

}  // namespace kvoffload
