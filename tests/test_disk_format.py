"""docs/block-format.md is what the tier writes: its example runs against real files."""

from __future__ import annotations

import random
import re
import shutil
import subprocess

import numpy as np
import pytest
from disk_world import ROOT

from kvoffload import _C
from kvoffload.arena import HostArena
from kvoffload.testing.blocks import make_copies, make_layout
from kvoffload.tiers import DiskTier
from kvoffload.tiers.table import MANIFEST, RECORD_BYTES, TABLE_DTYPE, decode_manifest

DOCUMENT = (ROOT / "docs" / "block-format.md").read_text()
KEY = bytes(range(16))
PAYLOAD = random.Random(9).randbytes(5000)


@pytest.fixture(scope="module")
def reader():
    """The names that the document's program defines."""
    (program,) = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    names = {}
    exec(compile(program, "block-format.md", "exec"), names)
    return names


@pytest.fixture
def directory(tmp_path):
    """The document's tier, with its one block."""
    layout = make_layout(5000)
    arena = HostArena(1 << 20, 1, layout)
    tier = DiskTier(tmp_path / "rank", layout, 1 << 20, 2, b"n" * 16)
    arena.view(0, 0)[:] = np.frombuffer(PAYLOAD, np.uint8)
    copies = make_copies(0, [KEY], host=[0], disk=[0x10002])
    copies["depth"], copies["seq"], copies["parent"] = 3, 7, 0x0A0B0C0D
    assert tier.write(copies, arena).tolist() == [0]
    tier.close()
    arena.close()
    return tmp_path / "rank"


def test_the_reader_reads(reader, directory):
    """The document's program finds the block in its slot, and nothing in the others."""
    assert reader["read_slot"](directory, 0, 0x10002) == (KEY, PAYLOAD)
    for other in (0, 2, 0x10001, 0x10003):
        assert reader["read_slot"](directory, 0, other) is None


def test_the_reader_refuses(reader, directory):
    """It returns nothing after one changed byte of payload or record, as the tier would."""
    for name, offset in (("slots", 1064960 + 4999), ("table", 8320 + 9)):
        data = bytearray((directory / name).read_bytes())
        data[offset] ^= 1
        (directory / name).write_bytes(data)
        assert reader["read_slot"](directory, 0, 0x10002) is None
        data[offset] ^= 1
        (directory / name).write_bytes(data)


def test_the_dump(directory):
    """The hex dump of the document is the file's."""
    shown = re.findall(r"^0000\w{4}: ((?:\w{8} ?)+)", DOCUMENT, re.MULTILINE)
    want = bytes.fromhex("".join("".join(line.split()) for line in shown))
    assert len(want) == 40
    assert (directory / "table").read_bytes()[8320 : 8320 + 40] == want
    if shutil.which("xxd"):
        command = re.search(r"^\$ (xxd .*)$", DOCUMENT, re.MULTILINE)[1]
        out = subprocess.run(
            command.split(), cwd=directory, capture_output=True, text=True, check=True
        ).stdout
        assert out.strip() in DOCUMENT


@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 5000])
def test_the_checksum(reader, size):
    """The document's checksum is the native one; its first lane is CRC32C as everybody has it."""
    data = PAYLOAD[:size]
    assert np.frombuffer(_C.checksum(data), "<u4").tolist() == list(reader["checksum"](data))
    assert reader["crc32c"](b"123456789") == 0xE3069283


def test_the_offsets():
    """The record's fields lie where the grammar says."""
    grammar = re.findall(r"(\w+)\[(\d+)\] +(\d+)\b", DOCUMENT)
    assert [name for name, _, _ in grammar] == list(TABLE_DTYPE.names)
    for name, size, offset in grammar:
        dtype, at = TABLE_DTYPE.fields[name][:2]
        assert (dtype.itemsize, at) == (int(size), int(offset))
    assert TABLE_DTYPE.itemsize == RECORD_BYTES


def test_the_manifest(directory):
    """The manifest holds exactly the keys of the document."""
    manifest = decode_manifest((directory / MANIFEST).read_bytes())
    assert (manifest.slab_bytes, manifest.slabs, manifest.records_per_slab) == (1 << 20, 2, 128)
    assert manifest.groups == ((5000, 8192),)
    documented = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", DOCUMENT, re.MULTILINE)))
    assert set(documented) == set(type(manifest).__dataclass_fields__)
