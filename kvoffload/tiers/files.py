"""Files of the disk tier: private, locked, preallocated, O_DIRECT where the file system has it."""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
from pathlib import Path

from kvoffload.errors import TierError
from kvoffload.layout import SLOT_ALIGN

log = logging.getLogger(__name__)

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700


def make_private_directory(path: Path) -> None:
    """Create `path` and what is missing above it, mode 0700 whatever the umask; existing ones stay."""
    if path.is_dir():
        return
    make_private_directory(path.parent)
    try:
        path.mkdir(DIRECTORY_MODE)
    except FileExistsError:
        if path.is_dir():  # another rank was faster
            return
        raise TierError(f"{path} is a file, not a folder: give another path") from None
    path.chmod(DIRECTORY_MODE)


def open_private(path: Path, flags: int = 0) -> int:
    """Open for reading and writing, created with mode 0600 whatever the umask; the descriptor."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | flags, FILE_MODE)
    os.fchmod(file, FILE_MODE)
    return file


def lock_directory(directory: Path) -> int:
    """Become the only owner until the descriptor is closed. Raises TierError naming the holder."""
    file = open_private(directory / "lock")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(file, 64, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(file)
        raise TierError(
            f"{directory} is in use by process {holder}; give each engine its own disk_path"
        ) from None
    _sign(file)
    return file


def _sign(file: int) -> None:
    """Say who holds the lock, for messages; a full drive has no room for that."""
    name = f"{os.getpid()}\n".encode()
    try:
        os.ftruncate(file, os.pwrite(file, name, 0))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        os.ftruncate(file, 0)


def reserve(file: int, path: Path, nbytes: int) -> int:
    """Make the file exactly `nbytes` long with every byte allocated; its length before.

    Raises TierError with needed and available bytes, the file then as long as it was.
    """
    before = os.fstat(file)
    if before.st_size > nbytes:
        os.ftruncate(file, nbytes)
    try:
        if nbytes:
            os.posix_fallocate(file, 0, nbytes)
    except OSError as error:
        os.ftruncate(file, min(before.st_size, nbytes))
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        room = os.statvfs(path.parent)
        available = room.f_bavail * room.f_frsize + before.st_blocks * 512
        raise TierError(
            f"{path}: {nbytes} bytes are needed and {available} bytes are available ({error.strerror}); "
            "lower disk_bytes or make room"
        ) from error
    return before.st_size


def open_direct(path: Path) -> int | None:
    """A descriptor with O_DIRECT, or None where the file system refuses it. REQUIRES: the file has a page."""
    try:
        file = open_private(path, os.O_DIRECT)
    except OSError as error:
        _warn_refused(path, error)
        return None
    with mmap.mmap(-1, SLOT_ALIGN) as page:
        try:
            os.preadv(file, [page], 0)
        except OSError as error:
            os.close(file)
            _warn_refused(path, error)
            return None
    return file


def _warn_refused(path: Path, error: OSError) -> None:
    if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
        raise error
    log.warning("%s: the file system refuses O_DIRECT (%s); using buffered I/O", path, error.strerror)


def replace_durably(path: Path, data: bytes) -> None:
    """The file holds either what it held or `data`, also after a power failure."""
    temporary = path.with_name(path.name + ".new")
    file = open_private(temporary, os.O_TRUNC)
    try:
        if os.write(file, data) != len(data):  # a full drive takes the first part without a word
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(temporary))
        os.fsync(file)
    finally:
        os.close(file)
    temporary.replace(path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
