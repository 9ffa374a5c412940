// Runs a kernel body on CPU threads, for the simulation.
#pragma once

#include <cstdint>
#include <thread>
#include <vector>

namespace kvoffload {

struct HostIndex {
    std::int64_t block_, blocks_;
    std::int32_t thread_, threads_;
    std::int64_t block() const { return block_; }
    std::int64_t blocks() const { return blocks_; }
    std::int32_t thread() const { return thread_; }
    std::int32_t threads() const { return threads_; }
};

// Blocks are dealt to `workers` CPU threads in turn, so that two blocks that write one place are a race that
// a thread sanitizer sees. REQUIRES: the body has no barriers.
template <class Body>
void host_launch(std::int64_t blocks, std::int32_t threads, int workers, const Body& body) {
    const auto run = [&](int worker) {
        for (std::int64_t block = worker; block < blocks; block += workers) {
            for (std::int32_t thread = 0; thread < threads; ++thread) {
                body(HostIndex{block, blocks, thread, threads});
            }
        }
    };
    std::vector<std::thread> others;
    for (int worker = 1; worker < workers; ++worker) others.emplace_back(run, worker);
    run(0);
    for (std::thread& other : others) other.join();
}

}  // namespace kvoffload
