"""One thing that was looked at."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """advice: what to do, "" where nothing is off. optional: it is not here, and only some will miss it."""

    area: str
    name: str
    value: str
    advice: str = ""
    optional: bool = False

    @property
    def state(self) -> str:
        """One of "ok", "optional", "look"."""
        if self.advice:
            return "look"
        return "optional" if self.optional else "ok"
