"""What this process tells others: its verdicts and effect counters, as files of this user."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import stat
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vllm_ext import __version__
from vllm_ext.core.effects import PAGE
from vllm_ext.core.plan import Planned

ENDED_KEPT_S = 3600.0
# vLLM titles its processes PREFIX::Name.
_TITLE = re.compile(r"^[^\s:]*::(?P<role>\S+)")


class ReportError(RuntimeError):
    """The runtime directory can't be trusted or written; the message says why."""


def directory() -> Path:
    """Runtime directory of this user, made if need be: not readable by anybody else.

    ``$XDG_RUNTIME_DIR/vllm-ext``, else ``vllm-ext-<uid>`` in the temporary directory. Raises
    ReportError if it is somebody else's, a link, or open to others.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    base = Path(runtime) if runtime and os.access(runtime, os.W_OK) else None
    path = base / "vllm-ext" if base else Path(tempfile.gettempdir()) / f"vllm-ext-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise ReportError(f"{path} can't be made: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ReportError(
            f"{path} is not a directory that belongs to user {os.getuid()} alone (mode 0700); "
            "remove it, or point XDG_RUNTIME_DIR somewhere else"
        )
    return path


def started(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot, None if there is no such process.

    With the pid it names a process for good: pids are used again, pairs of both aren't.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])


def title(pid: int) -> str:
    """Role from the title that vLLM gave a process (EngineCore, Worker_TP0), or nothing."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace")
    except OSError:
        return ""
    found = _TITLE.match(command.replace("\0", " "))
    return found["role"] if found else ""


class Report:
    """The report of one process: ``<server>.<pid>.json`` and ``.counters`` in the directory."""

    def __init__(self, server: str, version: str) -> None:
        self._server = server
        self._version = version
        self._path: Path | None = None
        self.role = ""

    def publish(self, planned: Iterable[Planned]) -> None:
        """Write the verdicts, atomically; raises ReportError or OSError if that can't be done."""
        if self._path is None:
            self._path = directory() / f"{self._server}.{os.getpid()}"
            PAGE.publish(self._path.with_name(self._path.name + ".counters"))
            atexit.register(self.remove)
        self.role = title(os.getpid())
        data = {
            "server": self._server,
            "pid": os.getpid(),
            "parent": os.getppid(),
            "started": started(os.getpid()),
            "role": self.role,
            "vllm": self._version,
            "plugin": __version__,
            "arguments": sys.argv[:200],
            "parts": {entry.id: vars_of(entry) for entry in planned},
        }
        write(self._path.with_name(self._path.name + ".json"), data)

    def restart(self) -> None:
        """In a forked child: patches came along, the report and the counters are its own."""
        self._path = None
        PAGE.restart()

    def remove(self) -> None:
        """A process that ends in good order leaves nothing behind."""
        # A child forked by a library that runs our exit handlers must not take our files away.
        if self._path is None or self._path.name != f"{self._server}.{os.getpid()}":
            return
        for suffix in (".json", ".counters"):
            with contextlib.suppress(OSError):
                self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)


def vars_of(entry: Planned) -> dict[str, str]:
    """A verdict as data."""
    return {"verdict": entry.judgement.verdict.value, "reason": entry.judgement.reason}


def write(path: Path, data: dict[str, Any]) -> None:
    """Write JSON so that a reader sees the old text or the new one, never a part."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(json.dumps(data))
    scratch.replace(path)


def prune(folder: Path) -> None:
    """Mark reports of processes that are gone; drop those marked more than an hour ago."""
    for path in folder.glob("*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            data = json.loads(path.read_text())
            if started(data["pid"]) == data["started"]:
                continue
            ended = data.setdefault("ended", time.time())
            if time.time() - ended > ENDED_KEPT_S:
                path.unlink()
                path.with_suffix(".counters").unlink(missing_ok=True)
            else:
                write(path, data)
