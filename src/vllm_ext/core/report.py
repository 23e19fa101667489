"""What this process tells others: its verdicts and effect counters, as files of this user."""

from __future__ import annotations

import atexit
import contextlib
import glob
import json
import os
import re
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from multiprocessing.util import Finalize
from pathlib import Path

from vllm_ext import __version__
from vllm_ext.core.effects import PAGE, decode, in_use
from vllm_ext.core.plan import Planned

ENDED_KEPT_S = 3600.0
UNREADABLE_KEPT_S = 24 * 3600.0
# vLLM titles its processes PREFIX::Name.
_TITLE = re.compile(r"^[^\s:]*::(?P<role>\S+)")
_RANK_OPTIONS = (
    ("--tensor-parallel-size", "-tp"),
    ("--pipeline-parallel-size", "-pp"),
    ("--data-parallel-size", "-dp"),
    ("--prefill-context-parallel-size", "-pcp"),
)
_BACKENDS = ("--distributed-executor-backend", "--data-parallel-backend")


class ReportError(RuntimeError):
    """The runtime directory can't be trusted or written; the message says why."""


@dataclass
class ProcessReport:
    """What one process tells. ``parts``: verdict and reason by ``FEATURE.part``.

    ``ranks`` is the world size by the arguments of a ``vllm serve``, None where they don't tell;
    ``elsewhere``: ranks may run on other hosts; ``ended`` the time at which somebody first found
    the process gone. ``effects`` and ``counting`` are read from the page beside.
    """

    server: str
    pid: int
    started: int
    namespace: str
    role: str
    vllm: str
    plugin: str
    serves: bool
    ranks: int | None
    elsewhere: bool
    parts: dict[str, tuple[str, str]]
    ended: float | None = None
    effects: dict[str, int] = field(default_factory=dict)
    counting: bool = False

    @property
    def here(self) -> bool:
        """Whether its pid means something in this pid namespace."""
        return self.namespace == _namespace()

    @property
    def live(self) -> bool:
        """Whether the process still runs, by its start time or, from elsewhere, by its lock."""
        return started(self.pid) == self.started if self.here else self.counting

    def to_json(self) -> str:
        """The report as JSON, without what is read from the page beside it."""
        beside = ("effects", "counting")
        return json.dumps({k: v for k, v in asdict(self).items() if k not in beside})

    @classmethod
    def from_json(cls, text: str) -> ProcessReport | None:
        """The report in a JSON text, None if it is none (garbage, or another plugin version's)."""
        try:
            data = json.loads(text)
            data["parts"] = {name: (str(v), str(why)) for name, (v, why) in data["parts"].items()}
            return cls(**data)
        except (ValueError, TypeError, KeyError, AttributeError):
            return None


def directory() -> Path:
    """Runtime directory of this user, made if need be: not readable by anybody else.

    ``$XDG_RUNTIME_DIR/vllm-ext``, else ``vllm-ext-<uid>`` in the temporary directory. Raises
    ReportError if it is somebody else's, a link, or open to others.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    usable = runtime and os.access(runtime, os.W_OK)
    path = Path(runtime) / "vllm-ext" if runtime and usable else _fallback()
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ReportError(f"{path} can't be made: {error.strerror}") from error
    if not _is_ours(path):
        raise ReportError(
            f"{path} is not a directory that belongs to user {os.getuid()} alone (mode 0700); "
            "remove it, or point XDG_RUNTIME_DIR somewhere else"
        )
    return path


def directories() -> list[Path]:
    """Every runtime directory a process of this user may have chosen; none is made.

    A server started by a service manager often lacks the XDG_RUNTIME_DIR that a login shell has.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    bases = [Path(runtime)] if runtime else []
    bases.append(Path(f"/run/user/{os.getuid()}"))
    paths = [*(base / "vllm-ext" for base in bases), _fallback()]
    return [path for path in dict.fromkeys(paths) if _is_ours(path)]


def _fallback() -> Path:
    return Path(tempfile.gettempdir()) / f"vllm-ext-{os.getuid()}"


def _is_ours(path: Path) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    ours = found.st_uid == os.getuid() and not found.st_mode & 0o077
    return stat.S_ISDIR(found.st_mode) and ours


def reports(server: str | None = None) -> Iterator[ProcessReport]:
    """The reports of this user's processes, of one server or of all, with their counters."""
    return (report for _, report in _found(server) if server in (None, report.server))


def unreadable() -> int:
    """How many reports there are that this version of the plugin can't read."""
    return len(_paths()) - len(list(_found()))


def _paths(server: str | None = None) -> list[Path]:
    pattern = f"{glob.escape(server)}.*.json" if server else "*.json"
    return [path for folder in directories() for path in sorted(folder.glob(pattern))]


def _found(server: str | None = None) -> Iterator[tuple[Path, ProcessReport]]:
    for path in _paths(server):
        page = path.with_suffix(".counters")
        with contextlib.suppress(OSError):
            report = ProcessReport.from_json(path.read_text("utf-8", "replace"))
            if report is not None:
                report.counting = in_use(page)
                report.effects = decode(page.read_bytes()) if page.is_file() else {}
                yield path, report


