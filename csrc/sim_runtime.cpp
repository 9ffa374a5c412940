// Devices, streams and events of the simulation; memory and copies are in sim_copies.cpp.
#include "sim_runtime.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>
#include <deque>
#include <memory>
#include <thread>

#include "sim_machine.h"

namespace kvoffload {

using sim::due;
using sim::machine;
using sim::note;
using sim::planted;
using sim::push;
using sim::result;

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

namespace sim {

simError_t result(simError_t error) {
    if (error != simSuccess) last_error = error;
    return error;
}

void note(const char* kind, simStream_t stream, simEvent_t event, std::int64_t bytes, std::int64_t count,
          bool blocked, bool strict) {
    const std::int64_t e = event == nullptr ? 0 : event->number;
    const std::int64_t s = number(reinterpret_cast<std::uintptr_t>(stream));
    std::lock_guard<std::mutex> lock(machine().mutex);
    machine().operations.push_back({kind, s, e, bytes, count, syscall(SYS_gettid), blocked, strict});
}

void push(simStream_t stream, std::function<void()> operation) {
    stream_of(stream).push(std::move(operation));
}

void synchronize(simStream_t stream) { stream_of(stream).synchronize(); }

}  // namespace sim

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
    sim::synchronize(stream);
    return simSuccess;
}

simError_t simStreamWaitEvent(simStream_t stream, simEvent_t event, unsigned) {
    if (event == nullptr) return result(simErrorInvalidValue);
    note("wait", stream, event);
    if (due("wait_at")) return result(simErrorLaunchFailure);
    std::unique_lock<std::mutex> lock(machine().mutex);
    const std::shared_ptr<Mark> mark = event->mark;
    lock.unlock();
    if (mark == nullptr) return simSuccess;
    push(stream, [mark] {
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
    push(stream, [mark] {
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

}  // namespace kvoffload
