"""Errors of the public interface. A miss is a value, never one of these."""

from __future__ import annotations


class KVOffloadError(Exception):
    """Base of every error that kvoffload raises on purpose."""


class ConfigError(KVOffloadError, ValueError):
    """A configuration value cannot be used; the message names the value, the limit and the way out."""


class LayoutError(KVOffloadError, ValueError):
    """A cache layout cannot be stored as described; the message names the group and the sizes."""


class TierError(KVOffloadError, OSError):
    """A tier cannot be opened or has lost its medium; the message names the path and the bytes."""


class TraceError(KVOffloadError, ValueError):
    """A trace cannot be read as asked; the message names file, line, value and the way out."""
