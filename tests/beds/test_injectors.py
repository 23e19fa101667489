"""What goes wrong when tests say so: loads of KV, and processes that die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.beds.answers import TOLERANCE
from tests.beds.checkpoints import write
from tests.beds.deaths import died_in, make_mortal
from tests.beds.engines import call
from tests.beds.serving import serve
from tests.beds.test_checkpoints import CLEAR
from vllm_ext.checks.server import ServerDied

pytestmark = pytest.mark.area("beds")

# Complete units of 140 tokens: blocks of 32, and of 128 where there are states.
LOADED = {"gemma3": 128, "lfm2": 128, "llama": 128}
_LIVES = """
from importlib.metadata import entry_points

(point,) = entry_points(group="vllm.general_plugins", name="mortal")
point.load()()
import colorsys

for _ in range(int({calls})):
    colorsys.rgb_to_hsv(0.1, 0.2, 0.3)
"""


@pytest.mark.engine
@pytest.mark.parametrize("model", ["gemma3", "llama"])
def test_loaded_kv_is_right_until_it_is_corrupted(release: str, model: str, tmp_path: Path) -> None:
    _check_loads(release, model, tmp_path, asynchronous=False)


@pytest.mark.full
@pytest.mark.engine
@pytest.mark.parametrize("model", tuple(LOADED))
def test_kv_loaded_asynchronously_is_right_too(release: str, model: str, tmp_path: Path) -> None:
    _check_loads(release, model, tmp_path, asynchronous=True)


def _check_loads(release: str, model: str, folder: Path, *, asynchronous: bool) -> None:
    found = call(release, "tests.beds.controls:loads", model, folder, asynchronous)
    assert found["external_tokens"] == LOADED[model]
    assert found["loaded"] <= TOLERANCE
    assert found["corrupted"] >= CLEAR
    assert found.get("recomputed", 0.0) <= TOLERANCE


@pytest.mark.parametrize(("calls", "code"), [(2, 0), (3, -signal.SIGKILL)])
def test_a_process_dies_at_the_named_call_and_not_before(
    calls: int, code: int, tmp_path: Path
) -> None:
    folders, env = make_mortal(tmp_path / "mortal", "colorsys", "rgb_to_hsv", call=3)
    environ = {**os.environ, **env, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    process = subprocess.Popen([sys.executable, "-c", _LIVES.format(calls=calls)], env=environ)
    assert process.wait() == code
    assert died_in(tmp_path / "mortal") == (process.pid if code else None)


@pytest.mark.engine
def test_an_engine_that_dies_in_a_step_takes_its_server_along(release: str, tmp_path: Path) -> None:
    model = write("llama", tmp_path / "model")
    folders, env = make_mortal(
        tmp_path / "mortal", "vllm.v1.core.sched.scheduler", "Scheduler.schedule", call=2
    )
    log = tmp_path / "log"
    with serve(model, release, log, plugin="without", env=env, pythonpath=folders) as server:
        family = {process.pid for process in server.processes()}
        body = {"model": str(model.path), "prompt": model.prompt(), "max_tokens": 8}
        try:
            refused = server.post("/v1/completions", body).status_code >= 500
        except (ServerDied, OSError):
            refused = True
        assert refused
        died = died_in(tmp_path / "mortal")
        assert died in family - {server.process.pid}
