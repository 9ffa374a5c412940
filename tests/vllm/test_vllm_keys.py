"""Keys of vLLM's requests: what keeps two of them apart, and what must not. KEY rows of docs/cases.md by id."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kvoffload.connectors.vllm.adapters import Adapters
from kvoffload.connectors.vllm.compat import hash_name
from kvoffload.connectors.vllm.requests import GrownChain
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256, sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, StreamingUpdate

from kvoffload.keys import Namespace

BLOCK = 16
TOKENS = list(range(100, 100 + 5 * BLOCK + 3))
OWN, ENGINE = "sha256", "vllm:sha256_cbor"


def made(tokens=TOKENS, hasher=sha256_cbor, **fields):
    """A request as vLLM makes it."""
    init_none_hash(hasher)
    hashes = get_request_block_hasher(BLOCK, hasher)
    return Request("r", tokens, SamplingParams(max_tokens=4), None, block_hasher=hashes, **fields)


def keys(request, algorithm=OWN, tenant=""):
    """The request's keys as a list of bytes."""
    space = Namespace("m", BLOCK, hash=algorithm, tenant=tenant)
    return [k.tobytes() for k in GrownChain(space, request).keys]


def picture(identity, begin, length=4):
    """A picture at the tokens [begin, begin + length)."""
    return MultiModalFeatureSpec(None, "image", identity, PlaceholderRange(offset=begin, length=length))


def adapter(name, path, number=1):
    return LoRARequest(name, number, path)


def engine_of(algorithm):
    return SimpleNamespace(cache_config=SimpleNamespace(prefix_caching_hash_algo=algorithm))


@pytest.mark.parametrize(
    ("algorithm", "name"),
    [("sha256", ""), ("sha256_cbor", ENGINE), ("xxhash", ""), ("xxhash_cbor", "")],
)
def test_only_hashes_that_are_equal_for_equal_inputs_are_the_engines(algorithm, name):
    """sha256_cbor is used as it is, under its own name; for the others kvoffload hashes the token ids itself."""
    assert hash_name(engine_of(algorithm)) == name


def test_equal_inputs_of_different_objects_have_equal_keys():
    """The same text twice, as one object and as two: vLLM's default tells them apart, kvoffload's keys do not."""
    salt = "".join(["ab", "c"])
    twin = "".join(["ab", "c"])
    once, twice = made(hasher=sha256, cache_salt=salt), made(hasher=sha256, cache_salt=twin)
    numbers = made(np.array(TOKENS, np.int64).tolist(), cache_salt=salt)

    assert sha256((salt, salt)) != sha256((salt, twin))
    assert keys(once) == keys(twice) == keys(numbers)
    assert sha256_cbor((salt, salt)) == sha256_cbor((salt, twin))
    assert keys(made(cache_salt=salt), ENGINE) == keys(made(cache_salt=twin), ENGINE)


@pytest.mark.parametrize("algorithm", [OWN, ENGINE])
def test_keys_grow_with_the_request(algorithm):
    """Generated tokens complete blocks; keys that were there stay; a chain made at the end is the same."""
    request = made()
    chain = GrownChain(Namespace("m", BLOCK, hash=algorithm), request)
    before = chain.keys.copy()
    request.append_output_token_ids(list(range(BLOCK)))

    assert len(before) == 5
    assert len(chain.keys) == 6
    assert np.array_equal(chain.keys[:5], before)
    assert [k.tobytes() for k in chain.keys] == keys(request, algorithm)


@pytest.mark.parametrize("algorithm", [OWN, ENGINE])
def test_KEY_04_a_picture_is_part_of_the_key_from_its_block_on(algorithm):
    """Equal tokens, another picture in block 3: keys 0 to 2 are equal, the rest differ."""
    a, b = (keys(made(mm_features=[picture(name, 3 * BLOCK + 2)]), algorithm) for name in ("aaaa", "bbaa"))

    assert a[:3] == b[:3] == keys(made(), algorithm)[:3]
    assert not set(a[3:]) & set(b[3:])


