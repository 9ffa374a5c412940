"""TOPO-02 of docs/cases.md between processes: host memory and disk of ranks with equal bytes, and who dies when."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from process_world import SLAB, Remote, fetch, layout_of, starts, store, together

from kvoffload.errors import ConfigError
from kvoffload.requests import RequestInfo
from kvoffload.shared import FOLDER, Member, SharedTiers
from kvoffload.sizing import Slabs
from kvoffload.testing.rig import Keys

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

CHAIN = Keys.of(range(60))
BYTES = 60 * 8192 + 3 * 4096
"""Of the chain: all of its full blocks, and the windows that its end takes."""


@pytest.fixture
def folder():
    """A folder in memory."""
    made = Path(tempfile.mkdtemp(prefix="test-", dir=FOLDER))
    yield made
    shutil.rmtree(made)


@pytest.mark.parametrize("way", ["fork", "spawn"])
@pytest.mark.parametrize("count", [2, 4])
def test_TOPO_02_processes_store_once_and_each_loads_it(folder, tmp_path, way, count):
    """Members have one memory and one disk directory between them: each block is stored once, every member loads the
    right bytes, also a new set from disk alone, and after a reset nobody finds anything."""
    more = {"disk": tmp_path / "d"}
    with together([Remote(s, way) for s in starts("one", count, folder, **more)]) as local:
        assert list(folder.iterdir()) == []
        mapped = [remote.ask("mapping") for remote in local.movers]
        assert mapped == [mapped[0]] * count
        assert mapped[0][0] == SLAB * (20 + 2 * count)
        store(local, CHAIN)
        assert fetch(local, CHAIN) == 0
        assert local.planner.counters["store_bytes_host"] == BYTES
        assert local.planner.counters["store_bytes_disk"] == BYTES
    assert sorted(p.name for p in (tmp_path / "d").iterdir()) == [
        "lock",
        "manifest.msgpack",
        "slots",
        "table",
    ]
    with together([Remote(s, way) for s in starts("two", count, folder, **more)]) as local:
        assert local.planner.counters["restored"] == 63
        assert fetch(local, CHAIN) == 0
        assert local.planner.counters["loaded_disk"] == 63
        local.planner.reset()
        local.drain()
        assert local.planner.match(RequestInfo("c"), CHAIN).boundary == 0
        store(local, CHAIN)
        local.planner.reset(["host"])
        assert fetch(local, CHAIN) == 0, "readers follow the owner's reset"
        assert local.planner.counters["loaded_disk"] == 126
        local.planner.reset()
        local.drain()
    with together([Remote(s, way) for s in starts("three", count, folder, **more)]) as local:
        assert local.planner.counters["restored"] == 0


def test_TOPO_02_a_prompt_longer_than_host_goes_through_each_members_transit(folder, tmp_path):
    """Blocks that host does not keep pass through transit slots, which every process has for itself."""
    sizes = Slabs(SLAB, 4, 2, 60)
    chain = Keys.of(range(300))
    with together([Remote(s) for s in starts("one", 2, folder, disk=tmp_path, slabs=sizes)]) as local:
        store(local, chain)
        assert local.planner.match(RequestInfo("c"), chain).disk > 200
        assert fetch(local, chain) == 0


def test_without_a_disk_memory_is_shared_alone(folder):
    """No directory and no transit: one memory, stored once, loaded right."""
    with together([Remote(s) for s in starts("one", 2, folder)]) as local:
        assert local.movers[0].ask("mapping")[0] == SLAB * 20
        store(local, CHAIN)
        assert fetch(local, CHAIN) == 0
        assert local.planner.counters["store_bytes_host"] == BYTES


def test_the_first_member_may_come_last(folder, tmp_path):
    """The others wait for it, and then have its memory; where it never comes, an error says what was waited for."""
    first, *others = starts("late", 3, folder, disk=tmp_path)
    waiting = [Remote(s) for s in others]
    assert all(remote.quiet(0.3) for remote in waiting)
    with together([Remote(first), *waiting]) as local:
        store(local, CHAIN)
        assert fetch(local, CHAIN) == 0
    (alone,) = starts("never", 2, folder, timeout=0.2)[1:]
    kind, message = Remote(alone).hear()
    assert kind == "TierError"
    assert "kvoffload-never: the first of the ranks that share host memory was not ready in 0.2 s" in message
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("victim", [0, 1])
def test_a_member_that_is_killed_when_all_run_leaves_nothing_behind(folder, tmp_path, victim):
    """What it mapped stays with the others, whole; the folder is empty already, and the next set on the same directory
    serves what was written."""
    remotes = [Remote(s) for s in starts("one", 2, folder, disk=tmp_path)]
    local = together(remotes)
    store(local, CHAIN)
    remotes[victim].kill()
    assert list(folder.iterdir()) == []
    other = remotes[1 - victim]
    other.ask("compute", CHAIN)
    assert other.ask("wrong", CHAIN) == 0
    other.close()
    with together([Remote(s) for s in starts("two", 2, folder, disk=tmp_path)]) as local:
        assert local.planner.counters["restored"] == 63
        assert fetch(local, CHAIN) == 0


def test_a_member_that_is_killed_before_it_has_come_leaves_what_its_first_member_removes(folder):
    """The folder goes when the first member ends, though not all have arrived."""
    first, second = starts("one", 2, folder)
    remote = Remote(first)
    remote.hear()
    dying = Remote(replace(second, hold=True))
    assert dying.hear()[0] == "held"
    dying.kill()
    assert [p.name for p in folder.iterdir()] == ["kvoffload-one"]
    remote.close()
    assert list(folder.iterdir()) == []


def test_what_a_killed_first_member_left_is_swept_by_the_next(folder):
    """Killed before the others came: the memory stays until another set starts, which removes it and nothing that
    somebody still holds; a link is left alone."""
    (first, _), (live, mate) = starts("dead", 2, folder), starts("live", 2, folder)
    dead, alive = Remote(first), Remote(live)
    dead.hear()
    alive.hear()
    dead.kill()
    hidden = folder / ".kvoffload-half.0123abcd"
    hidden.mkdir()
    (hidden / "memory").write_bytes(b"x")
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    (folder / "kvoffload-link").symlink_to(elsewhere)
    with together([Remote(s) for s in starts("new", 2, folder)]):
        left = sorted(p.name for p in folder.iterdir())
        assert left == ["elsewhere", "kvoffload-link", "kvoffload-live"]
    with together([alive, Remote(mate)]) as local:
        store(local, CHAIN)
        assert fetch(local, CHAIN) == 0


def test_nobody_joins_what_a_dead_first_member_left(folder):
    """The same name again, which should not be: who comes before the new first member waits for it, whatever lies
    there, and has its memory."""
    first, second = starts("again", 2, folder)
    dead = Remote(first)
    dead.hear()
    old = dead.token
    dead.kill()
    early = Remote(second)
    assert early.quiet(0.5)
    with together([Remote(first), early]) as local:
        assert local.movers[0].token != old
        store(local, CHAIN)
        assert fetch(local, CHAIN) == 0


def test_two_engines_of_one_name(folder):
    """While the first set is not complete the second is refused; after that it has memory of its own."""
    first, second = starts("same", 2, folder)
    remote = Remote(first)
    remote.hear()
    kind, message = Remote(first).hear()
    assert kind == "ConfigError"
    assert "kvoffload-same is in use by another engine: give each set of ranks a name of its own" in message
    with together([remote, Remote(second)]) as one, together([Remote(first), Remote(second)]) as other:
        assert one.movers[0].token != other.movers[0].token
        store(one, CHAIN)
        store(other, Keys.of(range(500, 560)))
        assert fetch(one, CHAIN) == 0
        assert fetch(other, Keys.of(range(500, 560))) == 0


def test_members_of_other_sizes_are_refused(folder, tmp_path):
    """A member with fewer slabs, and one with another disk, say what differs."""
    first, second = starts("sizes", 2, folder, disk=tmp_path, slabs=Slabs(SLAB, 20, 2, 60))
    remote = Remote(first)
    remote.hear()
    kind, message = Remote(replace(second, slabs=Slabs(SLAB, 19, 2, 60))).hear()
    assert kind == "ConfigError"
    assert f"memory has {SLAB * 24} bytes, {SLAB * 23} are to be" in message
    kind, message = Remote(replace(second, slabs=Slabs(SLAB, 20, 2, 59))).hear()
    assert kind == "TierError"
    assert "ranks with equal bytes need one layout" in message
    remote.close()
    assert list(folder.iterdir()) == []


def test_a_full_file_system_is_an_error_at_start(folder, monkeypatch):
    """Room is taken before anything is used, so a full /dev/shm is no signal later; nothing is left there."""

    def full(file, offset, nbytes):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        ConfigError, match=r"bytes of host memory are to be shared and \d+ are free there; lower"
    ):
        SharedTiers(Member("full", 0, 2), layout_of(2), Slabs(SLAB, 20, 0, 0), folder=folder)
    assert list(folder.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system takes root")
def test_a_small_file_system_is_an_error_at_start(tmp_path):
    """The same on a real one of 1 MiB: what is needed and what is free are named, and the next smaller set fits."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no mounts here: {mounted.stderr!r}")
    try:
        with pytest.raises(
            ConfigError, match=f"{SLAB * 20} bytes .* are to be shared and 10[0-9]{{5}} are free"
        ):
            SharedTiers(Member("full", 0, 2), layout_of(2), Slabs(SLAB, 20, 0, 0), folder=tmp_path)
        assert list(tmp_path.iterdir()) == []
        small = SharedTiers(Member("small", 0, 1), layout_of(1), Slabs(SLAB, 8, 0, 0), folder=tmp_path)
        small.arena.prefault()
        small.close()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_names_and_places_are_checked():
    """What could not be a file's name, and members that do not exist."""
    for name in ("", "-", "a/b", "a.b", "\u00e4"):
        with pytest.raises(ConfigError, match="give letters, digits, - and _"):
            Member(name, 0, 2)
    for index, count in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ConfigError, match="members count from 0"):
            Member("a", index, count)


def test_groups_with_other_numbers_of_replicas_are_refused(folder):
    """Ranks whose bytes differ would overwrite each other's."""
    with pytest.raises(ConfigError, match=r"3 ranks cannot share groups \[0, 1\]"):
        SharedTiers(Member("a", 0, 3), layout_of(2), Slabs(SLAB, 8, 0, 0), folder=folder)
    assert list(folder.iterdir()) == []
