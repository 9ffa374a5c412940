// The state behind the simulated runtime: what was recorded, planted and registered.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "sim_runtime.h"

namespace kvoffload::sim {

// One mutex and one condition for the whole machine, queues of streams and marks of events included.
struct Machine {
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<Operation> operations;
    std::map<std::string, std::int64_t> plants;
    std::map<std::uintptr_t, std::size_t> registered;  // base -> bytes
    std::map<std::uintptr_t, std::int64_t> numbers;    // handle -> number
    std::int64_t next_number = 1;
};

// Never destroyed: threads of streams may outlive main.
Machine& machine();

std::int64_t planted(const std::string& name);

// True for the call that a plant "the n-th from now on" names.
bool due(const std::string& name);

// Sleeps for the planted number of microseconds.
void delay(const std::string& name);

}  // namespace kvoffload::sim
