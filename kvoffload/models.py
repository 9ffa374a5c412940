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


_LATENT = 640
"""Bytes of a compressed entry: 512 numbers of 1 byte and 64 rotated ones of 2."""

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
            "62 layers, every sixth of them full, 16 key-value heads of 128, window 1,024",
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
        Model(
            "deepseek-v4",
            "the class, not one checkpoint: 60 layers with a window of 128 latent entries each; half of them keep one"
            " entry per 4 tokens and an index key for it, half one per 128 tokens",
            (
                ModelGroup("per 4", "full", 30, 256, 64 * _LATENT),
                ModelGroup("index", "full", 30, 256, 64 * 128),
                ModelGroup("per 128", "full", 30, 256, 2 * _LATENT),
                ModelGroup("window", "sliding", 60, 64, 64 * _LATENT, 128),
            ),
        ),
    )
}


def find_model(name: str) -> Model:
    """Raises ConfigError naming the models that there are."""
    if name not in MODELS:
        raise ConfigError(f"no model is called {name!r}; there are: {', '.join(MODELS)}")
    return MODELS[name]
