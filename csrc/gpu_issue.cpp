// How loads, and what loads and stores have in common, are put into streams; stores are in gpu_store.cpp.
#include <algorithm>

#include "gpu.h"
#include "gpu_copier.h"

namespace kvoffload {
namespace {

constexpr int kThreads = 512;

}  // namespace

// ---- loads ----

int GpuCopier::copy_layers(const JobRef& job, const PlacedGroup& placed, const std::vector<int>& layers) {
    const GroupPlan& group = groups_[placed.group];
    const int last = layers.empty() ? -1 : *std::max_element(layers.begin(), layers.end());
    const auto number = static_cast<std::int64_t>(placed.copies.size());
    int code = gpu::kOkay;
    for (int layer = 0; layer <= last; ++layer) {
        for (std::size_t r = 0; r < layers.size() && code == gpu::kOkay; ++r) {
            if (layers[r] != layer) continue;
            code = launch(placed.group, group.pieces_of[r], placed.copies.data(), number, {host_base_, false},
                          true, options_.side_blocks, load_stream_);
        }
        const std::uintptr_t event = take_event();
        const int recorded = gpu::event_record(event, load_stream_);
        if (code == gpu::kOkay) code = recorded;
        const std::lock_guard<std::mutex> lock(mutex_);
        job->layers.push_back(event);
    }
    return code;
}

// ---- on the issuing threads ----

void GpuCopier::load_staged(const JobRef& job, const PlacedGroup& placed) {
    const std::int64_t most =
        std::clamp<std::int64_t>(load_buffer_bytes_ / groups_[placed.group].slot_bytes, 1, kMaxItems);
    const auto total = static_cast<std::int64_t>(placed.copies.size());
    for (std::int64_t done = 0; done < total && !closing_; done += most) {
        const std::int64_t number = std::min(most, total - done);
        Chunk chunk{job, placed.group, {}, nullptr};
        chunk.copies.assign(placed.copies.begin() + done, placed.copies.begin() + done + number);
        settle(job.get(), chunk.copies.data(), number, receive_chunk(chunk), "load");
    }
}

int GpuCopier::receive_chunk(const Chunk& chunk) {
    const std::size_t buffer = next_buffer_++ % buffer_free_.size();
    const std::uintptr_t staging = load_staging_ + static_cast<std::uintptr_t>(buffer * load_buffer_bytes_);
    std::uintptr_t& scattered = buffer_free_[buffer];
    int code = gpu::kOkay;
    if (scattered == 0) {
        scattered = take_event();
    } else {
        code = gpu::stream_wait(load_stream_, scattered);
    }
    if (code == gpu::kOkay) code = copy_runs(chunk, staging, true, load_stream_);
    // The scatter stream follows even after a failure, so that its next event covers what was begun.
    const int followed = order_after(scatter_stream_, load_stream_);
    if (code == gpu::kOkay) code = followed;
    if (code == gpu::kOkay) {
        const std::pair<std::int32_t, std::int32_t> all(
            0, static_cast<std::int32_t>(groups_[chunk.group].pieces.size()));
        code = launch(chunk.group, all, chunk.copies.data(), static_cast<std::int64_t>(chunk.copies.size()),
                      {staging, true}, true, options_.side_blocks, scatter_stream_);
    }
    const int recorded = gpu::event_record(scattered, scatter_stream_);
    return code != gpu::kOkay ? code : recorded;
}

void GpuCopier::finish(const JobRef& job, bool to_device) {
    const gpu::DeviceScope device(options_.device);
    std::vector<std::uintptr_t> streams{store_stream_};
    if (to_device) streams = {load_stream_, scatter_stream_};
    std::vector<std::uintptr_t> events;
    for (const std::uintptr_t stream : streams) {
        const std::uintptr_t event = take_event();
        const int code = gpu::event_record(event, stream);
        if (code == gpu::kOkay) {
            events.push_back(event);
            continue;
        }
        // No later event can tell either: the stream is broken, and so is what was put into it.
        note(code, "end of a job");
        std::replace(job->status.begin(), job->status.end(), std::uint8_t{kOk}, std::uint8_t{kCopyFailed});
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    job->events = events;
    job->issued = true;
}

// ---- on either ----

void GpuCopier::copy_dma(const JobRef& job, const PlacedGroup& placed, bool to_device,
                         std::uintptr_t stream) {
    const GroupPlan& group = groups_[placed.group];
    const auto regions = std::max<std::int64_t>(1, static_cast<std::int64_t>(group.regions.size()));
    const std::int64_t most = std::max<std::int64_t>(1, options_.batch_limit / regions);
    const auto total = static_cast<std::int64_t>(placed.copies.size());
    for (std::int64_t done = 0; done < total && !closing_; done += most) {
        const std::int64_t number = std::min(most, total - done);
        const Placed* copies = placed.copies.data() + done;
        const int code = issue(descriptors(group, copies, number, host_base_, pinned_), to_device, stream);
        settle(job.get(), copies, number, code, "direct copy");
    }
}

int GpuCopier::issue(const std::vector<Descriptor>& list, bool to_device, std::uintptr_t stream) {
    const auto limit = static_cast<std::size_t>(std::max<std::int64_t>(1, options_.batch_limit));
    for (std::size_t begin = 0; begin < list.size(); begin += limit) {
        const std::size_t number = std::min(limit, list.size() - begin);
        if (number > 1 && batch_ && issue_batch(list.data() + begin, number, to_device, stream)) continue;
        for (std::size_t i = begin; i < begin + number; ++i) {
            const Descriptor& d = list[i];
            const int code = to_device ? gpu::copy(d.device, d.host, d.bytes, true, stream)
                                       : gpu::copy(d.host, d.device, d.bytes, false, stream);
            if (code != gpu::kOkay) return code;
        }
    }
    count("descriptors", static_cast<std::int64_t>(list.size()));
    return gpu::kOkay;
}

// False where the driver refused: batches are not tried again, and one warning says why.
bool GpuCopier::issue_batch(const Descriptor* list, std::size_t number, bool to_device,
                            std::uintptr_t stream) {
    std::vector<std::uintptr_t> to(number), from(number);
    std::vector<std::size_t> bytes(number);
    for (std::size_t i = 0; i < number; ++i) {
        to[i] = to_device ? list[i].device : list[i].host;
        from[i] = to_device ? list[i].host : list[i].device;
        bytes[i] = static_cast<std::size_t>(list[i].bytes);
    }
    const int code =
        gpu::copy_batch(to.data(), from.data(), bytes.data(), number, to_device, options_.device, stream);
    if (code == gpu::kOkay) {
        count("batches", 1);
        return true;
    }
    if (batch_.exchange(false)) note(code, "batch copies are refused, copying one by one");
    return false;
}

void GpuCopier::copy_kernel(const JobRef& job, const PlacedGroup& placed, bool to_device,
                            std::uintptr_t stream) {
    const auto number = static_cast<std::int64_t>(placed.copies.size());
    const std::pair<std::int32_t, std::int32_t> all(
        0, static_cast<std::int32_t>(groups_[placed.group].pieces.size()));
    const int code = launch(placed.group, all, placed.copies.data(), number, {host_base_, false}, to_device,
                            options_.side_blocks, stream);
    settle(job.get(), placed.copies.data(), number, code, "copy by kernel");
}

int GpuCopier::launch(std::int32_t group, std::pair<std::int32_t, std::int32_t> pieces, const Placed* copies,
                      std::int64_t number, SlotPlace slots, bool to_pages, int blocks,
                      std::uintptr_t stream) {
    const GroupPlan& plan = groups_[group];
    const std::int32_t piece_count = pieces.second - pieces.first;
    if (plan.narrow) count("narrow", number);
    for (std::int64_t done = 0; done < number; done += kMaxItems) {
        const auto items = static_cast<std::int32_t>(std::min<std::int64_t>(kMaxItems, number - done));
        CopyArgs args;
        args.task = {reinterpret_cast<const Piece*>(tables_[group]),
                     pieces.first,
                     piece_count,
                     items,
                     to_pages,
                     slots.base};
        for (std::int32_t i = 0; i < items; ++i) {
            const Placed& copy = copies[done + i];
            const std::int64_t offset = slots.packed ? (done + i) * plan.slot_bytes : copy.offset;
            args.items[i] = {copy.page, static_cast<std::uint32_t>(offset / kSlotPage)};
        }
        const std::int64_t teams = static_cast<std::int64_t>(items) * piece_count;
        const auto enough = static_cast<int>(
            std::min<std::int64_t>(blocks, (teams + kThreads / kTeam - 1) / (kThreads / kTeam)));
        const int code =
            gpu::launch_copy(args, std::max(1, enough), kThreads, items * plan.block_bytes, stream);
        if (code != gpu::kOkay) return code;
    }
    return gpu::kOkay;
}

// One DMA per run of slots that follow each other in host memory, padding between them included.
int GpuCopier::copy_runs(const Chunk& chunk, std::uintptr_t staging, bool to_device, std::uintptr_t stream) {
    const GroupPlan& group = groups_[chunk.group];
    const auto number = static_cast<std::int64_t>(chunk.copies.size());
    std::int64_t runs = 0;
    for (std::int64_t first = 0, next = 0; first < number; first = next, ++runs) {
        for (next = first + 1; next < number; ++next) {
            if (chunk.copies[next].offset != chunk.copies[next - 1].offset + group.slot_bytes) break;
        }
        const std::int64_t bytes = (next - first - 1) * group.slot_bytes + group.block_bytes;
        const auto host = host_base_ + static_cast<std::uintptr_t>(chunk.copies[first].offset);
        const auto device = staging + static_cast<std::uintptr_t>(first * group.slot_bytes);
        for (const auto& [at, size] : pinned_.parts(host, bytes)) {
            const std::uintptr_t there = device + (at - host);
            const int code = to_device ? gpu::copy(there, at, size, true, stream)
                                       : gpu::copy(at, there, size, false, stream);
            if (code != gpu::kOkay) return code;
        }
    }
    count("runs", runs);
    return gpu::kOkay;
}

void GpuCopier::settle(Job* job, const Placed* copies, std::int64_t number, int code, const char* what) {
    for (std::int64_t i = 0; i < number; ++i)
        job->status[copies[i].index] = code == gpu::kOkay ? kOk : kCopyFailed;
    if (code != gpu::kOkay) note(code, what);
}

}  // namespace kvoffload
