// Life of a copier and its jobs; how copies are issued is in gpu_issue.cpp.
#include "gpu_copier.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <thread>

#include "gpu.h"

namespace kvoffload {
namespace {

constexpr auto kNap = std::chrono::microseconds(50);  // between two looks at events, on threads that wait

void require(int code, const char* what) {
    if (code != gpu::kOkay) throw std::runtime_error(std::string(what) + ": " + gpu::error_text(code));
}

void require_fit(std::int64_t slot, std::int64_t staging) {
    if (slot <= staging) return;
    throw std::invalid_argument("a slot of " + std::to_string(slot) +
                                " bytes does not fit the staging buffer of " + std::to_string(staging) +
                                " bytes; make the buffer larger");
}

}  // namespace

GpuCopier::GpuCopier(const CopierOptions& options, std::uintptr_t host_base, SlotSpace host,
                     const std::vector<std::vector<PageRegion>>& regions,
                     std::vector<std::pair<CopyMode, CopyMode>> modes)
    : options_(options),
      host_base_(host_base),
      host_(std::move(host)),
      modes_(std::move(modes)),
      batch_(options.batch && gpu::has_batch()),
      ring_(options.store_staging / kSlotAlign * kSlotAlign) {
    if (host_base_ % kSlotAlign != 0) throw std::invalid_argument("host memory must begin on a slot border");
    if (static_cast<std::int64_t>(regions.size()) != host_.groups() || modes_.size() != regions.size()) {
        throw std::invalid_argument("regions and modes must have one entry per group");
    }
    std::int64_t largest = kSlotAlign;
    for (std::size_t g = 0; g < regions.size(); ++g) {
        groups_.emplace_back(regions[g], host_.slot_bytes(static_cast<std::int64_t>(g)));
        largest = std::max(largest, groups_.back().slot_bytes);
    }
    require_fit(largest, ring_.bytes());
    load_buffer_bytes_ = std::max(options_.chunk / kSlotAlign * kSlotAlign, largest);
    buffer_free_.assign(std::max<std::int64_t>(2, options_.load_staging / load_buffer_bytes_), 0);
    try {
        allocate();
    } catch (...) {
        release();
        throw;
    }
}

GpuCopier::~GpuCopier() { close(); }

void GpuCopier::allocate() {
    const gpu::DeviceScope device(options_.device);
    gpu::DeviceInfo info;
    require(gpu::device_info(options_.device, &info), "copy engine");
    if (options_.gather_blocks <= 0) options_.gather_blocks = 4 * info.multiprocessors;
    for (std::uintptr_t* stream : {&store_stream_, &load_stream_, &scatter_stream_}) {
        require(gpu::stream_create(stream, true), "copy stream");
    }
    for (const GroupPlan& group : groups_) {
        tables_.push_back(0);
        const auto bytes = static_cast<std::int64_t>(group.pieces.size() * sizeof(Piece));
        if (bytes == 0) continue;
        require(gpu::memory_allocate(&tables_.back(), bytes), "table of pages");
        const auto from = reinterpret_cast<std::uintptr_t>(group.pieces.data());
        require(gpu::copy(tables_.back(), from, bytes, true, load_stream_), "table of pages");
    }
    require(gpu::memory_allocate(&store_staging_, ring_.bytes()), "store staging (store_staging bytes)");
    const auto buffers = static_cast<std::int64_t>(buffer_free_.size());
    require(gpu::memory_allocate(&load_staging_, buffers * load_buffer_bytes_),
            "load staging (load_staging bytes)");
    // Slots are padded; what lies in the padding must not be another user's memory.
    require(gpu::fill(store_staging_, 0, ring_.bytes(), load_stream_), "store staging");
    require(gpu::stream_synchronize(load_stream_), "copy stream");
}

void GpuCopier::release() {
    const gpu::DeviceScope device(options_.device);
    tables_.insert(tables_.end(), {store_staging_, load_staging_});
    for (const std::uintptr_t memory : tables_) {
        if (memory != 0) gpu::memory_free(memory);
    }
    tables_.clear();
    for (const std::uintptr_t event : all_events_) gpu::event_destroy(event);
    all_events_.clear();
    for (const std::uintptr_t stream : {store_stream_, load_stream_, scatter_stream_}) {
        if (stream != 0) gpu::stream_destroy(stream);
    }
}

std::vector<PlacedGroup> GpuCopier::begin(const BlockCopy* copies, std::int64_t count, bool to_device,
                                          Job* job) {
    job->status.assign(count, kNotDone);
    return place(groups_, host_, copies, count, to_device, job->status.data());
}

std::int64_t GpuCopier::submit(const BlockCopy* copies, std::int64_t count, bool to_device,
                               std::uintptr_t event, std::uintptr_t stream) {
    const std::lock_guard<std::mutex> one(submit_mutex_);
    const gpu::DeviceScope device(options_.device);
    const auto job = std::make_shared<Job>();
    const std::vector<PlacedGroup> placed = begin(copies, count, to_device, job.get());
    if (to_device) {
        // The wait is put into the streams now: the event may mean something else when the copies are issued.
        int code = gpu::stream_wait(scatter_stream_, event);
        for (const PlacedGroup& group : placed) {
            const bool staged = modes_[group.group].second == CopyMode::kStaged;
            if (code == gpu::kOkay && !staged) code = gpu::stream_wait(load_stream_, event);
            if (code != gpu::kOkay) {
                const auto number = static_cast<std::int64_t>(group.copies.size());
                settle(job.get(), group.copies.data(), number, code, "wait for the last reader");
                continue;
            }
            loading_.start(1, 1, [this, job, group](std::int64_t, std::int64_t) {
                const gpu::DeviceScope on(options_.device);
                const CopyMode mode = modes_[group.group].second;
                if (mode == CopyMode::kDma) {
                    copy_dma(job, group, true, load_stream_);
                } else if (mode == CopyMode::kKernel && all_pinned(group)) {
                    copy_kernel(job, group, true, load_stream_);
                } else {
                    load_staged(job, group);
                }
            });
        }
    } else {
        for (const PlacedGroup& group : placed) store_group(job, group, event, stream);
    }
    return hand_over(job, to_device);
}

std::int64_t GpuCopier::submit_layers(const BlockCopy* copies, std::int64_t number, std::uintptr_t event,
                                      const std::vector<int>& layers) {
    {
        const std::lock_guard<std::mutex> one(submit_mutex_);
        const gpu::DeviceScope device(options_.device);
        const auto job = std::make_shared<Job>();
        const std::vector<PlacedGroup> placed = begin(copies, number, true, job.get());
        const bool possible = placed.size() == 1 && layers.size() == groups_[placed[0].group].regions.size();
        if (possible && all_pinned(placed[0])) {
            int code = gpu::stream_wait(load_stream_, event);
            if (code == gpu::kOkay) code = copy_layers(job, placed[0], layers);
            const auto size = static_cast<std::int64_t>(placed[0].copies.size());
            settle(job.get(), placed[0].copies.data(), size, code, "load layer by layer");
            return hand_over(job, true);
        }
    }
    return submit(copies, number, true, event, 0);
}

std::int64_t GpuCopier::hand_over(const JobRef& job, bool to_device) {
    ThreadPool& thread = to_device ? loading_ : storing_;
    thread.start(1, 1, [this, job, to_device](std::int64_t, std::int64_t) { finish(job, to_device); });
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) job->issued = true;
    jobs_.emplace(next_, job);
    return next_++;
}

