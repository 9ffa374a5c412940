// Copies of blocks between device pages and host slots by DMA and kernels.
//
// Store, staged: a kernel on the engine's own stream gathers pages into a ring in device memory, then one DMA
// per run of neighbouring slots goes out on the store stream. Once the engine's stream has passed the gather
// the pages are free, by the order of that stream alone. Load, staged: DMA into staging on the load stream,
// then a scatter on the scatter stream after the last reader of the pages. The other modes copy without
// staging; a store of that kind makes the engine's stream wait for it.
//
// No call but `wait` and `close` waits for the device. What could block (copies of memory that is not pinned,
// a full queue of the driver) is issued by two threads of the copier's own. Thread: any; calls exclude each
// other. Lifetime: pages and slots must outlive the copier; an array given to `submit` is not used after the
// call.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "gpu_plan.h"
#include "gpu_ring.h"
#include "thread_pool.h"

namespace kvoffload {

enum class CopyMode : int { kStaged = 0, kDma = 1, kKernel = 2 };

// Sizes in bytes.
struct CopierOptions {
    int device = 0;
    std::int64_t chunk = 16 << 20;           // gathered or scattered by one kernel
    std::int64_t store_staging = 256 << 20;  // blocks stored in one step beyond this are kNotDone
    std::int64_t load_staging = 64 << 20;
    int gather_blocks = 0;  // thread blocks of gathers on the engine's stream; 0 = four per multiprocessor
    int side_blocks = 16;   // thread blocks of kernels beside the engine's
    std::int64_t batch_limit = 4096;  // descriptors per batch copy
    bool batch = true;                // whether batch copies may be tried
};

class GpuCopier {
  public:
    // modes: by group, for stores and for loads. Throws std::invalid_argument for sizes that do not fit and
    // std::runtime_error where the device refuses.
    GpuCopier(const CopierOptions& options, std::uintptr_t host_base, SlotSpace host,
              const std::vector<std::vector<PageRegion>>& regions,
              std::vector<std::pair<CopyMode, CopyMode>> modes);
    ~GpuCopier();

    // Host memory is page-locked from now on.
    void add_pinned(std::uintptr_t begin, std::int64_t bytes) { pinned_.add(begin, bytes); }

    // Page-locked memory may be unlocked when this returns: no copy uses it, and until `forget_pinned` none
    // is issued; submits go on. Waits for the device: not for the engine's thread. REQUIRES: nobody else is
    // between the two calls.
    void withdraw_pinned();
    // No host memory is page-locked from now on.
    void forget_pinned();

    // Starts the copies after `event` and returns their handle. REQUIRES: event != 0; the stream is the one
    // whose later work may overwrite the pages of a store. No two copies of running jobs write the same
    // place.
    std::int64_t submit(const BlockCopy* copies, std::int64_t count, bool to_device, std::uintptr_t event,
                        std::uintptr_t stream);

    // A load layer by layer: `layers` gives the layer of every region of the group that all copies belong to.
    std::int64_t submit_layers(const BlockCopy* copies, std::int64_t count, std::uintptr_t event,
                               const std::vector<int>& layers);

    // Later work of `stream` waits for the layer of the load. 0 or an error code. REQUIRES: known(handle).
    int wait_layer(std::int64_t handle, int layer, std::uintptr_t stream);

    bool known(std::int64_t handle) const;
    // True with the outcome (the handle is then gone), false while it runs. REQUIRES: known(handle).
    bool query(std::int64_t handle, std::vector<std::uint8_t>* status);
    // Waits until the handle has an outcome; false after `seconds`. REQUIRES: known(handle).
    bool wait(std::int64_t handle, double seconds);

    // Ends everything; what is not on its way to the device gets kNotDone. Handles may still be queried.
    // Idempotent.
    void close();

    std::map<std::string, std::int64_t> counters() const;
    // The last failure or warning, for people; empty if there was none.
    std::string message() const;

  private:
    // `status` is written by the submitting thread, then by the issuing one until `issued`.
    struct Job {
        std::vector<std::uint8_t> status;
        bool issued = false;                 // protected by mutex_, as is all below
        std::vector<std::uintptr_t> events;  // complete when all copies have ended
        std::vector<std::uintptr_t> layers;  // by layer, of a load layer by layer
    };
    using JobRef = std::shared_ptr<Job>;

