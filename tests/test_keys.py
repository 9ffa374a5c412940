"""Identity of blocks: what a key covers, and that it is the same everywhere."""

from __future__ import annotations

import hashlib
import os
import random
import struct
import subprocess
import sys
from dataclasses import asdict, replace

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffload.errors import ConfigError
from kvoffload.keys import HASHES, Adapter, Chain, Media, Namespace

FULL = Namespace(
    "org/model",
    16,
    weights_revision="r1",
    dtype="bf16",
    groups=(("full", 16, 0, 8, 128),),
    ranks=(2, 1),
    tenant="t",
)
GOLDEN = {
    "digest": "35a8ec7f6dc55a5803e4530af3ea9329e66f511581eafb341bb577df94ed326c",
    "sha256": ("1862747f8ee987af53a0afc3071841fa", "d3a94b4e675ed22389f7dfc016c14907"),
    "xxh3_128": ("338c495682b96ed0777462c3cb59e36a", "5259f0deea3bb61536148b78f800a6a2"),
}
PROGRAM = """
from kvoffload.keys import Adapter, Chain, Media, Namespace
for name in ("sha256", "xxh3_128"):
    chain = Chain(Namespace("m", 16, hash=name), adapter=Adapter("a", "1"), salt="s")
    chain.extend(range(64), [Media("picture", 20, 40)])
    print(chain.keys.tobytes().hex())
"""


def rows(chain: Chain) -> list[bytes]:
    """The keys of a chain, one bytes object each."""
    return [bytes(k) for k in chain.keys]


def keys_of(tokens, namespace=FULL, *, media=(), adapter=None, salt=None) -> list[bytes]:
    """The keys of one fresh chain."""
    chain = Chain(namespace, adapter=adapter, salt=salt)
    chain.extend(tokens, media)
    return rows(chain)


def packed(value) -> bytes:
    """msgpack written out by hand for what keys use: the oracle of the encoding."""
    if isinstance(value, str):
        raw = value.encode()
        return (bytes([0xA0 | len(raw)]) if len(raw) < 32 else b"\xd9" + bytes([len(raw)])) + raw
    if isinstance(value, bytes):
        return b"\xc4" + bytes([len(value)]) + value
    if isinstance(value, int):
        if -32 <= value < 128:
            return struct.pack("b", value)
        return (b"\xcc" + bytes([value])) if 0 < value < 256 else struct.pack(">Bh", 0xD1, value)
    if isinstance(value, dict):
        return bytes([0x80 | len(value)]) + b"".join(packed(k) + packed(v) for k, v in value.items())
    return bytes([0x90 | len(value)]) + b"".join(packed(v) for v in value)


def oracle(namespace: Namespace, tokens: list[int], extras: dict[int, bytes]) -> list[bytes]:
    """The formula of the design, word for word."""
    digest = hashlib.sha256(packed(dict(sorted(asdict(namespace).items())))).digest()
    full = {
        "sha256": lambda b: hashlib.sha256(b).digest(),
        "xxh3_128": lambda b: xxhash.xxh3_128(b).digest(),
    }[namespace.hash]
    key, out, size = full(digest)[:16], [], namespace.tokens_per_block
    for i in range(len(tokens) // size):
        key = full(key + struct.pack(f"<{size}I", *tokens[i * size : i * size + size]) + extras.get(i, b""))[
            :16
        ]
        out.append(key)
    return out


@pytest.mark.parametrize("name", HASHES)
def test_golden_vectors(name):
    """Digest, first and last key of a known sequence never change: they name files on people's disks."""
    namespace = replace(FULL, hash=name)
    chain = keys_of(list(range(1000)), namespace, media=[Media(b"\x01\x02", 40, 50)], salt="pepper")

    assert FULL.digest.hex() == GOLDEN["digest"]
    assert (chain[0].hex(), chain[-1].hex()) == GOLDEN[name]


@pytest.mark.parametrize("name", HASHES)
def test_keys_follow_the_formula(name):
    """Keys are those of a second, independent implementation, extras of every kind included."""
    namespace = replace(FULL, hash=name)
    tokens = [random.Random(5).randrange(1 << 32) for _ in range(100)]
    media = [Media("cat", 20, 40), Media(b"\xff" * 40, 44, 47)]
    got = keys_of(tokens, namespace, media=media, adapter=Adapter("law", "7"), salt="x")

    extras = {
        0: packed([["adapter", "law", "7"], ["salt", "x"]]),
        1: packed([["media", "cat", 4, 16]]),
        2: packed([["media", "cat", -12, 8], ["media", b"\xff" * 40, 12, 15]]),
    }
    assert got == oracle(namespace, tokens, extras)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data(), name=st.sampled_from(sorted(HASHES)), size=st.integers(1, 20))
