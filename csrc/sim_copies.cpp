// Memory of the simulation, and what moves bytes in it.
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <utility>

#include "sim_machine.h"
#include "sim_runtime.h"

namespace kvoffload {

using sim::delay;
using sim::due;
using sim::machine;
using sim::note;
using sim::planted;
using sim::push;
using sim::result;

namespace {

// 1 = inside one registration, 0 = touches none, -1 = over a border.
int registration(const void* memory, std::size_t bytes) {
    const auto begin = reinterpret_cast<std::uintptr_t>(memory), end = begin + bytes;
    std::lock_guard<std::mutex> lock(machine().mutex);
    for (const auto& [base, entry] : machine().registered) {
        if (begin >= base && end <= base + entry.bytes) return 1;
        if (begin < base + entry.bytes && end > base) return -1;
    }
    return 0;
}

// A copy from or to this memory has been put into a stream. Returns the base of the registration that it
// holds, 0 where the memory is in none: it may be registered while the copy runs.
std::uintptr_t hold(const void* memory) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory);
    std::lock_guard<std::mutex> lock(machine().mutex);
    const auto after = machine().registered.upper_bound(address);
    if (after == machine().registered.begin()) return 0;
    const auto found = std::prev(after);
    if (address >= found->first + found->second.bytes) return 0;
    ++found->second.copies;
    return found->first;
}

// The copy has ended.
void let_go(std::uintptr_t base) {
    if (base == 0) return;
    std::lock_guard<std::mutex> lock(machine().mutex);
    --machine().registered.at(base).copies;
}

}  // namespace

simError_t simMalloc(void** memory, std::size_t bytes) {
    *memory = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    return result(*memory == nullptr ? simErrorMemoryAllocation : simSuccess);
}

simError_t simFree(void* memory) {
    std::free(memory);
    return simSuccess;
}

simError_t simHostRegister(void* memory, std::size_t bytes, unsigned) {
    note("register", nullptr, nullptr, static_cast<std::int64_t>(bytes));
    if (bytes == 0) return result(simErrorInvalidValue);
    if (registration(memory, bytes) != 0) return result(simErrorHostMemoryAlreadyRegistered);
    const auto call = static_cast<std::size_t>(planted("register_call"));
    const auto total = static_cast<std::size_t>(planted("register_total"));
    std::lock_guard<std::mutex> lock(machine().mutex);
    std::size_t sum = bytes;
    for (const auto& entry : machine().registered) sum += entry.second.bytes;
    if ((call != 0 && bytes > call) || (total != 0 && sum > total)) return result(simErrorMemoryAllocation);
    machine().registered[reinterpret_cast<std::uintptr_t>(memory)] = {bytes, 0};
    return simSuccess;
}

simError_t simHostUnregister(void* memory) {
    note("unregister", nullptr, nullptr);
    std::lock_guard<std::mutex> lock(machine().mutex);
    const auto found = machine().registered.find(reinterpret_cast<std::uintptr_t>(memory));
    if (found == machine().registered.end()) return result(simErrorHostMemoryNotRegistered);
    if (found->second.copies != 0) return result(simErrorInvalidValue);
    machine().registered.erase(found);
    return simSuccess;
}

simError_t simHostGetDevicePointer(void** device, void* host, unsigned) {
    *device = host;
    return result(registration(host, 1) == 1 ? simSuccess : simErrorHostMemoryNotRegistered);
}

simError_t simMemsetAsync(void* memory, int value, std::size_t bytes, simStream_t stream) {
    note("fill", stream, nullptr, static_cast<std::int64_t>(bytes));
    push(stream, [=] {
        delay("kernel_delay_us");
        std::memset(memory, value, bytes);
    });
    return simSuccess;
}

simError_t simMemcpyAsync(void* to, const void* from, std::size_t bytes, simMemcpyKind kind,
                          simStream_t stream) {
    const bool in = kind == simMemcpyHostToDevice;
    const int place = registration(in ? from : to, bytes);
    note(in ? "copy_in" : "copy_out", stream, nullptr, static_cast<std::int64_t>(bytes), 1, place == 0, true);
    if (place < 0) return result(simErrorInvalidValue);
    if (due("copy_at")) return result(simErrorLaunchFailure);
    const std::uintptr_t held = hold(in ? from : to);
    push(stream, [=] {
        delay("copy_delay_us");
        std::memcpy(to, from, bytes);
        let_go(held);
    });
    if (place == 0) sim::synchronize(stream);
    return simSuccess;
}

simError_t simMemcpyBatchAsync(void* const* to, const void* const* from, const std::size_t* bytes,
                               std::size_t count, const int* attributes, const std::size_t* indices,
                               std::size_t attribute_count, simStream_t stream) {
    struct Part {
        void* to;
        const void* from;
        std::size_t bytes;
        std::uintptr_t held_to, held_from;
    };
    std::vector<Part> parts;
    std::int64_t total = 0;
    const bool described =
        attribute_count == 1 && attributes != nullptr && indices != nullptr && indices[0] == 0;
    bool good = described && stream != nullptr && count > 0;
    for (std::size_t i = 0; i < count; ++i) {
        total += static_cast<std::int64_t>(bytes[i]);
        parts.push_back({to[i], from[i], bytes[i], 0, 0});
        good = good && indices[i] < attribute_count && bytes[i] > 0 && registration(to[i], bytes[i]) >= 0 &&
               registration(from[i], bytes[i]) >= 0;
    }
    const bool strict = described && attributes[0] == simMemcpySrcAccessOrderStream;
    note("batch", stream, nullptr, total, static_cast<std::int64_t>(count), false, strict);
    if (const std::int64_t error = planted("batch_error")) return result(static_cast<simError_t>(error));
    const auto limit = static_cast<std::size_t>(planted("batch_limit"));
    if (!good || (limit != 0 && count > limit)) return result(simErrorInvalidValue);
    if (due("copy_at")) return result(simErrorLaunchFailure);
    for (Part& part : parts) {
        part.held_to = hold(part.to);
        part.held_from = hold(part.from);
    }
    push(stream, [parts = std::move(parts)] {
        delay("copy_delay_us");
        for (const Part& part : parts) {
            std::memcpy(part.to, part.from, part.bytes);
            let_go(part.held_to);
            let_go(part.held_from);
        }
    });
    return simSuccess;
}

simError_t simLaunch(simStream_t stream, std::int64_t blocks, std::int32_t threads, std::int64_t bytes,
                     std::function<void(const HostIndex&)> body) {
    note("kernel", stream, nullptr, bytes, blocks);
    if (blocks < 1 || threads < 1 || threads > 1024) return result(simErrorInvalidValue);
    if (due("launch_at")) return result(simErrorLaunchFailure);
    const std::int64_t workers = planted("workers");
    push(stream, [=, body = std::move(body)] {
        delay("kernel_delay_us");
        host_launch(blocks, threads, workers > 0 ? static_cast<int>(workers) : 2, body);
    });
    return simSuccess;
}

}  // namespace kvoffload
