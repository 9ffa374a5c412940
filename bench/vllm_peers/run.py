"""One engine with one connector plays one workload."""

from __future__ import annotations

import gc
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ledger import Ledger, OffloadingLedger, OwnLedger, SimpleLedger
from meter import Meter
from workloads import Ask, Workload

BLOCK = 32
SETTLE_S = 0.25
"""For writes to disk that run beside the engine, before its cache is emptied."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A connector and its options, given (bytes of host, bytes of disk, a folder)."""

    connector: str
    options: Callable[[int, int, str], dict[str, Any]]
    ledger: Callable[[Any, Any], Ledger]


def _offloading(host: int, disk: int, folder: str) -> dict[str, Any]:
    return {"cpu_bytes_to_use": host, "offload_prompt_only": False}


PEERS: dict[str, Peer | None] = {
    "none": None,
    "offloading": Peer("OffloadingConnector", _offloading, OffloadingLedger),
    "tiering": Peer(
        "OffloadingConnector",
        lambda h, d, f: {**_offloading(h, d, f), "spec_name": "TieringOffloadingSpec"},
        OffloadingLedger,
    ),
    "tiering+fs": Peer(
        "OffloadingConnector",
        lambda h, d, f: {
            **_offloading(h, d, f),
            "spec_name": "TieringOffloadingSpec",
            "secondary_tiers": [{"type": "fs", "root_dir": f}],
        },
        OffloadingLedger,
    ),
    "simple": Peer("SimpleCPUOffloadConnector", lambda h, d, f: {"cpu_bytes_to_use": h}, SimpleLedger),
    "simple disk": Peer(
        "SimpleCPUOffloadConnector",
        lambda h, d, f: {
            "cpu_bytes_to_use": h,
            "kv_offload_backend": "disk",
            "disk_path": f"{f}/blocks",
            "disk_capacity_bytes": d,
        },
        SimpleLedger,
    ),
    "kvoffload": Peer("KVOffloadConnector", lambda h, d, f: {"host_bytes": f"{h >> 10}KiB"}, OwnLedger),
    "kvoffload rri": Peer(
        "KVOffloadConnector", lambda h, d, f: {"host_bytes": f"{h >> 10}KiB", "host_policy": "rri"}, OwnLedger
    ),
    "kvoffload+disk": Peer(
        "KVOffloadConnector",
        lambda h, d, f: {"host_bytes": f"{h >> 10}KiB", "disk_path": f, "disk_bytes": f"{d >> 10}KiB"},
        OwnLedger,
    ),
}


@dataclass(slots=True)
class Seen:
    """Prefixes that some request has computed: what an endless cache would hold."""

    blocks: set[int] = field(default_factory=set)

    def prefix(self, tokens: Sequence[int]) -> int:
        """Tokens of the longest prefix that is known, one at least left out."""
        known = 0
        for end in range(BLOCK, len(tokens), BLOCK):
            if hash(tuple(tokens[:end])) not in self.blocks:
                break
            known = end
        return known

    def add(self, tokens: Sequence[int]) -> None:
        self.blocks.update(hash(tuple(tokens[:end])) for end in range(BLOCK, len(tokens) + 1, BLOCK))


class EnginePlayer:
    """A workload's Player. answers: those of the engine without a connector, None while that one runs."""

    def __init__(self, llm: Any, meter: Meter, answers: Mapping[str, tuple[int, ...]] | None) -> None:
        self._llm = llm
        self._meter = meter
        self._answers = answers
        self._seen = Seen()
        self._fillers = 0
        self.said: dict[str, tuple[int, ...]] = {}
        self.recomputed = 0
        self.stuck: list[str] = []

    def batch(self, asks: Sequence[Ask]) -> dict[str, tuple[int, ...]]:
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        for ask in asks:
            params = SamplingParams(temperature=0, max_tokens=ask.new, ignore_eos=True, detokenize=False)
            engine.add_request(ask.id, {"prompt_token_ids": list(ask.tokens)}, params)
        done = self._until_done(asks)
        for ask in asks:
            known = self._seen.prefix(ask.tokens)
            if ask.id in done:
                self.said[ask.id] = tuple(done[ask.id].outputs[0].token_ids)
                self.recomputed += max(0, known - (done[ask.id].num_cached_tokens or 0))
                self._seen.add(ask.tokens + self.said[ask.id][:-1])
        return dict(self.said if self._answers is None else self._answers)

    def _until_done(self, asks: Sequence[Ask]) -> dict[str, Any]:
        engine = self._llm.llm_engine
        gone = {ask.id: ask.abort_after for ask in asks if ask.abort_after is not None}
        done: dict[str, Any] = {}
        steps, last = 0, time.monotonic()
        while engine.has_unfinished_requests():
            computed = self._meter.scheduled
            outputs = engine.step()
            if outputs or self._meter.scheduled > computed:
                last = time.monotonic()
            for output in outputs:
                if output.finished and output.outputs[0].finish_reason != "abort":
                    done[output.request_id] = output
            steps += 1
            late = [name for name, after in gone.items() if after <= steps and name not in done]
            if late:
                engine.abort_request(late)
                gone = {name: after for name, after in gone.items() if name not in late}
            if time.monotonic() - last > PATIENCE_S:
                waiting = [a.id for a in asks if a.id not in done]
                self.stuck += waiting
                engine.abort_request(waiting)
                break
        return done

    def _settle(self) -> None:
        """Two short requests that no cache keeps: reports and late stores get the steps that they wait for."""
        self._meter.on = False
        for _ in range(2):
            time.sleep(SETTLE_S)
            self._fillers += 1
            name = f"filler {self._fillers}"
            self._fill(name)
        self._meter.on = True

    def _fill(self, name: str) -> None:
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)
        engine.add_request(name, {"prompt_token_ids": [501, 502, 503]}, params)
        while engine.has_unfinished_requests():
            engine.step()

    def forget(self) -> None:
        self._settle()
        for _ in range(20):
            if self._llm.reset_prefix_cache():
                return
            self._settle()
        raise RuntimeError("the engine's cache could not be emptied: its blocks are still held")