def test_incremental_equals_whole(data, name, size):
    """However a sequence is cut into calls, and in whatever form tokens come, its keys are the same."""
    namespace = Namespace("m", size, hash=name)
    tokens = data.draw(st.lists(st.integers(0, 2**32 - 1), max_size=120))
    begin = data.draw(st.integers(0, 100))
    media = [Media("m", begin, begin + data.draw(st.integers(1, 40)))]
    whole = Chain(namespace, salt="s")
    whole.extend(np.array(tokens, np.uint32), media)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=6)))

    parts = Chain(namespace, salt="s")
    made = 0
    for i, (a, b) in enumerate(zip([0, *cuts], [*cuts, len(tokens)], strict=True)):
        form = data.draw(st.sampled_from([list, tuple, np.uint32, np.int64]))
        piece = tokens[a:b]
        made += parts.extend(
            np.array(piece, form) if form in (np.uint32, np.int64) else form(piece), media if i == 0 else ()
        )

    assert rows(parts) == rows(whole)
    assert made == parts.blocks == len(tokens) // size
    assert parts.tokens == len(tokens)
    assert parts.token_ids.tolist() == tokens


@pytest.mark.parametrize("end", [4, 5, 8, 9])
def test_media_is_kept_until_its_last_block(end):
    """Media given with the first call reaches every block it overlaps, down to one token, in later calls."""
    chain = Chain(Namespace("m", 4))
    for at in range(0, 12, 4):
        chain.extend(range(at, at + 4), [Media("a", 1, end)] if at == 0 else ())

    assert rows(chain) == keys_of(range(12), Namespace("m", 4), media=[Media("a", 1, end)])


def test_only_completed_blocks_are_hashed(monkeypatch):
    """Each block costs one call of the library, once, whatever the number of extend calls."""
    calls = []
    monkeypatch.setitem(HASHES, "sha256", lambda b: calls.append(len(b)) or hashlib.sha256(b).digest()[:16])
    chain = Chain(Namespace("m", 4))
    for t in range(41):
        chain.extend([t])

    assert chain.blocks == 10
    assert len(calls) == 10 + 1  # and the namespace
    assert set(calls[1:]) == {16 + 16}


