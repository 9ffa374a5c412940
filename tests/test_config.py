"""Configuration: sizes in words, errors that say what to do, and auto sizing inside the limits of the machine."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from kvoffload.config import Config, split_bytes
from kvoffload.errors import ConfigError
from kvoffload.memory import Memory, read_memory
from kvoffload.units import format_size, parse_size

GIB = 1 << 30
DISK = {"host_bytes": "1GiB", "disk_path": "/d", "disk_bytes": "2GB", "model_id": "m"}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64GiB", 64 << 30),
        ("64GB", 64 * 10**9),
        ("1.5 KiB", 1536),
        ("0.1TB", 10**11),
        ("7B", 7),
        (" 0 ", 0),
        ("0.0", 0),
        ("-2MiB", -2 << 20),
        ("4.000000000000000001GB", 4 * 10**9),
    ],
)
def test_sizes_in_words(text, size):
    """Binary and decimal units are what they say, exactly."""
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["64", "64.5", "64gib", "64 G", "GiB", "", "1e9B", "1GiB2", "64i"])
def test_sizes_without_a_unit_are_errors(text):
    """A number alone, or a unit that could mean two things, is refused with what to write instead."""
    with pytest.raises(ValueError, match="write for example"):
        parse_size(text)


@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 3 << 20, 64 << 30, 5 << 40])
def test_sizes_that_are_whole_come_back(size):
    """What is printed for a whole number of units reads back as the same size."""
    assert parse_size(format_size(size)) == size


def test_sizes_that_are_not_whole_show_their_bytes():
    """A rounded size names the exact bytes beside it."""
    assert format_size((1 << 30) + 1) == "1.0GiB (1073741825 bytes)"


def test_config_has_at_most_16_fields_each_with_default_and_reason():
    """The configuration stays small: every field has a default and is explained in the docstring."""
    names = [f.name for f in fields(Config)]

    assert len(names) <= 16
    assert Config() == Config.from_mapping({})
    for name in names:
        assert name in Config.__doc__


def test_mapping_is_parsed():
    """Words become bytes and paths; "auto" and null mean no number."""
    config = Config.from_mapping({**DISK, "disk_write_budget": "10GB", "deadline_s": 2})

    assert (config.host_bytes, config.disk_path, config.disk_bytes) == (GIB, Path("/d"), 2 * 10**9)
    assert (config.disk_write_budget, config.deadline_s) == (10**10, 2)
    assert (
        Config.from_mapping({"host_bytes": "auto"}) == Config.from_mapping({"host_bytes": None}) == Config()
    )
    assert Config.from_mapping({"host_bytes": 0}).host_bytes == 0


def test_OBS_08_unknown_option_is_an_error():
    """A misspelt option is refused, with the nearest name and all that there are."""
    with pytest.raises(ConfigError, match=r"'hostbytes'; did you mean 'host_bytes'\? Known: .*copy_mode"):
        Config.from_mapping({"hostbytes": "1GiB"})


@pytest.mark.parametrize(
    "option",
    [
        {"disk_bytes": "1GiB"},
        {"disk_admission": 2},
        {"disk_write_budget": "1GB"},
        {"checksum": False},
    ],
)
def test_OBS_08_option_without_effect_is_an_error(option):
    """An option of the disk without a disk is refused by name, and accepted with one."""
    with pytest.raises(ConfigError, match=rf"{next(iter(option))} has no effect without disk_path"):
        Config.from_mapping(option)
    Config.from_mapping({**DISK, **option})


def test_OBS_08_effective_configuration_is_shown():
    """One line and one mapping name every option as it is in force."""
    config = Config.from_mapping(DISK)

    assert list(config.effective()) == [f.name for f in fields(Config)]
    assert config.effective()["disk_path"] == "/d"
    for word in (
        "host_bytes=1GiB",
        "disk_bytes=1.9GiB",
        "hash=sha256",
        'tenant=""',
        "disk_write_budget=none",
    ):
        assert word in str(config)
    assert "\n" not in str(config)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"host_bytes": 64}, "host_bytes: '64' has no unit; write for example 64GiB"),
        ({"host_bytes": "64GIB"}, "unknown unit 'GIB'"),
        ({"host_bytes": "-1GiB"}, "host_bytes is -1073741824; it must be None or a whole number >= 0"),
        ({"host_bytes": True}, "host_bytes: 'True' is not a size"),
        ({"disk_bytes": "auto"}, "disk_bytes: 'auto' is not a size"),
        ({"disk_path": ""}, "disk_path is ''; it must be None or the path"),
        ({"hash": "md5"}, "hash is 'md5'; it must be one of sha256, xxh3_128"),
        ({"retention": "every 0"}, "one of boundaries, dense, every N"),
        ({"retention": "sometimes"}, "one of boundaries, dense, every N"),
        ({"store_generated": "no"}, "true or false"),
        ({"host_policy": "random"}, "host_policy is 'random'; it must be one of lru"),
        ({"disk_admission": 0}, "whole number >= 1"),
        ({"disk_admission": True}, "whole number >= 1"),
        ({"disk_admission": 16}, "<= 15"),
        ({"disk_write_budget": "0"}, "whole number >= 1"),
        ({"deadline_s": 0}, "seconds > 0"),
        ({"deadline_s": float("nan")}, "seconds > 0"),
        ({"deadline_s": float("inf")}, "seconds > 0"),
        ({"deadline_s": 10**400}, "<= 86400"),
        ({"deadline_s": 86_401}, "<= 86400"),
        ({"retention": f"every {(1 << 31) + 1}"}, "2147483648 at most"),
        ({"retention": "every 9000000000000000000"}, "2147483648 at most"),
        ({**DISK, "disk_path": "~nobody-of-this-name/x"}, "write the whole path"),
        ({"copy_mode": "fast"}, "auto, staged, dma, kernel"),
        ({"model_id": 3}, "model_id is 3; it must be text"),
        ({**DISK, "disk_bytes": "0"}, 'say how much, for example "100GiB"'),
        ({**DISK, "host_bytes": "0"}, "through host memory"),
        ({**DISK, "model_id": ""}, "name their model"),
    ],
)
def test_values_that_cannot_be_used(option, message):
    """Each wrong value is refused with its name, the value and what is allowed."""
    with pytest.raises(ConfigError) as caught:
        Config.from_mapping(option)
    assert message in str(caught.value)


def test_every_good_value_is_accepted():
    """The values that the errors recommend are accepted."""
    for option in (
        {"retention": "every 4096"},
        {"retention": "dense"},
        {"hash": "xxh3_128"},
        {"copy_mode": "dma"},
    ):
        assert Config.from_mapping(option) == Config(**option)


def test_host_beyond_the_limit_is_an_error():
    """More memory than the process may use is refused with value, limit and the way out; the limit itself is not."""
    memory = Memory(limit=8 * GIB, available=2 * GIB)
    assert Config(host_bytes=8 * GIB).resolve(memory).host_bytes == 8 * GIB
    with pytest.raises(ConfigError, match=r"host_bytes is 9GiB.*at most 8GiB; lower host_bytes or raise"):
        Config(host_bytes=9 * GIB).resolve(memory)


def test_MEM_06_auto_size_of_four_ranks():
    """Four ranks that size themselves one after the other on 100 GiB free take at most 50 GiB, never below 0."""
    for free in (100 * GIB, 3, 0):
        taken = 0
        for rank in range(4):
            total = Config().resolve(Memory(limit=128 * GIB, available=free - taken)).host_bytes
            share = split_bytes(total, [1, 1, 1, 1])[rank]
            assert share >= 0
            taken += share
        assert taken <= free // 2
    assert Config().resolve(Memory(128 * GIB, 100 * GIB)).host_bytes == 50 * GIB


def test_split_follows_block_bytes():
    """A total is split in proportion, rounded down, and a rank without blocks gets nothing."""
    assert split_bytes(100, [1, 1, 1]) == (33, 33, 33)
    assert split_bytes(100, [3, 0, 1]) == (75, 0, 25)
    assert split_bytes(100, [0, 0]) == (0, 0)


def machine(root: Path, files: dict[str, str], cgroup: str) -> Path:
    """A root folder with 100 GiB free of 128 and the given files."""
    text = f"MemTotal: {128 << 20} kB\nMemFree: 1 kB\nMemAvailable: {100 << 20} kB\n"
    for name, content in {"proc/meminfo": text, "proc/self/cgroup": cgroup, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def v2(folder: str, limit: str, used: int, cache: int = 0) -> dict[str, str]:
    """The memory files of a cgroup v2 folder."""
    at = f"sys/fs/cgroup/{folder}"
    return {
        at + "memory.max": limit + "\n",
        at + "memory.current": f"{used}\n",
        at + "memory.stat": f"anon 5\ninactive_file {cache}\n",
    }


def test_memory_of_the_machine(tmp_path):
    """Without a limit, what the machine has counts; a missing cgroup tree limits nothing."""
    assert read_memory(machine(tmp_path, {}, "0::/a/b\n")) == Memory(128 * GIB, 100 * GIB)
    assert read_memory(machine(tmp_path, v2("a/", "max", 5), "0::/a/b\n")) == Memory(128 * GIB, 100 * GIB)


def test_memory_in_cgroup_v2(tmp_path):
    """The tightest of the nested cgroups counts, less what it uses, page cache not in use left out."""
    files = {**v2("a/b/", str(64 * GIB), 10 * GIB), **v2("a/", str(32 * GIB), 12 * GIB, cache=4 * GIB)}

    assert read_memory(machine(tmp_path, files, "0::/a/b\n")) == Memory(32 * GIB, 24 * GIB)


def test_memory_in_a_container(tmp_path):
    """Where the host's path does not exist inside the container, the mount itself is its cgroup."""
    files = v2("", str(16 * GIB), 20 * GIB)

    assert read_memory(machine(tmp_path, files, "0::/kube/pod/c\n")) == Memory(16 * GIB, 0)


def test_memory_in_cgroup_v1(tmp_path):
    """The memory controller's limit counts; other controllers' folders and the unlimited number do not."""
    at = "sys/fs/cgroup/memory/docker/x/"
    files = {
        at + "memory.limit_in_bytes": f"{20 * GIB}\n",
        at + "memory.usage_in_bytes": f"{6 * GIB}\n",
        at + "memory.stat": f"total_inactive_file {GIB}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{90 * GIB}\n",
    }
    cgroup = "3:cpu,cpuacct:/docker/y\n2:memory:/docker/x\n"

    assert read_memory(machine(tmp_path, files, cgroup)) == Memory(20 * GIB, 15 * GIB)


def test_memory_here_is_plausible():
    """On the machine that runs the test, something is available and not more than the limit."""
    memory = read_memory()

    assert 0 < memory.available <= memory.limit
