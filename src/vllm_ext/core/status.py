"""Every vLLM process of this user on this host, with its verdicts, grouped by server."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_ext.core.effects import decode
from vllm_ext.core.feature import Verdict
from vllm_ext.core.report import directory, prune, started, title

# vLLM loads no plugins in its data parallel coordinator.
_WITHOUT_PLUGINS = ("DPCoordinator", "DP_Coordinator")
_IN_FORCE = (Verdict.ACTIVE, Verdict.ARMED, Verdict.NATIVE, Verdict.IDLE)


@dataclass
class ProcessStatus:
    """One process. ``state``: live, ended (its report is left) or no report."""

    pid: int
    role: str
    state: str
    parts: dict[str, dict[str, str]] = field(default_factory=dict)
    effects: dict[str, int] = field(default_factory=dict)
    lacks: dict[str, str] = field(default_factory=dict)


@dataclass
class ServerStatus:
    """All processes that belong to one server, first the one that was started first."""

    id: str
    vllm: str
    plugin: str
    processes: list[ProcessStatus]
    expected_ranks: int | None
    ray: bool

    @property
    def live(self) -> bool:
        """Whether any process of it still runs."""
        return any(process.state != "ended" for process in self.processes)

    @property
    def ranks(self) -> str:
        """How many worker ranks are seen here, of how many, and what that does not cover."""
        seen = sum(
            "Worker" in process.role for process in self.processes if process.state == "live"
        )
        told = f"{seen} of {self.expected_ranks} ranks" if self.expected_ranks else f"{seen} ranks"
        return f"{told}; other hosts not visible" if self.ray else told

    @property
    def problems(self) -> list[str]:
        """One sentence per process that lacks what its siblings have, or never reported."""
        sentences = []
        for process in self.processes:
            if process.state == "no report":
                sentences.append(
                    f"pid {process.pid} ({process.role}) gave no report: the plugin does not run "
                    "in it, so nothing of it is in force there."
                )
            sentences += [
                f"pid {process.pid} ({process.role}) lacks {part}, which its siblings have: {why}."
                for part, why in process.lacks.items()
            ]
        return sentences


def servers() -> list[ServerStatus]:
    """All servers with a report of this user on this host. Raises ReportError."""
    folder = directory()
    prune(folder)
    grouped: dict[str, list[dict[str, Any]]] = {}
    for report in reports(folder):
        grouped.setdefault(report["server"], []).append(report)
    return [_server(server, found) for server, found in sorted(grouped.items())]


def reports(folder: Path, server: str = "*") -> Iterator[dict[str, Any]]:
    """The reports in a runtime directory, with their counters under ``effects``."""
    for path in sorted(folder.glob(f"{server}.*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError):
            data = json.loads(path.read_text())
            data["effects"] = decode(path.with_suffix(".counters").read_bytes())
            yield data


def _server(server: str, found: list[dict[str, Any]]) -> ServerStatus:
    found.sort(key=lambda report: (report["started"], report["pid"]))
    first = found[0]
    processes = [_process(report, first) for report in found]
    live = {process.pid for process in processes if process.state == "live"}
    silent = _silent(live)
    _compare(processes)
    arguments = " ".join(first["arguments"])
    return ServerStatus(
        id=server,
        vllm=first["vllm"],
        plugin=first["plugin"],
        processes=processes + silent,
        expected_ranks=_expected_ranks(arguments),
        ray="--distributed-executor-backend ray" in arguments.replace("=", " "),
    )


def _process(report: dict[str, Any], first: dict[str, Any]) -> ProcessStatus:
    pid = report["pid"]
    live = started(pid) == report["started"]
    titled = title(pid) if live else report["role"]
    role = titled or ("APIServer" if report is first and "serve" in first["arguments"] else "")
    return ProcessStatus(
        pid,
        role or ("main" if report is first else "child"),
        "live" if live else "ended",
        report["parts"],
        report["effects"],
    )


def _compare(processes: list[ProcessStatus]) -> None:
    """Note in each live process the parts that a sibling has in force and it hasn't."""
    live = [process for process in processes if process.state == "live"]
    for process in live:
        for part in {part for sibling in live for part in sibling.parts}:
            there = any(_has(sibling, part) for sibling in live)
            if there and not _has(process, part):
                own = process.parts.get(part)
                process.lacks[part] = f"{own['verdict']}, {own['reason']}" if own else "not known"


def _has(process: ProcessStatus, part: str) -> bool:
    return process.parts.get(part, {}).get("verdict") in _IN_FORCE


def _silent(reported: set[int]) -> list[ProcessStatus]:
    """Descendants of processes that reported which vLLM gave a title, but which never reported."""
    parents = _parents()
    found = []
    for pid in sorted(parents.keys() - reported):
        above, role = parents[pid], title(pid)
        while above in parents and above not in reported:
            above = parents[above]
        if above in reported and role and not role.startswith(_WITHOUT_PLUGINS):
            found.append(ProcessStatus(pid, role, "no report"))
    return found


def _parents() -> dict[int, int]:
    """Parent of every process on this host."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                found[int(path.parent.name)] = int(fields[1])
    return found


def _expected_ranks(arguments: str) -> int | None:
    """World size by the server's own arguments, None if it isn't a ``vllm serve``."""
    if "serve" not in arguments.split():
        return None
    ranks = 1
    for option in (
        "tensor-parallel-size|-tp",
        "pipeline-parallel-size|-pp",
        "data-parallel-size|-dp",
    ):
        name, _, short = option.partition("|")
        found = re.search(rf"(?:--{name}|{short})[ =](\d+)", arguments)
        ranks *= int(found[1]) if found else 1
    return ranks
