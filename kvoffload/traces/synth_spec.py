"""What a synthetic trace is made from: one frozen dataclass, also written "synth:sessions=14,seed=0,..."."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from decimal import Decimal, InvalidOperation

from kvoffload.errors import TraceError

SPEC_PREFIX = "synth:"
_SCALE = {"k": 1_000, "m": 1_000_000}
_LIMITS: dict[str, tuple[float, float]] = {
    "sessions": (1, 100_000),
    "seed": (0, 2**63 - 1),
    "block_size": (1, 1 << 20),
    "max_context": (4_096, 1 << 40),
    "shared_prefix": (0, 1 << 30),
    "turns": (1, 100_000),
    "subagents": (0.0, 1.0),
    "max_gap_s": (1.0, 1e7),
    "spread_s": (0.0, 1e9),
    "vocabulary": (2, 2**32 - 1),
}


@dataclass(frozen=True, kw_only=True)
class SynthSpec:
    """The options of the generator; equal specs make equal traces, byte for byte, on any Python version."""

    sessions: int = 14
    seed: int = 0
    block_size: int = 64  # tokens
    max_context: int = 990_016  # tokens of prompt and answer: the AgentX cap
    shared_prefix: int = 0  # tokens that all sessions start with; AgentX has none
    turns: int = 90  # median of the main agent's turns in a session; at least min(20, turns)
    subagents: float = 0.445  # share of sessions that have sub-agents
    max_gap_s: float = 300.0  # longest wait between an answer and the next prompt
    spread_s: float = 600.0  # sessions start at uniform times in [0, spread_s)
    vocabulary: int = 128_000  # token ids are below it

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            low, high = _LIMITS[name]
            if not low <= value <= high:
                raise TraceError(f"synth: {name} = {value}; it must be {low:,} to {high:,}")
        if self.shared_prefix > self.max_context // 2:
            raise TraceError(
                f"synth: shared_prefix = {self.shared_prefix}; it must be at most half of max_context"
                f" ({self.max_context // 2})"
            )

    def short(self) -> str:
        """As str, but only sessions, seed and what is not the default: it stands for the same trace."""
        default = asdict(SynthSpec())
        return SPEC_PREFIX + ",".join(
            f"{name}={value}"
            for name, value in asdict(self).items()
            if name in ("sessions", "seed") or value != default[name]
        )

    def __str__(self) -> str:
        return SPEC_PREFIX + ",".join(f"{name}={value}" for name, value in asdict(self).items())


def shown(name: str) -> str:
    """The name of a trace for people: of a synthetic one what is not the default."""
    return parse_spec(name).short() if name.startswith(SPEC_PREFIX) else name


def parse_spec(text: str) -> SynthSpec:
    """The spec of "synth:name=value,..."; numbers may end in k (1,000) or m (1,000,000)."""
    types = {field.name: field.type for field in fields(SynthSpec)}
    given: dict[str, float] = {}
    for part in filter(None, text.removeprefix(SPEC_PREFIX).split(",")):
        name, _, value = part.partition("=")
        name = name.strip()
        if name not in types:
            raise TraceError(f"{text}: unknown option {name!r}; the options are {', '.join(types)}")
        if name in given:
            raise TraceError(f"{text}: {name} is given twice; keep one")
        given[name] = parse_number(name, value.strip(), whole=types[name] == "int")
    return SynthSpec(**given)  # type: ignore[arg-type]


def parse_number(name: str, text: str, *, whole: bool) -> float:
    """A number with an optional k or m, an int where `whole`."""
    scale = _SCALE.get(text[-1:].lower(), 1)
    digits = text[:-1] if scale > 1 else text
    try:
        value = Decimal(digits) * scale
    except InvalidOperation:
        value = Decimal("nan")
    if not value.is_finite():
        raise TraceError(f"synth: {name} = {text!r}; it must be a number, like 300000 or 300k")
    if whole and value != int(value):
        raise TraceError(f"synth: {name} = {text!r}; it must be a whole number")
    return int(value) if whole else float(value)
