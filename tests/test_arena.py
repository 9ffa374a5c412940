"""Host slabs: addresses, limits, lifetime."""

from __future__ import annotations

import os

import pytest
from disk_world import run_child

from kvoffload.arena import HostArena, available_host_bytes
from kvoffload.errors import ConfigError
from kvoffload.testing.blocks import make_layout

SLAB_BYTES = 1 << 20


@pytest.fixture
def arena():
    arena = HostArena(SLAB_BYTES, 3, make_layout(5000, 100, 0))
    yield arena
    arena.close()


def test_slots_lie_where_the_layout_says(arena):
    """Slot (slab, index) of a group begins at slab * slab bytes + index * slot bytes."""
    assert arena.base % 4096 == 0
    for group, slot_bytes in ((0, 8192), (1, 4096)):
        for slab in range(3):
            for index in (0, 1, SLAB_BYTES // slot_bytes - 1):
                want = arena.base + slab * SLAB_BYTES + index * slot_bytes
                assert arena.address(group, slab << 16 | index) == want
                assert arena.view(group, slab << 16 | index).ctypes.data == want
    assert arena.view(0, 0).shape == (5000,)


@pytest.mark.parametrize(
    ("group", "slot"), [(0, -1), (0, 3 << 16), (0, 128), (1, 256), (2, 0), (3, 0), (-1, 0)]
)
def test_slots_that_do_not_exist(arena, group, slot):
    """IndexError, never an address: negative, behind the slab or the arena, an absent or unknown group."""
    with pytest.raises(IndexError):
        arena.address(group, slot)
    with pytest.raises(IndexError):
        arena.view(group, slot)


def test_prefault_keeps_the_content(arena):
    """Backing the slabs changes no byte."""
    arena.view(0, 2)[:] = 7
    arena.prefault(threads=3)
    assert (arena.view(0, 2) == 7).all()
    assert (arena.view(0, 3) == 0).all()


def test_close(arena):
    """Close is idempotent; a view that is still alive stays readable; new ones are refused."""
    view = arena.view(0, 0)
    view[:] = 9
    arena.close()
    arena.close()
    assert (view == 9).all()
    with pytest.raises(ValueError, match="closed"):
        arena.view(0, 0)


@pytest.mark.parametrize(("slab_bytes", "slabs"), [(0, 1), (4095, 1), (4096, 0), (-4096, 1)])
def test_impossible_slabs(slab_bytes, slabs):
    """Sizes that cannot be are errors that name the value."""
    with pytest.raises(ConfigError, match=str(slab_bytes if slabs else slabs)):
        HostArena(slab_bytes, slabs, make_layout(1))


def test_MEM_05_more_than_there_is():
    """A mapping larger than memory is a ConfigError with needed and available bytes, not a signal later."""
    with pytest.raises(ConfigError) as error:
        HostArena(1 << 30, 1 << 14, make_layout(1))
    assert f"{1 << 44} bytes are needed" in str(error.value)
    needed, available = (int(word) for word in str(error.value).split() if word.isdigit())
    assert 0 < available < needed


def test_MEM_05_a_limit_of_the_process(tmp_path):
    """A mapping that the kernel refuses is a ConfigError too."""
    if "asan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("the address sanitizer's own mappings do not fit into the limit")
    script = "\n".join(
        (
            "import resource",
            "from kvoffload.errors import ConfigError",
            "resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))",
            "try:",
            "    make_arena(1 << 12)",
            "except ConfigError as error:",
            "    print(error)",
        )
    )
    assert f"{1 << 32} bytes are needed" in run_child(script, tmp_path)


MEMINFO = "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    800 kB\n"


def machine(root, cgroup, files):
    """A fake /proc and /sys."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(MEMINFO)
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2 = "0::/a/b\n"
V1 = "5:cpu:/x\n4:memory:/c\n"


@pytest.mark.parametrize(
    ("cgroup", "files", "want"),
    [
        (V2, {}, 800 << 10),
        (V2, {"a/b/memory.max": "max\n", "a/b/memory.current": "5\n"}, 800 << 10),
        (V2, {"a/b/memory.max": "100000\n", "a/b/memory.current": "30000\n"}, 70_000),
        (V2, {"a/memory.max": "100000\n", "a/memory.current": "30000\n"}, 70_000),
        (V2, {"memory.max": "50\n", "memory.current": "70\n"}, 0),
        (
            V2,
            {
                "a/memory.max": "100000\n",
                "a/memory.current": "90000\n",
                "a/memory.stat": "anon 1\ninactive_file 20000\n",
            },
            30_000,
        ),
        (
            V1,
            {"memory/c/memory.limit_in_bytes": "9000\n", "memory/c/memory.usage_in_bytes": "1000\n"},
            8000,
        ),
        (
            V1,
            {
                "memory/c/memory.limit_in_bytes": f"{(1 << 63) - 4096}\n",
                "memory/c/memory.usage_in_bytes": "1\n",
            },
            800 << 10,
        ),
    ],
)
def test_MEM_05_cgroup_limits_count(tmp_path, cgroup, files, want):
    """The tightest limit of the process's cgroup and those above it bounds what is there; never below 0."""
    assert available_host_bytes(machine(tmp_path, cgroup, files)) == want
