#include "prefault.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>

#include "thread_pool.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif

namespace kvoffload {
namespace {

constexpr std::int64_t kPiece = 32 << 20;  // bytes of one call
constexpr std::int64_t kPage = 4096;

bool populate(std::uintptr_t base, std::int64_t bytes) {
    if (::madvise(reinterpret_cast<void*>(base), bytes, MADV_POPULATE_WRITE) == 0) return true;
    if (errno != EINVAL) return false;
    for (std::int64_t offset = 0; offset < bytes; offset += kPage) {
        auto* byte = reinterpret_cast<volatile std::uint8_t*>(base + offset);
        *byte = *byte;
    }
    return true;
}

}  // namespace

bool prefault(std::uintptr_t base, std::int64_t bytes, int threads) {
    std::atomic<bool> ok{true};
    ThreadPool pool(threads);
    const auto batch =
        pool.start((bytes + kPiece - 1) / kPiece, 1, [&](std::int64_t begin, std::int64_t end) {
            for (std::int64_t i = begin; i < end; ++i) {
                if (!populate(base + i * kPiece, std::min(kPiece, bytes - i * kPiece))) ok = false;
            }
        });
    pool.wait(batch, -1);
    return ok;
}

}  // namespace kvoffload
