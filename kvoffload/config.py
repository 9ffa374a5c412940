"""The configuration: one frozen dataclass. Unknown names, sizes without unit, options without effect are errors."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeAlias

from kvoffload.errors import ConfigError
from kvoffload.keys import HASHES
from kvoffload.memory import Memory, read_memory
from kvoffload.units import format_size, parse_size

AUTO_FRACTION = 2
"""Auto sizing takes 1/2 of the memory that is available now, over all ranks together: the engine loads weights and
pins buffers in the other half."""

MAX_ADMISSION = 15
"""The index counts no more touches of a block (csrc/entry_pool.h, kMaxTouches)."""

MAX_DEADLINE_S = 86_400
"""A day, of what a user writes: the end of an engine waits for so long, and no thread can wait for any number."""

MAX_RETENTION = 1 << 31
"""Tokens: more than any sequence has, and few enough for positions of 64 bits."""

POLICIES = ("lru", "rri", "rri-keep")
COPY_MODES = ("auto", "staged", "dma", "kernel")
RETENTIONS = ("boundaries", "dense", "every N")

Check: TypeAlias = tuple[Callable[[Any], bool], str]
"""Whether a value fits, and the rule in words."""

_RETENTION = re.compile(r"boundaries|dense|every ([1-9]\d{0,9})")


@dataclass(frozen=True, slots=True)
class Config:
    """What a user may set. Sizes are bytes, totals per engine instance.

    host_bytes: memory of the host tier, transit included; None = auto, see `resolve`; 0 only where tiers are sized
        in slots. Auto, since the right size is a share of the machine and not a number.
    disk_path: folder of the disk tier, None = no disk tier: nothing is written to a disk unasked.
    disk_bytes: size of the disk tier; it has no default beyond 0, since it is preallocated.
    model_id: whose blocks these are; connectors fill it from the engine. Needed with a disk, which outlives the
        process.
    weights_revision: changes when the weights do; connectors fill it where the engine knows it.
    tenant: blocks of different tenants never meet; "" = one tenant.
    hash: sha256 by default, safe where tenants are mixed; xxh3_128 is faster and for one trusted tenant.
    retention: window blocks worth storing; `boundaries` by default, the few from which a sequence is resumed.
    store_generated: also store blocks that the model wrote; on by default, agents send them back next turn.
    host_policy, disk_policy: which segment is given up first; lru (tail-first) by default, rri learns what comes
        back and refuses what is worth less than all that is there, rri-keep orders like it and refuses nothing.
    disk_admission: the touch at which a block is written: 1 = the first (default, every block survives a restart),
        2 = the second (spares a disk from prompts seen once).
    disk_write_budget: bytes per hour that may be written, None = no bound: the wear that is right is the owner's.
    checksum: verify payloads from disk; on by default, since torn writes are found by nothing else.
    deadline_s: seconds after which a job that touches no engine page is given up; 10 by default, longer than any
        healthy disk takes and shorter than users wait.
    copy_mode: how pages are copied; auto = calibrated once per device.
    """

    host_bytes: int | None = None
    disk_path: Path | None = None
    disk_bytes: int = 0
    model_id: str = ""
    weights_revision: str = ""
    tenant: str = ""
    hash: str = "sha256"
    retention: str = "boundaries"
    store_generated: bool = True
    host_policy: str = "lru"
    disk_policy: str = "lru"
    disk_admission: int = 1
    disk_write_budget: int | None = None
    checksum: bool = True
    deadline_s: float = 10.0
    copy_mode: str = "auto"

    def __post_init__(self) -> None:
        values = asdict(self)
        for name, (fits, rule) in _CHECKS.items():
            if not fits(values[name]):
                raise ConfigError(f"{name} is {values[name]!r}; it must be {rule}")
        _check_disk(self)

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> Config:
        """The configuration that a user wrote: sizes are words ("64GiB", "auto" for host_bytes), paths are text."""
        unknown = sorted(map(str, set(options) - set(_NAMES)))
        if unknown:
            near = difflib.get_close_matches(unknown[0], _NAMES, 1, 0)[0]
            raise ConfigError(
                f"unknown option {unknown[0]!r}; did you mean {near!r}? Known: {', '.join(_NAMES)}"
            )
        return cls(**{name: _parsed(name, value) for name, value in options.items()})

    def resolve(self, memory: Memory | None = None) -> Config:
        """This configuration with host_bytes as a number that fits `memory`, by default what this process may use."""
        memory = memory or read_memory()
        if self.host_bytes is None:
            return replace(self, host_bytes=memory.available // AUTO_FRACTION)
        if self.host_bytes > memory.limit:
            raise ConfigError(
                f"host_bytes is {format_size(self.host_bytes)}, but this process may use at most "
                f"{format_size(memory.limit)}; lower host_bytes or raise the memory limit of the container"
            )
        return self

    def effective(self) -> dict[str, str | int | float | bool | None]:
        """Every option as it is in force, printable."""
        return {name: str(v) if isinstance(v, Path) else v for name, v in asdict(self).items()}

    def __str__(self) -> str:
        """One line, sizes in words: printed once at start."""
        return "kvoffload: " + " ".join(f"{name}={_shown(name, v)}" for name, v in self.effective().items())


def split_bytes(total: int, weights: Sequence[int]) -> tuple[int, ...]:
    """`total` split over ranks by their block bytes; the sum is never above `total`."""
    whole = sum(weights)
    return tuple(total * w // whole if whole else 0 for w in weights)


def _check_disk(config: Config) -> None:
    """Raise ConfigError where the disk options contradict each other or have no effect."""
    if config.disk_path is None:
        useless = [n for n in _DISK_ONLY if asdict(config)[n] != _DEFAULTS[n]]
        if useless:
            raise ConfigError(f"{useless[0]} has no effect without disk_path; set disk_path or leave it out")
        return
    if config.disk_bytes == 0:
        raise ConfigError(
            f'disk_bytes is 0 with disk_path {config.disk_path}; say how much, for example "100GiB"'
        )
    if config.host_bytes == 0:
        raise ConfigError(
            "host_bytes is 0 with a disk_path; blocks reach the disk through host memory: give it some"
        )
    if not config.model_id:
        raise ConfigError(
            "model_id is empty with a disk_path; blocks on disk outlive the process: name their model"
        )


def _parsed(name: str, value: Any) -> Any:
    """One option as the dataclass holds it."""
    if name == "disk_path" and isinstance(value, str) and value:
        return _folder(value)
    if name == "deadline_s" and isinstance(value, int | float) and value > MAX_DEADLINE_S:
        raise ConfigError(
            f"deadline_s is {value!r}; it must be a number of seconds > 0 and <= {MAX_DEADLINE_S}"
        )
    if name not in _SIZES or value is None:
        return value
    if name == "host_bytes" and value == "auto":
        return None
    try:
        return parse_size(str(value))
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None


def _folder(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ConfigError(
            f"disk_path is {text!r}, and nobody is called so here: write the whole path"
        ) from None


def _retains(value: Any) -> bool:
    found = _RETENTION.fullmatch(value) if isinstance(value, str) else None
    return found is not None and int(found[1] or 0) <= MAX_RETENTION


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "auto" if name == "host_bytes" else "none"
    if name in _SIZES:
        return format_size(value).partition(" ")[0]
    return str(value) if value != "" else '""'


def _whole(low: int) -> Check:
    return lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= low, f"a whole number >= {low}"


def _optional(check: Check) -> Check:
    fits, rule = check
    return lambda v: v is None or fits(v), f"None or {rule}"


def _one_of(names: Iterable[str]) -> Check:
    allowed = tuple(names)
    return lambda v: v in allowed, f"one of {', '.join(allowed)}"


def _kind(kind: type, rule: str) -> Check:
    return lambda v: isinstance(v, kind), rule


_NAMES = tuple(f.name for f in fields(Config))
_DEFAULTS = {f.name: f.default for f in fields(Config)}
_SIZES = ("host_bytes", "disk_bytes", "disk_write_budget")
_DISK_ONLY = ("disk_bytes", "disk_policy", "disk_admission", "disk_write_budget", "checksum")
_CHECKS: dict[str, Check] = {
    "host_bytes": _optional(_whole(0)),
    "disk_path": _optional(_kind(Path, "the path of a folder")),
    "disk_bytes": _whole(0),
    "model_id": _kind(str, "text"),
    "weights_revision": _kind(str, "text"),
    "tenant": _kind(str, "text"),
    "hash": _one_of(HASHES),
    "retention": (_retains, f"one of {', '.join(RETENTIONS)} (N tokens, {MAX_RETENTION} at most)"),
    "store_generated": _kind(bool, "true or false"),
    "host_policy": _one_of(POLICIES),
    "disk_policy": _one_of(POLICIES),
    "disk_admission": (
        lambda v: _whole(1)[0](v) and v <= MAX_ADMISSION,
        f"a whole number >= 1 and <= {MAX_ADMISSION}",
    ),
    "disk_write_budget": _optional(_whole(1)),
    "checksum": _kind(bool, "true or false"),
    "deadline_s": (
        lambda v: isinstance(v, int | float) and not isinstance(v, bool) and 0 < v <= sys.float_info.max,
        "a number of seconds > 0",
    ),
    "copy_mode": _one_of(COPY_MODES),
}
