"""All processes of one session: found even when their parents are dead, ended without traces."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import psutil


class Family:
    """The processes of the session that ``leader``, a process id, leads, and their children."""

    def __init__(self, leader: int) -> None:
        self.leader = leader
        self._seen: set[psutil.Process] = set()

    def live(self) -> list[psutil.Process]:
        """Those that run now. A zombie doesn't, and who left the session after a call does."""
        # An orphan of a dead parent is nobody's descendant any more, but still in the session.
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if os.getsid(process.pid) == self.leader:
                    self._seen.update((process, *process.children(recursive=True)))
        return [process for process in self._seen if _alive(process)]

    def end(self, patience: float) -> None:
        """Ask all by SIGTERM, kill those that still run ``patience`` seconds later.

        An interrupt meanwhile goes straight to the kill. Raises ``RuntimeError`` if a process
        survives it.
        """
        try:
            self._signal(signal.SIGTERM, patience)
        finally:
            # Alone, a resource tracker removes the shared memory of the killed, then ends.
            self._signal(signal.SIGKILL, 5.0, spare_trackers=True)
            left = self._signal(signal.SIGKILL, 5.0)
        if left:
            raise RuntimeError(f"these processes can't be ended: {left}")

    def _signal(
        self, number: signal.Signals, patience: float, *, spare_trackers: bool = False
    ) -> list[psutil.Process]:
        """Signal all, wait up to ``patience`` seconds until none is left; return the rest."""
        for process in self.live():
            with contextlib.suppress(psutil.NoSuchProcess):
                if not (spare_trackers and _tracks_resources(process)):
                    process.send_signal(number)
        deadline = time.monotonic() + patience
        while (left := self.live()) and time.monotonic() < deadline:
            psutil.wait_procs(left, timeout=0.1)
        return left


def _alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _tracks_resources(process: psutil.Process) -> bool:
    return any("multiprocessing.resource_tracker" in part for part in process.cmdline())