PATIENCE_S = 3.0
"""After so long without a computed token a batch is given up: a request in it hangs."""


def engine_of(model: Path, peer: Peer | None, options: dict[str, Any], **sizes: Any) -> Any:
    """A CPU engine in this process."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    extra: dict[str, Any] = {}
    if peer is not None:
        extra["kv_transfer_config"] = KVTransferConfig(
            kv_connector=peer.connector, kv_role="kv_both", kv_connector_extra_config=options
        )
    return LLM(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_num_seqs=8,
        block_size=BLOCK,
        enable_prefix_caching=True,
        prefix_caching_hash_algo="sha256_cbor",
        seed=0,
        disable_log_stats=False,
        **sizes,
        **extra,
    )


def close(llm: Any) -> None:
    """End an engine, so that another can be made in this process."""
    import vllm

    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    vllm.distributed.cleanup_dist_env_and_memory()


def play(
    workload: Workload, name: str, model: Path, folder: Path, answers: Mapping[str, tuple[int, ...]] | None
) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """(the figures of one connector, its answers)."""
    peer = PEERS[name]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    options = {} if peer is None else peer.options(workload.host, workload.disk, str(folder))
    llm = engine_of(
        model,
        peer,
        options,
        max_model_len=workload.longest,
        max_num_batched_tokens=256,
        kv_cache_memory_bytes=workload.pool,
    )
    meter = Meter()
    meter.attach(llm.llm_engine, None if peer is None else peer.ledger)
    player = EnginePlayer(llm, meter, answers)
    workload.play(player)
    figures = _figures(meter, player, folder, answers)
    close(llm)
    shutil.rmtree(folder, ignore_errors=True)
    return figures, player.said


def _figures(
    meter: Meter, player: EnginePlayer, folder: Path, answers: Mapping[str, tuple[int, ...]] | None
) -> dict[str, Any]:
    scheduler = sorted(step.scheduler / 1e3 for step in meter.steps)
    worker = sorted(step.worker / 1e3 for step in meter.steps)
    both = player.said if answers is None else answers
    equal = sum(both.get(name) == said for name, said in player.said.items())
    found: dict[str, Any] = {
        "hit_host": meter.served - meter.disk,
        "hit_disk": meter.disk,
        "computed": meter.scheduled,
        "recomputed": player.recomputed,
        "requests": len(player.said),
        "equal": equal,
        "stuck": len(player.stuck),
        "steps": len(meter.steps),
        "step_us": statistics.median(step.total / 1e3 for step in meter.steps),
        "share": [
            sum(part) / sum(step.total for step in meter.steps)
            for part in ((s.scheduler for s in meter.steps), (s.worker for s in meter.steps))
        ],
        "scheduler_us": [statistics.median(scheduler), scheduler[int(0.9 * len(scheduler))]],
        "worker_us": [statistics.median(worker), worker[int(0.9 * len(worker))]],
    }
    if meter.ledger is not None:
        stored, loaded = meter.ledger.bytes()
        found |= {
            "stored_blocks": meter.ledger.stored,
            "stored_again": meter.ledger.again,
            "stored_twice": meter.ledger.twice,
            "stored_bytes": stored,
            "loaded_blocks": meter.ledger.loaded,
            "loaded_bytes": loaded,
            "disk_bytes": meter.ledger.disk_bytes(folder),
            "host_bytes": meter.ledger.host_bytes(),
        }
    return found
