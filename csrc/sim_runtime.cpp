#include "sim_runtime.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <thread>

#include "sim_machine.h"

namespace kvoffload {

using sim::delay;
using sim::due;
using sim::machine;
using sim::planted;

// One recording of an event; an operation that waits for it keeps it, whatever the event is used for
// afterwards. Protected by the machine's mutex.
struct Mark {
    bool passed = false;
};

class SimEvent {
  public:
    std::int64_t number = 0;
    std::shared_ptr<Mark> mark;  // the last recording, null before the first
};

namespace {

thread_local simError_t last_error = simSuccess;
thread_local int current_device = 0;

simError_t result(simError_t error) {
    if (error != simSuccess) last_error = error;
    return error;
}

void note(const char* kind, simStream_t stream, simEvent_t event, std::int64_t bytes = 0,
          std::int64_t count = 0, bool blocked = false, bool strict = false) {
    const std::int64_t e = event == nullptr ? 0 : event->number;
    const std::int64_t s = sim::number(reinterpret_cast<std::uintptr_t>(stream));
    std::lock_guard<std::mutex> lock(machine().mutex);
    machine().operations.push_back({kind, s, e, bytes, count, syscall(SYS_gettid), blocked, strict});
}

// 1 = inside one registration, 0 = touches none, -1 = over a border.
int registration(const void* memory, std::size_t bytes) {
    const auto begin = reinterpret_cast<std::uintptr_t>(memory), end = begin + bytes;
    std::lock_guard<std::mutex> lock(machine().mutex);
    for (const auto& [base, size] : machine().registered) {
        if (begin >= base && end <= base + size) return 1;
        if (begin < base + size && end > base) return -1;
    }
    return 0;
}

}  // namespace

// Protected by the machine's mutex.
class SimStream {
  public:
    SimStream() : worker_([this] { work(); }) {}
    ~SimStream() {
        {
            std::lock_guard<std::mutex> lock(machine().mutex);
            stop_ = true;
        }
        machine().changed.notify_all();
        worker_.join();
    }

    void push(std::function<void()> operation) {
        {
            std::lock_guard<std::mutex> lock(machine().mutex);
            queue_.push_back(std::move(operation));
            ++pushed_;
        }
        machine().changed.notify_all();
    }

    void synchronize() {
        std::unique_lock<std::mutex> lock(machine().mutex);
        machine().changed.wait(lock, [this, target = pushed_] { return done_ >= target; });
    }

  private:
    void work() {
        std::unique_lock<std::mutex> lock(machine().mutex);
        while (true) {
            machine().changed.wait(lock, [this] { return stop_ || !queue_.empty(); });
            if (queue_.empty()) return;
            const std::function<void()> operation = std::move(queue_.front());
            queue_.pop_front();
            lock.unlock();
            operation();
            lock.lock();
            ++done_;
            machine().changed.notify_all();
        }
    }

    std::deque<std::function<void()>> queue_;
    std::int64_t pushed_ = 0, done_ = 0;
    bool stop_ = false;
    std::thread worker_;  // last: it starts when everything else is there
};

namespace {

SimStream& stream_of(simStream_t stream) {
    static SimStream* const standard = new SimStream;
    return stream == nullptr ? *standard : *stream;
}

}  // namespace

const char* simGetErrorName(simError_t error) {
    switch (error) {
        case simSuccess:
            return "simSuccess";
        case simErrorInvalidValue:
            return "simErrorInvalidValue";
        case simErrorMemoryAllocation:
            return "simErrorMemoryAllocation";
        case simErrorNoDevice:
            return "simErrorNoDevice";
        case simErrorNotReady:
            return "simErrorNotReady";
        case simErrorHostMemoryAlreadyRegistered:
            return "simErrorHostMemoryAlreadyRegistered";
        case simErrorHostMemoryNotRegistered:
            return "simErrorHostMemoryNotRegistered";
        case simErrorLaunchFailure:
            return "simErrorLaunchFailure";
        case simErrorNotSupported:
            return "simErrorNotSupported";
    }
    return "simErrorUnknown";
}

const char* simGetErrorString(simError_t error) { return simGetErrorName(error); }

simError_t simGetLastError() {
    const simError_t error = last_error;
    last_error = simSuccess;
    return error;
}

simError_t simGetDeviceCount(int* count) {
    const auto error = static_cast<simError_t>(planted("device_error"));
    *count = error == simSuccess ? 1 : 0;
    return result(error);
}

simError_t simGetDevice(int* device) {
    *device = current_device;
    return simSuccess;
}

simError_t simSetDevice(int device) {
    if (device != 0) return result(simErrorInvalidValue);
    current_device = device;
    return simSuccess;
}

simError_t simGetDeviceProperties(simDeviceProp* properties, int device) {
    if (device != 0) return result(simErrorInvalidValue);
    *properties = {"simulated device", 4};
    return simSuccess;
}

simError_t simDeviceGetPCIBusId(char* id, int length, int device) {
    if (device != 0 || length < 13) return result(simErrorInvalidValue);
    std::memcpy(id, "0000:00:1f.0", 13);
    return simSuccess;
}

simError_t simDriverGetVersion(int* version) {
    *version = 0;
    return simSuccess;
}

simError_t simRuntimeGetVersion(int* version) { return simDriverGetVersion(version); }

simError_t simDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0;
    *greatest = -5;
    return simSuccess;
}

simError_t simStreamCreateWithPriority(simStream_t* stream, unsigned, int priority) {
    *stream = new SimStream;
    {
        std::lock_guard<std::mutex> lock(machine().mutex);
        machine().numbers[reinterpret_cast<std::uintptr_t>(*stream)] = machine().next_number++;
    }
    note("stream", *stream, nullptr, 0, priority);
    return simSuccess;
}

