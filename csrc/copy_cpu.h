// Copies of blocks between device pages that the CPU can address and host slots.
//
// A block of group g is, in its slot, the pages of the group's regions one after the other, in region order.
// Thread: several threads may call, each with handles of its own; copies run on the copier's own threads.
// Lifetime: pages and slots must outlive the copier; the array given to `submit` must live, unchanged, until
// its handle has ended.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "block_copy.h"
#include "slots.h"
#include "thread_pool.h"

namespace kvoffload {

// Page p lies in [base + p * stride, base + p * stride + page_bytes).
struct PageRegion {
    std::uintptr_t base;
    std::int64_t stride;
    std::int64_t page_bytes;
    std::int64_t pages;
};

class CpuCopier {
  public:
    // regions: by group. REQUIRES: by group, the sum of page_bytes is at most the slot bytes.
    CpuCopier(std::uintptr_t host_base, SlotSpace host, std::vector<std::vector<PageRegion>> regions,
              int threads);
    ~CpuCopier();

    // Starts all copies, TO_DEVICE or TO_HOST, and returns their handle at once. A copy whose page, slot or
    // group does not exist, or that waits for another job (kCopyWait), gets kCopyFailed and touches nothing.
    // REQUIRES: no two copies of running jobs write the same place.
    std::int64_t submit(const BlockCopy* copies, std::int64_t count, bool to_device);

    bool known(std::int64_t handle) const;

    // True with the outcome in `status` (the handle is then gone), false while it runs. REQUIRES:
    // known(handle).
    bool query(std::int64_t handle, std::vector<std::uint8_t>* status);

    // Waits until the handle has an outcome, and copies meanwhile what no thread has begun; false after
    // `seconds`. REQUIRES: known(handle).
    bool wait(std::int64_t handle, double seconds);

    // Ends everything; copies not begun get kNotDone. Handles may still be queried. Idempotent.
    void close() { pool_.shutdown(); }

  private:
    struct Job {
        std::vector<std::uint8_t> status;
        ThreadPool::Handle batch;
    };

    std::uint8_t copy(const BlockCopy& copy, bool to_device) const;

    // Constant after construction.
    const std::uintptr_t host_base_;
    const SlotSpace host_;
    const std::vector<std::vector<PageRegion>> regions_;

    // A job's status array is written by the pool until its batch is done.
    mutable std::mutex mutex_;  // protects jobs_ and next_
    std::unordered_map<std::int64_t, std::unique_ptr<Job>> jobs_;
    std::int64_t next_ = 1;

    ThreadPool pool_;  // last: its threads end before anything they use
};

}  // namespace kvoffload