@pytest.mark.parametrize("algorithm", [OWN, ENGINE])
def test_KEY_04_a_picture_of_a_later_turn_of_a_streamed_session_is_part_of_the_key(algorithm):
    """Two sessions send the same tokens with another picture in the second turn: the keys of that turn differ, and are
    those of a request that brings all at once."""
    sessions = [two_turns(name, algorithm) for name in ("aaaa", "bbaa")]
    at_once = [
        keys(made(TOKENS + TOKENS, mm_features=[picture(n, len(TOKENS) + 2)]), algorithm)
        for n in ("aaaa", "bbaa")
    ]

    assert sessions == at_once
    assert sessions[0][:5] == sessions[1][:5] == keys(made(), algorithm)
    assert not set(sessions[0][5:]) & set(sessions[1][5:])


def two_turns(name, algorithm):
    """The keys of a session whose chain was hashed after the first turn."""
    session = made(list(TOKENS), resumable=True)
    chain = GrownChain(Namespace("m", BLOCK, hash=algorithm), session)
    assert len(chain.keys) == 5
    session.num_computed_tokens = len(TOKENS)
    session.append_output_token_ids([7])
    turn = made(list(TOKENS), resumable=True, mm_features=[picture(name, 2)])
    engine = SimpleNamespace(hash_block_size=BLOCK, log_stats=False)
    Scheduler._update_request_as_session(engine, session, StreamingUpdate.from_request(turn))
    assert not chain.broken
    return [k.tobytes() for k in chain.keys]


@pytest.mark.parametrize("algorithm", [OWN, ENGINE])
def test_KEY_03_picture_ids_are_used_whole(algorithm):
    """Many ids that end alike: as many keys."""
    names = [f"{n:012x}beef" for n in range(300)]

    assert len({keys(made(mm_features=[picture(n, 0)]), algorithm)[0] for n in names}) == len(names)


def test_a_picture_elsewhere_in_its_block_is_another_key():
    """The place of a picture inside the block counts."""
    assert keys(made(mm_features=[picture("x", 2)])) != keys(made(mm_features=[picture("x", 3)]))


@pytest.mark.parametrize("algorithm", [OWN, ENGINE])
def test_KEY_06_adapters_have_keys_of_their_own(algorithm):
    """No adapter, A, B, and A from another path: four sets of keys that share nothing."""
    adapters = (None, adapter("a", "/x"), adapter("b", "/x"), adapter("a", "/y"))
    found = [set(keys(made(lora_request=lora), algorithm)) for lora in adapters]

    assert all(not x & y for x, y in itertools.combinations(found, 2))


@pytest.mark.parametrize("algorithm", [OWN, ENGINE])
def test_KEY_06_an_adapter_trained_again_into_its_folder_is_another_one(algorithm, tmp_path):
    """Same name, same folder, other weights: an engine started afterwards shares no key with the one before, nor one
    with adapters of no folder. Unchanged files: the same keys in both."""
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"first")
    lora = adapter("a", str(tmp_path))
    before, again = (adapted(algorithm, lora, Adapters()) for _ in range(2))
    weights.write_bytes(b"the second")
    after = adapted(algorithm, lora, Adapters())
    weights.unlink()
    tmp_path.rmdir()
    gone = adapted(algorithm, lora, Adapters())

    assert before == again
    assert all(not set(x) & set(y) for x, y in itertools.combinations((before, after, gone), 2))


@pytest.mark.parametrize("algorithm", [OWN, ENGINE])
def test_KEY_06_an_adapter_whose_files_change_under_the_engine_has_no_keys(algorithm, tmp_path):
    """vLLM may hold the old weights or the new ones: nothing is stored or loaded until all was forgotten."""
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"first")
    lora, adapters = adapter("a", str(tmp_path)), Adapters()
    before = adapted(algorithm, lora, adapters)
    weights.write_bytes(b"the second")
    changed = adapted(algorithm, lora, adapters)
    adapters.forget()
    after = adapted(algorithm, lora, adapters)

    assert changed == []
    assert len(before) == len(after) == 5
    assert not set(before) & set(after)


def adapted(algorithm, lora, adapters):
    """Keys of a request with that adapter, as bytes."""
    chain = GrownChain(Namespace("m", BLOCK, hash=algorithm), made(lora_request=lora), adapters)
    return [k.tobytes() for k in chain.keys]