simError_t simStreamDestroy(simStream_t stream) {
    delete stream;
    return simSuccess;
}

simError_t simStreamSynchronize(simStream_t stream) {
    note("synchronize", stream, nullptr, 0, 0, true);
    stream_of(stream).synchronize();
    return simSuccess;
}

simError_t simStreamWaitEvent(simStream_t stream, simEvent_t event, unsigned) {
    if (event == nullptr) return result(simErrorInvalidValue);
    note("wait", stream, event);
    std::unique_lock<std::mutex> lock(machine().mutex);
    const std::shared_ptr<Mark> mark = event->mark;
    lock.unlock();
    if (mark == nullptr) return simSuccess;
    stream_of(stream).push([mark] {
        std::unique_lock<std::mutex> inner(machine().mutex);
        machine().changed.wait(inner, [&] { return mark->passed; });
    });
    return simSuccess;
}

simError_t simEventCreateWithFlags(simEvent_t* event, unsigned) {
    *event = new SimEvent;
    std::lock_guard<std::mutex> lock(machine().mutex);
    (*event)->number = machine().next_number++;
    machine().numbers[reinterpret_cast<std::uintptr_t>(*event)] = (*event)->number;
    return simSuccess;
}

simError_t simEventDestroy(simEvent_t event) {
    delete event;
    return simSuccess;
}

simError_t simEventRecord(simEvent_t event, simStream_t stream) {
    note("record", stream, event);
    std::unique_lock<std::mutex> lock(machine().mutex);
    const auto mark = std::make_shared<Mark>();
    event->mark = mark;
    lock.unlock();
    stream_of(stream).push([mark] {
        std::lock_guard<std::mutex> inner(machine().mutex);
        mark->passed = true;
        machine().changed.notify_all();
    });
    return simSuccess;
}

simError_t simEventQuery(simEvent_t event) {
    std::lock_guard<std::mutex> lock(machine().mutex);
    return result(event->mark == nullptr || event->mark->passed ? simSuccess : simErrorNotReady);
}

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
    for (const auto& entry : machine().registered) sum += entry.second;
    if ((call != 0 && bytes > call) || (total != 0 && sum > total)) return result(simErrorMemoryAllocation);
    machine().registered[reinterpret_cast<std::uintptr_t>(memory)] = bytes;
    return simSuccess;
}

simError_t simHostUnregister(void* memory) {
    note("unregister", nullptr, nullptr);
    std::lock_guard<std::mutex> lock(machine().mutex);
    const bool found = machine().registered.erase(reinterpret_cast<std::uintptr_t>(memory)) != 0;
    return result(found ? simSuccess : simErrorHostMemoryNotRegistered);
}

simError_t simHostGetDevicePointer(void** device, void* host, unsigned) {
    *device = host;
    return result(registration(host, 1) == 1 ? simSuccess : simErrorHostMemoryNotRegistered);
}

simError_t simMemsetAsync(void* memory, int value, std::size_t bytes, simStream_t stream) {
    note("fill", stream, nullptr, static_cast<std::int64_t>(bytes));
    stream_of(stream).push([=] {
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
    stream_of(stream).push([=] {
        delay("copy_delay_us");
        std::memcpy(to, from, bytes);
    });
    if (place == 0) stream_of(stream).synchronize();
    return simSuccess;
}

simError_t simMemcpyBatchAsync(void* const* to, const void* const* from, const std::size_t* bytes,
                               std::size_t count, const int* attributes, const std::size_t* indices,
                               std::size_t attribute_count, simStream_t stream) {
    struct Part {
        void* to;
        const void* from;
        std::size_t bytes;
    };
    std::vector<Part> parts;
    std::int64_t total = 0;
    const bool described =
        attribute_count == 1 && attributes != nullptr && indices != nullptr && indices[0] == 0;
    bool good = described && stream != nullptr && count > 0;
    for (std::size_t i = 0; i < count; ++i) {
        total += static_cast<std::int64_t>(bytes[i]);
        parts.push_back({to[i], from[i], bytes[i]});
        good = good && indices[i] < attribute_count && bytes[i] > 0 && registration(to[i], bytes[i]) >= 0 &&
               registration(from[i], bytes[i]) >= 0;
    }
    const bool strict = described && attributes[0] == simMemcpySrcAccessOrderStream;
    note("batch", stream, nullptr, total, static_cast<std::int64_t>(count), false, strict);
    if (const std::int64_t error = planted("batch_error")) return result(static_cast<simError_t>(error));
    const auto limit = static_cast<std::size_t>(planted("batch_limit"));
    if (!good || (limit != 0 && count > limit)) return result(simErrorInvalidValue);
    if (due("copy_at")) return result(simErrorLaunchFailure);
    stream_of(stream).push([parts = std::move(parts)] {
        delay("copy_delay_us");
        for (const Part& part : parts) std::memcpy(part.to, part.from, part.bytes);
    });
    return simSuccess;
}

simError_t simLaunch(simStream_t stream, std::int64_t blocks, std::int32_t threads, std::int64_t bytes,
                     std::function<void(const HostIndex&)> body) {
    note("kernel", stream, nullptr, bytes, blocks);
    if (blocks < 1 || threads < 1 || threads > 1024) return result(simErrorInvalidValue);
    if (due("launch_at")) return result(simErrorLaunchFailure);
    const std::int64_t workers = planted("workers");
    stream_of(stream).push([=, body = std::move(body)] {
        delay("kernel_delay_us");
        host_launch(blocks, threads, workers > 0 ? static_cast<int>(workers) : 2, body);
    });
    return simSuccess;
}

}  // namespace kvoffload
