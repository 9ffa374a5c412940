#!/usr/bin/env bash
# Installs for real, in fresh environments: with nvcc where it is here, and without; what was asked for and cannot be built
# must be an error. In each environment the package is used from another folder, and doctor says what was built.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
nowhere=$scratch/nowhere
mkdir "$nowhere"
# A copy of what is in the tree and not ignored: building in the tree itself would leave files there.
git ls-files -z --cached --others --exclude-standard | xargs -0 tar cf - 2>/dev/null | (mkdir "$scratch/tree" && tar xf - -C "$scratch/tree")

# install NAME VARIABLE=VALUE...: pip install into a fresh environment; output to $scratch/NAME.log.
install() {
    local name=$1
    shift
    [ -d "$scratch/$name" ] || "$python" -m venv "$scratch/$name"
    (cd "$scratch/tree" && rm -rf build ./*.egg-info &&
        env "$@" "$scratch/$name/bin/python" -m pip --disable-pip-version-check install -v .) >"$scratch/$name.log" 2>&1
}

# in_it NAME COMMAND...: from another folder than the tree.
in_it() {
    local name=$1
    shift
    (cd "$scratch" && PYTHONPATH='' "$scratch/$name/bin/$@")
}

# refused NAME TEXT VARIABLE=VALUE...: the install must fail and say TEXT.
refused() {
    local name=$1 text=$2
    shift 2
    if install "$name" "$@"; then
        echo "$*: installed, and should not have"
        exit 1
    fi
    grep -qF "$text" "$scratch/$name.log" || {
        tail -n 40 "$scratch/$name.log"
        echo "$*: failed without saying: $text"
        exit 1
    }
    echo "$*: refused, as it should be"
}

must_say() {
    grep -qE "$2" "$scratch/$1.doctor" || {
        cat "$scratch/$1.doctor"
        echo "doctor of the $1 install does not say: $2"
        exit 1
    }
}

refused refused 'KVOFFLOAD_CUDA=1, but nvcc was not found' KVOFFLOAD_CUDA=1 CUDA_HOME="$nowhere"
refused refused 'KVOFFLOAD_HIP=1, but hipcc was not found' KVOFFLOAD_HIP=1 ROCM_PATH="$nowhere" KVOFFLOAD_CUDA=0

variants=(plain)
install plain CUDA_HOME="$nowhere" ROCM_PATH="$nowhere" || { tail -n 40 "$scratch/plain.log"; exit 1; }
grep -q 'no nvcc here, its module is not built' "$scratch/plain.log"
if command -v nvcc >/dev/null || [ -x /usr/local/cuda/bin/nvcc ]; then
    install cuda KVOFFLOAD_CUDA=1 KVOFFLOAD_CUDA_ARCHS=90 || { tail -n 40 "$scratch/cuda.log"; exit 1; }
    variants+=(cuda)
else
    echo 'install with nvcc: not tried, nvcc is not here'
fi
for name in "${variants[@]}"; do
    in_it "$name" kvoffload doctor --path "$scratch" >"$scratch/$name.doctor" 2>&1 || true
    in_it "$name" python - "$name" <<'PROGRAM'
import sys

import kvoffload
from kvoffload import native

assert "site-packages" in kvoffload.__file__, kvoffload.__file__
assert native.simulation().device_count()[0] == 1
found = native.load("_cuda")
assert (found.module is not None) == (sys.argv[1] == "cuda"), found
assert found.devices or found.reason
print(f"{sys.argv[1]}: {kvoffload.__file__}; _cuda: {found.devices} devices, {found.reason or 'usable'}")
PROGRAM
done
must_say plain '_cuda +absent: .*not in this build'
for name in "${variants[@]}"; do must_say "$name" '_hip +(absent|built)'; done
echo "installed and used: ${variants[*]}"