@pytest.mark.parametrize("algorithm", [OWN, ENGINE])
def test_KEY_08_no_field_can_stand_for_another(algorithm):
    """A salt named like an adapter, and fields split elsewhere, are other keys."""
    found = [
        keys(made(cache_salt="x"), algorithm),
        keys(made(lora_request=adapter("x", "x")), algorithm),
        keys(made(lora_request=adapter("ab", "c")), algorithm),
        keys(made(lora_request=adapter("a", "bc")), algorithm),
        keys(made(mm_features=[picture("x", 0)]), algorithm),
        keys(made(), algorithm),
    ]

    assert all(not set(x) & set(y) for x, y in itertools.combinations(found, 2))


@pytest.mark.parametrize("algorithm", [OWN, ENGINE])
def test_KEY_09_salts_keep_apart(algorithm):
    """Two salts and none: nothing is shared; the same salt shares all."""
    x, y, none = (keys(made(cache_salt=s), algorithm) for s in ("x", "y", None))

    assert not set(x) & set(y)
    assert not set(x) & set(none)
    assert x == keys(made(cache_salt="x"), algorithm)


def test_KEY_13_token_ids_are_used_whole():
    """Ids that agree in their low bits are other tokens, up to the largest."""
    ids = (7, 263, 65535, 65536, 2**31 - 1)
    found = [keys(made([i] * BLOCK))[0] for i in ids]

    assert len(set(found)) == len(ids)


def test_a_prompt_of_embeddings_has_no_keys():
    """Token ids do not tell its content: nothing of it is stored or found."""
    request = made(None, prompt_embeds=torch.zeros(3 * BLOCK, 8))

    assert keys(request) == []


@pytest.mark.parametrize("algorithm", [OWN, ENGINE])
@pytest.mark.parametrize("blocks", [1, 5])
def test_tokens_that_are_taken_back_break_the_chain(algorithm, blocks):
    """A session that was edited below what has keys: shorter, or another token in the last block; one that goes on
    behind it is whole."""
    tokens = TOKENS[: blocks * BLOCK + 3]
    chain = GrownChain(Namespace("m", BLOCK, hash=algorithm), made(tokens))
    assert not chain.broken
    assert len(chain.keys) == blocks
    assert not chain.broken
    changed = [*tokens[: blocks * BLOCK - 1], 7, *tokens[blocks * BLOCK :]]
    for edited, broken in (
        (tokens[: blocks * BLOCK - 1], True),
        (tokens[: blocks * BLOCK], False),
        (changed, True),
        ([*changed, *TOKENS], True),
        ([*tokens, *TOKENS], False),
    ):
        chain._request = made(edited)
        assert chain.broken is broken


def test_a_request_without_hashes_tells_by_its_length_that_it_was_edited():
    """vLLM without prefix caching makes no hashes."""
    chain = GrownChain(Namespace("m", BLOCK, hash=OWN), Request("r", TOKENS, SamplingParams(), None))
    assert len(chain.keys) == 5
    assert not chain.broken
    chain._request = Request("r", TOKENS[: 5 * BLOCK - 1], SamplingParams(), None)
    assert chain.broken


def test_a_picture_that_comes_with_a_later_turn_is_part_of_the_keys():
    """A streamed session gets a picture after its first blocks have keys: as if all had come at once."""
    request = made(TOKENS[: 2 * BLOCK], mm_features=[picture("a", 3)])
    chain = GrownChain(Namespace("m", BLOCK, hash=OWN), request)
    assert len(chain.keys) == 2
    request.mm_features.append(picture("b", 2 * BLOCK + 1))
    request._all_token_ids.extend(TOKENS[2 * BLOCK :])

    whole = keys(made(mm_features=[picture("a", 3), picture("b", 2 * BLOCK + 1)]))
    assert [key.tobytes() for key in chain.keys] == whole
    assert whole[2:] != keys(made(mm_features=[picture("a", 3), picture("c", 2 * BLOCK + 1)]))[2:]


def test_KEY_01_keys_are_the_same_in_every_process():
    """A process with another hash seed makes the same keys of the same request."""
    program = (
        "import sys; sys.path[:0] = sys.argv[1:]; import runner; runner.import_vllm()\n"
        "from test_vllm_keys import *; print(*(k.hex() for k in keys(made(cache_salt='s'))))"
    )
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", program, here]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "12345", "PATH": ""}
    )

    assert done.stdout.split() == [k.hex() for k in keys(made(cache_salt="s"))]
