"""Keys of vLLM's requests: of what the engine has hashed, and whether that still holds."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from kvoffload.keys import Namespace

requests = pytest.importorskip("kvoffload.connectors.vllm.requests", reason="kvoffload is not installed")


def _hashed(rng, count):
    return [rng.randbytes(32) for _ in range(count)]


def _chain(hashes):
    request = SimpleNamespace(block_hashes=hashes)
    return requests.GrownChain(Namespace("m", 16, hash="vllm:sha256_cbor"), request), request


def _bytes(hashes):
    return b"".join(h[:16] for h in hashes)


def test_keys_follow_the_engines_hashes():
    """The keys are the first halves of all hashes there are, however many came since the last look."""
    rng = random.Random(1)
    chain, request = _chain([])
    for more in (0, 3, 0, 1, 20):
        request.block_hashes += _hashed(rng, more)
        assert chain.keys.tobytes() == _bytes(request.block_hashes)
        assert not chain.broken


def test_equal_hashes_are_no_break_and_others_are():
    """Hashes that are made anew and equal change nothing; fewer of them, or another last one, break the chain."""
    hashes = _hashed(random.Random(2), 4)
    chain, request = _chain(hashes)
    assert len(chain.keys) == 4
    request.block_hashes = [bytes(bytearray(h)) for h in hashes]
    assert not chain.broken
    request.block_hashes = hashes[:3]
    assert chain.broken
    request.block_hashes = [*hashes[:3], hashes[0], hashes[3]]
    assert chain.broken
