"""kvoffload: the KV cache of an LLM engine through tiers, HBM -> CPU -> disk."""

__version__ = "0.1.0"
