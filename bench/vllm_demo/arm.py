"""One arm of the demo in a process of its own: the same conversations on one engine, its figures as JSON on stdout.

A session sends its next turn as soon as the last one is answered; the turn's prompt is the whole conversation so far.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

BLOCK = 32


@dataclass(frozen=True, slots=True)
class Plan:
    """What an arm does. pool: tokens that fit the engine's pages. extra: the connector's configuration, None = none."""

    model: str
    sessions: int
    turns: int
    first: int
    last: int
    pool: int
    extra: dict[str, Any] | None

    def inputs(self) -> list[int]:
        """Tokens of the prompt, by turn."""
        step = (self.last - self.first) / max(1, self.turns - 1)
        return [round(self.first + step * turn) for turn in range(self.turns)]


@dataclass(slots=True)
class Session:
    """One conversation. sent: when the running turn was sent, seconds."""

    number: int
    tokens: list[int]
    turn: int = 0
    sent: float = 0.0
    first: float = 0.0
    seen: int = 0


@dataclass(slots=True)
class Figures:
    """Of one arm: seconds by turn, tokens, and what the connector took of the engine's time. copied: bytes between
    pages and host."""

    seconds: float = 0.0
    ttft: list[float] = field(default_factory=list)
    latency: list[float] = field(default_factory=list)
    inputs: int = 0
    outputs: int = 0
    computed: int = 0
    steps: int = 0
    digest: str = ""
    connector: dict[str, float] = field(default_factory=dict)
    copied: int = 0


def engine_of(plan: Plan, page_bytes: int) -> Any:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    transfer = {}
    if plan.extra is not None:
        transfer["kv_transfer_config"] = KVTransferConfig(
            kv_connector="KVOffloadConnector", kv_role="kv_both", kv_connector_extra_config=plan.extra
        )
    return LLM(
        model=plan.model,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=plan.last + plan.last // 100 + 2 * BLOCK,
        max_num_seqs=plan.sessions,
        max_num_batched_tokens=2048,
        block_size=BLOCK,
        kv_cache_memory_bytes=(plan.pool // BLOCK + 1) * page_bytes,
        enable_prefix_caching=True,
        prefix_caching_hash_algo="sha256_cbor",
        seed=0,
        disable_log_stats=False,
        **transfer,
    )


def play(plan: Plan, engine: Any) -> Figures:
    """All turns of all sessions."""
    chance = random.Random(7)
    inputs, figures = plan.inputs(), Figures()
    words = [[chance.randrange(3, 2000) for _ in range(plan.last)] for _ in range(plan.sessions)]
    sessions = [Session(n, words[n][: inputs[0]]) for n in range(plan.sessions)]
    begun = time.perf_counter()
    for session in sessions:
        _send(engine, session)
    while engine.has_unfinished_requests():
        figures.steps += 1
        for output in engine.step():
            session = sessions[int(output.request_id.partition(".")[0])]
            now = time.perf_counter()
            made = output.outputs[0].token_ids
            if made and not session.first:
                session.first = now
            if not output.finished:
                continue
            figures.ttft.append(session.first - session.sent)
            figures.latency.append(now - session.sent)
            figures.inputs += len(session.tokens)
            figures.outputs += len(made)
            figures.computed += len(session.tokens) - (output.num_cached_tokens or 0)
            session.tokens = [*session.tokens, *made]
            session.turn += 1
            if session.turn < plan.turns:
                add = inputs[session.turn] - len(session.tokens)
                session.tokens += words[session.number][-add:]
                _send(engine, session)
    figures.seconds = time.perf_counter() - begun
    told = json.dumps([s.tokens for s in sessions]).encode()
    figures.digest = hashlib.sha256(told).hexdigest()[:16]
    return figures


def _send(engine: Any, session: Session) -> None:
    from vllm import SamplingParams

    session.sent, session.first = time.perf_counter(), 0.0
    limit = max(1, len(session.tokens) // 100)
    engine.add_request(
        f"{session.number}.{session.turn}",
        {"prompt_token_ids": session.tokens},
        SamplingParams(temperature=0, max_tokens=limit, ignore_eos=True, detokenize=False),
    )


def connector_times(engine: Any) -> dict[str, float]:
    """Seconds of the engine's threads inside the connector's calls, and those of them that were copies."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if not has_kv_transfer_group():
        return {}
    worker = get_kv_transfer_group()
    scheduler = engine.engine_core.engine_core.scheduler.connector
    return worker.engine_seconds() | scheduler.engine_seconds()


def bytes_copied(engine: Any) -> int:
    """Bytes that went between pages and host since the engine's start."""
    connector = engine.engine_core.engine_core.scheduler.connector
    if connector is None:
        return 0
    totals = connector.stats().totals
    return int(totals["store_bytes_host"] + totals["load_bytes_host"])


def token_bytes(model: Path) -> int:
    """Bytes of one token's keys and values in 32-bit floats."""
    config = json.loads((model / "config.json").read_text())
    return int(2 * 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"])


def main() -> None:
    plan = Plan(**json.loads(sys.argv[1]))
    llm = engine_of(plan, BLOCK * token_bytes(Path(plan.model)))
    warm = Plan(plan.model, 1, 1, 256, 256, plan.pool, None)
    play(warm, llm.llm_engine)
    before, copied = connector_times(llm.llm_engine), bytes_copied(llm.llm_engine)
    figures = play(plan, llm.llm_engine)
    after = connector_times(llm.llm_engine)
    figures.copied = bytes_copied(llm.llm_engine) - copied
    figures.connector = {name: after[name] - before[name] for name in after}
    llm.llm_engine.engine_core.shutdown()
    print("FIGURES " + json.dumps(asdict(figures)))


if __name__ == "__main__":
    main()
