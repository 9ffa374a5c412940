"""KEY rows of docs/cases.md that need the tiers, by id."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvoffload.config import Config
from kvoffload.identity import namespace_of
from kvoffload.keys import Chain, Namespace
from kvoffload.layout import CacheGroup, GroupKind, Layout, Region
from kvoffload.local import Local
from kvoffload.requests import RequestInfo
from kvoffload.testing.faults import Counting, Op
from kvoffload.testing.rig import Keys, Rig, Sizes

TOKENS = np.arange(64)


def test_KEY_09_the_salt_holds_in_every_tier(tmp_path: Path) -> None:
    """Stored under salt x and evicted to disk: another salt, and none, find nothing and read nothing; x finds all."""
    count = Counting()
    namespace = Namespace("m", 16)
    mine, theirs, bare = (Chain(namespace, salt=salt) for salt in ("x", "y", None))
    for chain in (mine, theirs, bare):
        chain.extend(TOKENS)
    with Rig(Sizes(host=2, disk=4), path=tmp_path, tier_faults=[count]) as rig:
        rig.store(mine)
        rig.planner.reset(["host"])
        for other in (theirs, bare):
            assert rig.match(other).boundary == 0
            assert rig.load(other)[0].id == 0
        assert count.copies(Op.READ) == 0
        assert rig.load(mine)[1][-1].boundary == 64
        assert count.copies(Op.READ) == 4


BASE = Layout(16, (CacheGroup(0, GroupKind.FULL, 16, 8192, layers=("a", "b")),))
CONFIG = Config(
    host_bytes=2 << 20, disk_path=Path("disk"), disk_bytes=2 << 20, model_id="m", weights_revision="1"
)


@pytest.mark.parametrize(
    ("layout", "change", "dtype"),
    [
        (BASE, {"weights_revision": "2"}, "fp16"),
        (BASE, {"model_id": "n"}, "fp16"),
        (BASE, {"tenant": "t"}, "fp16"),
        (BASE, {}, "fp8"),
        (Layout(32, (replace(BASE.groups[0], tokens_per_block=32),)), {}, "fp16"),
        (Layout(16, (replace(BASE.groups[0], block_bytes=4096),)), {}, "fp16"),
        (Layout(16, (replace(BASE.groups[0], layers=("a", "b", "c")),)), {}, "fp16"),
        (BASE, {}, "fp16"),
    ],
)
def test_KEY_10_one_directory_never_mixes_formats(
    tmp_path: Path, layout: Layout, change: dict[str, str], dtype: str
) -> None:
    """Whatever changes the bytes of a block is a miss in the same directory; the same again is a hit."""
    same = layout == BASE and not change and dtype == "fp16"
    found = []
    first = replace(CONFIG, disk_path=tmp_path)
    for some, config, kind in ((BASE, first, "fp16"), (layout, replace(first, **change), dtype)):
        namespace = namespace_of(config, some, dtype=kind)
        chain = Chain(namespace)
        chain.extend(TOKENS)
        memory = np.zeros((8, some.groups[0].block_bytes), np.uint8)
        pools = ((Region(memory.ctypes.data, memory.strides[0], memory.shape[1], 8),),)
        with Local.open(config, some, [pools], namespace=namespace) as local:
            info = RequestInfo("r")
            found.append(local.planner.match(info, chain).boundary)
            local.planner.offer(info, chain, 64, [np.arange(chain.blocks, dtype=np.int32)])
            local.drain()
    assert found == [0, 64 if same else 0]


def test_KEY_12_a_reset_of_the_device_alone_keeps_the_tiers(tmp_path: Path) -> None:
    """The engine wipes its pages and resets no tier: host and disk hits stay, with their bytes."""
    with Rig(Sizes(host=4, disk=4), path=tmp_path) as rig:
        chain = Keys.of(range(10))
        rig.store(chain)
        rig.planner.reset([])
        rig.wipe()
        assert rig.match(chain).host == 10
        assert rig.load(chain)[2] == 0
        rig.planner.reset(["host"])
        assert rig.match(chain).disk == 10
        assert rig.load(chain)[2] == 0
