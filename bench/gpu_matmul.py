"""What copies cost an engine that computes: a loop of matrix products alone, and beside copies in both directions.

Run as `python bench/gpu_matmul.py`; needs torch with a device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvoffload.bench.gpu_copy import Stage
from kvoffload.copying.modes import CopyMode
from kvoffload.native import device_module

TARGET = 0.03
"""Part of its speed that the loop may lose."""

SIZE, PRODUCTS = 8192, 60


def product_seconds(torch: Any, a: Any, b: Any) -> float:
    """Seconds of one loop of products."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(PRODUCTS):
        a @ b
    torch.cuda.current_stream().synchronize()
    return time.perf_counter() - begin


def losses(torch: Any, module: Any, fragment: int, nbytes: int, rounds: int) -> dict[str, float]:
    """By mode: the part of the loop's speed that is lost beside copies in both directions."""
    a, b = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product_seconds(torch, a, b)
    lost = {}
    for mode in CopyMode:
        stage = Stage(module, 0, fragment, nbytes)
        copier = stage.copier(mode)
        jobs = [stage.copies(half) for half in (0, 1)]
        ratios = []
        for _ in range(rounds):
            alone = product_seconds(torch, a, b)
            stop, ready = threading.Event(), threading.Event()

            def copy_all(stop: threading.Event = stop, ready: threading.Event = ready) -> None:
                while not stop.is_set():
                    copier.seconds((0, 1), jobs)  # noqa: B023
                    ready.set()

            thread = threading.Thread(target=copy_all)
            thread.start()
            ready.wait()
            beside = product_seconds(torch, a, b)
            stop.set()
            thread.join()
            ratios.append(1 - alone / beside)
        lost[mode.name.lower()] = statistics.median(ratios)
        copier.native.close()
        stage.close()
    return lost


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fragment", type=int, default=64 << 10, help="bytes")
    parser.add_argument("--bytes", type=int, default=256 << 20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    found = device_module()
    try:
        import torch
    except ImportError as error:
        sys.stdout.write(f"not measured: {error}\n")
        return 0
    if found.module is None or not torch.cuda.is_available():
        sys.stdout.write(f"not measured: no device ({found.reason})\n")
        return 0
    lost = losses(torch, found.module, given.fragment, given.bytes, given.rounds)
    for mode, part in lost.items():
        verdict = "" if mode != "staged" else ("reached" if part <= TARGET else "MISSED")
        sys.stdout.write(f"matmul beside {mode} copies loses {part:6.2%}  target {TARGET:.0%} {verdict}\n")
    if given.json:
        given.json.write_text(json.dumps(lost))
    return 0


if __name__ == "__main__":
    sys.exit(main())
