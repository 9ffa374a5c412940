"""A small disk tier with known blocks, used by the disk tests and by the processes that they start."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from kvoffload.arena import HostArena
from kvoffload.testing.blocks import make_copies, make_key, make_layout, payload
from kvoffload.tiers import DiskTier

ROOT = Path(__file__).parents[1]
SLAB_BYTES = 1 << 20
SLABS = 2
BLOCK_BYTES = 20_000
SLOT_BYTES = 20_480
PER_SLAB = SLAB_BYTES // SLOT_BYTES
LAYOUT = make_layout(BLOCK_BYTES)
NAMESPACE = b"n" * 16

WRITE, READ, ALLOCATE, DIRECT, OPEN, SHORT = 1, 2, 4, 8, 16, 32
"""Operations of tests/native/io_faults.c."""


def slot(number):
    """The number-th disk slot."""
    return number // PER_SLAB << 16 | number % PER_SLAB


def file_offset(number):
    """Where the number-th slot begins in the slot file."""
    return number // PER_SLAB * SLAB_BYTES + number % PER_SLAB * SLOT_BYTES


def open_tier(folder, **options):
    """A tier in `folder`/rank."""
    options = {"layout": LAYOUT, "slab_bytes": SLAB_BYTES, "slabs": SLABS, "namespace": NAMESPACE, **options}
    return DiskTier(Path(folder) / "rank", **options)


def make_arena(slabs=2):
    return HostArena(SLAB_BYTES, slabs, LAYOUT)


def copies_of(numbers, first=0):
    """Block n in host slot 0.. of its position and in disk slot first + position."""
    places = [slot(n) for n in range(len(numbers))]
    return make_copies(
        0, [make_key(n) for n in numbers], host=places, disk=[slot(first + n) for n in range(len(numbers))]
    )


def fill(arena, copies):
    """Put every copy's content into its host slot."""
    for copy in copies:
        data = payload(copy["key"].tobytes(), 0, BLOCK_BYTES)
        arena.view(0, int(copy["host"]))[:] = np.frombuffer(data, np.uint8)


def wipe(arena, copies):
    for copy in copies:
        arena.view(0, int(copy["host"]))[:] = 0xA5


def store(tier, arena, numbers, first=0):
    """Write blocks; (copies, status)."""
    copies = copies_of(numbers, first)
    fill(arena, copies)
    return copies, tier.write(copies, arena).tolist()


def load(tier, arena, copies):
    """Read into wiped slots and compare by bytes; the statuses."""
    wipe(arena, copies)
    status = tier.read(copies, arena).tolist()
    for copy, outcome in zip(copies, status, strict=True):
        if outcome == 0:
            want = payload(copy["key"].tobytes(), 0, BLOCK_BYTES)
            assert arena.view(0, int(copy["host"])).tobytes() == want
    return status


ALWAYS = (1 << 64) - 1


def io_faults(ops, end, calls=ALWAYS, error=5):
    """Arm the shim of this process: bit n of `calls` = the n-th such call from now fails."""
    ctypes.CDLL(None).io_faults_set(ops, end.encode(), ctypes.c_ulong(calls), error)


def run_child(script, *args, preload=None, check=True):
    """Run `script` in a new interpreter with this module's names; its output."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    if preload is not None:
        env["LD_PRELOAD"] = str(preload)
    code = "import sys\nfrom disk_world import *\nfolder = sys.argv[1]\n" + script
    command = [sys.executable, "-X", "faulthandler", "-c", code, *map(str, args)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)
    if check:
        assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr
