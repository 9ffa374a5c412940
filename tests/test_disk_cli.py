"""`kvoffload disk`: list, verify, clear, as a user meets them."""

from __future__ import annotations

import json
import os

import pytest
from disk_world import BLOCK_BYTES, LAYOUT, SLAB_BYTES, SLABS, file_offset, make_arena, store
from typer.testing import CliRunner

from kvoffload.cli import app
from kvoffload.tiers import DiskTier, inspect, rank_directory

OLD, NEW = b"a" * 16, b"b" * 16


@pytest.fixture
def disk(tmp_path):
    """Two namespaces: the old one with two ranks of 10 and 11 blocks, the new one with one of 12."""
    arena = make_arena()
    for number, (namespace, rank) in enumerate(((OLD, 0), (OLD, 1), (NEW, 0))):
        tier = open_rank(tmp_path, namespace, rank)
        store(tier, arena, range(10 + number))
        tier.close()
    arena.close()
    return tmp_path


def open_rank(path, namespace, rank):
    return DiskTier(rank_directory(path, namespace, 0, rank), LAYOUT, SLAB_BYTES, SLABS, namespace)


def run(*arguments, **options):
    """The result of `kvoffload disk`."""
    return CliRunner().invoke(app, ["disk", *map(str, arguments)], **options)


def flip(folder, *numbers):
    """Other bytes in the slots of blocks."""
    with (folder / "slots").open("r+b") as file:
        for number in numbers:
            os.pwrite(file.fileno(), b"!!!!", file_offset(number) + 5000)


def test_list_shows_every_namespace(disk):
    """Old namespaces are listed with blocks and bytes, in 80 columns, and again in JSON."""
    printed, as_json = run("ls", disk), run("ls", disk, "--json")
    ranks = json.loads(as_json.stdout)["ranks"]

    assert (printed.exit_code, as_json.exit_code) == (0, 0)
    assert max(map(len, printed.stdout.splitlines())) <= 80
    assert printed.stdout.count(OLD.hex()[:12]) == 2
    assert "2 namespaces, 33 blocks" in printed.stdout
    assert printed.stdout.count("idle") == 3
    assert [(r["namespace"], r["blocks"], r["used"]) for r in ranks] == [
        (OLD.hex(), 10, 10 * BLOCK_BYTES),
        (OLD.hex(), 11, 11 * BLOCK_BYTES),
        (NEW.hex(), 12, 12 * BLOCK_BYTES),
    ]
    assert all(r["holder"] is None and r["readable"] for r in ranks)


def test_list_of_one_namespace(disk):
    """A prefix picks."""
    ranks = json.loads(run("ls", disk, "--namespace", NEW.hex()[:4], "--json").stdout)["ranks"]
    assert [r["blocks"] for r in ranks] == [12]


def test_list_names_the_holder(disk):
    """A directory that an engine has open is shown with its process; asking takes no lock from it."""
    tier = open_rank(disk, NEW, 0)
    ranks = json.loads(run("ls", disk, "--json").stdout)["ranks"]

    assert [r["holder"] for r in ranks] == [None, None, os.getpid()]
    assert f"process {os.getpid()}" in run("ls", disk).stdout
    tier.close()
    assert json.loads(run("ls", disk, "--json").stdout)["ranks"][2]["holder"] is None


def test_no_locks_are_known(disk, monkeypatch, tmp_path):
    """Where the kernel does not list locks, nobody is named, and nothing fails."""
    tier = open_rank(disk, NEW, 0)
    monkeypatch.setattr(inspect, "LOCKS", tmp_path / "none")
    assert json.loads(run("ls", disk, "--json").stdout)["ranks"][2]["holder"] is None
    tier.close()


def test_list_of_what_cannot_be_read(disk):
    """A directory whose manifest is not one is shown as unreadable, and can be cleared."""
    (rank_directory(disk, NEW, 0, 0) / "manifest.msgpack").write_bytes(b"?")
    result = run("ls", disk)

    assert result.exit_code == 0
    assert "unreadable" in result.stdout
    assert run("clear", disk, "--namespace", NEW.hex(), "--yes").exit_code == 0


