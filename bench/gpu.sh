#!/usr/bin/env bash
# Everything that needs a GPU, in one run of less than 4 minutes, without any download. Run from the root of the tree.
#
# Builds in place with this machine's python3 and nvcc, runs tests/gpu (cupy included), a small case under
# compute-sanitizer, the sweep of `bench copy`, what a matmul loses, and a replay with the pool in HBM. Logs and figures
# go to $OUT (default build/gpu); a summary and the table come last. Wheels in ./.whl, if any, are used for packages that
# this python lacks. Exits 1 if a test fails; a missed target is shown, not an error.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

OUT=${OUT:-build/gpu}
PY=${PYTHON:-python3}
mkdir -p "$OUT"
TOTAL=${TOTAL:-235} # seconds
summary=$(mktemp)
failed=0

# step NAME SECONDS COMMAND...: run with a limit, log to $OUT, note how it ended.
step() {
    local name=$1 limit=$2 begun=$SECONDS status=0 left=$((TOTAL - SECONDS))
    shift 2
    if [ "$left" -lt 5 ]; then
        echo "$name: not run, the time is up" | tee -a "$summary"
        return 1
    fi
    [ "$limit" -lt "$left" ] || limit=$left
    timeout "$limit" "$@" >"$OUT/$name.log" 2>&1 || status=$?
    printf '%-20s exit %-3s %4s s  %s\n' "$name" "$status" "$((SECONDS - begun))" "$(grep -av '^ *$' "$OUT/$name.log" | tail -n 1 | cut -c1-100)" |
        tee -a "$summary"
    return "$status"
}

if compgen -G '.whl/*.whl' >/dev/null; then
    "$PY" -m pip install -q --no-index --no-deps --no-compile --upgrade --target build/site .whl/*.whl || exit 1
    export PYTHONPATH="$PWD/build/site${PYTHONPATH:+:$PYTHONPATH}"
fi
# What this python lacks, and what is left out for it. Without the first four nothing runs.
lacks=$("$PY" - <<'PROGRAM'
from importlib.util import find_spec

needed = {
    "setuptools": "", "numpy": "", "xxhash": "", "msgpack": "",
    "pytest": "tests, sanitizer", "typer": "replay", "rich": "the tables, replay", "torch": "matmul", "cupy": "its test",
}
for name, part in needed.items():
    if find_spec(name) is None:
        print(f"{name}: {part or 'EVERYTHING'} cannot run")
PROGRAM
)
has() { ! grep -q "^$1:" <<<"$lacks"; }
[ -z "$lacks" ] || printf 'this python lacks %s\n' "$lacks" | tee -a "$summary"
if grep -q EVERYTHING <<<"$lacks"; then
    echo 'put wheels of these into .whl/'
    exit 1
fi

if ! "$PY" -c 'import pybind11' 2>/dev/null; then # torch ships the headers
    include=$("$PY" -c 'import importlib.util as u, pathlib; print(pathlib.Path(u.find_spec("torch").origin).parent / "include")') || {
        echo 'pybind11 is missing: put its wheel into .whl/'
        exit 1
    }
    export CPATH="$include${CPATH:+:$CPATH}"
fi

{
    nvidia-smi --query-gpu=name,driver_version,memory.total,pcie.link.gen.current,pcie.link.width.current --format=csv 2>&1
    nvcc --version 2>&1 | tail -n 2
    uname -a
    nproc
} >"$OUT/machine.txt"

KVOFFLOAD_CUDA=1 KVOFFLOAD_CUDA_ARCHS=${KVOFFLOAD_CUDA_ARCHS:-90} \
    step build 150 "$PY" setup.py -q build_ext --inplace || {
    tail -n 40 "$OUT/build.log"
    exit 1
}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
found='import sys; from kvoffload import native; f = native.device_module(); print(f); sys.exit(f.module is None)'
step device 20 "$PY" -c "$found" || {
    echo 'no device can be used: nothing after the build was run'
    cat "$OUT/device.log"
    exit 1
}
test=("$PY" -m pytest tests/gpu -q -p no:cacheprovider)
if "$PY" -c 'import pytest_timeout' 2>/dev/null; then
    test+=(-o filterwarnings=default --timeout=60)
else
    test+=(-c /dev/null --rootdir .) # the project's settings name what that plugin reads
fi
if has pytest; then step tests 90 "${test[@]}" || failed=1; fi
step sweep 100 "$PY" -m kvoffload.bench.gpu_copy --json "$OUT/copy.json" # a missed target is no failure
has torch && step matmul 40 "$PY" bench/gpu_matmul.py --json "$OUT/matmul.json"
if has typer && has rich; then
    step replay 50 "$PY" tests/gpu/replay_hbm.py synth:sessions=4,seed=1,max_context=20k --lanes 4 \
        --block-bytes 16KiB --device-blocks 2000 --host-blocks 1500 --disk-blocks 30000 || failed=1
fi
if has pytest && command -v compute-sanitizer >/dev/null; then
    # 77 = it found something. Any other end but 0: the machine does not let the tool attach, and the log says so.
    step sanitizer 60 compute-sanitizer --tool memcheck --error-exitcode 77 "${test[@]}" -k small_round_trip
    if [ $? -eq 77 ]; then failed=1; fi
else
    echo 'sanitizer: not here, or no pytest' | tee -a "$summary"
fi

echo
cat "$OUT/machine.txt" "$summary" "$OUT/matmul.log" "$OUT/sweep.log" 2>/dev/null
exit "$failed"
