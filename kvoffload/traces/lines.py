"""Trace files as rows of checked fields: JSON lines or one JSON document, plain or .gz, one row in memory."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from kvoffload.errors import TraceError
from kvoffload.traces.record import Ids

_MAX_ID = 2**63 - 1
_MAX_RUN_IDS = 1 << 26  # ids of one prompt when run-length coded: 512 MiB expanded


class Row(NamedTuple):
    """One JSON value and the place it came from, as FILE:LINE."""

    where: str
    value: object


def rows(path: Path) -> Iterator[Row]:
    """The JSON values of a file. Raises TraceError for what is not readable, not JSON, or empty."""
    found = False
    try:
        source = _document(path) if path.name.removesuffix(".gz").endswith(".json") else _lines(path)
        for row in source:
            found = True
            yield row
    except FileNotFoundError:
        raise TraceError(
            f"{path}: no such file; give a trace file, a folder of sessions or synth:..."
        ) from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read ({error}); is it whole, and UTF-8 or gzip?") from error
    if not found:
        raise TraceError(f"{path}: empty; a trace has at least one request")


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb")  # type: ignore[return-value]


def _lines(path: Path) -> Iterator[Row]:
    with _open(path) as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                where = f"{path}:{number}"
                yield Row(where, _parse(where, line.decode()))


def _document(path: Path) -> Iterator[Row]:
    """A .json file is one document, unless several follow each other: then they are lines."""
    with _open(path) as stream:
        text = stream.read().decode()
    if not text.strip():
        return
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            yield from _lines(path)
            return
        raise TraceError(f"{path}:{error.lineno}: not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}: not JSON that can be held: {error}") from None
    yield Row(str(path), value)


def _parse(where: str, line: str) -> object:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise TraceError(
            f"{where}: not JSON: {error.msg} at column {error.colno}; a trace has one JSON object a line"
        ) from None
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{where}: not JSON that can be held: {error}") from None


def shown(value: object) -> str:
    """A value for a message, cut to a readable length."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


class Fields:
    """Takes the fields of one JSON object by name and type; what is left at the end is an error.

    A field that is null counts as absent where it may be absent.
    """

    __slots__ = ("_left", "where")

    def __init__(self, where: str, value: object) -> None:
        if not isinstance(value, dict):
            raise TraceError(
                f"{where}: {shown(value)} is not a JSON object; each row is one request or session"
            )
        self.where = where
        self._left = dict(value)

    def __contains__(self, name: str) -> bool:
        return self._left.get(name) is not None

    def wrong(self, name: str, value: object, wanted: str) -> TraceError:
        """The error for a field whose value cannot be used."""
        return TraceError(f"{self.where}: {name} = {shown(value)}; it must be {wanted}")

    def take(self, name: str) -> object:
        """A field of any type, which must be there."""
        if name not in self._left:
            raise TraceError(f"{self.where}: no field {name}; it is required")
        return self._left.pop(name)

    def drop(self, *names: str) -> None:
        """Accept fields that are known and not used."""
        for name in names:
            self._left.pop(name, None)

    def integer(self, name: str, lowest: int = 0) -> int:
        """An int that is at least `lowest`."""
        value = self.take(name)
        if type(value) is not int or value < lowest or value > _MAX_ID:
            raise self.wrong(name, value, f"an integer of at least {lowest}")
        return value

    def maybe_integer(self, name: str, lowest: int = 0) -> int | None:
        """The same, or None where absent."""
        if name in self:
            return self.integer(name, lowest)
        self.drop(name)
        return None

    def number(self, name: str) -> float:
        """A finite number, not negative; times and delays."""
        value = self.take(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, value, "a number of at least 0")
        if not 0 <= value <= 1e15:  # false for NaN too
            raise self.wrong(name, value, "a number of 0 to 1e15")
        return float(value)

    def maybe_number(self, name: str) -> float | None:
        """The same, or None where absent."""
        if name in self:
            return self.number(name)
        self.drop(name)
        return None

    def text(self, name: str) -> str:
        """A string."""
        value = self.take(name)
        if not isinstance(value, str):
            raise self.wrong(name, value, "a string")
        return value

    def text_or(self, name: str, default: str) -> str:
        """A string, or the default where absent."""
        if name in self:
            return self.text(name)
        self.drop(name)
        return default

    def flag(self, name: str, default: bool) -> bool:
        """True or false, or the default where absent."""
        value = self._left.pop(name, None)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return default if value is None else value

    def array(self, name: str) -> list[object]:
        """A JSON list."""
        value = self.take(name)
        if not isinstance(value, list):
            raise self.wrong(name, value, "a list")
        return value

    def ids(self, name: str) -> Ids:
        """A list of ids, integers in [0, 2**63)."""
        return self._integers(name, self.array(name))

    def runs(self, name: str, most: int) -> Ids:
        """Ids run-length coded as [[start, count], ...], expanded; `most` limits their number."""
        pairs = self.array(name)
        for pair in pairs:
            if not isinstance(pair, list) or len(pair) != 2:
                raise self.wrong(name, pair, "[start, count] pairs")
        flat = self._integers(name, [number for pair in pairs for number in pair])  # type: ignore[attr-defined]
        starts, counts = flat[0::2], flat[1::2]
        most = min(most, _MAX_RUN_IDS)
        if len(counts) and (counts.min() < 1 or counts.max() > most or starts.max() > _MAX_ID - most):
            raise self.wrong(name, pairs, f"pairs with a count of 1 to {most} and ids under 2**63")
        ends = np.cumsum(counts)
        if len(ends) and ends[-1] > most:
            raise self.wrong(name, pairs, f"at most {most} ids, one token or more each")
        total = int(ends[-1]) if len(ends) else 0
        return np.repeat(starts - (ends - counts), counts) + np.arange(total, dtype=np.int64)

    def _integers(self, name: str, values: list[object]) -> Ids:
        if not set(map(type, values)) <= {int}:
            odd = next(value for value in values if type(value) is not int)
            raise self.wrong(name, odd, "integers only")
        try:
            array = np.array(values, dtype=np.int64)
        except OverflowError:
            raise self.wrong(name, "a larger number", "ids in [0, 2**63)") from None
        if len(array) and array.min() < 0:
            raise self.wrong(name, int(array.min()), "ids in [0, 2**63)")
        return array

    def finish(self) -> None:
        """REQUIRES: every known field has been taken or dropped. Raises TraceError for the rest."""
        if self._left:
            name, value = next(iter(self._left.items()))
            raise TraceError(
                f"{self.where}: unknown field {name} = {shown(value)}; remove it or correct its name"
            )
