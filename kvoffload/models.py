"""Layouts of known models, from their public configurations: whole model, one rank.

Bytes are those of the cache: 2 bytes per number unless a comment says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvoffload.errors import ConfigError
from kvoffload.layout import CacheGroup, Layout, lifetime

KIB = 1 << 10


@dataclass(frozen=True, slots=True)
class ModelGroup:
    """Layers of one lifetime. kind, window: as layout.lifetime. block: tokens per block, as engines choose them.

    layers: how many; bytes: of one layer's block.
    """

    name: str
    kind: str
    layers: int
    block: int
    bytes: int
    window: int = 0

    @property
    def token_bytes(self) -> float:
        """Bytes per token, all layers, if every block is kept."""
        return self.layers * self.bytes / self.block


@dataclass(frozen=True, slots=True)
class Model:
    """One entry of the registry. source: where the numbers come from."""

    name: str
    source: str
    groups: tuple[ModelGroup, ...]

    def layout(self, base_tokens: int = 16, scale: int = 1) -> Layout:
        """Its groups over base blocks of so many tokens; a group's block is the next multiple of that.

        scale: divides all bytes, so that a small machine can play a large model. Raises ConfigError where it does not
        divide some group's bytes.
        """
        groups = []
        for number, group in enumerate(self.groups):
            kind, lookback = lifetime(group.kind, group.window)
            tokens = -(-group.block // base_tokens) * base_tokens
            whole = group.layers * group.bytes
            if group.kind != "state":
                if whole * tokens % group.block:
                    raise ConfigError(
                        f"{self.name}: blocks of {tokens} tokens do not fit group {group.name} of {group.block}"
                    )
                whole = whole * tokens // group.block
            if scale < 1 or whole % scale:
                raise ConfigError(
                    f"--scale-bytes {scale} does not divide the {whole} bytes of group {group.name} of {self.name}"
                )
            groups.append(
                CacheGroup(number, kind, tokens, whole // scale, lookback, layers=(f"{group.name} layers",))
            )
        return Layout(base_tokens, tuple(groups))


def _attention(name: str, layers: int, heads: int, head_bytes: int, window: int = 0) -> ModelGroup:
    """Keys and values of `heads` heads, blocks of 16 tokens."""
    kind = "sliding" if window else "full"
    return ModelGroup(name, kind, layers, 16, 16 * 2 * heads * head_bytes, window)


_ENTRY = 584
"""Bytes of a compressed entry of DeepSeek-V4 as vLLM lays it out: 448 numbers of 1 byte, 64 rotated ones of 2, and 8 of
scales."""

_INDEX = 132
"""Bytes of an index key there: 128 numbers of 1 byte and a scale of 4."""

_CARRY = 8 * (2 * 2 * 512 + 2 * 2 * 128) * 4
"""Bytes that a layer with one entry per 4 tokens carries over a boundary: compressors and their scores, of entries that
overlap by half, for cache and index, 8 tokens of 4-byte numbers. The compressors of one entry per 128 tokens carry
nothing where 128 divides the boundary."""


def _deepseek_v4(name: str, layers: int, per_4: int, per_128: int) -> Model:
    return Model(
        name,
        f"{layers} layers with one head of 512, each with a window of 128; {per_4} of them keep one entry per 4 tokens"
        f" and an index key of 128 for it, {per_128} one entry per 128 tokens",
        (
            ModelGroup("per 4", "full", per_4, 256, 64 * _ENTRY),
            ModelGroup("index", "full", per_4, 256, 64 * _INDEX),
            ModelGroup("per 128", "full", per_128, 256, 2 * _ENTRY),
            ModelGroup("window", "sliding", layers, 64, 64 * _ENTRY, 128),
            ModelGroup("carry", "state", per_4, 256, _CARRY),
        ),
    )


MODELS = {
    model.name: model
    for model in (
        Model(
            "llama-3.1-8b",
            "32 layers, 8 key-value heads of 128",
            (_attention("full", 32, 8, 256),),
        ),
        Model(
            "gemma-3-27b",
            "62 layers, every sixth full, 16 key-value heads of 128, window 1,024",
            (_attention("full", 10, 16, 256), _attention("window", 52, 16, 256, 1024)),
        ),
        Model(
            "gpt-oss-120b",
            "36 layers, full and window in turn, 8 key-value heads of 64, window 128",
            (_attention("full", 18, 8, 128), _attention("window", 18, 8, 128, 128)),
        ),
        Model(
            "qwen3-next-80b",
            "48 layers, every fourth of them full with 2 key-value heads of 256; the others gated delta nets:"
            " 32 states of 128 x 128 (4 bytes) and 3 steps of 8,192 convolution channels",
            (
                _attention("full", 12, 2, 512),
                ModelGroup("state", "state", 36, 256, 32 * 128 * 128 * 4 + 3 * 8192 * 2),
            ),
        ),
        _deepseek_v4("deepseek-v4", 43, 21, 20),
        _deepseek_v4("deepseek-v4-pro", 61, 30, 31),
    )
}


def find_model(name: str) -> Model:
    """Raises ConfigError naming the models that there are."""
    if name not in MODELS:
        raise ConfigError(f"no model is called {name!r}; there are: {', '.join(MODELS)}")
    return MODELS[name]
