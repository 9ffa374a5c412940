"""A folder in memory by which processes of one machine find each other: one makes it, the others come to it.

The maker puts everything into a hidden folder and renames it when all is in place. It holds a lock in it as long as it
lives, so that nobody comes to what a killed process left. Everyone there holds a shared lock on the folder; the last to
arrive removes it, and what was opened in it lives on without a name. What is left after a kill is swept by whoever
makes a folder next.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from kvoffload.errors import ConfigError, TierError
from kvoffload.tiers import files

PREFIX = "kvoffload-"
WAIT_SECONDS = 0.01
"""Between two looks."""

TRIES = 100
"""Of the maker, while somebody looks at what lies under its name from before."""


class Rendezvous:
    """A folder that this process holds. Thread: one. Use as what `make` and `join` return; `close` it."""

    def __init__(self, path: Path, held: int, owner: int | None) -> None:
        """held: the descriptor of the folder, locked. owner: that of the maker's lock, None in a joiner."""
        self.path = path
        self._held: int | None = held
        self._owner = owner

    @classmethod
    def make(cls, path: Path, fill: Callable[[Path], None]) -> Rendezvous:
        """The folder at `path`, after `fill` has put into it what all need.

        Raises ConfigError where somebody alive has one there already, and what `fill` raises."""
        sweep(path.parent)
        made = cls._hidden(path)
        try:
            _write(made.inside("token"), secrets.token_bytes(16))
            fill(made.inside(""))
            made._publish(path)
        except BaseException:
            made.close()
            raise
        return made

    @classmethod
    def join(cls, path: Path, timeout: float) -> Rendezvous:
        """The folder at `path`, whose maker is alive. Raises TierError where there is none after `timeout` seconds."""
        end = time.monotonic() + timeout
        while True:
            held = _locked(path)
            if held is not None:
                joined = cls(path, held, None)
                if joined._alive():
                    return joined
                joined.close()
            if time.monotonic() > end:
                raise TierError(
                    f"{path}: the first of the ranks that share host memory was not ready in {timeout:g} s;"
                    " its log says why"
                )
            time.sleep(WAIT_SECONDS)

    @property
    def token(self) -> str:
        """Of this folder and no other, on any machine. Not after `close`."""
        return self.inside("token").read_bytes().hex()

    def inside(self, name: str) -> Path:
        """A place in this very folder, whatever its path names by now. Good until `close`."""
        return Path(f"/proc/self/fd/{self._held}") / name

    def arrive(self, member: int, count: int) -> None:
        """This member has opened what it needs; with the last of `count` the folder goes."""
        os.close(files.open_private(self.inside(str(member))))
        if all(self.inside(str(n)).exists() for n in range(count)):
            self._remove()

    def close(self) -> None:
        """Give everything up; a maker whose folder is still there removes it. Idempotent."""
        held, self._held = self._held, None
        owner, self._owner = self._owner, None
        if held is None:
            return
        if owner is not None:
            _remove(self.path, held)
            _unlocked(owner)
        _unlocked(held)

    def _remove(self) -> None:
        assert self._held is not None
        _remove(self.path, self._held)

    @classmethod
    def _hidden(cls, path: Path) -> Rendezvous:
        """An empty folder beside `path`, locked; another process may have swept it before it was."""
        while True:
            new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
            files.make_private_directory(new)
            held = _locked(new)
            if held is not None:
                break
        owner = files.open_private(Path(f"/proc/self/fd/{held}/owner"))
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return cls(new, held, owner)

    def _publish(self, path: Path) -> None:
        for _ in range(TRIES):
            try:
                self.path.rename(path)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            else:
                self.path = path
                return
            there = _locked(path)
            if there is not None:
                other = Rendezvous(path, there, None)
                alive = other._alive()
                other.close()
                if alive:
                    break
            sweep(path.parent)
            time.sleep(WAIT_SECONDS)
        raise ConfigError(f"{path} is in use by another engine: give each set of ranks a name of its own")

    def _alive(self) -> bool:
        """Whether the maker holds its lock."""
        try:
            owner = os.open(self.inside("owner"), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(owner, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(owner)
        return False


def _write(path: Path, data: bytes) -> None:
    file = files.open_private(path)
    try:
        os.write(file, data)
    finally:
        os.close(file)


def sweep(folder: Path) -> None:
    """Remove what nobody holds any more."""
    for path in [*folder.glob(PREFIX + "*"), *folder.glob("." + PREFIX + "*")]:
        held = _locked(path, fcntl.LOCK_EX)
        if held is not None:
            _remove(path, held)
            _unlocked(held)


def _locked(path: Path, kind: int = fcntl.LOCK_SH) -> int | None:
    """The folder at `path`, locked until the descriptor is closed; None where there is none, or it is held."""
    try:
        held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(held, kind | fcntl.LOCK_NB)
        if _is_at(path, held):
            return held
    except BlockingIOError:
        pass
    os.close(held)
    return None


def _unlocked(held: int) -> None:
    """Closing alone would leave the lock with a forked child."""
    fcntl.flock(held, fcntl.LOCK_UN)
    os.close(held)


def _is_at(path: Path, held: int) -> bool:
    """Whether the path still names this folder."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(held))
    except FileNotFoundError:
        return False


def _remove(path: Path, held: int) -> None:
    """Remove the folder if the path still names it. REQUIRES: its lock, which keeps the path as it is."""
    if _is_at(path, held):
        shutil.rmtree(path, ignore_errors=True)
