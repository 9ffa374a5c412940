"""The disk tier on a medium that fails: the operating system's answers are replaced under a process."""

from __future__ import annotations

import os
import shutil
import subprocess
import textwrap

import pytest
from disk_world import (
    ROOT,
    SHORT,
    SLAB_BYTES,
    SLABS,
    SLOT_BYTES,
    WRITE,
    copies_of,
    load,
    make_arena,
    open_tier,
    run_child,
    store,
)

SHIM = ROOT / "tests" / "native" / "io_faults.c"


@pytest.fixture(scope="session")
def shim(tmp_path_factory):
    """The fault injector, compiled."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    library = tmp_path_factory.mktemp("shim") / "io_faults.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SHIM, "-ldl", "-pthread"], check=True)
    return library


def child(script, *args, **options):
    return run_child(textwrap.dedent(script), *args, **options)


@pytest.mark.parametrize("where", ["slots", "table"])
def test_DISK_01_a_failed_write_is_never_visible(tmp_path, shim, where):
    """EIO on one of three writes: two keys hit, the failed one misses and counts, the retry works."""
    script = """
        tier, arena = open_tier(folder), make_arena()
        copies = copies_of([1, 2, 3])
        copies["disk"] = [slot(0), slot(20), slot(40)]  # apart: three transfers
        fill(arena, copies)
        io_faults(WRITE, sys.argv[2], calls=0b10)
        status = tier.write(copies, arena).tolist()
        print(sorted(status), tier.counters()["io_errors"], tier.counters()["last_errno"], tier.healthy)
        failed = status.index(2)
        print([s for s in load(tier, arena, copies)] == [1 if n == failed else 0 for n in range(3)])
        fill(arena, copies)
        print(tier.write(copies[failed:failed + 1], arena).tolist(), load(tier, arena, copies))
        """
    out = child(script, tmp_path, where, preload=shim).splitlines()
    assert out == ["[0, 0, 2] 1 5 True", "True", "[0] [0, 0, 0]"]


def test_DISK_01_one_bad_slot_of_a_run(tmp_path, shim):
    """Adjacent slots move in one call; when it fails they go one by one, and only the bad one fails."""
    script = """
        tier, arena = open_tier(folder), make_arena()
        copies = copies_of(range(8))
        fill(arena, copies)
        io_faults(WRITE, "slots", calls=0b1001)  # the run, and its third slot
        print(tier.write(copies, arena).tolist(), load(tier, arena, copies))
        fill(arena, copies)
        print(tier.write(copies, arena).tolist())
        io_faults(READ, "slots", calls=0b100001)
        print(load(tier, arena, copies), load(tier, arena, copies))
        """
    out = child(script, tmp_path, preload=shim).splitlines()
    third, fifth, none = ([n * (i == bad) for i in range(8)] for n, bad in ((2, 2), (1, 4), (0, 0)))
    missing = [int(i == 2) for i in range(8)]
    assert out == [f"{third} {missing}", str(none), f"{fifth} {none}"]


@pytest.mark.parametrize(("where", "ops"), [("slots", WRITE | SHORT), ("table", WRITE)])
def test_DISK_02_a_write_that_breaks_off(tmp_path, shim, where, ops):
    """An overwrite that ends in the payload or before its record: both keys miss, also after a restart."""
    script = """
        tier, arena = open_tier(folder), make_arena()
        old, _ = store(tier, arena, [1])
        io_faults(int(sys.argv[3]), sys.argv[2], calls=1)
        new, status = store(tier, arena, [2])
        print(status, load(tier, arena, old), load(tier, arena, new))
        tier.close()
        tier = open_tier(folder)
        print(load(tier, arena, old), load(tier, arena, new))
        """
    out = child(script, tmp_path, where, ops, preload=shim).splitlines()
    assert out == ["[2] [1] [1]", "[1] [1]"]


def test_QNT_03_a_block_without_its_last_part(tmp_path, shim):
    """The part of a payload that is written last, such as scales, fails: the block is not visible."""
    script = """
        tier, arena = open_tier(folder, direct=False), make_arena()
        io_faults(WRITE | SHORT, "slots", calls=1)
        copies, status = store(tier, arena, [7])
        print(status, load(tier, arena, copies))
        """
    assert child(script, tmp_path, preload=shim).splitlines() == ["[2] [1]"]


def test_DISK_03_no_room_at_start(tmp_path, shim):
    """ENOSPC while slots are reserved: TierError with needed and available bytes, no space or lock kept."""
    script = """
        from kvoffload.errors import TierError
        io_faults(ALLOCATE, "slots", error=28)
        try:
            open_tier(folder)
        except TierError as error:
            print(error)
        io_faults(ALLOCATE, "slots", calls=0)
        print((Path(folder) / "rank" / "slots").stat().st_size, open_tier(folder).slabs)
        """
    out = child(script, tmp_path, preload=shim).splitlines()
    assert f"{SLABS * SLAB_BYTES + 4096} bytes are needed and " in out[0]
    assert "lower disk_bytes" in out[0]
    assert out[1:] == [f"0 {SLABS}"]


def test_DISK_03_a_real_limit_at_start(tmp_path):
    """A file size limit of the process is an error with both numbers, not a signal."""
    script = """
        import resource
        from kvoffload.errors import TierError
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            open_tier(folder)
        except TierError as error:
            print(error)
        """
    assert "bytes are needed and" in child(script, tmp_path)


def test_DISK_03_read_only(tmp_path, shim):
    """A file system that turned read-only is an error naming the path."""
    script = """
        from kvoffload.errors import TierError
        io_faults(OPEN, "slots", error=30)
        try:
            open_tier(folder)
        except TierError as error:
            print(error)
        """
    out = child(script, tmp_path, preload=shim)
    assert "Read-only file system" in out
    assert str(tmp_path) in out


def test_DISK_08_no_direct_io(tmp_path, shim):
    """A file system that refuses O_DIRECT, at open or first read: one warning, buffered, same bytes."""
    script = """
        arena = make_arena()
        io_faults(int(sys.argv[2]), "slots", calls=1, error=22)
        tier = open_tier(folder)
        copies, status = store(tier, arena, range(30))
        print(tier.direct, set(status), set(load(tier, arena, copies)))
        """
    for op in (8, 2):
        out = child(script, tmp_path, op, preload=shim).splitlines()
        assert out[0] == "False {0} {0}"
        assert len(out) == 2
        assert "refuses O_DIRECT" in out[1]


def test_failures_in_a_row_switch_off_until_a_probe_works(tmp_path, shim):
    """Three slots in a row fail: not healthy. A probe fails on the broken medium, not on the mended."""
    script = """
        tier, arena = open_tier(folder), make_arena()
        io_faults(WRITE, sys.argv[2], error=5)
        seen = []
        for n in range(3):
            copies, status = store(tier, arena, [n], n)
            seen.append((status, tier.healthy))
        print(seen, tier.probe(), tier.healthy)
        io_faults(WRITE, sys.argv[2], calls=0)
        print(tier.healthy, tier.probe(), tier.healthy, store(tier, arena, [5])[1])
        """
    for where in ("slots", "table"):
        out = child(script, tmp_path, where, preload=shim).splitlines()
        assert out[0] == "[([2], True), ([2], True), ([2], False)] False False"
        assert out[1] == "False True True [0]"


def test_success_between_failures_keeps_the_tier_on(tmp_path, shim):
    """Failures that are not consecutive never switch the tier off; reads count as writes do."""
    script = """
        tier, arena = open_tier(folder), make_arena()
        copies, _ = store(tier, arena, [1])
        for n in range(4):
            for m in range(2):
                io_faults(READ, "slots", calls=1)
                assert load(tier, arena, copies) == [1]
            assert load(tier, arena, copies) == [0]
        print(tier.healthy, tier.counters()["io_errors"], tier.counters()["mismatches"])
        io_faults(READ, "slots", calls=0b111)
        print([load(tier, arena, copies)[0] for n in range(4)], tier.healthy)
        """
    assert child(script, tmp_path, preload=shim).splitlines() == ["True 8 0", "[1, 1, 1, 0] False"]


def test_DISK_14_a_file_that_is_cut_short(tmp_path):
    """A slot file truncated under the tier: reads miss without an exception, writes work again."""
    tier, arena = open_tier(tmp_path), make_arena()
    copies, _ = store(tier, arena, range(10))
    os.truncate(tmp_path / "rank" / "slots", 3 * SLOT_BYTES + 4096)
    assert load(tier, arena, copies) == [0] * 3 + [1] * 7
    assert tier.counters()["io_errors"] == 7
    assert store(tier, arena, range(10))[1] == [0] * 10
    assert load(tier, arena, copies_of(range(10))) == [0] * 10
    tier.close()
    arena.close()


@pytest.mark.parametrize("name", ["slots", "table", "manifest.msgpack"])
def test_DISK_14_a_file_that_is_unlinked(tmp_path, name):
    """Unlinked while open: still served. Gone at the next start: a miss, nothing else."""
    tier, arena = open_tier(tmp_path), make_arena()
    copies, _ = store(tier, arena, range(10))
    (tmp_path / "rank" / name).unlink()
    assert load(tier, arena, copies) == [0] * 10
    tier.close()

    again = open_tier(tmp_path)
    assert len(again.records()) == 0
    assert load(again, arena, copies) == [1] * 10
    assert again.healthy
    again.close()
    arena.close()
