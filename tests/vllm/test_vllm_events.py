"""KV events of the tiers beside the engine's own, as a router sees them."""

from __future__ import annotations

import time

import pytest
from runner import Engine, prompts


def published(engine):
    """Everything that the engine publishes from now on, in order."""
    seen = []
    publisher = engine.core.scheduler.kv_event_publisher
    publisher.publish = lambda batch: seen.extend(batch.events)
    return seen


def engine_of(model, name, tmp_path, algorithm):
    from vllm.config import KVEventsConfig

    disk = {"disk_path": str(tmp_path), "disk_bytes": "64MiB"}
    return Engine(
        model(name),
        {"host_bytes": "256MiB", **disk},
        prefix_caching_hash_algo=algorithm,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
    )


def visible(events, medium):
    """Block hashes by group after these events."""
    there = set()
    for event in (e for e in events if type(e).__name__ != "AllBlocksCleared"):
        if event.medium != medium:
            continue
        names = {(event.group_idx, h) for h in event.block_hashes}
        there = there | names if type(event).__name__ == "BlockStored" else there - names
    return there


@pytest.mark.parametrize("name", ["llama", "gemma3odd"])
def test_tiers_publish_the_blocks_that_the_engine_published(model, tmp_path, name):
    """What is stored in host and on disk is named, followed and filled as the engine's pages were; a reset takes every
    block back."""
    with engine_of(model, name, tmp_path, "sha256_cbor") as engine:
        seen = published(engine)
        engine.generate(prompts())
        time.sleep(0.5)
        engine.generate(prompts(seed=9, lengths=(40,)))
        stored = [e for e in seen if type(e).__name__ == "BlockStored"]
        pages = {}
        # A hash is the same in every group; of windows vLLM publishes more tokens than blocks.
        for event in (e for e in stored if e.medium == "GPU" and e.kv_cache_spec_kind == "full_attention"):
            size, parent = event.block_size, event.parent_block_hash
            for n, block in enumerate(event.block_hashes):
                tokens = tuple(event.token_ids[n * size : (n + 1) * size])
                pages[block] = (parent, tokens)
                parent = block
        for medium in ("CPU", "STORAGE"):
            mine = [e for e in stored if e.medium == medium]
            assert mine
            for event in mine:
                size, parent = event.block_size, event.parent_block_hash
                for n, block in enumerate(event.block_hashes):
                    tokens = tuple(event.token_ids[n * size : (n + 1) * size])
                    assert pages[block] == (parent, tokens)
                    parent = block
        assert visible(seen, "CPU") >= visible(seen, "STORAGE") > set()

        engine.forget_all()
        engine.generate(prompts(seed=5, lengths=(20,)), tokens=4)  # no full block: only the news of the reset
        assert visible(seen, "CPU") == visible(seen, "STORAGE") == set()


def test_nothing_is_published_unasked(model):
    """Without an event configuration the connector makes no events."""
    with Engine(model("llama"), {"host_bytes": "256MiB"}) as engine:
        engine.generate(prompts())
        assert list(engine.scheduler.take_events()) == []