def prune() -> None:
    """Mark reports of processes that are gone; drop those marked more than an hour ago.

    Those of other plugin versions are dropped a day after their process last used the page.
    """
    readable = dict(_found())
    for path in _paths():
        with contextlib.suppress(OSError):
            page = path.with_suffix(".counters")
            old = time.time() - path.stat().st_mtime > UNREADABLE_KEPT_S
            if path not in readable and old and not in_use(page):
                _drop(path)
    for path, report in readable.items():
        if report.live:
            continue
        report.ended = report.ended or time.time()
        with contextlib.suppress(OSError):
            if time.time() - report.ended > ENDED_KEPT_S:
                _drop(path)
            else:
                _write(path, report)


def _drop(path: Path) -> None:
    for file in (path, path.with_suffix(".counters")):
        file.unlink(missing_ok=True)


def stat_fields(pid: int) -> list[str] | None:
    """What /proc tells of a process from its state on, None if it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields


def started(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot, None if there is no such process.

    With the pid it names a process for good: pids are used again, pairs of both aren't.
    """
    fields = stat_fields(pid)
    return int(fields[19]) if fields else None


def title(pid: int) -> str:
    """Role from the title that vLLM gave a process (EngineCore, Worker_TP0), or nothing."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace")
    except OSError:
        return ""
    found = _TITLE.match(command.replace("\0", " "))
    return found["role"] if found else ""


def _namespace() -> str:
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def _value(arguments: list[str], names: tuple[str, ...]) -> str | None:
    """Value of an option in a command line: ``--name VALUE``, ``--name=VALUE`` or ``-nVALUE``."""
    for at, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name.replace("_", "-") in names:
            return value if equals else next(iter(arguments[at + 1 :]), None)
        short = next((n for n in names if not n.startswith("--") and argument.startswith(n)), None)
        if short and argument[len(short) :].isdigit():
            return argument[len(short) :]
    return None


def _ranks(arguments: list[str]) -> int | None:
    """World size by the arguments of a ``vllm serve``, None where they don't tell."""
    if "serve" not in arguments or _value(arguments, ("--config",)):
        return None
    sizes = (_value(arguments, names) or "1" for names in _RANK_OPTIONS)
    ranks = 1
    for size in sizes:
        ranks *= int(size) if size.isdigit() else 1
    return ranks


def _elsewhere(arguments: list[str]) -> bool:
    """Whether ranks may run on other hosts, by the arguments of a ``vllm serve``."""
    ray = any(_value(arguments, (name,)) == "ray" for name in _BACKENDS)
    nodes = _value(arguments, ("--nnodes",)) or "1"
    return ray or nodes != "1" or bool(_value(arguments, ("--data-parallel-size-local",)))


def _write(path: Path, report: ProcessReport) -> None:
    """A reader sees the old text or the new one, never a part."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_text(report.to_json())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


class Reporter:
    """Keeps the report of this process: ``<server>.<pid>.json`` and ``.counters``.

    The server's first process, whose pid its id begins with, tidies up after the others.
    """

    def __init__(self, server: str, version: str) -> None:
        self._server = server
        self._version = version
        self._path: Path | None = None
        self._lock = threading.Lock()
        self.role = ""
        self.pid = 0

    def publish(self, planned: Iterable[Planned]) -> None:
        """Write the verdicts, atomically; raises ReportError or OSError if that can't be done."""
        # Imports and garbage collections publish, in whatever thread they happen.
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._publish(planned)
        finally:
            self._lock.release()

    def _publish(self, planned: Iterable[Planned]) -> None:
        fresh = self._path is None
        path = self._path or directory() / f"{self._server}.{os.getpid()}.json"
        self.role, self.pid = title(os.getpid()), os.getpid()
        arguments = [str(argument) for argument in sys.argv]
        report = ProcessReport(
            server=self._server,
            pid=os.getpid(),
            started=started(os.getpid()) or 0,
            namespace=_namespace(),
            role=self.role,
            vllm=self._version,
            plugin=__version__,
            serves="serve" in arguments,
            ranks=_ranks(arguments),
            elsewhere=_elsewhere(arguments),
            parts={e.id: (e.judgement.verdict.value, e.judgement.reason) for e in planned},
        )
        _write(path, report)
        self._path = path
        if fresh:
            # Children of multiprocessing leave without running atexit.
            atexit.register(self.remove)
            Finalize(None, self.remove, exitpriority=0)
            PAGE.publish(path.with_suffix(".counters"))

    def restart(self) -> None:
        """In a forked child: patches came along, the report and the counters are its own."""
        self._path = None
        self._lock = threading.Lock()
        PAGE.restart()

    def remove(self) -> None:
        """A process that ends in good order leaves nothing behind."""
        # A forked child that runs our exit handlers must not take its parent's files away.
        if self._path is None or self._path.stem != f"{self._server}.{os.getpid()}":
            return
        with contextlib.suppress(OSError):
            _drop(self._path)
            # vLLM kills its engine and workers at an ordinary stop: they can't do it themselves.
            first = self._server.partition("-")[0] == str(os.getpid())
            for path, report in _found(self._server) if first else ():
                if not report.live:
                    _drop(path)
