"""`vllm-ext status` and /metrics on a real server with two workers, one of which lost a part."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.beds.foreign import make_thief
from tests.beds.pooling_models import PoolingModel, decoder_embedder
from tests.beds.serving import serve
from tests.conftest import CI_RELEASE
from vllm_ext.checks.server import Server

pytestmark = [pytest.mark.engine, pytest.mark.area("observability")]

LOST = "CACHE_KEYS.compile_key"
BILLED = "SCORE_USAGE.prompt_tokens"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PoolingModel:
    """A tiny scoring model."""
    return decoder_embedder(tmp_path_factory.mktemp("status") / "model")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server's runtime directory and log."""
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def server(model: PoolingModel, folder: Path) -> Iterator[Server]:
    """A server with two workers; a foreign plugin takes a part away from one of them."""
    thief = make_thief(folder / "thief", "thief", folder / "taken")
    env = {"XDG_RUNTIME_DIR": str(folder), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    arguments = ["--tensor-parallel-size", "2"]
    log = folder / "log"
    with serve(model, CI_RELEASE, log, env=env, args=arguments, pythonpath=[thief]) as running:
        yield running


def _status(folder: Path) -> tuple[int, dict[str, Any], str]:
    command = str(Path(sys.executable).with_name("vllm-ext"))
    environ = {**os.environ, "XDG_RUNTIME_DIR": str(folder), "COLUMNS": "160"}
    environ["TMPDIR"] = str(folder)
    shown = subprocess.run([command, "status"], capture_output=True, text=True, env=environ)
    told = subprocess.run(
        [command, "status", "--json"], capture_output=True, text=True, env=environ
    )
    (server,) = json.loads(told.stdout)["servers"]
    assert shown.returncode == told.returncode
    return told.returncode, server, shown.stdout


def _by_role(server: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {process["role"]: process for process in server["processes"]}


def test_every_process_is_seen_and_the_one_that_lacks_a_part_is_named(
    server: Server, folder: Path
) -> None:
    code, told, shown = _status(folder)
    roles = _by_role(told)
    assert sorted(roles) == ["APIServer", "EngineCore", "Worker_TP0", "Worker_TP1"]
    assert roles["APIServer"]["pid"] == server.process.pid
    assert {process["state"] for process in roles.values()} == {"live"}
    assert told["ranks"] == "2 of 2 ranks"
    robbed = int((folder / "taken").read_text())
    (role,) = [role for role, process in roles.items() if process["pid"] == robbed]
    assert role.startswith("Worker_TP")
    (sentence,) = told["problems"]
    assert code == 1
    assert sentence.startswith(f"pid {robbed} ({role}) lacks {LOST}") and "thief" in sentence
    assert f"pid {robbed} ({role})" in re.sub(r"\s+", " ", shown)
    assert roles["APIServer"]["parts"]["SCORE_USAGE.prompt_tokens"]["verdict"] == "active"


def test_three_requests_are_counted_live_on_metrics_and_after_sigkill(
    server: Server, model: PoolingModel, folder: Path
) -> None:
    body = {"model": str(model.path), "text_1": "red cat", "text_2": ["blue dog", "red"]}
    for _ in range(3):
        server.post("/score", body).raise_for_status()
    assert _by_role(_status(folder)[1])["APIServer"]["effects"][BILLED] == 3
    metrics = server.get("/metrics").raise_for_status().text
    assert re.search(
        r'^vllm_ext_effects_total\{feature="SCORE_USAGE",part="prompt_tokens"\} 3\.0$',
        metrics,
        re.MULTILINE,
    )
    info = r'^vllm_ext_feature_info\{feature="SCORE_USAGE",part="prompt_tokens",.*\} 1\.0$'
    assert len(re.findall(info, metrics, re.MULTILINE)) == 1
    os.kill(server.process.pid, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(server.process.pid)], timeout=30)
    api = _by_role(_status(folder)[1])["APIServer"]
    assert api["state"] == "ended" and api["effects"][BILLED] == 3
