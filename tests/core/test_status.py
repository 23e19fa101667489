"""Reports of real processes: grouping, forks, death, and who may read them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from vllm_ext.core import report
from vllm_ext.core.effects import PAGE
from vllm_ext.core.metrics import EffectCollector
from vllm_ext.core.report import Reporter, ReportError, _elsewhere, _ranks, directory
from vllm_ext.core.status import servers

# A stand-in for a server's process tree: what vLLM is in it doesn't matter here.
PROGRAM = """
import os, sys
from vllm_ext.core.feature import Feature, Judgement, Part, Verdict, effect
from vllm_ext.core.plan import Planned
from vllm_ext.core.report import Reporter

def planned(verdict):
    part = Part("part", "", (), lambda: None)
    return [Planned(Feature("TINY", "test", "", "", (), (part,)), part, Judgement(verdict, "so"))]

def say(word):
    print(word, flush=True)

mine = Reporter(sys.argv[1], "0.29.0")
mine.publish(planned(Verdict(sys.argv[2])))
"""
WAIT = "say('ready'); sys.stdin.readline()\n"
FORK = """
import atexit
effect("TINY.part", 5)
child = os.fork()
if child == 0:
    mine.restart()
    mine.publish(planned(Verdict.FAILED))
    effect("TINY.part", 2)
    say(f"child {os.getpid()}")
    sys.stdin.readline()
    os._exit(0)
say(f"parent {os.getpid()}")
os.waitpid(child, 0)
"""
SILENT = """
import subprocess
title = "import setproctitle, sys; setproctitle.setproctitle('VLLM::Worker_TP1');"
code = title + "print('up', flush=True); sys.stdin.readline()"
silent = subprocess.Popen([sys.executable, "-c", code], stdin=sys.stdin, stdout=subprocess.PIPE)
silent.stdout.readline()
say(f"silent {silent.pid}")
silent.wait()
"""


class Running:
    """A process that waits for a line on its standard input."""

    def __init__(self, server: str, verdict: str, body: str = WAIT) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM + body, server, verdict],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> list[str]:
        """The next words it says."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().split()


