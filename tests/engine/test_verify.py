"""verify with its engine: a real server, all processes of which agree."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_verify import run
from tests.conftest import recorded
from vllm_ext.checks.engine import EngineError, try_engine
from vllm_ext.core.feature import Verdict
from vllm_ext.core.report import reports

pytestmark = [pytest.mark.engine, pytest.mark.area("observability")]


def test_a_tiny_engine_starts_answers_and_its_processes_agree(
    release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run(release, "--json", env={"XDG_RUNTIME_DIR": str(tmp_path)})
    assert done.returncode == 0, done.stdout + done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    assert answer["problems"] == []
    processes = answer["engine"]["processes"]
    assert {"APIServer", "EngineCore"} <= {process["role"] for process in processes}
    assert {process["state"] for process in processes} == {"live"}
    assert len(answer["engine"]["text"].split()) == 8
    seen = {part_id: part["engine"] for part_id, part in answer["parts"].items()}
    for part_id, part in answer["parts"].items():
        if recorded(release, part_id) is Verdict.ACTIVE:
            assert part["right"] is True, part
        else:
            assert seen[part_id]["active"] == []
    assert seen["CACHE_KEYS.compile_key"]["active"]
    assert seen["EFFECT_METRICS.metrics"]["active"] == ["APIServer"]
    # The weights were made up by the loader that DUMMY_LOAD patches.
    assert seen["DUMMY_LOAD.stream"]["effects"] > 0
    # No process of it is left; one that was killed at the end leaves its last report.
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    running = {process["pid"] for process in processes}
    assert [report.pid for report in reports() if report.pid in running and report.live] == []


@pytest.mark.full
def test_an_engine_that_does_not_start_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_EXT_STRICT", "2")
    with pytest.raises(EngineError) as caught:
        try_engine("cpu")
    assert re.fullmatch(
        "vllm serve ended with code 1: .*VLLM_EXT_STRICT is '2'.*", str(caught.value)
    )
