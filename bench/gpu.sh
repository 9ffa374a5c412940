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
summary=$(mktemp)
failed=0

# step NAME SECONDS COMMAND...: run with a limit, log to $OUT, note how it ended.
step() {
    local name=$1 limit=$2 begun=$SECONDS status=0
    shift 2
    timeout "$limit" "$@" >"$OUT/$name.log" 2>&1 || status=$?
    printf '%-20s exit %-3s %4s s  %s\n' "$name" "$status" "$((SECONDS - begun))" "$(grep -av '^ *$' "$OUT/$name.log" | tail -n 1 | cut -c1-100)" |
        tee -a "$summary"
    return "$status"
}

if compgen -G '.whl/*.whl' >/dev/null; then
    "$PY" -m pip install -q --no-index --no-deps --no-compile --upgrade --target build/site .whl/*.whl || exit 1
    export PYTHONPATH="$PWD/build/site${PYTHONPATH:+:$PYTHONPATH}"
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

KVOFFLOAD_CUDA=1 KVOFFLOAD_CUDA_ARCHS=${KVOFFLOAD_CUDA_ARCHS:-90} step build 100 "$PY" setup.py -q build_ext --inplace || {
    tail -n 40 "$OUT/build.log"
    exit 1
}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
step devices 20 "$PY" -c 'from kvoffload import native; print(native.device_module())' || failed=1
step tests 90 "$PY" -m pytest tests/gpu -q -p no:cacheprovider -o filterwarnings=default --timeout=60 || failed=1
if command -v compute-sanitizer >/dev/null; then
    # Not a failure where the machine does not let the tool attach: the log says which it was.
    step sanitizer 60 compute-sanitizer --tool memcheck --error-exitcode 77 "$PY" -m pytest tests/gpu -q \
        -p no:cacheprovider -o filterwarnings=default -k small_round_trip
    if [ $? -eq 77 ]; then failed=1; fi
else
    echo 'sanitizer            not here' | tee -a "$summary"
fi
trace=build/gpu-trace.jsonl
cli='from kvoffload.cli import app; app()'
"$PY" -c "$cli" trace synth --force --sessions 12 --max-context 20k --seed 1 --out "$trace" >"$OUT/synth.log" 2>&1 &&
    step replay 50 "$PY" tests/gpu/replay_hbm.py "$trace" --lanes 4 --block-bytes 16KiB --device-blocks 3000 \
        --host-blocks 1500 --disk-blocks 30000 || failed=1
step matmul 40 "$PY" -m kvoffload.bench.gpu_matmul --json "$OUT/matmul.json"
step sweep 100 "$PY" -m kvoffload.bench.gpu_copy --json "$OUT/copy.json"

echo
cat "$OUT/machine.txt" "$summary" "$OUT/matmul.log" "$OUT/sweep.log"
exit "$failed"