def only_directory(patch: pytest.MonkeyPatch, path: Path) -> None:
    """Have reports written to and read from one place, whatever else runs on this machine."""
    (path / "elsewhere").mkdir()
    patch.setenv("XDG_RUNTIME_DIR", str(path))
    patch.setenv("TMPDIR", str(path / "elsewhere"))
    patch.setattr(tempfile, "tempdir", str(path / "elsewhere"))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Starts processes that share a runtime directory of their own; ends them all."""
    only_directory(monkeypatch, tmp_path)
    started: list[Running] = []

    def start(*arguments: str) -> Running:
        started.append(Running(*arguments))
        return started[-1]

    yield start
    for running in started:
        running.process.kill()
        running.process.communicate()


_COMMAND = str(Path(sys.executable).with_name("vllm-ext"))


def _command() -> subprocess.CompletedProcess[str]:
    return subprocess.run([_COMMAND, "status", "--json"], capture_output=True, text=True)


def test_processes_are_grouped_by_server_and_a_difference_is_red(run: Any) -> None:
    running = [run("one", "active"), run("one", "failed"), run("two", "native")]
    assert [r.line() for r in running] == [["ready"]] * 3
    one, two = servers()
    assert (one.id, two.id) == ("one", "two")
    assert two.problems == []
    (sentence,) = one.problems
    assert f"pid {running[1].process.pid} " in sentence and "lacks TINY.part" in sentence
    done = _command()
    assert done.returncode == 1
    assert sentence in json.loads(done.stdout)["servers"][0]["problems"]


def test_a_process_that_ends_in_good_order_leaves_nothing(run: Any, tmp_path: Path) -> None:
    running = run("one", "active")
    running.line()
    running.process.communicate("\n")
    assert list((tmp_path / "vllm-ext").iterdir()) == []
    assert servers() == [] and _command().returncode == 0


def test_a_forked_child_reports_for_itself_and_counts_from_zero(run: Any) -> None:
    running = run("one", "active", FORK)
    pids = dict(running.line() for _ in range(2))
    (server,) = servers()
    found = {process.pid: process for process in server.processes}
    assert found[int(pids["parent"])].effects == {"TINY.part": 5}
    assert found[int(pids["child"])].effects == {"TINY.part": 2}
    assert found[int(pids["child"])].parts["TINY.part"][0] == "failed"
    assert f"pid {pids['child']} " in server.problems[0]


def test_a_killed_process_is_told_for_an_hour_then_pruned(
    run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    running = run("one", "active")
    running.line()
    os.kill(running.process.pid, signal.SIGKILL)
    running.process.wait()
    (server,) = servers()
    assert [process.state for process in server.processes] == ["ended"]
    assert not server.live and server.problems == []
    monkeypatch.setattr(report, "ENDED_KEPT_S", -1.0)
    assert servers() == [], "a server prunes as well, once it has started"
    assert list((tmp_path / "vllm-ext").iterdir()) == []


def test_a_child_that_vllm_named_but_that_never_reported_is_red(run: Any) -> None:
    running = run("one", "active", SILENT)
    word, pid = running.line()
    assert word == "silent"
    (server,) = servers()
    assert [(p.pid, p.state) for p in server.processes][1:] == [(int(pid), "no report")]
    assert server.problems[0].startswith(f"pid {pid} (Worker_TP1) gave no report")
    assert _command().returncode == 1


def test_the_directory_is_the_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only_directory(monkeypatch, tmp_path)
    path = directory()
    assert path.stat().st_mode & 0o777 == 0o700
    path.chmod(0o755)
    with pytest.raises(ReportError, match=r"alone \(mode 0700\); remove it"):
        directory()
    path.rmdir()
    path.symlink_to(tmp_path)
    with pytest.raises(ReportError):
        directory()
    assert servers() == [], "what could be somebody else's is not read"


def test_a_server_without_the_logins_runtime_directory_is_found(
    run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as patch:
        patch.delenv("XDG_RUNTIME_DIR")
        running = run("one", "active")
    running.line()
    assert [server.id for server in servers()] == ["one"]
    assert _command().returncode == 0


@pytest.mark.parametrize("text", ["[]", "null", "{}", '{"server": "x"}', "{", "\x00"])
def test_garbage_among_the_reports_is_passed_over(run: Any, tmp_path: Path, text: str) -> None:
    running = run("one", "active")
    running.line()
    (tmp_path / "vllm-ext" / "one.1.json").write_text(text)
    (server,) = servers()
    assert [process.pid for process in server.processes] == [running.process.pid]
    assert list(EffectCollector().collect()) == []


def test_a_verdict_of_another_plugin_version_counts_as_failed(run: Any, tmp_path: Path) -> None:
    running = run("one", "active")
    running.line()
    (path,) = (tmp_path / "vllm-ext").glob("*.json")
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "parts": {"TINY.part": ["degraded", "so"]}}))
    assert servers()[0].processes[0].parts["TINY.part"][0] == "degraded"
    assert _command().returncode == 0


def test_a_process_in_another_pid_namespace_is_left_alone(run: Any, tmp_path: Path) -> None:
    running = run("one", "active")
    running.line()
    (path,) = (tmp_path / "vllm-ext").glob("*.json")
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "namespace": "pid:[1]", "started": 1}))
    (server,) = servers()
    assert [process.state for process in server.processes] == ["live"]
    assert json.loads(path.read_text())["ended"] is None
    # As after a container was killed and started again: another namespace, and nobody counts.
    os.kill(running.process.pid, signal.SIGKILL)
    running.process.wait()
    assert [process.state for process in servers()[0].processes] == ["ended"]


@pytest.mark.parametrize(
    ("arguments", "ranks"),
    [
        (["vllm", "serve", "m"], 1),
        (["vllm", "serve", "m", "-tp", "4"], 4),
        (["vllm", "serve", "m", "-tp4", "--pipeline_parallel_size=2"], 8),
        (["vllm", "serve", "m", "--tensor-parallel-size=2", "-dp", "3"], 6),
        (["vllm", "serve", "m", "--enable-dp", "3"], 1),
        (["vllm", "serve", "m", "-tp", "2", "--prefill-context-parallel-size", "2"], 4),
        (["vllm", "serve", "m", "--config", "server.yaml"], None),
        (["python", "notebook"], None),
    ],
)
def test_ranks_are_told_by_the_arguments(arguments: list[str], ranks: int | None) -> None:
    assert _ranks(arguments) == ranks


TIDY = """
mine.remove()
first = Reporter(f"{os.getpid()}-1", "0.29.0")
first.publish(planned(Verdict(sys.argv[2])))
say("ready")
sys.stdin.readline()
"""


def test_the_first_process_takes_the_reports_of_killed_children_along(
    run: Any, tmp_path: Path
) -> None:
    """As at every ordinary stop of vLLM, which kills its engine and workers."""
    first = run("one", "active", TIDY)
    worker, other = run(f"{first.process.pid}-1", "active"), run("two", "active")
    for running in (first, worker, other):
        running.line()
    worker.process.kill()
    worker.process.wait()
    first.process.communicate("\n")
    left = sorted(path.name for path in (tmp_path / "vllm-ext").iterdir())
    pid = other.process.pid
    assert left == [f"two.{pid}.counters", f"two.{pid}.json"]


def test_reports_of_another_version_are_told_and_dropped_after_a_day(
    run: Any, tmp_path: Path
) -> None:
    running = run("one", "active")
    running.line()
    path = tmp_path / "vllm-ext" / "old.1.json"
    path.write_text("{}")
    shown = subprocess.run([_COMMAND, "status"], capture_output=True, text=True)
    assert "another vllm-ext version, not shown: 1." in shown.stdout and path.exists()
    os.utime(path, (0, 0))
    servers()
    assert not path.exists()


@pytest.mark.parametrize(
    ("arguments", "elsewhere"),
    [
        (["serve", "m"], False),
        (["serve", "m", "--distributed-executor-backend=ray"], True),
        (["serve", "m", "--data-parallel-backend", "ray"], True),
        (["serve", "m", "--nnodes", "2"], True),
    ],
)
def test_other_hosts_are_told_by_the_arguments(arguments: list[str], elsewhere: bool) -> None:
    assert _elsewhere(arguments) is elsewhere


def test_threads_may_publish_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only_directory(monkeypatch, tmp_path)
    mine = Reporter("one", "0.29.0")
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda at: mine.publish([]), range(400)))
        assert len(list((tmp_path / "vllm-ext").iterdir())) == 2
    finally:
        mine.remove()
        PAGE.restart()


def test_nothing_secret_is_written(run: Any, tmp_path: Path) -> None:
    """Command lines hold API keys."""
    running = run("one", "active")
    running.line()
    (path,) = (tmp_path / "vllm-ext").glob("*.json")
    assert "arguments" not in path.read_text() and "TINY" in path.read_text()


def test_a_pid_that_is_used_again_is_not_the_same_process(run: Any, tmp_path: Path) -> None:
    running = run("one", "active")
    running.line()
    (path,) = (tmp_path / "vllm-ext").glob("*.json")
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "started": data["started"] - 1}))
    assert [process.state for process in servers()[0].processes] == ["ended"]
