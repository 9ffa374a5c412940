"""The disk tier over starts: what is found again, by whom, and what is forgotten."""

from __future__ import annotations

import errno
import logging
import os
import random
import signal
import subprocess
import sys

import msgpack
import numpy as np
import pytest
from disk_world import (
    BLOCK_BYTES,
    PER_SLAB,
    ROOT,
    SLAB_BYTES,
    copies_of,
    fill,
    load,
    make_arena,
    open_tier,
    run_child,
    store,
)

from kvoffload.arena import HostArena
from kvoffload.errors import TierError
from kvoffload.messages import RECORD_DTYPE
from kvoffload.testing.blocks import make_key, make_layout
from kvoffload.tiers.table import TABLE_DTYPE, decode_manifest, encode_manifest


@pytest.fixture
def arena():
    arena = make_arena()
    yield arena
    arena.close()


@pytest.fixture
def tier(tmp_path):
    tier = open_tier(tmp_path)
    yield tier
    tier.close()


def test_DISK_10_a_restart_finds_everything(tmp_path, arena):
    """A hundred blocks before, a hundred hits after, none written; seq, depth and parent are kept."""
    tier = open_tier(tmp_path)
    copies, _ = store(tier, arena, range(100))
    tier.close()
    tier = open_tier(tmp_path)
    records = tier.records()
    assert records.dtype == RECORD_DTYPE
    assert records["slot"].tolist() == copies["disk"].tolist()
    for name in ("key", "seq", "depth", "parent", "group"):
        assert records[name].tolist() == copies[name].tolist()
    assert copies["parent"][5] == int.from_bytes(make_key(4)[:4], "little")
    assert load(tier, arena, copies) == [0] * 100
    assert tier.counters()["blocks_written"] == 0
    tier.close()


def test_a_restart_on_a_full_drive_finds_everything(tmp_path, arena, monkeypatch):
    """All that the tier needs is there: neither the manifest nor the lock needs another byte."""
    copies = copies_of(range(4))
    fill(arena, copies)
    with_tier = open_tier(tmp_path)
    assert (with_tier.write(copies, arena) == 0).all()
    with_tier.close()

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name in ("write", "pwrite"):
        monkeypatch.setattr(os, name, full)
    again = open_tier(tmp_path)
    monkeypatch.undo()
    assert len(again.records()) == 4
    assert (again.read(copies, arena) == 0).all()
    again.close()


def test_DISK_10_more_and_fewer_slabs(tmp_path, arena):
    """A restart with more slabs keeps all blocks, one with fewer those of the slabs that stay."""
    tier = open_tier(tmp_path)
    copies, _ = store(tier, arena, range(100))
    tier.close()
    for slabs, kept in ((5, 100), (1, PER_SLAB), (2, PER_SLAB)):
        tier = open_tier(tmp_path, slabs=slabs)
        assert len(tier.records()) == kept
        assert load(tier, arena, copies) == [0] * kept + [1] * (100 - kept)
        assert (tmp_path / "rank" / "slots").stat().st_size == slabs * SLAB_BYTES + 4096
        tier.close()


def test_DISK_10_start_reads_no_payload(tmp_path):
    """The inventory comes from the table: a start beside unreadable slots still lists all blocks."""
    tier, arena = open_tier(tmp_path), make_arena()
    store(tier, arena, range(100))
    tier.close()
    arena.close()
    script = "\n".join(
        (
            "import os, kvoffload.tiers.files",
            "real = os.preadv",
            "os.preadv = lambda *args: 0",
            "tier = open_tier(folder)",
            "print(len(tier.records()), tier.counters()['blocks_read'])",
        )
    )
    assert run_child(script, tmp_path).splitlines() == ["100 0"]


def test_a_slab_with_two_groups_counts_as_free(tmp_path):
    """Valid records of two groups in one slab, which only a power failure leaves, are not listed."""
    layout = make_layout(5000, 9000)
    arena = HostArena(SLAB_BYTES, 2, layout)
    tier = open_tier(tmp_path, layout=layout)
    copies = copies_of(range(4))
    copies["group"] = [0, 0, 1, 1]
    copies["disk"] = [0, 1, 1 << 16, (1 << 16) + 1]
    copies["host"] = [0, 1, 1 << 16, (1 << 16) + 1]
    assert tier.write(copies, arena).tolist() == [0] * 4
    tier.close()
    per_slab = SLAB_BYTES // 8192
    with (tmp_path / "rank" / "table").open("r+b", buffering=0) as file:
        strange = os.pread(file.fileno(), 64, per_slab * 64)
        os.pwrite(file.fileno(), strange, 5 * 64)
    tier = open_tier(tmp_path, layout=layout)
    assert sorted(tier.records()["slot"].tolist()) == [1 << 16, (1 << 16) + 1]
    assert tier.write(copies[:1], arena).tolist() == [0]
    tier.close()
    tier = open_tier(tmp_path, layout=layout)
    assert sorted(tier.records()["slot"].tolist()) == [0, 1 << 16, (1 << 16) + 1]
    tier.close()
    arena.close()


KILLED = """
import itertools
tier, arena = open_tier(folder), make_arena()
for turn in itertools.count(int(sys.argv[2])):
    copies, status = store(tier, arena, range(turn * 8, turn * 8 + 8), turn % 12 * 8)
    assert status == [0] * 8
    print(turn, flush=True)
"""


