// Copies under the sanitizers: permuted pages to host and back over several regions, jobs side by side, bad
// ids, and an end while copies wait. Exits 0 if every byte is right.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "copy_cpu.h"

using namespace kvoffload;

namespace {

constexpr std::int64_t kPages = 37, kStride = 1500, kSlots = 64;

void require(bool condition, const char* what) {
    if (condition) return;
    std::fprintf(stderr, "failed: %s\n", what);
    std::exit(1);
}

std::uint8_t content(std::int64_t region, std::int64_t page, std::int64_t byte) {
    return static_cast<std::uint8_t>(region * 101 + page * 7 + byte);
}

// One job of all pages in a permuted order; with bad ids at both ends.
std::vector<BlockCopy> make_job(std::int64_t step) {
    std::vector<BlockCopy> copies(kPages + 2);
    for (std::int64_t i = 0; i < kPages; ++i) {
        copies[i + 1].page = static_cast<std::int32_t>(i * step % kPages);
        copies[i + 1].host = static_cast<std::int32_t>((i * 11) % kSlots);
    }
    copies.front().page = kPages;
    copies.back().host = kSlots;
    return copies;
}

void run(CpuCopier& copier, const std::vector<BlockCopy>& job, bool to_device) {
    const auto handle = copier.submit(job.data(), static_cast<std::int64_t>(job.size()), to_device);
    require(copier.wait(handle, 60), "the job ends");
    std::vector<std::uint8_t> status;
    require(copier.query(handle, &status), "the outcome is there");
    for (std::size_t i = 0; i < job.size(); ++i) {
        const bool bad = i == 0 || i + 1 == job.size();
        require(status[i] == (bad ? kCopyFailed : kOk), "status");
    }
}

}  // namespace

int main() {
    // Exact allocations, so that one byte too far is seen.
    std::vector<std::uint8_t> host(kSlots * 4096);
    std::vector<std::vector<std::uint8_t>> pools(2, std::vector<std::uint8_t>((kPages - 1) * kStride + 1152));
    std::vector<PageRegion> regions;
    for (std::int64_t r = 0; r < 2; ++r) {
        for (std::int64_t p = 0; p < kPages; ++p) {
            for (std::int64_t b = 0; b < 1152; ++b) pools[r][p * kStride + b] = content(r, p, b);
        }
        regions.push_back({reinterpret_cast<std::uintptr_t>(pools[r].data()), kStride, 1152, kPages});
    }
    CpuCopier copier(reinterpret_cast<std::uintptr_t>(host.data()), SlotSpace(kSlots * 4096, 1, {4096}),
                     {regions}, 3);
    for (std::int64_t step = 1; step < 8; ++step) {
        const auto job = make_job(step);
        run(copier, job, false);
        for (auto& pool : pools) std::fill(pool.begin(), pool.end(), std::uint8_t{0});
        run(copier, job, true);
        for (std::int64_t r = 0; r < 2; ++r) {
            for (std::int64_t p = 0; p < kPages; ++p) {
                for (std::int64_t b = 0; b < 1152; ++b) {
                    require(pools[r][p * kStride + b] == content(r, p, b), "content");
                }
            }
        }
    }
    std::vector<std::vector<BlockCopy>> jobs(50, make_job(1));
    std::vector<std::int64_t> handles;
    for (std::size_t i = 0; i < jobs.size(); ++i) {  // side by side: each writes slots of its own
        jobs[i].assign(1, BlockCopy{});
        jobs[i][0].page = static_cast<std::int32_t>(i % kPages);
        jobs[i][0].host = static_cast<std::int32_t>(i);
        handles.push_back(copier.submit(jobs[i].data(), 1, false));
    }
    copier.close();
    std::vector<std::uint8_t> status;
    for (const auto handle : handles) {
        require(copier.query(handle, &status), "close ends every job");
        require(status[0] == kOk || status[0] == kNotDone, "done or not begun");
    }
    return 0;
}
