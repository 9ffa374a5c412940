"""The ways in: a trace as a whole, or request by request."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from kvoffload.errors import TraceError
from kvoffload.traces.adversarial import ADVERSARY_PREFIX, parse_adversary
from kvoffload.traces.blocks import Entry, Shape, coarsen
from kvoffload.traces.chain import ChainCheck, Rekey
from kvoffload.traces.lines import Row, rows
from kvoffload.traces.mooncake import Asked, MooncakeReader
from kvoffload.traces.record import Form, Request, Trace
from kvoffload.traces.synth import synthesize
from kvoffload.traces.synth_spec import SPEC_PREFIX, parse_spec
from kvoffload.traces.weka import WekaReader, is_session

_SUFFIXES = (".json", ".jsonl", ".json.gz", ".jsonl.gz")


def open_trace(
    source: str | Path, block_size: int | None = None, form: Asked = "auto", rekey: bool = False
) -> Trace:
    """The whole trace of a file, a folder of sessions, a spec "synth:sessions=14,seed=0,...",
    or "adversary:SHAPE:SEED:REQUESTS".

    `block_size` is the one wanted: the trace's own or, of aligned chained traces, a multiple of it; where the
    lines do not state theirs, one that fits the lengths counts as theirs. `rekey` accepts ids that are not
    chained, by naming each block (parent, id). Raises TraceError with file, line, value and the way out.
    """
    if block_size is not None and block_size < 1:
        raise TraceError(f"block size {block_size}: it must be at least 1 token")
    if form not in ("auto", "full", "delta"):
        raise TraceError(f"form {form!r}: it must be auto, full or delta")
    if str(source).startswith(ADVERSARY_PREFIX):
        trace = parse_adversary(str(source)).trace()
        return trace if block_size is None else coarsen(trace, block_size)
    if str(source).startswith(SPEC_PREFIX):
        spec = parse_spec(str(source))
        return synthesize(spec if block_size is None else replace(spec, block_size=block_size))
    path = Path(source)
    reader, shape, aligned = _reader(path, form), Shape(), True
    requests = []
    for entry in _checked(reader, rekey):
        shape.add(entry)
        aligned = aligned and entry.aligned
        requests.append(entry.request)
    size, tail = shape.resolve(block_size)
    notes = [*reader.notes, "ids re-keyed by (parent, id), as asked"] if rekey else reader.notes
    trace = Trace(
        name=path.name,
        source=str(path),
        block_tokens=size,
        partial_tail=tail,
        form=_form(reader),
        aligned=aligned,
        requests=tuple(requests),
        notes=tuple(notes),
    )
    return trace if block_size is None else coarsen(trace, block_size)


def iter_requests(source: str | Path, form: Asked = "auto", rekey: bool = False) -> Iterator[Request]:
    """The requests one by one, in the trace's own block size, with the same checks of form and chaining.

    Memory grows with distinct ids and sessions, not with requests. Block size and tail rule are not checked.
    """
    for entry in _checked(_reader(Path(source), form), rekey):
        yield entry.request


def _checked(reader: MooncakeReader | WekaReader, rekey: bool) -> Iterator[Entry]:
    """Entries whose ids are chained: checked, or made so."""
    if rekey:
        names = Rekey()
        for entry in reader:
            yield entry._replace(request=replace(entry.request, ids=names.apply(entry.request.ids)))
        return
    check = ChainCheck()
    for entry in reader:
        check.add(entry.where, entry.request.ids)
        yield entry


def _reader(path: Path, form: Asked) -> MooncakeReader | WekaReader:
    source = _folder(path) if path.is_dir() else rows(path)
    first = next(source)
    source = itertools.chain([first], source)
    if not is_session(first.value):
        return MooncakeReader(source, form)
    if form == "delta":
        raise TraceError(
            f"{first.where}: a Weka session holds full prompts, not delta form; leave out --form delta"
        )
    return WekaReader(source)


def _folder(path: Path) -> Iterator[Row]:
    """The sessions of a folder, files in order of name."""
    files = sorted(file for file in path.iterdir() if file.name.endswith(_SUFFIXES) and file.is_file())
    if not files:
        raise TraceError(
            f"{path}: no {', '.join(_SUFFIXES)} file in this folder; give a folder of session files"
        )
    for file in files:
        for row in rows(file):
            if not is_session(row.value):
                raise TraceError(
                    f"{row.where}: not a Weka session; a folder holds only those, give other traces as a file"
                )
            yield row


def _form(reader: MooncakeReader | WekaReader) -> Form:
    if isinstance(reader, WekaReader):
        return "weka"
    return "delta" if reader.form == "delta" else "full"
