"""Run the tests of a vLLM release in a child process, and replay their reports in this run.

One interpreter can import one vLLM. The parent run collects every test once per release; the
tests of a release then run in one child whose PYTHONPATH starts with that release. The child
writes its reports as JSON lines, the parent hands them to its own hooks: one run, one summary.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.beds.layout import release_path

REPORTS = "VLLMEXT_TEST_REPORTS"


def environment(release: str) -> dict[str, str]:
    """Environment of a process that is to import ``release``."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_EXT_")}
    folder = release_path(release)
    paths = [str(folder)] if folder else []
    root = Path(__file__).parents[2]
    environ["PYTHONPATH"] = os.pathsep.join([*paths, str(root / "src"), str(root)])
    environ.update(VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    return environ


class Child:
    """The child run of one release: its reports, item by item, in the order they are asked for."""

    def __init__(self, release: str, items: list[pytest.Item], config: pytest.Config) -> None:
        self._config = config
        self._release = release
        self._folder = Path(tempfile.mkdtemp(prefix=f"vllm-{release}-"))
        names = self._folder / "items"
        names.write_text("\n".join(item.nodeid for item in items))
        reading, writing = os.pipe()
        self._log = (self._folder / "log").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", f"--release={release}", f"@{names}"],
            cwd=config.rootpath,
            env={**environment(release), REPORTS: f"/dev/fd/{writing}"},
            stdout=self._log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            pass_fds=(writing,),
        )
        os.close(writing)
        self._lines = os.fdopen(reading)
        self._reports: dict[str, list[pytest.TestReport]] = {}

    def replay(self, item: pytest.Item) -> list[pytest.TestReport]:
        """The reports of one item; a failed one if the child ended before it.

        pytest may order a child's items in another way, for the sake of fixtures they share.
        """
        while not self._complete(item.nodeid):
            line = self._lines.readline()
            if not line:
                return [self._death(item)]
            report = self._config.hook.pytest_report_from_serializable(
                config=self._config, data=json.loads(line)
            )
            self._reports.setdefault(report.nodeid, []).append(report)
        return self._reports.pop(item.nodeid)

    def _complete(self, nodeid: str) -> bool:
        reports = self._reports.get(nodeid, [])
        return bool(reports) and reports[-1].when == "teardown"

    def _death(self, item: pytest.Item) -> pytest.TestReport:
        self._log.seek(0)
        text = (
            f"the child for vLLM {self._release} ended (status {self._process.poll()}) before this "
            f"test reported:\n{self._log.read()[-4000:]}"
        )
        return pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")

    def close(self) -> None:
        """End the child, should it still run."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._lines.close()
        self._log.close()


class Reporter:
    """In the child: sends every report up the pipe."""

    def __init__(self, config: pytest.Config, path: str) -> None:
        self._config = config
        self._pipe = open(path, "w", buffering=1)  # noqa: SIM115

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Serialise a report; xdist's hooks of pytest itself do the work."""
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._pipe.write(json.dumps(data) + "\n")
