"""Speculative decoding: drafts that are refused leave garbage in pages, which no tier may keep."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CHILD = Path(__file__).with_name("spec_child.py")


def run(folder, options, speculate):
    """What a process of its own says; see spec_child.py."""
    command = [sys.executable, str(CHILD), str(folder), json.dumps(options), str(int(speculate))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def compare(folder, options):
    """With and without speculation: the tokens of an engine without connector, and as many blocks hit."""
    plain = run(folder, None, False)["said"]
    calm, bold = run(folder, options, False), run(folder, options, True)
    for name in ("cold", "again", "next turn"):
        assert calm["said"][name][0] == bold["said"][name][0] == plain[name][0]
        assert calm["said"][name][1] == bold["said"][name][1]
    assert bold["said"]["again"][1] == [192, 320, 64, 480]
    # the last token has no KV: of 200 + 60 + 3 tokens 259 had when they were stored, so 8 blocks
    assert bold["said"]["next turn"][1] == [256, 384, 96, 544]
    assert bold["accepted"] > 20


def test_synchronous_loads(model):
    """llama, loads from host that the forward waits for."""
    compare(model("llama"), {"host_bytes": "256MiB"})


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["llama", "gemma3odd"])
def test_asynchronous_loads(model, name, tmp_path):
    """The hybrid model, and llama with so little host memory that most comes from disk."""
    host = {"llama": "2MiB", "gemma3odd": "256MiB"}[name]
    compare(model(name), {"host_bytes": host, "disk_path": str(tmp_path), "disk_bytes": "64MiB"})
