"""Agent conversations on vLLM with a page pool too small for them: recomputed, and with kvoffload; with room for all as
the limit. Each arm is a process of its own; same prompts, greedy tokens compared.

    python demo.py MODEL_FOLDER [--json] [--sessions N] [--turns N]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any

import arm
import model

HERE = Path(__file__).parent
SPEEDUP, LATENCY, SHARE = 3.0, 0.35, 0.01
"""What is asked: throughput at least so many times, mean latency at most so much of recomputing; the connector's own
share of the engine's time for requests that hit nothing."""

SHAPES = {"4k to 12k tokens": (4096, 12288), "2k tokens": (1024, 2048)}


def run(plan: arm.Plan) -> arm.Figures:
    """One arm. Raises RuntimeError with the end of its output where it fails."""
    done = subprocess.run(
        [sys.executable, str(HERE / "arm.py"), json.dumps(asdict(plan))],
        capture_output=True,
        text=True,
        check=False,
        cwd=HERE,
    )
    for line in done.stdout.splitlines():
        if line.startswith("FIGURES "):
            return arm.Figures(**json.loads(line[8:]))
    raise RuntimeError(f"the arm {plan} failed:\n{(done.stdout + done.stderr)[-3000:]}")


def arms(base: arm.Plan) -> dict[str, arm.Plan]:
    """By name. The pool of the first two holds a quarter of the sessions at their longest."""
    longest = base.last + base.last // 100 + 4 * arm.BLOCK
    small = max(base.sessions // 4, 1) * longest
    bytes_of_all = base.sessions * longest * arm.token_bytes(Path(base.model))
    extra = {"host_bytes": f"{bytes_of_all * 5 // 4 >> 20}MiB"}
    return {
        "recompute": replace(base, pool=small),
        "kvoffload": replace(base, pool=small, extra=extra),
        "resident": replace(base, pool=base.sessions * longest),
    }


def figures_of(figures: arm.Figures) -> dict[str, float]:
    """One arm in the numbers of the table."""
    return {
        "requests": len(figures.latency),
        "prefill tokens computed": figures.computed,
        "TTFT mean s": fmean(figures.ttft),
        "TTFT p90 s": quantiles(figures.ttft, n=10)[-1],
        "latency mean s": fmean(figures.latency),
        "tokens/s": (figures.inputs + figures.outputs) / figures.seconds,
        "seconds": figures.seconds,
    }


def show(title: str, results: dict[str, arm.Figures]) -> bool:
    """Print a table of the arms; whether all said the same tokens."""
    print(f"\n{title}")
    columns = {name: figures_of(f) for name, f in results.items()}
    print(f"{'':26}" + "".join(f"{name:>14}" for name in columns))
    for row in next(iter(columns.values())):
        values = "".join(
            f"{c[row]:14,.0f}" if c[row] >= 1000 or row == "requests" else f"{c[row]:14.3f}"
            for c in columns.values()
        )
        print(f"{row:26}{values}")
    same = len({f.digest for f in results.values()}) == 1
    print(f"greedy tokens: {'the same in all' if same else 'DIFFERENT'}")
    return same


def judge(results: dict[str, arm.Figures]) -> list[tuple[str, float, str, bool]]:
    """(what, value, asked, met)."""
    old, new = figures_of(results["recompute"]), figures_of(results["kvoffload"])
    speed = new["tokens/s"] / old["tokens/s"]
    latency = new["latency mean s"] / old["latency mean s"]
    return [
        ("throughput, times recompute", speed, f">= {SPEEDUP}", speed >= SPEEDUP),
        ("mean latency, of recompute", latency, f"<= {LATENCY}", latency <= LATENCY),
    ]


def overhead(cold: arm.Figures) -> tuple[str, float, str, bool]:
    """Of requests that hit nothing: the connector's calls, copies left out, as a share of the engine's time."""
    calls = sum(s for name, s in cold.connector.items() if not name.endswith("copies"))
    share = calls / cold.seconds
    return ("connector calls, of step time", share, f"<= {SHARE}", share <= SHARE)


def gather_speed(fragment: int) -> float:
    """GB/s of the copy engine alone, as `kvoffload bench copy` measures it."""
    from kvoffload.bench.copy import bench_copy

    rows = bench_copy([fragment], threads=(2,), nbytes=64 << 20, rounds=5)
    return next(row.figure.median for row in rows if "to host" in row.name)


def main(given: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(given)
    folder = model.make(options.model.resolve())
    out: dict[str, Any] = {}
    good = True
    judged = []
    for title, (first, last) in SHAPES.items():
        base = arm.Plan(str(folder), options.sessions, options.turns, first, last, 0, None)
        results = {}
        for name, plan in arms(base).items():
            print(f"{title}: {name} ...", file=sys.stderr, flush=True)
            results[name] = run(plan)
        good &= show(f"{options.sessions} sessions of {options.turns} turns, {title}", results)
        out[title] = {name: figures_of(f) | {"connector": f.connector} for name, f in results.items()}
        if not judged:
            judged = judge(results)
            copied = results["kvoffload"]
    cold = arm.Plan(
        str(folder), options.sessions, 1, 4096, 4096, options.sessions * 4224, {"host_bytes": "1GiB"}
    )
    judged.append(overhead(run(cold)))
    print()
    for what, value, asked, met in judged:
        print(f"{what:34}{value:9.4f}   asked {asked:8} {'met' if met else 'MISSED'}")
    fragment = arm.token_bytes(folder) * arm.BLOCK // model.CONFIG["num_hidden_layers"]
    speed = copied.copied / copied.connector["worker|copies"] / 1e9
    alone = gather_speed(fragment)
    print(
        f"bytes copied, over the seconds that the engine waited for copies (some run beside it): {speed:.2f} GB/s;"
        f" bench copy, {fragment >> 10} KiB: {alone:.2f} GB/s"
    )
    if options.json:
        print(json.dumps({**out, "judged": judged, "copies GB/s": speed, "bench copy GB/s": alone}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