def test_an_empty_folder(tmp_path):
    """No engine has been here: said plainly, and nothing is wrong."""
    assert "nothing of kvoffload here" in run("ls", tmp_path).stdout
    assert run("verify", tmp_path).stdout.startswith("0 blocks read, 0 bad")
    assert run("clear", tmp_path).exit_code == 0
    assert json.loads(run("ls", tmp_path, "--json").stdout)["ranks"] == []


def test_verify(disk):
    """All good: status 0. Bytes flipped: they are counted per rank, status 1, and it says what that means."""
    good = run("verify", disk)
    assert (good.exit_code, "33 blocks read, 0 bad" in good.stdout) == (0, True)

    flip(rank_directory(disk, OLD, 0, 1), 3, 7)
    bad, as_json = run("verify", disk), run("verify", disk, "--json")
    assert bad.exit_code == 1
    assert "33 blocks read, 2 bad" in bad.stdout
    assert "never served" in bad.stdout
    assert max(map(len, bad.stdout.splitlines())) <= 80
    body = json.loads(as_json.stdout)
    assert as_json.exit_code == 1
    assert (body["blocks"], body["bad"], [r["bad"] for r in body["ranks"]]) == (33, 2, [0, 2, 0])
    assert run("verify", disk, "--namespace", NEW.hex()[:6]).exit_code == 0


def test_verify_counts_what_it_has_read(disk):
    """Progress moves by every block that was read, and ends at what the listing says."""
    told = []
    assert [(v.blocks, v.bad) for v in inspect.verify(disk, "", told.append)] == [(10, 0), (11, 0), (12, 0)]
    assert sum(told) == sum(u.blocks for u in inspect.list_ranks(disk, 0.0)) == 33


def test_verify_beside_an_engine(disk):
    """In use: refused before anything is read; other namespaces can be checked meanwhile."""
    tier = open_rank(disk, NEW, 0)
    refused = run("verify", disk)
    assert refused.exit_code == 2
    assert f"in use by process {os.getpid()}" in refused.stderr
    assert run("verify", disk, "--namespace", OLD.hex()[:4]).exit_code == 0
    tier.close()


def test_clear_asks_on_a_terminal(disk, monkeypatch):
    """On a terminal the listing and a question; no deletes nothing, yes deletes all."""
    monkeypatch.setattr("kvoffload.tiers.commands._can_ask", lambda: True)
    no = run("clear", disk, input="n\n")
    assert "nothing deleted" in no.stdout
    assert "Delete 2 namespaces, 33 blocks" in no.stderr
    assert len(inspect.list_ranks(disk, 0.0)) == 3
    yes = run("clear", disk, input="y\n")
    assert "3 directories deleted" in yes.stdout
    assert inspect.list_ranks(disk, 0.0) == []


def test_clear_is_refused_while_in_use(disk):
    """One directory in use: nothing at all is deleted, and the holder is named."""
    tier = open_rank(disk, NEW, 0)
    refused = run("clear", disk, "--yes")
    assert refused.exit_code == 2
    assert f"in use by process {os.getpid()}" in refused.stderr
    assert len(inspect.list_ranks(disk, 0.0)) == 3
    tier.close()


def test_clear_one_namespace(disk):
    """Only the one that is named goes; what is not ours stays; the bytes are told."""
    (disk / "notes.txt").write_text("mine")
    body = json.loads(run("clear", disk, "--namespace", OLD.hex()[:8], "--yes", "--json").stdout)

    assert body["ranks"] == 2
    assert body["freed"] >= 2 * SLABS * SLAB_BYTES
    assert sorted(os.listdir(disk)) == [NEW.hex(), "notes.txt"]
    assert run("clear", disk, "--yes").exit_code == 0
    assert os.listdir(disk) == ["notes.txt"]
