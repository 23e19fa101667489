"""Two plugins on one function of a real server, in both orders."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.beds.foreign import make_first, make_plugin
from tests.beds.pooling_models import bi_encoder
from tests.beds.serving import serve
from tests.conftest import CI_RELEASE
from vllm_ext.checks.server import Server

pytestmark = [pytest.mark.engine, pytest.mark.area("serving")]

QUERY, DOCS = "red cat", ["red cat sleeps", "blue dog"]


def _ask(server: Server, model: Path) -> dict[str, Any]:
    body = {"model": str(model), "text_1": QUERY, "text_2": DOCS}
    answer: dict[str, Any] = server.post("/score", body).raise_for_status().json()
    assert len(answer["data"]) == 2 and all(-1 <= row["score"] <= 1 for row in answer["data"])
    return answer


def test_a_plugin_before_us_is_named_and_behaviour_stays_theirs(tmp_path: Path) -> None:
    model = bi_encoder(tmp_path / "model")
    theirs = make_plugin(tmp_path / "theirs", "early_bird")
    with serve(model, CI_RELEASE, tmp_path / "log", pythonpath=[theirs]) as server:
        answer = _ask(server, model.path)
        log = server.log_text()
    (line,) = set(re.findall(r"SCORE_USAGE\.prompt_tokens is conflict: .*", log))
    assert "early_bird.register.<locals>.marked_response" in line
    assert str(theirs / "early_bird.py") in line
    assert answer["usage"]["prompt_tokens"] == model.joined_tokens([QUERY], DOCS)


def test_a_plugin_after_us_is_found_when_the_engine_has_started(tmp_path: Path) -> None:
    model = bi_encoder(tmp_path / "model")
    ours = make_first(tmp_path / "ours")
    theirs = make_plugin(tmp_path / "theirs", "late_riser")
    with serve(model, CI_RELEASE, tmp_path / "log", pythonpath=[ours, theirs]) as server:
        answer = _ask(server, model.path)
        log = server.log_text()
    found = re.findall(r"\((\w+ pid=\d+)\).*SCORE_USAGE\.prompt_tokens is active: (.*)", log)
    processes = [process for process, _ in found]
    assert len(processes) == len(set(processes)), "a process tells it once"
    assert any(process.startswith("APIServer") for process in processes)
    (sentence,) = {sentence for _, sentence in found}
    assert "was wrapped after us by late_riser.register.<locals>.marked_response" in sentence
    assert answer["usage"]["prompt_tokens"] == model.prompt_tokens([QUERY], DOCS)