    // Copies of one group that share a staging buffer, in the order of their slots.
    struct Chunk {
        JobRef job;
        std::int32_t group = 0;
        std::vector<Placed> copies;
        std::shared_ptr<RingSpan> span;  // of a store
    };

    // Where a kernel finds the slots of its items: one after the other from `base`, or at their host offsets.
    struct SlotPlace {
        std::uintptr_t base;
        bool packed;
    };

    // On the calling thread.
    std::vector<PlacedGroup> begin(const BlockCopy* copies, std::int64_t count, bool to_device, Job* job);
    std::int64_t hand_over(const JobRef& job, bool to_device);
    void store_group(const JobRef& job, const PlacedGroup& placed, std::uintptr_t event,
                     std::uintptr_t stream);
    void store_directly(const JobRef& job, const PlacedGroup& placed, std::uintptr_t event,
                        std::uintptr_t stream);
    void gather(const JobRef& job, const PlacedGroup& placed, std::uintptr_t stream);
    int gather_chunk(const Chunk& chunk, std::uintptr_t stream);
    int copy_layers(const JobRef& job, const PlacedGroup& placed, const std::vector<int>& layers);

    // On the issuing threads.
    void send_chunk(const Chunk& chunk);
    void load_staged(const JobRef& job, const PlacedGroup& placed);
    int receive_chunk(const Chunk& chunk);
    void finish(const JobRef& job, bool to_device);

    // On either.
    void copy_dma(const JobRef& job, const PlacedGroup& placed, bool to_device, std::uintptr_t stream);
    int issue(const std::vector<Descriptor>& list, bool to_device, std::uintptr_t stream);
    bool issue_batch(const Descriptor* list, std::size_t count, bool to_device, std::uintptr_t stream);
    void copy_kernel(const JobRef& job, const PlacedGroup& placed, bool to_device, std::uintptr_t stream);
    int launch(std::int32_t group, std::pair<std::int32_t, std::int32_t> pieces, const Placed* copies,
               std::int64_t count, SlotPlace slots, bool to_pages, int blocks, std::uintptr_t stream);
    int copy_runs(const Chunk& chunk, std::uintptr_t staging, bool to_device, std::uintptr_t stream);
    int order_after(std::uintptr_t later, std::uintptr_t earlier);
    bool all_pinned(const PlacedGroup& placed) const;
    void hold();
    void settle(Job* job, const Placed* copies, std::int64_t count, int code, const char* what);

    void note(int code, const char* what);
    void count(const char* what, std::int64_t number);
    void reclaim();        // REQUIRES: mutex_ held
    bool ended(Job* job);  // REQUIRES: mutex_ held
    std::uintptr_t take_event();
    void give_events(std::vector<std::uintptr_t>* events);  // REQUIRES: mutex_ held
    void allocate();
    void release();

    // Constant after construction.
    CopierOptions options_;
    const std::uintptr_t host_base_;
    const SlotSpace host_;
    std::vector<GroupPlan> groups_;
    std::vector<std::uintptr_t> tables_;  // by group: its pieces in device memory
    const std::vector<std::pair<CopyMode, CopyMode>> modes_;
    std::uintptr_t store_stream_ = 0, load_stream_ = 0, scatter_stream_ = 0;
    std::uintptr_t store_staging_ = 0, load_staging_ = 0;
    std::int64_t load_buffer_bytes_ = 0;

    PinnedRanges pinned_;
    std::atomic<bool> closing_{false};
    std::atomic<bool> batch_{true};

    // Used by the load thread alone.
    std::vector<std::uintptr_t> buffer_free_;  // by load buffer: its last scatter, 0 = never used
    std::size_t next_buffer_ = 0;

    std::mutex submit_mutex_;  // one submit at a time; taken before mutex_
    mutable std::mutex mutex_;
    StagingRing ring_;  // protected by mutex_, as is all below
    std::unordered_map<std::int64_t, JobRef> jobs_;
    std::int64_t next_ = 1;
    std::vector<std::uintptr_t> spare_events_, all_events_;
    std::map<std::string, std::int64_t> counters_;
    std::string message_;
    bool closed_ = false;              // written with submit_mutex_ held, too
    bool holding_ = false;             // the issuing threads are to stop
    int held_ = 0;                     // of them, those that have
    std::condition_variable changed_;  // of closed_, closing_, holding_, held_

    ThreadPool storing_{1}, loading_{1};  // last: their threads end before anything they use
};

}  // namespace kvoffload
