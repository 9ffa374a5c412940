"""Sizes in words: "64GiB" is binary, "64GB" is 10^9 times 64."""

from __future__ import annotations

import re

UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
}
_SIZE = re.compile(r"(-?\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def parse_size(text: str) -> int:
    """Bytes of "64GiB", "1.5 TB", "0". Raises ValueError naming the text, why it is refused, and what to write."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write for example 64GiB")
    number, unit = match.groups()
    if not unit and float(number) == 0:
        return 0
    if unit not in UNITS:
        problem = f"has the unknown unit {unit!r}" if unit else "has no unit"
        raise ValueError(
            f"{text!r} {problem}; write for example {number}GiB or {number}GB ({', '.join(UNITS)})"
        )
    whole, _, part = number.partition(".")
    return int(whole + part) * UNITS[unit] // int("1" + "0" * len(part))


def format_size(size: int) -> str:
    """The size in the largest binary unit of which it has at least one; exact in brackets where that is not."""
    unit = next((u for u in ("TiB", "GiB", "MiB", "KiB") if abs(size) >= UNITS[u]), "B")
    if size % UNITS[unit] == 0:
        return f"{size // UNITS[unit]}{unit}"
    return f"{size / UNITS[unit]:.1f}{unit} ({size} bytes)"
