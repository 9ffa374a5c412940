#include <algorithm>
#include <chrono>
#include <iterator>
#include <stdexcept>
#include <thread>

#include "sim_machine.h"

namespace kvoffload::sim {

Machine& machine() {
    static Machine* const instance = new Machine;
    return *instance;
}

std::int64_t planted(const std::string& name) {
    const std::lock_guard<std::mutex> lock(machine().mutex);
    const auto found = machine().plants.find(name);
    return found == machine().plants.end() ? 0 : found->second;
}

bool due(const std::string& name) {
    const std::lock_guard<std::mutex> lock(machine().mutex);
    const auto found = machine().plants.find(name);
    return found != machine().plants.end() && found->second > 0 && --found->second == 0;
}

void delay(const std::string& name) {
    if (const std::int64_t us = planted(name)) std::this_thread::sleep_for(std::chrono::microseconds(us));
}

std::vector<Operation> operations() {
    const std::lock_guard<std::mutex> lock(machine().mutex);
    return machine().operations;
}

void forget_operations() {
    const std::lock_guard<std::mutex> lock(machine().mutex);
    machine().operations.clear();
}

void plant(const std::string& name, std::int64_t value) {
    static const char* const names[] = {"device_error",    "register_call", "register_total", "batch_error",
                                        "batch_limit",     "launch_at",     "wait_at",        "copy_at",
                                        "kernel_delay_us", "copy_delay_us", "workers"};
    if (std::find(std::begin(names), std::end(names), name) == std::end(names)) {
        throw std::invalid_argument("no fault is called " + name);
    }
    const std::lock_guard<std::mutex> lock(machine().mutex);
    machine().plants[name] = value;
}

void clear_plants() {
    const std::lock_guard<std::mutex> lock(machine().mutex);
    machine().plants.clear();
}

std::int64_t number(std::uintptr_t handle) {
    const std::lock_guard<std::mutex> lock(machine().mutex);
    const auto found = machine().numbers.find(handle);
    return found == machine().numbers.end() ? 0 : found->second;
}

}  // namespace kvoffload::sim