int GpuCopier::wait_layer(std::int64_t handle, int layer, std::uintptr_t stream) {
    const gpu::DeviceScope device(options_.device);
    std::unique_lock<std::mutex> lock(mutex_);
    const JobRef job = jobs_.at(handle);
    if (layer >= 0 && layer < static_cast<int>(job->layers.size()))
        return gpu::stream_wait(stream, job->layers[layer]);
    while (!job->issued) {  // what is waited for is the issuing thread, not the device
        lock.unlock();
        std::this_thread::sleep_for(kNap);
        lock.lock();
    }
    int code = gpu::kOkay;
    for (const std::uintptr_t event : job->events) code = std::max(code, gpu::stream_wait(stream, event));
    return code;
}

bool GpuCopier::known(std::int64_t handle) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return jobs_.count(handle) != 0;
}

bool GpuCopier::ended(Job* job) {
    if (!job->issued) return false;
    int failure = gpu::kOkay;
    for (const std::uintptr_t event : job->events) {
        const int code = gpu::event_query(event);
        if (gpu::is_not_ready(code)) return false;
        if (code != gpu::kOkay) failure = code;
    }
    if (failure != gpu::kOkay) {
        message_ = "copy: " + gpu::error_text(failure);
        std::replace(job->status.begin(), job->status.end(), std::uint8_t{kOk}, std::uint8_t{kCopyFailed});
    }
    return true;
}

bool GpuCopier::query(std::int64_t handle, std::vector<std::uint8_t>* status) {
    const gpu::DeviceScope device(options_.device);
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = jobs_.find(handle);
    if (!ended(found->second.get())) return false;
    *status = std::move(found->second->status);
    give_events(&found->second->events);
    give_events(&found->second->layers);
    jobs_.erase(found);
    return true;
}

bool GpuCopier::wait(std::int64_t handle, double seconds) {
    const gpu::DeviceScope device(options_.device);
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(std::min(seconds, 1e6));
    while (true) {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            const auto found = jobs_.find(handle);
            if (found == jobs_.end() || ended(found->second.get())) return true;
        }
        if (std::chrono::steady_clock::now() >= end) return false;
        std::this_thread::sleep_for(kNap);
    }
}

void GpuCopier::close() {
    const std::lock_guard<std::mutex> one(submit_mutex_);
    if (closed_) return;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        closing_ = true;
        changed_.notify_all();
    }
    storing_.shutdown();
    loading_.shutdown();
    const gpu::DeviceScope device(options_.device);
    for (const std::uintptr_t stream : {store_stream_, load_stream_, scatter_stream_})
        gpu::stream_synchronize(stream);
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    changed_.notify_all();
    // Gathers run on the engine's stream and write staging that is about to be freed.
    for (const auto& span : ring_.spans()) {
        while (span->gathered != 0 && gpu::is_not_ready(gpu::event_query(span->gathered))) {
            std::this_thread::sleep_for(kNap);
        }
    }
    ring_.spans().clear();
    for (auto& [handle, job] : jobs_) {
        job->issued = true;
        ended(job.get());
        job->events.clear();
        job->layers.clear();
    }
    release();
}

std::map<std::string, std::int64_t> GpuCopier::counters() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return counters_;
}

std::string GpuCopier::message() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return message_;
}

void GpuCopier::note(int code, const char* what) {
    const std::lock_guard<std::mutex> lock(mutex_);
    message_ = std::string(what) + ": " + gpu::error_text(code);
    ++counters_["failures"];
}

void GpuCopier::count(const char* what, std::int64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    counters_[what] += number;
}

}  // namespace kvoffload