def test_views_keep_their_content_while_the_chain_grows():
    """An array handed out earlier is never changed, moved or writable, across many reallocations."""
    chain = Chain(Namespace("m", 2))
    seen = []
    for t in range(400):
        chain.extend([t])
        seen.append((chain.keys, chain.keys.tobytes(), chain.token_ids, list(range(t + 1))))
    for keys, content, ids, expected in seen:
        assert keys.tobytes() == content
        assert ids.tolist() == expected
        assert keys.flags.c_contiguous
        assert not keys.flags.writeable
        assert not ids.flags.writeable
        assert keys.shape == (len(expected) // 2, 16)


def test_growth_is_amortised():
    """Appending block by block moves the array a logarithmic number of times."""
    chain = Chain(Namespace("m", 1, hash="xxh3_128"))
    places = set()
    for t in range(4096):
        chain.extend([t])
        places.add(chain.keys.__array_interface__["data"][0])

    assert len(places) <= 13


@pytest.mark.parametrize("bad", [-1, 2**32, 2**40, -(2**70), 2**64])
@pytest.mark.parametrize("form", [list, np.array])
def test_token_out_of_range_is_named(bad, form):
    """A token that does not fit uint32 is refused by value and limit, and the chain is as before."""
    chain = Chain(Namespace("m", 2))
    chain.extend([1, 2, 3])
    before = rows(chain)
    with pytest.raises(ValueError, match=rf"{bad}\b.*4294967296|one row of integers"):
        chain.extend(form([4, bad]))

    assert (rows(chain), chain.tokens) == (before, 3)
    chain.extend([4])
    assert rows(chain) == keys_of([1, 2, 3, 4], Namespace("m", 2))


@pytest.mark.parametrize("bad", [np.zeros((2, 2), np.int32), np.array([1.0]), np.array([True])])
def test_other_arrays_are_refused(bad):
    """Only one row of integers is a sequence of tokens."""
    with pytest.raises(ValueError, match="one row of integers"):
        Chain(Namespace("m", 2)).extend(bad)
    with pytest.raises(TypeError):
        Chain(Namespace("m", 2)).extend([1.5])


def test_media_of_hashed_blocks_is_refused():
    """Media that would have changed a key already made is an error, and changes nothing."""
    chain = Chain(Namespace("m", 4))
    chain.extend(range(9))
    with pytest.raises(ValueError, match=r"token 7; 8 tokens"):
        chain.extend([9], [Media("a", 7, 9)])
    with pytest.raises(ValueError, match=r"\[5, 5\)"):
        Media("a", 5, 5)
    chain.extend([9, 10, 11], [Media("a", 8, 9)])

    assert rows(chain) == keys_of(range(12), Namespace("m", 4), media=[Media("a", 8, 9)])


def test_KEY_01_same_keys_in_every_process():
    """Three processes with PYTHONHASHSEED unset, 0 and 12345 make the keys that this one makes."""
    printed = set()
    for seed in (None, "0", "12345"):
        env = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
        env |= {"PYTHONHASHSEED": seed} if seed is not None else {}
        run = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True
        )
        printed.add(run.stdout)

    here = ""
    for name in ("sha256", "xxh3_128"):
        keys = keys_of(
            range(64),
            Namespace("m", 16, hash=name),
            media=[Media("picture", 20, 40)],
            adapter=Adapter("a", "1"),
            salt="s",
        )
        here += b"".join(keys).hex() + "\n"
    assert printed == {here}


def test_KEY_03_media_ids_count_whole():
    """100,000 random media ids over the same tokens give as many keys; ids equal at their end differ."""
    namespace = Namespace("m", 4, hash="xxh3_128")
    source = random.Random(3)
    ids = {source.randbytes(32).hex() for _ in range(100_000)}
    keys = {keys_of((9, 9, 9, 9), namespace, media=[Media(i, 0, 4)])[0] for i in ids}

    assert len(keys) == len(ids) == 100_000
    twins = ["0123beef", "4567beef"]
    assert len({keys_of((9, 9, 9, 9), namespace, media=[Media(i, 0, 4)])[0] for i in twins}) == 2
    assert keys_of((9,) * 4, media=[Media("a", 0, 4)] * 1, namespace=namespace) != keys_of(
        (9,) * 4, namespace, media=[Media(b"a", 0, 4)]
    )


def test_KEY_04_media_changes_keys_from_its_block_on():
    """With a placeholder in block 3, another picture leaves keys 0..2 and changes all from 3 on."""
    tokens = [5] * 96
    a = keys_of(tokens, media=[Media("a", 50, 60)])
    b = keys_of(tokens, media=[Media("b", 50, 60)])
    moved = keys_of(tokens, media=[Media("a", 51, 60)])
    longer = keys_of(tokens, media=[Media("a", 50, 61)])
    plain = keys_of(tokens)

    for other in (b, moved, longer, plain):
        assert other[:3] == a[:3]
        assert not set(other[3:]) & set(a[3:])


def test_KEY_06_adapters_share_no_key():
    """No adapter, adapter A, adapter B and a new revision of A have disjoint key sets for the same tokens."""
    tokens = list(range(160))
    adapters = [None, Adapter("A"), Adapter("B"), Adapter("A", "2")]
    keys = [k for a in adapters for k in keys_of(tokens, adapter=a)]

    assert len(set(keys)) == len(keys) == 40


