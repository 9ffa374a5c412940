"""What makes two engine instances share their blocks, or not."""

from __future__ import annotations

from dataclasses import replace

from kvoffload.config import Config
from kvoffload.identity import namespace_of
from kvoffload.layout import CacheGroup, GroupKind, Layout

GIB = 1 << 30


def test_namespace_of_configuration_layout_and_ranks():
    """Whatever of configuration, layout or ranks changes bytes or owner changes the namespace; the rest does not."""
    group = CacheGroup(0, GroupKind.SLIDING, 16, 4096, 128, ("a", "b"))
    config = Config(model_id="m")
    base = namespace_of(config, Layout(16, (group,)), (2,), dtype="bf16")
    others = [
        namespace_of(config, Layout(16, (replace(group, **change),)), (2,), dtype="bf16")
        for change in (
            {"block_bytes": 8192},
            {"lookback": 64},
            {"layers": ("a",)},
            {"replicas": 2},
            {"tokens_per_block": 32},
            {"kind": GroupKind.FULL, "lookback": 0},
        )
    ]
    others += [
        namespace_of(replace(config, **change), Layout(16, (group,)), (2,), dtype="bf16")
        for change in ({"model_id": "n"}, {"weights_revision": "2"}, {"tenant": "t"}, {"hash": "xxh3_128"})
    ]
    others.append(namespace_of(config, Layout(16, (group,)), (4,), dtype="bf16"))
    others.append(namespace_of(config, Layout(16, (group,)), (2,), dtype="fp8"))
    others.append(namespace_of(config, Layout(16, (group,)), (2,), dtype="bf16", hash_name="vllm:sha256"))

    assert len({n.digest for n in (base, *others)}) == len(others) + 1
    assert base.hex == base.digest.hex()
    slower = replace(config, deadline_s=1.0, host_bytes=GIB)
    assert namespace_of(slower, Layout(16, (group,)), (2,), dtype="bf16") == base
