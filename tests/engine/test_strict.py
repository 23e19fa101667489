"""A vLLM whose source drifted: STRICT and =1 stop the start at once, auto serves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.beds.copies import altered
from tests.beds.pooling_models import PoolingModel, bi_encoder
from tests.beds.serving import serve
from tests.conftest import CI_RELEASE

pytestmark = [pytest.mark.engine, pytest.mark.area("serving")]

FILE = "vllm/entrypoints/pooling/scoring/serving.py"
LINE = "        created_time = ctx.created_time\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PoolingModel:
    """A tiny scoring model."""
    return bi_encoder(tmp_path_factory.mktemp("strict") / "model")


@pytest.fixture(scope="module")
def drifted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The CI release with one line of a target changed, in a way that still works."""
    folder = tmp_path_factory.mktemp("drifted")
    yield altered(CI_RELEASE, folder, FILE, LINE, LINE.rstrip() + " + 0\n")


@pytest.mark.parametrize("asked", ["VLLM_EXT_STRICT", "VLLM_EXT_SCORE_USAGE"])
def test_what_was_asked_for_stops_the_start_in_one_sentence(
    asked: str, model: PoolingModel, drifted: Path, tmp_path: Path
) -> None:
    server = serve(model, CI_RELEASE, tmp_path / "log", env={asked: "1"}, pythonpath=[drifted])
    server.start()
    code, text = server.wait_exit(120)
    assert code == 1
    lines = [line for line in text.splitlines() if line.startswith("vllm-ext: ")]
    assert lines == [text.strip().splitlines()[-1]], "one sentence, and nothing after it"
    assert f"{asked}=1 can't be honoured, SCORE_USAGE is drifted" in lines[0]
    assert f"{FILE}, line 80: " in lines[0] and "VLLM_EXT_SCORE_USAGE=0" in lines[0]
    assert "Traceback" not in text
    assert "EngineCore" not in text and "Loading" not in text, "the model was already loading"


def test_auto_serves_and_says_what_it_left_out(
    model: PoolingModel, drifted: Path, tmp_path: Path
) -> None:
    query, docs = "red cat", ["red cat sleeps", "blue dog"]
    with serve(model, CI_RELEASE, tmp_path / "log", pythonpath=[drifted]) as server:
        body = {"model": str(model.path), "text_1": query, "text_2": docs}
        usage = server.post("/score", body).raise_for_status().json()["usage"]
        log = server.log_text()
    assert usage["prompt_tokens"] == model.joined_tokens([query], docs), "vLLM's own count"
    told = rf"SCORE_USAGE\.prompt_tokens.* drifted: the source is not that of vLLM {CI_RELEASE}"
    assert re.search(told, log)
