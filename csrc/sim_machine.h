// The state behind the simulated runtime: what was recorded, planted and registered.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "sim_runtime.h"

namespace kvoffload::sim {

struct Registration {
    std::size_t bytes;
    std::int64_t copies;  // put into streams and not ended
};

// One mutex and one condition for the whole machine, queues of streams and marks of events included.
struct Machine {
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<Operation> operations;
    std::map<std::string, std::int64_t> plants;
    std::map<std::uintptr_t, Registration> registered;  // by base
    std::map<std::uintptr_t, std::int64_t> numbers;     // handle -> number
    std::int64_t next_number = 1;
};

// Never destroyed: threads of streams may outlive main.
Machine& machine();

std::int64_t planted(const std::string& name);

// True for the call that a plant "the n-th from now on" names.
bool due(const std::string& name);

// Hands an error on and keeps it pending for this thread.
simError_t result(simError_t error);

// Records a call.
void note(const char* kind, simStream_t stream, simEvent_t event, std::int64_t bytes = 0,
          std::int64_t count = 0, bool blocked = false, bool strict = false);

// Puts an operation into a stream; waits for all of a stream's operations.
void push(simStream_t stream, std::function<void()> operation);
void synchronize(simStream_t stream);

// Sleeps for the planted number of microseconds.
void delay(const std::string& name);

}  // namespace kvoffload::sim
