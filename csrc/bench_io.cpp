#include "bench_io.h"

#include <atomic>
#include <chrono>
#include <cstring>

#include "file_io.h"
#include "thread_pool.h"

namespace kvoffload {
namespace {

// Seconds from the start of a batch to its end, on threads that are already there.
double timed(int threads, std::int64_t items, std::int64_t grain, const ThreadPool::Body& body) {
    ThreadPool pool(threads);
    pool.wait(pool.start(threads, 1, [](std::int64_t, std::int64_t) {}), -1);
    const auto begin = std::chrono::steady_clock::now();
    pool.wait(pool.start(items, grain, body), -1);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

double raw_file_loop(int file, bool write, std::uintptr_t base, std::int64_t bytes,
                     const std::vector<std::int64_t>& offsets, int threads) {
    std::atomic<int> error{kWhole};
    const Way way = write ? Way::kWrite : Way::kRead;
    const double seconds = timed(
        threads, static_cast<std::int64_t>(offsets.size()), 1, [&](std::int64_t begin, std::int64_t end) {
            for (std::int64_t i = begin; i < end; ++i) {
                const int result =
                    transfer(way, file, reinterpret_cast<void*>(base + i * bytes), bytes, offsets[i]);
                if (result != kWhole) error = result == kShort ? 1 : result;
            }
        });
    return error == kWhole ? seconds : -static_cast<double>(error);
}

double memcpy_loop(std::uintptr_t target, std::uintptr_t source, std::int64_t bytes, std::int64_t count,
                   int threads) {
    const std::int64_t share = (count + threads - 1) / threads;
    return timed(threads, count, share, [=](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) {
            std::memcpy(reinterpret_cast<void*>(target + i * bytes),
                        reinterpret_cast<const void*>(source + i * bytes), bytes);
        }
    });
}

}  // namespace kvoffload
