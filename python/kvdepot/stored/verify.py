"""Reads every block file of a namespace and compares its checksums: a scrub with a rate limit."""

import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvdepot.stored.blocks import BlockFile, block_files
from kvdepot.stored.header import BrokenBlockError, check_block
from kvdepot.stored.namespaces import StoredNamespace

ASIDE_MAX = 16
"""Corrupt files kept per namespace, for inspection; more are removed. The depot has the same limit."""


@dataclass(frozen=True)
class Finding:
    """A file or a place on a medium that is not the complete block that its name promises.

    Attributes:
        path: path of the file or medium.
        namespace: the namespace's name on disk; empty if it is not known.
        reason: what is wrong.
        done: ``kept`` (with the reason, if it was to be set aside), ``set aside`` (renamed to ``.bad``), ``removed`` or
            ``gone``.
        hash: the block's hash, 32 hex digits; empty if it is not known.
        offset_bytes: where the block lies on a medium; ``None`` = it is a file.
    """

    path: Path
    namespace: str
    reason: str
    done: str
    hash: str
    offset_bytes: int | None = None

    @property
    def place(self) -> str:
        """The file, or the medium and the offset there, for people."""
        return str(self.path) if self.offset_bytes is None else f"{self.path} at {self.offset_bytes}"


class Pace:
    """Limits the rate of reading.

    Args:
        bytes_per_s: the limit; ``None`` = none.
        now_s: a clock.
        sleep: waits for the given seconds.
    """

    def __init__(
        self,
        bytes_per_s: float | None,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._bytes_per_s, self._now_s, self._sleep = bytes_per_s, now_s, sleep
        self._due_s = now_s()

    def read(self, count: int) -> None:
        """Waits until ``count`` more bytes may have been read."""
        if self._bytes_per_s is None:
            return
        now = self._now_s()
        self._due_s = max(self._due_s, now) + count / self._bytes_per_s
        if self._due_s > now:
            self._sleep(self._due_s - now)


def verify(
    namespace: StoredNamespace, *, pace: Pace, set_aside: bool = False, checked: Callable[[BlockFile], object]
) -> Iterator[Finding]:
    """Checks all blocks of the current epoch, concurrently with depots that use the directory.

    Args:
        namespace: the namespace to check.
        pace: rate limit.
        set_aside: whether broken files are renamed to ``.bad``, or removed if there are already enough of those.
        checked: called with each checked file.

    Yields:
        The broken files, except those that a depot removes or replaces in the meantime.
    """
    key_id, shard_bytes = namespace.key_id(), namespace.shard_bytes
    for file in block_files(namespace):
        reason = _broken(file, key_id, shard_bytes)
        # A depot may have replaced the file while it was read, so it must fail twice.
        if reason and _broken(file, key_id, shard_bytes):
            done = _set_aside(file, namespace) if set_aside else "kept"
            yield Finding(file.path, namespace.root, reason, done, file.hash)
        checked(file)
        pace.read(file.bytes)


def _broken(file: BlockFile, key_id: str, shard_bytes: tuple[int, ...]) -> str:
    try:
        handle = os.open(file.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"it cannot be opened: {error.strerror}"
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        return "it is not a file"
    with open(handle, "rb") as opened:
        try:
            check_block(opened.read(), file.hash, key_id, shard_bytes)
        except OSError as error:
            return f"it cannot be read: {error.strerror}"
        except BrokenBlockError as error:
            return str(error)
    return ""


def _set_aside(file: BlockFile, namespace: StoredNamespace) -> str:
    aside = sum(1 for directory in namespace.block_directories() for _ in directory.glob("*.bad"))
    try:
        if aside < ASIDE_MAX:
            os.rename(file.path, file.path.with_suffix(".bad"))
        else:
            os.unlink(file.path)
    except FileNotFoundError:
        return "gone"
    except OSError as error:  # such as a file system that is read-only after an error
        return f"kept: {error.strerror}"
    return "set aside" if aside < ASIDE_MAX else "removed"
