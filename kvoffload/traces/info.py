"""What a trace asks of a cache: sizes, reuse in an unbounded cache, and what storing it costs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvoffload.traces.record import Trace


@dataclass(frozen=True, slots=True)
class Summary:
    """Facts of one trace. Hits are of an unbounded cache in file order: leading ids seen before.

    `rewrite_factor` = blocks / unique blocks: what storing each full prompt costs, over only what is new.
    Sessions and agents are None where the trace names none. An empty cache answers nothing: 0 of 0 is 0 %.
    """

    source: str
    form: str
    block_tokens: int
    partial_tail: str
    aligned: bool
    requests: int
    sessions: int | None
    agents: int | None
    duration_s: float
    input_tokens: int
    output_tokens: int
    median_input: float
    median_output: float
    blocks: int
    unique_blocks: int
    hit_blocks: int
    hit_percent: float
    hit_percent_tokens: float
    rewrite_factor: float
    notes: tuple[str, ...]


def summarize(trace: Trace) -> Summary:
    """The facts of a trace. REQUIRES: chained ids, so that the seen ids of a prompt are its leading ones."""
    requests = trace.requests
    counts = np.array([len(request.ids) for request in requests], dtype=np.int64)
    ids = np.concatenate([request.ids for request in requests] or [np.empty(0, dtype=np.int64)])
    _, first = np.unique(ids, return_index=True)
    new = np.zeros(len(ids), dtype=bool)
    new[first] = True
    ends = np.cumsum(counts)
    new_before = np.concatenate(([0], np.cumsum(new)))
    hits = counts - (new_before[ends] - new_before[ends - counts])
    prompts = np.array([request.input_tokens for request in requests], dtype=np.int64)
    answers = np.array([request.output_tokens for request in requests], dtype=np.int64)
    named = {(request.session, request.agent) for request in requests if request.session}
    times = [request.t for request in requests]
    total, unique = len(ids), len(first)
    return Summary(
        source=trace.source,
        form=trace.form,
        block_tokens=trace.block_tokens,
        partial_tail=trace.partial_tail,
        aligned=trace.aligned,
        requests=len(requests),
        sessions=len({session for session, _ in named}) or None,
        agents=len(named) or None,
        duration_s=max(times, default=0.0) - min(times, default=0.0),
        input_tokens=int(prompts.sum()),
        output_tokens=int(answers.sum()),
        median_input=float(np.median(prompts)) if requests else 0.0,
        median_output=float(np.median(answers)) if requests else 0.0,
        blocks=total,
        unique_blocks=unique,
        hit_blocks=int(hits.sum()),
        hit_percent=_percent(int(hits.sum()), total),
        hit_percent_tokens=_percent(
            int(np.minimum(hits * trace.block_tokens, prompts).sum()), int(prompts.sum())
        ),
        rewrite_factor=total / unique if unique else 0.0,
        notes=trace.notes,
    )


def _percent(part: int, whole: int) -> float:
    return 100.0 * part / whole if whole else 0.0
