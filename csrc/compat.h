// One spelling for the CUDA, HIP and simulated runtimes. All conditional compilation of device code is here.
//
// KVOFFLOAD_RT(Name)   cudaName | hipName | simName
// KVOFFLOAD_PROPERTIES the record that GetDeviceProperties fills
// KVOFFLOAD_HD         function of host and device
// load16 / store16     16-byte accesses to device or mapped host memory that will not be used again soon
// DeviceIndex          which thread of which block runs; the simulation passes its own
#pragma once

// The run-time compiler (NVRTC, hiprtc) has these types built in or from its own headers.
#if defined(__CUDACC_RTC__)
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
#else
#include <cstdint>
using std::int32_t;
using std::int64_t;
using std::uint16_t;
using std::uint32_t;
using std::uint64_t;
using std::uint8_t;
#endif

#if defined(KVOFFLOAD_SIM)
#define KVOFFLOAD_HOST_ONLY 1
#define KVOFFLOAD_RT(name) sim##name
#define KVOFFLOAD_PROPERTIES simDeviceProp
#define KVOFFLOAD_HD inline
#elif defined(__HIP__) || defined(__HIPCC__)
#include <hip/hip_runtime.h>
#define KVOFFLOAD_RT(name) hip##name
#define KVOFFLOAD_PROPERTIES hipDeviceProp_t
#define KVOFFLOAD_HD __host__ __device__ inline
#elif defined(__CUDACC_RTC__)
#define KVOFFLOAD_HD __device__ inline
#elif defined(__CUDACC__)
#include <cuda_runtime.h>
#define KVOFFLOAD_RT(name) cuda##name
#define KVOFFLOAD_PROPERTIES cudaDeviceProp
#define KVOFFLOAD_HD __host__ __device__ inline
#else  // host code that only needs the records
#define KVOFFLOAD_HOST_ONLY 1
#define KVOFFLOAD_HD inline
#endif

namespace kvoffload {

struct alignas(16) Word16 {
    uint32_t x, y, z, w;
};

#if defined(KVOFFLOAD_HOST_ONLY)

// Alignment is part of the access on a device: a misaligned one is undefined behaviour, seen by UBSAN.
KVOFFLOAD_HD Word16 load16(const Word16* p) { return *p; }
KVOFFLOAD_HD void store16(Word16* p, Word16 v) { *p = v; }

#elif defined(__HIP__) || defined(__HIPCC__)

using Vector4 = uint32_t __attribute__((ext_vector_type(4)));

KVOFFLOAD_HD Word16 load16(const Word16* p) {
    const Vector4 v = __builtin_nontemporal_load(reinterpret_cast<const Vector4*>(p));
    return {v.x, v.y, v.z, v.w};
}
KVOFFLOAD_HD void store16(Word16* p, Word16 v) {
    __builtin_nontemporal_store(Vector4{v.x, v.y, v.z, v.w}, reinterpret_cast<Vector4*>(p));
}

// The builtins, and not blockIdx, which needs the device library that a compile-only machine lacks.
struct DeviceIndex {
    __device__ int64_t block() const { return __builtin_amdgcn_workgroup_id_x(); }
    __device__ int64_t blocks() const {
        return __builtin_amdgcn_grid_size_x() / __builtin_amdgcn_workgroup_size_x();
    }
    __device__ int32_t thread() const { return __builtin_amdgcn_workitem_id_x(); }
    __device__ int32_t threads() const { return __builtin_amdgcn_workgroup_size_x(); }
};

#else

KVOFFLOAD_HD Word16 load16(const Word16* p) {
#if defined(__CUDA_ARCH__) || defined(__CUDACC_RTC__)
    const uint4 v = __ldcs(reinterpret_cast<const uint4*>(p));
    return {v.x, v.y, v.z, v.w};
#else
    return *p;
#endif
}
KVOFFLOAD_HD void store16(Word16* p, Word16 v) {
#if defined(__CUDA_ARCH__) || defined(__CUDACC_RTC__)
    __stcs(reinterpret_cast<uint4*>(p), make_uint4(v.x, v.y, v.z, v.w));
#else
    *p = v;
#endif
}

struct DeviceIndex {
    __device__ int64_t block() const { return blockIdx.x; }
    __device__ int64_t blocks() const { return gridDim.x; }
    __device__ int32_t thread() const { return static_cast<int32_t>(threadIdx.x); }
    __device__ int32_t threads() const { return static_cast<int32_t>(blockDim.x); }
};

#endif

}  // namespace kvoffload
