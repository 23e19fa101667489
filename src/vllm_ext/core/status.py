"""Every vLLM process of this user on this host, with its verdicts, grouped by server."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from vllm_ext.core.feature import Verdict
from vllm_ext.core.report import ProcessReport, prune, reports, stat_fields, title

# vLLM loads no plugins in its data parallel coordinator.
_WITHOUT_PLUGINS = ("DPCoordinator", "DP_Coordinator")


@dataclass
class ProcessStatus:
    """One process. ``state``: live, ended (its report is left) or no report."""

    pid: int
    role: str
    state: str
    parts: dict[str, tuple[str, str]] = field(default_factory=dict)
    effects: dict[str, int] = field(default_factory=dict)
    lacks: dict[str, str] = field(default_factory=dict)

    def has(self, part: str) -> bool:
        """Whether a part is in force here, or vLLM's own."""
        return part in self.parts and verdict(self.parts[part][0]).in_force


@dataclass
class ServerStatus:
    """All processes that belong to one server, first the one that was started first."""

    id: str
    vllm: str
    plugin: str
    processes: list[ProcessStatus]
    expected_ranks: int | None
    elsewhere: bool

    @property
    def live(self) -> bool:
        """Whether any process of it still runs."""
        return any(process.state != "ended" for process in self.processes)

    @property
    def ranks(self) -> str:
        """How many worker ranks are seen here, of how many, and what that does not cover."""
        live = [process.role for process in self.processes if process.state == "live"]
        # With one rank per engine the engine works itself.
        seen = sum("Worker" in role for role in live) or sum("EngineCore" in role for role in live)
        told = f"{seen} of {self.expected_ranks} ranks" if self.expected_ranks else f"{seen} ranks"
        return f"{told}; other hosts not visible" if self.elsewhere else told

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


def verdict(word: str) -> Verdict:
    """A reported verdict; a word of another plugin version counts as failed."""
    return Verdict(word) if word in list(Verdict) else Verdict.FAILED


def servers() -> list[ServerStatus]:
    """All servers with a report of this user on this host."""
    prune()
    grouped: dict[str, list[ProcessReport]] = {}
    for report in reports():
        grouped.setdefault(report.server, []).append(report)
    return [_server(server, found) for server, found in sorted(grouped.items())]


def _server(server: str, found: list[ProcessReport]) -> ServerStatus:
    found.sort(key=lambda report: (report.started, report.pid))
    first = found[0]
    processes = [_process(report, first) for report in found]
    _compare([process for process in processes if process.state == "live"])
    return ServerStatus(
        id=server,
        vllm=first.vllm,
        plugin=first.plugin,
        processes=processes
        + _silent({report.pid for report in found if report.live and report.here}),
        expected_ranks=first.ranks,
        elsewhere=first.elsewhere,
    )


def _process(report: ProcessReport, first: ProcessReport) -> ProcessStatus:
    role = (title(report.pid) if report.live and report.here else "") or report.role
    if not role:
        role = "child" if report is not first else "APIServer" if report.serves else "main"
    state = "live" if report.live else "ended"
    return ProcessStatus(report.pid, role, state, report.parts, report.effects)


def _compare(live: list[ProcessStatus]) -> None:
    """Note in each process the parts that a sibling has in force and it hasn't."""
    parts = sorted({part for process in live for part in process.parts if process.has(part)})
    for process in live:
        for part in parts:
            if not process.has(part):
                process.lacks[part] = ", ".join(process.parts.get(part, ("not known",)))


def _silent(reported: set[int]) -> list[ProcessStatus]:
    """Descendants of processes that reported which vLLM gave a title, but which never reported."""
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    parents = {pid: int(fields[1]) for pid in pids if (fields := stat_fields(pid))}
    found = []
    for pid in sorted(parents.keys() - reported):
        above, role = parents[pid], title(pid)
        while above in parents and above not in reported:
            above = parents[above]
        if above in reported and role and not role.startswith(_WITHOUT_PLUGINS):
            found.append(ProcessStatus(pid, role, "no report"))
    return found