def test_KEY_08_fields_do_not_run_into_each_other():
    """No two ways to fill salt, adapter, revision and media give the same extra bytes."""
    ways = [
        {"salt": "x"},
        {"adapter": Adapter("x")},
        {"adapter": Adapter("", "x")},
        {"adapter": Adapter("ab", "c")},
        {"adapter": Adapter("a", "bc")},
        {"adapter": Adapter("a", "b"), "salt": "c"},
        {"salt": "adapter"},
        {"salt": ""},
        {},
        {"media": [Media("x", 0, 16)]},
        {"media": [Media(b"x", 0, 16)]},
        {"media": [Media("x", 0, 8), Media("x", 8, 16)]},
    ]
    first = [keys_of(range(16), **way)[0] for way in ways]

    assert len(set(first)) == len(ways)


@pytest.mark.parametrize(
    "change",
    [
        {"model_id": "org/other"},
        {"weights_revision": "r2"},
        {"dtype": "fp8"},
        {"tokens_per_block": 32},
        {"groups": (("full", 16, 0, 4, 128),)},
        {"groups": (*FULL.groups, ("sliding", 16, 1023, 8, 128))},
        {"ranks": (1, 2)},
        {"tenant": "u"},
        {"hash": "xxh3_128"},
        {"schema": 2},
    ],
    ids=lambda c: next(iter(c)),
)
def test_KEY_10_every_field_of_the_namespace_counts(change):
    """Any one field changed gives another directory and no common key."""
    other = replace(FULL, **change)

    assert other.digest != FULL.digest
    assert not set(keys_of(range(320), other)) & set(keys_of(range(320)))
    assert Namespace.from_canonical(other.canonical) == other


def test_KEY_13_token_ids_are_not_cut():
    """Ids that agree in their low 8 or 16 bits, and the largest ids, all have their own keys."""
    ids = [7, 263, 65535, 65536, 65536 + 7, 2**31 - 1, 2**31, 2**32 - 1]
    keys = [keys_of([i] * 16)[0] for i in ids]

    assert len(set(keys)) == len(ids)


def test_engine_hashes_are_cut_to_16_bytes():
    """Hashes of the engine, as bytes or array, are kept by their first 16 bytes and grow the chain."""
    golden = bytes.fromhex("fe8fa5dda3210d0ca2031e37cbe3b001186773cd1c710beb2d45fcb51d434798")
    more = hashlib.sha256(golden).digest()
    namespace = Namespace("m", 16, hash="vllm:sha256")
    chain = Chain.from_engine([golden], namespace)
    assert chain.append(np.frombuffer(more, np.uint8).reshape(1, 32)) == 1

    assert rows(chain) == [golden[:16], more[:16]]
    assert (chain.blocks, chain.tokens, len(chain.token_ids)) == (2, 32, 0)
    assert Chain.from_engine([], namespace).keys.shape == (0, 16)


def test_engine_hashes_need_their_own_namespace():
    """Tokens and engine hashes never meet in one chain, and hashes too short to be safe are refused."""
    engine = Namespace("m", 16, hash="vllm:sha256")
    with pytest.raises(ValueError, match="use append"):
        Chain(engine).extend([1])
    with pytest.raises(ValueError, match="use extend"):
        Chain.from_engine([b"x" * 32], FULL)
    with pytest.raises(ValueError, match="must be in them"):
        Chain(engine, salt="s")
    for short in ([b"x" * 8], [b""], np.zeros((1, 16), np.int8), np.zeros(16, np.uint8)):
        with pytest.raises(ValueError, match=r"\(n, >= 16\) uint8"):
            Chain.from_engine(short, engine)
    with pytest.raises(ValueError, match="16 and 32 bytes"):
        Chain.from_engine([b"x" * 16, b"x" * 32], engine)


def test_namespace_refuses_what_cannot_be():
    """A block of no tokens and a hash without a name are configuration errors that say what is allowed."""
    with pytest.raises(ConfigError, match="tokens_per_block is 0"):
        Namespace("m", 0)
    with pytest.raises(ConfigError, match="sha256, xxh3_128"):
        Namespace("m", 16, hash="")
