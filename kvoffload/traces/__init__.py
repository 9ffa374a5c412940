"""Request traces: one record, readers for what others publish, a generator, and conversion."""

from kvoffload.traces.blocks import coarsen
from kvoffload.traces.convert import write_trace
from kvoffload.traces.info import Summary, summarize
from kvoffload.traces.load import iter_requests, open_trace
from kvoffload.traces.record import MAIN, NO_PARENT, Request, Trace, trace_keys
from kvoffload.traces.synth import synthesize
from kvoffload.traces.synth_spec import SynthSpec, parse_spec

__all__ = [
    "MAIN",
    "NO_PARENT",
    "Request",
    "Summary",
    "SynthSpec",
    "Trace",
    "coarsen",
    "iter_requests",
    "open_trace",
    "parse_spec",
    "summarize",
    "synthesize",
    "trace_keys",
    "write_trace",
]
