// The device runtime as plain C++: integers only, so that its users need no device compiler.
//
// Streams, events and addresses are uintptr_t; a stream of 0 is the runtime's default stream. Every function
// returns 0 or the runtime's error code (an event of 0 is an invalid value), and leaves no error pending in
// the runtime for its next user. Thread: any. Implemented by gpu.cu, once for CUDA, HIP and the simulation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace kvoffload {

struct CopyArgs;

namespace gpu {

constexpr int kOkay = 0;

struct DeviceInfo {
    std::string name;
    std::string pci;  // "0000:17:00.0"
    int driver = 0;
    int runtime = 0;
    int multiprocessors = 0;
};

std::string error_text(int code);
bool is_not_ready(int code);

// 0 devices with the reason when the runtime cannot be used at all.
int device_count(std::string* reason);
int device_info(int device, DeviceInfo* info);

// Makes `device` current in this thread, and the former one again at the end.
class DeviceScope {
  public:
    explicit DeviceScope(int device);
    ~DeviceScope();
    DeviceScope(const DeviceScope&) = delete;
    DeviceScope& operator=(const DeviceScope&) = delete;

  private:
    int before_, device_;
};

int stream_create(std::uintptr_t* stream, bool low_priority);
int stream_destroy(std::uintptr_t stream);
int stream_wait(std::uintptr_t stream, std::uintptr_t event);
int stream_synchronize(std::uintptr_t stream);

int event_create(std::uintptr_t* event);
int event_destroy(std::uintptr_t event);
int event_record(std::uintptr_t event, std::uintptr_t stream);
int event_query(std::uintptr_t event);  // is_not_ready while it runs

int memory_allocate(std::uintptr_t* address, std::int64_t bytes);
int memory_free(std::uintptr_t address);
int fill(std::uintptr_t address, int value, std::int64_t bytes, std::uintptr_t stream);

// Page-locks host memory. Its device address must be its host address, else it is unlocked again and an error
// returned, for kernels take host addresses.
int host_register(std::uintptr_t address, std::int64_t bytes);
int host_unregister(std::uintptr_t address);

// REQUIRES: the host side lies in one registration, or in none (then the call blocks).
int copy(std::uintptr_t to, std::uintptr_t from, std::int64_t bytes, bool to_device, std::uintptr_t stream);

// Many copies in one call; sources are read after all earlier work of the stream.
// REQUIRES: as for `copy`, count > 0, stream != 0.
bool has_batch();  // compiled in; the driver may refuse it still
int copy_batch(std::uintptr_t* to, std::uintptr_t* from, std::size_t* bytes, std::size_t count,
               bool to_device, int device, std::uintptr_t stream);

int launch_copy(const CopyArgs& args, int blocks, int threads, std::int64_t bytes, std::uintptr_t stream);

}  // namespace gpu
}  // namespace kvoffload
