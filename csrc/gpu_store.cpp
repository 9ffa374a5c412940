// How stores are put into streams: gathers by the calling thread, DMA by the store thread.
#include <algorithm>

#include "gpu.h"
#include "gpu_copier.h"

namespace kvoffload {

// ---- on the calling thread ----

void GpuCopier::store_group(const JobRef& job, const PlacedGroup& placed, std::uintptr_t event,
                            std::uintptr_t stream) {
    if (modes_[placed.group].first != CopyMode::kStaged && all_pinned(placed)) {
        store_directly(job, placed, event, stream);
        return;
    }
    const int code = gpu::stream_wait(stream, event);
    if (code == gpu::kOkay) {
        gather(job, placed, stream);
    } else {
        settle(job.get(), placed.copies.data(), static_cast<std::int64_t>(placed.copies.size()), code,
               "wait for the producer");
    }
}

void GpuCopier::store_directly(const JobRef& job, const PlacedGroup& placed, std::uintptr_t event,
                               std::uintptr_t stream) {
    const int code = gpu::stream_wait(store_stream_, event);
    if (code != gpu::kOkay) {
        settle(job.get(), placed.copies.data(), static_cast<std::int64_t>(placed.copies.size()), code,
               "wait for the producer");
        return;
    }
    if (modes_[placed.group].first == CopyMode::kDma) {
        copy_dma(job, placed, false, store_stream_);
    } else {
        copy_kernel(job, placed, false, store_stream_);
    }
    // The pages may be overwritten by later work of the engine's stream: it waits for their reader.
    const int fence = order_after(stream, store_stream_);
    if (fence != gpu::kOkay) {
        settle(job.get(), placed.copies.data(), static_cast<std::int64_t>(placed.copies.size()), fence,
               "hold the pages of a store");
    }
}

void GpuCopier::gather(const JobRef& job, const PlacedGroup& placed, std::uintptr_t stream) {
    const std::int64_t unit = groups_[placed.group].slot_bytes;
    const std::int64_t most = std::clamp<std::int64_t>(options_.chunk / unit, 1, kMaxItems);
    const auto total = static_cast<std::int64_t>(placed.copies.size());
    for (std::int64_t done = 0; done < total;) {
        Chunk chunk{job, placed.group, {}, nullptr};
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            reclaim();
            chunk.span = ring_.take(unit, std::min(most, total - done));
        }
        if (chunk.span == nullptr) {  // the rest keeps kNotDone: the planner offers it again
            count("staging_full", total - done);
            return;
        }
        const std::int64_t number = chunk.span->bytes / unit;
        chunk.copies.assign(placed.copies.begin() + done, placed.copies.begin() + done + number);
        done += number;
        const int code = gather_chunk(chunk, stream);
        if (code != gpu::kOkay) {
            settle(job.get(), chunk.copies.data(), number, code, "gather");
            continue;
        }
        storing_.start(1, 1, [this, chunk](std::int64_t, std::int64_t) {
            const gpu::DeviceScope on(options_.device);
            send_chunk(chunk);
        });
    }
}

int GpuCopier::gather_chunk(const Chunk& chunk, std::uintptr_t stream) {
    const auto number = static_cast<std::int64_t>(chunk.copies.size());
    const std::pair<std::int32_t, std::int32_t> all(
        0, static_cast<std::int32_t>(groups_[chunk.group].pieces.size()));
    const SlotPlace place{store_staging_ + static_cast<std::uintptr_t>(chunk.span->begin), true};
    const int code =
        launch(chunk.group, all, chunk.copies.data(), number, place, false, options_.gather_blocks, stream);
    if (code != gpu::kOkay) {
        const std::lock_guard<std::mutex> lock(mutex_);
        ring_.spans().pop_back();  // nothing uses it: only this thread takes spans
        return code;
    }
    // Without its event the span stays taken for good: nobody could know when it is free.
    const std::uintptr_t event = take_event();
    const int recorded = gpu::event_record(event, stream);
    if (recorded == gpu::kOkay) {
        const std::lock_guard<std::mutex> lock(mutex_);
        chunk.span->gathered = event;
    }
    return recorded;
}

void GpuCopier::reclaim() {
    auto& spans = ring_.spans();
    while (!spans.empty() && spans.front()->copied != 0 &&
           !gpu::is_not_ready(gpu::event_query(spans.front()->copied))) {
        std::vector<std::uintptr_t> events{spans.front()->gathered, spans.front()->copied};
        give_events(&events);
        spans.pop_front();
    }
}

// ---- on the store thread ----

void GpuCopier::send_chunk(const Chunk& chunk) {
    int code = gpu::stream_wait(store_stream_, chunk.span->gathered);
    if (code == gpu::kOkay) {
        code = copy_runs(chunk, store_staging_ + static_cast<std::uintptr_t>(chunk.span->begin), false,
                         store_stream_);
    }
    const std::uintptr_t event = take_event();
    const int recorded = gpu::event_record(event, store_stream_);
    settle(chunk.job.get(), chunk.copies.data(), static_cast<std::int64_t>(chunk.copies.size()),
           std::max(code, recorded), "store");
    if (recorded != gpu::kOkay) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    chunk.span->copied = event;
}

}  // namespace kvoffload
