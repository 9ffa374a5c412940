"""`kvoffload doctor`: what it says about builds, machines and disks that are as they should be, and that are not."""

from __future__ import annotations

import errno
import json
import os
import resource

import pytest
from typer.testing import CliRunner

from kvoffload.cli import app
from kvoffload.doctor import build, disk, machine
from kvoffload.doctor.commands import report
from kvoffload.doctor.disk import look_at_disk
from kvoffload.doctor.finding import Finding
from kvoffload.doctor.machine import look_at_machine
from kvoffload.native import Found

GIB = 1 << 30


@pytest.fixture
def root(tmp_path):
    """The proc/ and sys/ of a machine with nothing wrong."""
    put(tmp_path, "proc/meminfo", f"MemTotal: {64 * GIB >> 10} kB\nMemAvailable: {32 * GIB >> 10} kB\n")
    put(tmp_path, "proc/cpuinfo", "processor : 0\nmodel name : Some   CPU  9000\n")
    put(tmp_path, "proc/self/cgroup", "0::/pod/engine\n")
    put(tmp_path, "sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
    return tmp_path


def put(root, path, text):
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def seen(findings):
    """(value, advice) by name."""
    return {f.name: (f.value, f.advice) for f in findings}


def test_a_good_machine(root):
    """Figures of the files, and no advice on what they say."""
    found = seen(look_at_machine(root))

    assert found["CPU"] == ("Some CPU 9000", "")
    assert found["memory"] == ("32GiB of 64GiB available", "")
    assert found["host_bytes=auto"] == ("16GiB now", "")
    assert found["cgroup memory"] == ("no limit", "")
    assert found["huge pages"] == ("transparent, madvise", "")
    assert found["cgroup I/O"] == ("no limit", "")


def test_a_small_container(root):
    """The smallest limit of all cgroups above counts: memory, cores, and I/O with advice."""
    put(root, "sys/fs/cgroup/pod/memory.max", str(3 * GIB))
    put(root, "sys/fs/cgroup/pod/memory.current", str(1 * GIB))
    put(root, "sys/fs/cgroup/pod/engine/memory.max", "max")
    put(root, "sys/fs/cgroup/pod/cpu.max", "150000 100000")
    put(root, "sys/fs/cgroup/pod/engine/cpu.max", "400000 100000")
    put(root, "sys/fs/cgroup/cpu.max", "max 100000")
    put(root, "sys/fs/cgroup/pod/engine/io.max", "259:0 rbps=max wbps=104857600 riops=max wiops=max\n")
    put(root, "sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n")
    found = seen(look_at_machine(root))

    assert found["memory"][0] == "2GiB of 3GiB available"
    assert "raise the container's limit" in found["memory"][1]
    assert found["cgroup memory"] == ("limit 3GiB", "")
    assert found["cores"][0].endswith("cgroup quota 1.5")
    assert "at least 2" in found["cores"][1]
    assert "wbps=104857600" in found["cgroup I/O"][0]
    assert "disk_write_budget" in found["cgroup I/O"][1]
    assert "write madvise to" in found["huge pages"][1]


def test_an_old_container(root):
    """Version 1 of cgroups: each controller has a folder of its own; its "no limit" is a number near 2^63."""
    put(root, "proc/self/cgroup", "5:memory:/box\n3:cpu,cpuacct:/box\n4:blkio:/\n")
    put(root, "sys/fs/cgroup/memory/box/memory.limit_in_bytes", str(8 * GIB))
    put(root, "sys/fs/cgroup/memory/box/memory.usage_in_bytes", str(2 * GIB))
    put(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", str(2**63 - 4096))
    put(root, "sys/fs/cgroup/blkio/blkio.throttle.read_bps_device", "8:0 1048576\n")
    found = seen(look_at_machine(root))

    assert found["memory"][0] == "6GiB of 8GiB available"
    assert found["cgroup memory"][0] == "limit 8GiB"
    assert found["cgroup I/O"][0] == "8:0 1048576"


def test_no_limit_of_the_old_kind(root):
    """The number that version 1 writes for "no limit" is none."""
    put(root, "proc/self/cgroup", "5:memory:/\n")
    put(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", str(2**63 - 4096))
    assert seen(look_at_machine(root))["cgroup memory"] == ("no limit", "")


def test_a_machine_that_says_nothing(tmp_path):
    """Files that are not there limit nothing; only the memory of the machine must be known."""
    put(tmp_path, "proc/meminfo", "MemTotal: 1048576 kB\nMemAvailable: 1048576 kB\n")
    found = seen(look_at_machine(tmp_path))

    assert found["CPU"][0] == os.uname().machine
    assert found["huge pages"][0] == "unknown"
    assert found["cgroup I/O"] == ("no limit", "")


@pytest.mark.parametrize(
    ("look", "soft", "hard", "value", "advice"),
    [
        (machine._pinned, resource.RLIM_INFINITY, resource.RLIM_INFINITY, "no limit", ""),
        (machine._pinned, 8 << 20, resource.RLIM_INFINITY, "limit 8MiB", "ulimit -l unlimited"),
        (machine._pinned, 8 << 20, 8 << 20, "limit 8MiB", "--ulimit memlock=-1"),
        (machine._open_files, 64, 1024, "limit 64", "ulimit -n 1024"),
        (machine._open_files, 1024, 1024, "limit 1,024", ""),
        (machine._file_size, resource.RLIM_INFINITY, resource.RLIM_INFINITY, "no limit", ""),
        (machine._file_size, GIB, GIB, "limit 1GiB", "ulimit -f unlimited"),
    ],
)
def test_limits_of_a_process(look, soft, hard, value, advice):
    """Each limit that hurts says how it is raised; one that does not is only shown."""
    found, said = look(soft, hard)

    assert found == value
    assert advice in said
    assert bool(advice) is bool(said)


def test_the_checksum_says_which_way_it_goes(monkeypatch):
    """Without the CPU's instruction the table works, and doctor says what that costs."""
    monkeypatch.setattr("kvoffload._C.checksum_has_instruction", lambda: True)
    assert seen(build.look_at_build())["_C"] == ("index, CPU copies, disk I/O; CRC32C by instruction", "")
    monkeypatch.setattr("kvoffload._C.checksum_has_instruction", lambda: False)
    value, advice = seen(build.look_at_build())["_C"]
    assert value.endswith("CRC32C by table")
    assert "no CRC32C instruction" in advice


def test_what_is_not_built_is_said_and_why(monkeypatch):
    """An absent native module is named with its compiler; one that does not load with the reason; neither is fatal."""
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    found = {f.name: f for f in build.look_at_build()}
    for name in (*build.GPU_MODULES, *build.PACKAGES):
        assert found[name].state == "optional"
        assert found[name].value.startswith("absent: only for ")
    assert "nvcc" in found["_cuda"].value

    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(build, "load", lambda name: Found(name, None, 0, "libnone.so.1 is missing"))
    monkeypatch.setattr(build.importlib.metadata, "version", lambda name: "1.2")
    found = {f.name: f for f in build.look_at_build()}
    assert found["_hip"].state == "look"
    assert "libnone.so.1 is missing" in found["_hip"].value
    assert found["torch"].value == "1.2"


def test_devices_are_named(monkeypatch):
    """A module without a device says why; with devices, how many and which."""

    class Module:
        def device_info(self, number):
            return "Some GPU", "0000:01:00.0", 1, 1

    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(build.importlib.metadata, "version", lambda name: "1.2")
    monkeypatch.setattr(build, "load", lambda name: Found(name, Module(), 0, "no driver"))
    found = {f.name: f for f in build.look_at_build()}
    assert (found["_cuda"].value, found["_cuda"].state) == ("built; no device: no driver", "optional")
    monkeypatch.setattr(build, "load", lambda name: Found(name, Module(), 2, ""))
    found = {f.name: f for f in build.look_at_build()}
    assert (found["_cuda"].value, found["_cuda"].state) == ("built; 2 x Some GPU", "ok")


def test_a_good_folder(tmp_path):
    """The folder, its file system, room and O_DIRECT; the file that was tried with is gone."""
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        f"2 1 8:2 / {tmp_path.resolve()} rw shared:1 - ext4 /dev/b rw\n"
        "1 0 8:1 / / rw - xfs /dev/a rw\n"
        "3 1 0:9 / /elsewhere rw - tmpfs none rw\n"
    )
    found = seen(look_at_disk(tmp_path, mounts))

    assert found["folder"] == (str(tmp_path.resolve()), "")
    assert found["file system"] == ("ext4", "")
    assert set(os.listdir(tmp_path)) == {"mountinfo"}


@pytest.mark.parametrize(
    ("kind", "advice"), [("tmpfs", "memory"), ("nfs4", "network"), ("btrfs", "copy-on-write"), ("xfs", "")]
)
def test_file_systems(kind, advice, tmp_path):
    """Those that suit badly are named with the reason."""
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"1 0 8:1 / / rw - {kind} /dev/a rw\n")
    value, said = seen(look_at_disk(tmp_path, mounts))["file system"]

    assert value == kind
    assert advice in said
    assert bool(advice) is bool(said)


@pytest.mark.parametrize(
    ("error", "value", "advice"),
    [
        (errno.EINVAL, "refused", "page cache"),
        (errno.EROFS, "not tried", "give another folder"),
        (errno.ENOSPC, "not tried", "give another folder"),
    ],
)
def test_direct_io_that_does_not_work(error, value, advice, tmp_path, monkeypatch):
    """A file system that refuses O_DIRECT is told from one that cannot be written at all."""

    def fail(*args):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(disk.os, "pwritev", fail)
    found, said = seen(look_at_disk(tmp_path))["O_DIRECT"]

    assert found.startswith(value)
    assert advice in said


def test_report_is_80_wide_and_counts_what_is_off():
    """Long values and advice fold; optional things do not count as off."""
    findings = [
        Finding("a", "fine", "x" * 100),
        Finding("a", "missing", "absent", optional=True),
        Finding("b", "wrong", "off", "do this " * 20),
    ]
    from test_bench import capture

    text = capture(report(findings))
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("LOOK") == 1
    assert "1 to look at" in text
    assert "nothing is off" in capture(report(findings[:2]))


def test_the_command(tmp_path):
    """The status is 0 whatever was found; JSON has the same findings as the table, each with its state."""
    printed = CliRunner().invoke(app, ["doctor", "--path", str(tmp_path)])
    as_json = CliRunner().invoke(app, ["doctor", "--path", str(tmp_path), "--json"])
    body = json.loads(as_json.stdout)

    assert (printed.exit_code, as_json.exit_code) == (0, 0)
    assert max(map(len, printed.stdout.splitlines())) <= 80
    assert {f["area"] for f in body["findings"]} == {"built", "machine", "disk"}
    assert all(f["name"] in printed.stdout for f in body["findings"])
    assert body["look"] == sum(f["state"] == "look" for f in body["findings"])
    assert {f["state"] for f in body["findings"]} <= {"ok", "optional", "look"}
