"""What parts changed, counted in a memory-mapped page: live, no thread, and after SIGKILL."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import threading
from pathlib import Path

_NAME = 56
_SLOT = struct.Struct(f"<{_NAME}sQ")
_SLOTS = 128
_OTHERS = "OTHERS.others"
SIZE = _SLOT.size * _SLOTS


class Page:
    """Counters of one process: slots of a name (UTF-8, up to 56 bytes) and a 64-bit count.

    Anonymous until ``publish`` puts it into a file; what was counted before is carried over. When
    all slots are taken, further names share the last one: counting never fails.
    """

    _map: mmap.mmap

    def __init__(self) -> None:
        self.restart()

    def add(self, name: str, amount: int) -> None:
        """Add to a counter."""
        with self._lock:
            offset = self._offsets.get(name)
            if offset is None:
                offset = self._claim(name if len(self._offsets) < _SLOTS - 1 else _OTHERS)
            value = int.from_bytes(self._map[offset : offset + 8], "little") + amount
            self._map[offset : offset + 8] = value.to_bytes(8, "little")

    def _claim(self, name: str) -> int:
        if name not in self._offsets:
            at = len(self._offsets) * _SLOT.size
            _SLOT.pack_into(self._map, at, name.encode()[:_NAME], 0)
            self._offsets[name] = at + _NAME
        return self._offsets[name]

    def publish(self, path: Path) -> None:
        """Move the counters to a file that others of this user can read while we count.

        Raises OSError if there is no room for it.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            # A page without room on the disk would end the process by SIGBUS when it is written.
            os.posix_fallocate(descriptor, 0, SIZE)
            # Kept by the mapping until we end: tells readers in other pid namespaces that we live.
            with contextlib.suppress(OSError):  # not every file system has locks
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with self._lock:
                shared = mmap.mmap(descriptor, SIZE)
                shared[:] = self._map[:]
                self._map = shared
        finally:
            os.close(descriptor)

    def restart(self) -> None:
        """Count from zero on an anonymous page: what a forked child does, its parent counts on."""
        # The garbage collector may look again, and publish, in the middle of a count.
        self._lock = threading.RLock()
        self._map = mmap.mmap(-1, SIZE)
        self._offsets: dict[str, int] = {}

    def read(self) -> dict[str, int]:
        """All counters, by name."""
        return decode(self._map[:])


def in_use(path: Path) -> bool:
    """Whether the process that counts on the page at ``path`` lives, in whatever namespace."""
    try:
        with path.open("rb") as page:
            fcntl.flock(page, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def decode(page: bytes) -> dict[str, int]:
    """Counters of a page, by name; also of a process that is gone."""
    slots = (_SLOT.unpack_from(page, at * _SLOT.size) for at in range(len(page) // _SLOT.size))
    return {
        name.rstrip(b"\0").decode("utf-8", "replace"): count for name, count in slots if name[0]
    }


PAGE = Page()
