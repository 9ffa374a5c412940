"""The manifest of a disk tier directory, and its table as numpy sees it (docs/block-format.md)."""

from __future__ import annotations

import logging
import secrets
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from kvoffload.layout import MAX_SLABS, SLOT_ALIGN, Layout
from kvoffload.tiers.files import replace_durably

log = logging.getLogger(__name__)

FORMAT = "kvoffload-slots"
VERSION = 1
RECORD_BYTES = 64
RECORD_MAGIC = 0x564B
MANIFEST = "manifest.msgpack"
MANIFEST_LIMIT = 1 << 20
"""Bytes. A longer file is no manifest."""

TABLE_DTYPE = np.dtype(
    [
        ("magic", "<u2"),
        ("group", "<u2"),
        ("parent", "<u4"),
        ("depth", "<u4"),
        ("length", "<u4"),
        ("seq", "<u8"),
        ("key", "u1", (16,)),
        ("payload", "<u4", (4,)),
        ("check", "<u8"),
    ]
)
"""One record; the native struct DiskRecord."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What must be known to read a directory.

    namespace: digest of everything that changes bytes. epoch: seeds every record check. groups: per group
    (block_bytes, slot_bytes). slabs may change from start to start; nothing else may.
    """

    namespace: bytes
    epoch: int
    slab_bytes: int
    slabs: int
    records_per_slab: int
    groups: tuple[tuple[int, int], ...]
    checksum: bool
    format: str = FORMAT
    version: int = VERSION


def new_manifest(namespace: bytes, layout: Layout, slab_bytes: int, slabs: int, checksum: bool) -> Manifest:
    """A manifest under which nothing is stored yet."""
    present = [
        n for n, g in zip(layout.slots_per_slab(slab_bytes), layout.groups, strict=True) if g.block_bytes
    ]
    return Manifest(
        namespace=namespace,
        epoch=secrets.randbits(63),
        slab_bytes=slab_bytes,
        slabs=slabs,
        records_per_slab=max(present, default=0),
        groups=tuple((g.block_bytes, g.slot_bytes) for g in layout.groups),
        checksum=checksum,
    )


def encode_manifest(manifest: Manifest) -> bytes:
    """The file's content."""
    return bytes(msgpack.packb(asdict(manifest), use_bin_type=True))


def decode_manifest(data: bytes) -> Manifest:
    """Raises ValueError saying what is wrong."""
    try:
        body = msgpack.unpackb(data, raw=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ValueError(f"not msgpack ({type(error).__name__})") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise ValueError("not a manifest of kvoffload")
    if body.get("version") != VERSION:
        raise ValueError(f"format version {body.get('version')!r}, this program reads version {VERSION}")
    return _typed(body)


def load_manifest(directory: Path) -> Manifest | None:
    """The directory's manifest; None where there is none or, with a warning, where it cannot be used."""
    path = directory / MANIFEST
    try:
        with path.open("rb") as file:
            return decode_manifest(file.read(MANIFEST_LIMIT + 1))
    except FileNotFoundError:
        return None
    except ValueError as error:
        log.warning("%s: %s; the directory counts as empty", path, error)
        return None


def save_manifest(directory: Path, manifest: Manifest) -> None:
    """Durable when it returns."""
    replace_durably(directory / MANIFEST, encode_manifest(manifest))


def adopt(found: Manifest | None, wanted: Manifest, directory: Path) -> Manifest | None:
    """`found`, with the wanted number of slabs, where its blocks can be used; else None."""
    if found is None or not (found.checksum and wanted.checksum):
        return None
    differing = [
        f"{f.name} is {_show(found, f.name)}, this engine needs {_show(wanted, f.name)}"
        for f in fields(Manifest)
        if f.name not in ("epoch", "slabs") and _show(found, f.name) != _show(wanted, f.name)
    ]
    if differing:
        log.warning("%s: %s; the directory counts as empty", directory / MANIFEST, "; ".join(differing))
        return None
    return replace(found, slabs=wanted.slabs)


def bumped(manifest: Manifest) -> Manifest:
    """The same with an epoch that was never used: no record of before is valid, nor one of a reset whose manifest
    was not saved."""
    return replace(manifest, epoch=secrets.randbits(63))


def _typed(body: dict[str, Any]) -> Manifest:
    names = {f.name for f in fields(Manifest)}
    _require(set(body) == names, f"fields {sorted(map(str, body))}, not {sorted(names)}")
    for name in ("epoch", "slab_bytes", "slabs", "records_per_slab"):
        _require(isinstance(body[name], int) and 0 <= body[name] < 1 << 63, f"{name} is not a number")
    _require(body["slab_bytes"] % SLOT_ALIGN == 0 and body["slabs"] <= MAX_SLABS, "no such slabs")
    _require(isinstance(body["namespace"], bytes), "namespace is not bytes")
    _require(isinstance(body["checksum"], bool), "checksum is not a bool")
    groups = body["groups"]
    _require(isinstance(groups, list) and all(map(_is_pair, groups)), "groups is not a list of pairs")
    return Manifest(**{**body, "groups": tuple((g[0], g[1]) for g in groups)})


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ValueError(otherwise)


def _is_pair(value: object) -> bool:
    if not (isinstance(value, list) and len(value) == 2 and all(isinstance(v, int) for v in value)):
        return False
    block, slot = value
    return bool(0 <= block <= slot < 1 << 33 and slot % SLOT_ALIGN == 0)


def _show(manifest: Manifest, name: str) -> str:
    value = asdict(manifest)[name]
    return value.hex() if isinstance(value, bytes) else str(value)
