// A fixed set of threads that work through batches of numbered items.
//
// Batches share the threads in turn, one range of items at a time, so a long batch does not hold up a short
// one. Thread: every method may be called from any thread except from inside a body.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace kvoffload {

class ThreadPool {
  public:
    // Works on items [begin, end). REQUIRES: does not throw.
    using Body = std::function<void(std::int64_t begin, std::int64_t end)>;

    // One batch; all members are protected by the pool's mutex.
    class Batch {
        friend class ThreadPool;
        Body body;
        std::int64_t items = 0, grain = 1;
        std::int64_t next = 0;     // items [next, items) are not begun
        std::int64_t running = 0;  // ranges begun and not ended
    };
    using Handle = std::shared_ptr<Batch>;

    explicit ThreadPool(int threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int threads() const { return static_cast<int>(workers_.size()); }

    // Starts body over [0, items) in ranges of `grain` and returns at once. After shutdown nothing is begun.
    // REQUIRES: what the body refers to lives until the batch has ended.
    Handle start(std::int64_t items, std::int64_t grain, Body body);

    // True once no item of the batch is running or will be begun.
    bool done(const Handle& batch) const;

    // Waits for `done`; false after `seconds`. A negative time waits for ever.
    bool wait(const Handle& batch, double seconds) const;

    // As `wait`, but what no thread has begun is done by the caller; a caller that works notices the end of
    // its time only after a range.
    bool help(const Handle& batch, double seconds);

    // Begins no further item, waits for the running ones, those of `help` too, and joins the threads.
    // Idempotent.
    void shutdown();

  private:
    void work();
    // Works on one range of the batch. REQUIRES: mutex_ held by `lock`; not all of the batch is begun.
    void run_range(const Handle& batch, std::unique_lock<std::mutex>* lock);

    mutable std::mutex mutex_;
    mutable std::condition_variable work_, done_;
    std::deque<Handle> queue_;  // batches with items not begun; protected by mutex_
    bool stop_ = false;         // protected by mutex_
    int helpers_ = 0;           // callers of `help` that work; protected by mutex_
    std::vector<std::thread> workers_;
};

}  // namespace kvoffload
