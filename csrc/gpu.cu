// The device runtime behind gpu.h: CUDA by nvcc, HIP by hipcc or clang, the simulation by g++.
#include <vector>

#include "gpu.h"
#include "kernels.h"

#if defined(KVOFFLOAD_SIM)
#include "sim_runtime.h"
#endif

namespace kvoffload {

#if defined(__CUDACC__)
#define KVOFFLOAD_PARAMETER const __grid_constant__
#else
#define KVOFFLOAD_PARAMETER const
#endif

#if !defined(KVOFFLOAD_SIM)
__global__ void __launch_bounds__(1024) copy_kernel(KVOFFLOAD_PARAMETER CopyArgs args) {
    copy_body(DeviceIndex(), args.task, args.items);
}
#endif

namespace gpu {
namespace {

using Stream = KVOFFLOAD_RT(Stream_t);
using Event = KVOFFLOAD_RT(Event_t);

Stream as_stream(std::uintptr_t handle) { return reinterpret_cast<Stream>(handle); }
Event as_event(std::uintptr_t handle) { return reinterpret_cast<Event>(handle); }
void* as_memory(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

// A failure is handed on as a code and no longer pending.
int checked(KVOFFLOAD_RT(Error_t) error) {
    if (error != KVOFFLOAD_RT(Success)) static_cast<void>(KVOFFLOAD_RT(GetLastError)());
    return static_cast<int>(error);
}

}  // namespace

std::string error_text(int code) {
    const auto error = static_cast<KVOFFLOAD_RT(Error_t)>(code);
    return std::string(KVOFFLOAD_RT(GetErrorName)(error)) + ": " + KVOFFLOAD_RT(GetErrorString)(error);
}

bool is_not_ready(int code) { return code == static_cast<int>(KVOFFLOAD_RT(ErrorNotReady)); }

int device_count(std::string* reason) {
    int count = 0;
    const int code = checked(KVOFFLOAD_RT(GetDeviceCount)(&count));
    if (code != kOkay) {
        *reason = error_text(code);
        return 0;
    }
    if (count == 0) *reason = "the driver reports no device";
    return count;
}

int device_info(int device, DeviceInfo* info) {
    KVOFFLOAD_PROPERTIES properties;
    int code = checked(KVOFFLOAD_RT(GetDeviceProperties)(&properties, device));
    char pci[32] = "";
    if (code == kOkay) code = checked(KVOFFLOAD_RT(DeviceGetPCIBusId)(pci, sizeof(pci), device));
    if (code == kOkay) code = checked(KVOFFLOAD_RT(DriverGetVersion)(&info->driver));
    if (code == kOkay) code = checked(KVOFFLOAD_RT(RuntimeGetVersion)(&info->runtime));
    if (code != kOkay) return code;
    info->name = properties.name;
    info->pci = pci;
    info->multiprocessors = properties.multiProcessorCount;
    return kOkay;
}

DeviceScope::DeviceScope(int device) : before_(device), device_(device) {
    if (checked(KVOFFLOAD_RT(GetDevice)(&before_)) != kOkay) before_ = device_;
    if (before_ != device_) checked(KVOFFLOAD_RT(SetDevice)(device_));
}

DeviceScope::~DeviceScope() {
    if (before_ != device_) checked(KVOFFLOAD_RT(SetDevice)(before_));
}

int stream_create(std::uintptr_t* stream, bool low_priority) {
    int least = 0, greatest = 0;
    int code = checked(KVOFFLOAD_RT(DeviceGetStreamPriorityRange)(&least, &greatest));
    if (code != kOkay) return code;
    Stream created = nullptr;
    code = checked(KVOFFLOAD_RT(StreamCreateWithPriority)(&created, KVOFFLOAD_RT(StreamNonBlocking),
                                                          low_priority ? least : greatest));
    *stream = reinterpret_cast<std::uintptr_t>(created);
    return code;
}

int stream_destroy(std::uintptr_t stream) { return checked(KVOFFLOAD_RT(StreamDestroy)(as_stream(stream))); }

int stream_wait(std::uintptr_t stream, std::uintptr_t event) {
    if (event == 0) return static_cast<int>(KVOFFLOAD_RT(ErrorInvalidValue));
    return checked(KVOFFLOAD_RT(StreamWaitEvent)(as_stream(stream), as_event(event), 0));
}

int stream_synchronize(std::uintptr_t stream) {
    return checked(KVOFFLOAD_RT(StreamSynchronize)(as_stream(stream)));
}

int event_create(std::uintptr_t* event) {
    Event created = nullptr;
    const int code = checked(KVOFFLOAD_RT(EventCreateWithFlags)(&created, KVOFFLOAD_RT(EventDisableTiming)));
    *event = reinterpret_cast<std::uintptr_t>(created);
    return code;
}

int event_destroy(std::uintptr_t event) { return checked(KVOFFLOAD_RT(EventDestroy)(as_event(event))); }

int event_record(std::uintptr_t event, std::uintptr_t stream) {
    if (event == 0) return static_cast<int>(KVOFFLOAD_RT(ErrorInvalidValue));
    return checked(KVOFFLOAD_RT(EventRecord)(as_event(event), as_stream(stream)));
}

int event_query(std::uintptr_t event) { return checked(KVOFFLOAD_RT(EventQuery)(as_event(event))); }

int memory_allocate(std::uintptr_t* address, std::int64_t bytes) {
    void* memory = nullptr;
    const int code = checked(KVOFFLOAD_RT(Malloc)(&memory, static_cast<std::size_t>(bytes)));
    *address = reinterpret_cast<std::uintptr_t>(memory);
    return code;
}

int memory_free(std::uintptr_t address) { return checked(KVOFFLOAD_RT(Free)(as_memory(address))); }

int fill(std::uintptr_t address, int value, std::int64_t bytes, std::uintptr_t stream) {
    return checked(KVOFFLOAD_RT(MemsetAsync)(as_memory(address), value, static_cast<std::size_t>(bytes),
                                             as_stream(stream)));
}

int host_register(std::uintptr_t address, std::int64_t bytes) {
    const unsigned flags = KVOFFLOAD_RT(HostRegisterPortable) | KVOFFLOAD_RT(HostRegisterMapped);
    int code =
        checked(KVOFFLOAD_RT(HostRegister)(as_memory(address), static_cast<std::size_t>(bytes), flags));
    if (code != kOkay) return code;
    void* device = nullptr;
    code = checked(KVOFFLOAD_RT(HostGetDevicePointer)(&device, as_memory(address), 0));
    if (code == kOkay && device == as_memory(address)) return kOkay;
    host_unregister(address);
    return code != kOkay ? code : static_cast<int>(KVOFFLOAD_RT(ErrorInvalidValue));
}

int host_unregister(std::uintptr_t address) {
    return checked(KVOFFLOAD_RT(HostUnregister)(as_memory(address)));
}

int copy(std::uintptr_t to, std::uintptr_t from, std::int64_t bytes, bool to_device, std::uintptr_t stream) {
    return checked(KVOFFLOAD_RT(MemcpyAsync)(
        as_memory(to), as_memory(from), static_cast<std::size_t>(bytes),
        to_device ? KVOFFLOAD_RT(MemcpyHostToDevice) : KVOFFLOAD_RT(MemcpyDeviceToHost), as_stream(stream)));
}

// One attribute for all copies: attribute 0 begins at copy 0. The source order "stream" is what makes a
// source that earlier work of the stream writes safe to read.
#if defined(KVOFFLOAD_SIM)

bool has_batch() { return true; }

int copy_batch(std::uintptr_t* to, std::uintptr_t* from, std::size_t* bytes, std::size_t count, bool, int,
               std::uintptr_t stream) {
    const int order = simMemcpySrcAccessOrderStream;
    const std::vector<std::size_t> indices(count, 0);
    return checked(simMemcpyBatchAsync(reinterpret_cast<void**>(to), reinterpret_cast<void**>(from), bytes,
                                       count, &order, indices.data(), 1, as_stream(stream)));
}

#elif defined(CUDART_VERSION) && CUDART_VERSION >= 12080

bool has_batch() { return true; }

int copy_batch(std::uintptr_t* to, std::uintptr_t* from, std::size_t* bytes, std::size_t count,
               bool to_device, int device, std::uintptr_t stream) {
    cudaMemcpyAttributes attributes = {};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
    cudaMemLocation& on_device = to_device ? attributes.dstLocHint : attributes.srcLocHint;
    cudaMemLocation& on_host = to_device ? attributes.srcLocHint : attributes.dstLocHint;
    on_device.type = cudaMemLocationTypeDevice;
    on_device.id = device;
    on_host.type = cudaMemLocationTypeHost;
    std::vector<std::size_t> indices(count, 0);
#if CUDART_VERSION >= 13000
    return checked(cudaMemcpyBatchAsync(reinterpret_cast<void**>(to), reinterpret_cast<const void**>(from),
                                        bytes, count, &attributes, indices.data(), 1, as_stream(stream)));
#else
    std::size_t failed = 0;
    return checked(cudaMemcpyBatchAsync(reinterpret_cast<void**>(to), reinterpret_cast<void**>(from), bytes,
                                        count, &attributes, indices.data(), 1, &failed, as_stream(stream)));
#endif
}

#else

bool has_batch() { return false; }

int copy_batch(std::uintptr_t*, std::uintptr_t*, std::size_t*, std::size_t, bool, int, std::uintptr_t) {
    return static_cast<int>(KVOFFLOAD_RT(ErrorNotSupported));
}

#endif

#if defined(KVOFFLOAD_SIM)

int launch_copy(const CopyArgs& args, int blocks, int threads, std::int64_t bytes, std::uintptr_t stream) {
    return checked(simLaunch(as_stream(stream), blocks, threads, bytes,
                             [args](const HostIndex& index) { copy_body(index, args.task, args.items); }));
}

#else

int launch_copy(const CopyArgs& args, int blocks, int threads, std::int64_t, std::uintptr_t stream) {
    void* parameters[] = {const_cast<CopyArgs*>(&args)};
    return checked(KVOFFLOAD_RT(LaunchKernel)(
        reinterpret_cast<const void*>(copy_kernel), dim3(static_cast<unsigned>(blocks)),
        dim3(static_cast<unsigned>(threads)), parameters, 0, as_stream(stream)));
}

#endif

}  // namespace gpu
}  // namespace kvoffload
