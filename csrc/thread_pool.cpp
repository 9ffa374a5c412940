#include "thread_pool.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace kvoffload {

ThreadPool::ThreadPool(int threads) {
    workers_.reserve(std::max(threads, 1));
    for (int i = 0; i < std::max(threads, 1); ++i) workers_.emplace_back([this] { work(); });
}

ThreadPool::~ThreadPool() { shutdown(); }

ThreadPool::Handle ThreadPool::start(std::int64_t items, std::int64_t grain, Body body) {
    auto batch = std::make_shared<Batch>();
    batch->body = std::move(body);
    batch->grain = std::max<std::int64_t>(grain, 1);
    std::lock_guard<std::mutex> lock(mutex_);
    if (stop_ || items <= 0) return batch;
    batch->items = items;
    queue_.push_back(batch);
    if (items > batch->grain) {
        work_.notify_all();
    } else {
        work_.notify_one();
    }
    return batch;
}

bool ThreadPool::done(const Handle& batch) const {
    std::lock_guard<std::mutex> lock(mutex_);
    return batch->next == batch->items && batch->running == 0;
}

bool ThreadPool::wait(const Handle& batch, double seconds) const {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto ended = [&] { return batch->next == batch->items && batch->running == 0; };
    if (seconds < 0) {
        done_.wait(lock, ended);
        return true;
    }
    return done_.wait_for(lock, std::chrono::duration<double>(std::min(seconds, 1e6)), ended);
}

void ThreadPool::shutdown() {
    std::vector<std::thread> workers;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
        for (const Handle& batch : queue_) batch->items = batch->next;
        queue_.clear();
        workers.swap(workers_);
    }
    work_.notify_all();
    for (std::thread& worker : workers) worker.join();
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return helpers_ == 0; });
    done_.notify_all();
}

bool ThreadPool::help(const Handle& batch, double seconds) {
    const auto end =
        std::chrono::steady_clock::now() + std::chrono::duration<double>(std::clamp(seconds, 0.0, 1e6));
    {
        std::unique_lock<std::mutex> lock(mutex_);
        ++helpers_;
        while (batch->next < batch->items && std::chrono::steady_clock::now() < end) run_range(batch, &lock);
        if (--helpers_ == 0) done_.notify_all();
    }
    const std::chrono::duration<double> left = end - std::chrono::steady_clock::now();
    return wait(batch, std::max(left.count(), 0.0));
}

void ThreadPool::run_range(const Handle& batch, std::unique_lock<std::mutex>* lock) {
    const std::int64_t begin = batch->next;
    const std::int64_t end = std::min(batch->items, begin + batch->grain);
    batch->next = end;
    ++batch->running;
    lock->unlock();
    batch->body(begin, end);
    lock->lock();
    if (--batch->running == 0 && batch->next == batch->items) done_.notify_all();
}

void ThreadPool::work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        work_.wait(lock, [this] { return stop_ || !queue_.empty(); });
        if (stop_) return;
        Handle batch = std::move(queue_.front());
        queue_.pop_front();
        if (batch->next == batch->items) continue;  // a caller of `help` has begun the rest
        if (batch->items - batch->next > batch->grain) queue_.push_back(batch);
        run_range(batch, &lock);
    }
}

}  // namespace kvoffload
