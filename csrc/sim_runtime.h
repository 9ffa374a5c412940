// A stand-in for the CUDA runtime: the calls that gpu.cu makes, on CPU threads.
//
// A stream is a thread that takes operations first in, first out; an event completes when its stream reaches
// it. "Device memory" is ordinary memory. What a real runtime forbids or does slowly is an error or a
// blocking call here too: copies over the border of two registrations fail, copies from or to memory that is
// not registered block the caller, memory is not unregistered under a copy. Every call is recorded; failures
// and delays can be planted. Thread: all functions from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "host_launch.h"

namespace kvoffload {

enum simError_t {
    simSuccess = 0,
    simErrorInvalidValue = 1,
    simErrorMemoryAllocation = 2,
    simErrorNoDevice = 100,
    simErrorNotReady = 600,
    simErrorHostMemoryAlreadyRegistered = 712,
    simErrorHostMemoryNotRegistered = 713,
    simErrorLaunchFailure = 719,
    simErrorNotSupported = 801,
};

enum simMemcpyKind { simMemcpyHostToDevice = 1, simMemcpyDeviceToHost = 2 };

class SimStream;
class SimEvent;
using simStream_t = SimStream*;
using simEvent_t = SimEvent*;

struct simDeviceProp {
    char name[64];
    int multiProcessorCount;
};

constexpr unsigned simStreamNonBlocking = 1, simEventDisableTiming = 2;
constexpr unsigned simHostRegisterPortable = 1, simHostRegisterMapped = 2;

const char* simGetErrorName(simError_t error);
const char* simGetErrorString(simError_t error);
simError_t simGetLastError();
simError_t simGetDeviceCount(int* count);
simError_t simGetDevice(int* device);
simError_t simSetDevice(int device);
simError_t simGetDeviceProperties(simDeviceProp* properties, int device);
simError_t simDeviceGetPCIBusId(char* id, int length, int device);
simError_t simDriverGetVersion(int* version);
simError_t simRuntimeGetVersion(int* version);
simError_t simDeviceGetStreamPriorityRange(int* least, int* greatest);
simError_t simStreamCreateWithPriority(simStream_t* stream, unsigned flags, int priority);
simError_t simStreamDestroy(simStream_t stream);
simError_t simStreamSynchronize(simStream_t stream);
simError_t simStreamWaitEvent(simStream_t stream, simEvent_t event, unsigned flags);
simError_t simEventCreateWithFlags(simEvent_t* event, unsigned flags);
simError_t simEventDestroy(simEvent_t event);
simError_t simEventRecord(simEvent_t event, simStream_t stream);
simError_t simEventQuery(simEvent_t event);
simError_t simMalloc(void** memory, std::size_t bytes);
simError_t simFree(void* memory);
simError_t simHostRegister(void* memory, std::size_t bytes, unsigned flags);
simError_t simHostUnregister(void* memory);
simError_t simHostGetDevicePointer(void** device, void* host, unsigned flags);
simError_t simMemsetAsync(void* memory, int value, std::size_t bytes, simStream_t stream);
simError_t simMemcpyAsync(void* to, const void* from, std::size_t bytes, simMemcpyKind kind,
                          simStream_t stream);

// attributes: access orders of sources. indices: one entry per copy, each below attribute_count and the first
// one 0, which is right both for runtimes that read it per attribute and for those that read it per copy.
simError_t simMemcpyBatchAsync(void* const* to, const void* const* from, const std::size_t* bytes,
                               std::size_t count, const int* attributes, const std::size_t* indices,
                               std::size_t attribute_count, simStream_t stream);
constexpr int simMemcpySrcAccessOrderStream = 1;

// Runs the body for every (block, thread) when the stream comes to it. bytes: for the record only.
simError_t simLaunch(simStream_t stream, std::int64_t blocks, std::int32_t threads, std::int64_t bytes,
                     std::function<void(const HostIndex&)> body);

namespace sim {

// One call, in the order of calls. stream and event are numbers from 1 on in order of creation, 0 = the
// default stream or none. thread: the kernel's id of the calling thread. blocked: the call waited for the
// stream.
// A stream's creation has its priority as count.
struct Operation {
    std::string
        kind;  // stream copy_in copy_out batch kernel fill wait record query synchronize register unregister
    std::int64_t stream, event, bytes, count, thread;
    bool blocked, strict;
};

std::vector<Operation> operations();
void forget_operations();

// Faults and delays by name; every value is 0 (none) until planted:
//   device_error       simGetDeviceCount fails with this code
//   register_call      bytes above which one registration fails
//   register_total     bytes above which all registrations together fail
//   batch_error        every batch copy fails with this code
//   batch_limit        descriptors above which a batch copy fails
//   launch_at          the n-th launch from now on fails
//   wait_at            so does the n-th wait that is put into a stream
//   copy_at            the n-th copy (or batch copy) from now on fails
//   kernel_delay_us    every kernel takes this much longer
//   copy_delay_us      every copy or batch copy takes this much longer
//   workers            CPU threads per kernel (0 = 2)
// Throws std::invalid_argument for any other name.
void plant(const std::string& name, std::int64_t value);
void clear_plants();

// Number of the stream or event with this handle, as in Operation; 0 for none.
std::int64_t number(std::uintptr_t handle);

}  // namespace sim
}  // namespace kvoffload
