"""What work takes in virtual time: a forward of a model on a device, a copy over a link, a block to and from disk.

A roofline: a step takes what its arithmetic needs or what its memory traffic needs, whichever is more, and a fixed
overhead. Copies queue behind each other per direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from kvoffload.errors import ConfigError
from kvoffload.messages import CopyFlag, Job, JobKind


@dataclass(frozen=True, slots=True)
class CostModel:
    """Rates of one device and one model. The defaults: an 8B dense model in bf16 (32 layers, 32 heads of 128, 8 of them
    for keys and values) on one 80 GB GPU of the 1,000 TFLOP/s class at half its peak, four fifths of its memory rate,
    a x16 link of the fifth generation, and one fast NVMe drive.

    parameters: of the model. attention: layers x heads x head size. kv_bytes: bytes of one token's keys and values.
    flops: arithmetic per second that is reached. memory: bytes per second that are reached. overhead_s: of each step.
    link_in, link_out: bytes per second to and from the device. disk_read, disk_write: bytes per second. job_s: of each
    job on the link or the disk.
    """

    parameters: float = 8.03e9
    weight_bytes: float = 16.06e9
    attention: int = 32 * 32 * 128
    kv_bytes: int = 131_072
    flops: float = 495e12
    memory: float = 2.7e12
    overhead_s: float = 0.002
    link_in: float = 50e9
    link_out: float = 50e9
    disk_read: float = 6e9
    disk_write: float = 3e9
    job_s: float = 50e-6

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 0 or (value == 0 and name not in ("overhead_s", "job_s")):
                raise ConfigError(f"cost {name} = {value:g}; it must be greater than 0")

    @classmethod
    def parse(cls, text: str) -> CostModel:
        """The defaults with "name=value,..." put over them."""
        given: dict[str, float] = {}
        names = [f.name for f in fields(cls)]
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            if name.strip() not in names:
                raise ConfigError(f"--cost: no rate is called {name.strip()!r}; there are {', '.join(names)}")
            try:
                given[name.strip()] = float(value)
            except ValueError:
                raise ConfigError(f"--cost: {name.strip()} = {value!r} is not a number, like 5e10") from None
        return replace(cls(), **given)  # type: ignore[arg-type]

    def step(self, work: Sequence[tuple[int, int]]) -> float:
        """Seconds of one forward over (new tokens, tokens before them) of every request."""
        if not work:
            return 0.0
        arithmetic = sum(self._arithmetic(new, before) for new, before in work)
        traffic = self.weight_bytes + self.kv_bytes * sum(new + before for new, before in work)
        return max(arithmetic / self.flops, traffic / self.memory) + self.overhead_s

    def prefill(self, tokens: int, before: int) -> float:
        """Seconds of arithmetic for `tokens` that follow on `before` others."""
        return self._arithmetic(tokens, before) / self.flops

    def _arithmetic(self, new: int, before: int) -> float:
        """Two operations per parameter and token; four per element of attention and token looked at."""
        pairs = new * before + new * (new + 1) / 2
        return 2 * self.parameters * new + 4 * self.attention * pairs

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class Channels:
    """When copies end, if each direction of the link and of the disk does one after the other. Bytes so far.

    block_bytes: of one block on the modelled device, which need not be that of the blocks that are really moved.
    """

    cost: CostModel
    block_bytes: int
    busy: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("in", "out", "read", "write"), 0.0))
    moved: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("in", "out", "read", "write"), 0))

    def ends(self, job: Job, now: float) -> float:
        """When a job that is submitted now has ended. Reads of a load and its copies overlap, chunk by chunk."""
        blocks = len(job.copies)
        if job.kind is JobKind.STORE:
            return self.move("out", blocks, now)
        if job.kind is JobKind.WRITE:
            return self.move("write", blocks, now)
        reads = blocks
        if job.kind is JobKind.LOAD:
            reads = int(((job.copies["flags"] & int(CopyFlag.READ)) != 0).sum())
        end = self.move("read", reads, now) if reads else now
        return max(end, self.move("in", blocks, now)) if job.kind is JobKind.LOAD else end

    def move(self, channel: str, blocks: int, now: float) -> float:
        """Queue so many blocks on a channel; when the last one has passed."""
        rates = {"in": self.cost.link_in, "out": self.cost.link_out}
        rates |= {"read": self.cost.disk_read, "write": self.cost.disk_write}
        size = blocks * self.block_bytes
        self.moved[channel] += size
        self.busy[channel] = max(self.busy[channel], now) + self.cost.job_s + size / rates[channel]
        return self.busy[channel]