def test_DISK_11_killed_while_writing(tmp_path, arena):
    """SIGKILL at random moments: the lock is free, completed blocks hit, whatever hits is right."""
    chosen, turn, acknowledged = random.Random(5), 0, {}
    for _ in range(6):
        turn, done = killed_after(tmp_path, turn, chosen.randrange(1, 30))
        acknowledged.update({t % 12: t for t in done})
        tier = open_tier(tmp_path)
        assert sorted(os.listdir(tier.directory)) == ["lock", "manifest.msgpack", "slots", "table"]
        for place, last in acknowledged.items():
            copies = copies_of(range(last * 8, last * 8 + 8), place * 8)
            status = load(tier, arena, copies)
            if place != turn % 12:  # the killed turn may have been overwriting this place
                assert status == [0] * 8
        assert check_listed(tier, arena) >= 8 * (len(acknowledged) - 1)
        tier.close()


def killed_after(folder, turn, lines):
    """Run the writer from `turn` on, kill it after so many lines; (turn it was in, turns done)."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    code = "import sys\nfrom disk_world import *\nfolder = sys.argv[1]\n" + KILLED
    command = [sys.executable, "-c", code, str(folder), str(turn)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as writer:
        for _ in range(lines):
            writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
        last = turn + lines - 1
        for line in writer.stdout:
            last = int(line)
    return last + 1, range(turn, last + 1)


def check_listed(tier, arena):
    """Read every listed block; the number that hit. `load` compares bytes."""
    hits = 0
    for record in tier.records():
        copies = copies_of([0])
        copies["key"][0], copies["disk"][0] = record["key"], record["slot"]
        hits += load(tier, arena, copies) == [0]
    return hits


def test_one_owner(tier, tmp_path):
    """A second open fails naming the holder's process; after close the directory is free."""
    with pytest.raises(TierError, match=f"in use by process {os.getpid()}"):
        open_tier(tmp_path)
    out = run_child("try:\n    open_tier(folder)\nexcept OSError as error:\n    print(error)", tmp_path)
    assert f"in use by process {os.getpid()}" in out
    tier.close()
    open_tier(tmp_path).close()


OTHERS = {
    "version": lambda m: msgpack.packb({**msgpack.unpackb(m), "version": 2}),
    "no map": lambda m: msgpack.packb([1, 2]),
    "garbage": lambda m: bytes(range(200)),
    "empty": lambda m: b"",
    "long": lambda m: m + b"\0" * (2 << 20),
    "huge slabs": lambda m: msgpack.packb({**msgpack.unpackb(m), "slabs": 1 << 62}),
    "bad groups": lambda m: msgpack.packb({**msgpack.unpackb(m), "groups": [[5, 4]]}),
    "one more": lambda m: msgpack.packb({**msgpack.unpackb(m), "extra": 2}),
}


@pytest.mark.parametrize("change", OTHERS)
def test_a_manifest_that_cannot_be_used(tmp_path, arena, caplog, change):
    """Another version or anything else in the manifest: one clear warning, then an empty tier that works."""
    tier = open_tier(tmp_path)
    copies, _ = store(tier, arena, range(3))
    tier.close()
    path = tmp_path / "rank" / "manifest.msgpack"
    path.write_bytes(OTHERS[change](path.read_bytes()))
    with caplog.at_level(logging.WARNING):
        tier = open_tier(tmp_path)
    assert len(caplog.records) == 1
    assert "counts as empty" in caplog.text
    assert ("version 2" in caplog.text) == (change == "version")
    assert len(tier.records()) == 0
    assert load(tier, arena, copies) == [1] * 3
    assert store(tier, arena, range(3))[1] == [0] * 3
    tier.close()
    decode_manifest(path.read_bytes())


def test_manifest_round_trip(tmp_path):
    """A manifest decodes to what was encoded."""
    open_tier(tmp_path).close()
    data = (tmp_path / "rank" / "manifest.msgpack").read_bytes()
    assert encode_manifest(decode_manifest(data)) == data


def test_QNT_01_another_type_is_another_tier(tmp_path, arena, caplog):
    """Blocks of another namespace (dtype) or of another size are not read, and the log says what differs."""
    tier = open_tier(tmp_path)
    copies, _ = store(tier, arena, range(3))
    tier.close()
    for options, word in (
        ({"namespace": b"m" * 16}, "namespace"),
        ({"layout": make_layout(BLOCK_BYTES + 1)}, "groups"),
    ):
        caplog.clear()
        tier = open_tier(tmp_path, **options)
        assert f"{word} is " in caplog.text
        assert len(tier.records()) == 0
        tier.close()
        tier = open_tier(tmp_path)
        assert load(tier, arena, copies) == [1] * 3
        store(tier, arena, range(3))
        tier.close()


def test_without_checksums_nothing_outlives_the_process(tmp_path, arena):
    """checksum=False serves what this process wrote and forgets it at the next start, in both directions."""
    tier = open_tier(tmp_path, checksum=False)
    copies, _ = store(tier, arena, range(3))
    assert load(tier, arena, copies) == [0] * 3
    copies["key"][0] = copies["key"][1]
    assert tier.read(copies[:1], arena).tolist() == [1]
    tier.close()
    for checksum in (True, False):
        tier = open_tier(tmp_path, checksum=checksum)
        assert len(tier.records()) == 0
        assert load(tier, arena, copies_of(range(3))) == [1] * 3
        store(tier, arena, range(3))
        tier.close()


def test_reset_is_another_epoch(tier, arena):
    """Records of before a reset are invalid even where they still lie in the table."""
    copies, _ = store(tier, arena, range(3))
    tier.reset()
    table = np.fromfile(tier.directory / "table", TABLE_DTYPE)
    assert (table["magic"][:3] == 0x564B).all()
    assert load(tier, arena, copies) == [1] * 3
    store(tier, arena, [2], 2)
    assert load(tier, arena, copies) == [1, 1, 0]
