#!/usr/bin/env bash
# Compiles the device source for AMD architectures, without linking or running. Debian: libamdhip64-dev clang-19 lld-19.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

clang=${CLANG:-$(command -v clang++-19 || command -v clang++ || true)}
if [ -z "$clang" ] || [ ! -e "${ROCM_PATH:-/usr}/include/hip/hip_runtime.h" ]; then
    echo 'HIP: not compiled, clang or the HIP headers are missing (Debian: libamdhip64-dev clang-19 lld-19)'
    [ "${CI:-}" != true ] || [ "${KVOFFLOAD_HIP:-auto}" != 1 ]
    exit
fi
object=$(mktemp)
trap 'rm -f "$object"' EXIT
for arch in ${KVOFFLOAD_HIP_ARCHS:-gfx90a gfx942 gfx1100}; do
    "$clang" -x hip -O3 -std=c++17 -fPIC -Wall -Wextra -Werror -D__HIP_PLATFORM_AMD__=1 --offload-arch="$arch" \
        --rocm-path="${ROCM_PATH:-/usr}" -nogpulib -Icsrc -c csrc/gpu.cu -o "$object"
    echo "HIP $arch: compiled"
done
