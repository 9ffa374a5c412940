"""The disk tier's directory under forks and short writes."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest

from kvoffload.testing.rig import NAMESPACE, one_group
from kvoffload.tiers.disk import DiskTier
from kvoffload.tiers.files import replace_durably

SLAB = 8 * 8192


def test_a_closed_tier_is_free_though_a_forked_child_lives(tmp_path: Path) -> None:
    """A child that was forked while the tier was open does not keep the directory locked."""
    tier = DiskTier(tmp_path, one_group(), SLAB, 2, NAMESPACE)
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        tier.close()
        DiskTier(tmp_path, one_group(), SLAB, 2, NAMESPACE).close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_short_write_does_not_replace_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drive that takes only the first bytes: an error, and the file holds what it held."""
    path = tmp_path / "manifest"
    replace_durably(path, b"before")
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda file, data: write(file, data[:3]))
        with pytest.raises(OSError, match="No space") as caught:
            replace_durably(path, b"after all")
    assert caught.value.errno == errno.ENOSPC
    assert path.read_bytes() == b"before"
