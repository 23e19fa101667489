"""SCORE_USAGE on real servers: usage is what the tokenizer counts and what the engine counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.beds.pooling_models import POOLING_MODELS, PoolingModel
from tests.beds.serving import serve, settled_metric
from tests.beds.variables import every_variable
from tests.conftest import FEATURES
from vllm_ext.checks.server import Server
from vllm_ext.names import DISABLE, STRICT

pytestmark = pytest.mark.engine

COUNTER = "vllm:prompt_tokens_total"
PART = "SCORE_USAGE.prompt_tokens"
QUERY = "red cat"
DOCS = ["red cat sleeps", "blue dog", "the green bird sings today"]


@dataclass
class Served:
    """A running server, its model and how far its counter is accounted for."""

    server: Server
    model: PoolingModel
    counted: float

    def usage(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Usage of one request; it must agree with the rise of the server's own counter."""
        answer = self.server.post(path, {"model": str(self.model.path), **body})
        usage: dict[str, Any] = answer.raise_for_status().json()["usage"]
        assert usage["prompt_tokens"] == usage["total_tokens"]
        return usage

    def rise(self, expected: int) -> int:
        """By how much the server's counter rose since the last call."""
        now = settled_metric(self.server, COUNTER, self.counted + expected)
        rise, self.counted = int(now - self.counted), now
        return rise


def all_on() -> dict[str, str]:
    """Every name the plugin knows, set: toggles to auto, options on."""
    toggles = {feature.toggle: "auto" for feature in FEATURES.values()}
    return {**every_variable("1"), **toggles, DISABLE: "0", STRICT: "0"}


@pytest.fixture(scope="session")
def served(
    release: str, plugin: str, model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """One server per release, plugin setting and model, shared by the tests of this module."""
    folder = tmp_path_factory.mktemp(f"{model}-{release}-{plugin}")
    built = POOLING_MODELS[model](folder / "model")
    env = all_on() if plugin == "with" else {}
    args = ["--fail-on-environ-validation"] if plugin == "with" else []
    with serve(built, release, folder / "log", plugin=plugin, env=env, args=args) as server:
        yield Served(server, built, server.metric(COUNTER))


def _requests(served: Served) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Endpoint, body and the tokenizer's count."""
    count = served.model.prompt_tokens
    for path in ("/score", "/v1/score"):
        yield path, {"text_1": QUERY, "text_2": DOCS[0]}, count([QUERY], DOCS[:1])
        yield path, {"text_1": QUERY, "text_2": DOCS}, count([QUERY], DOCS)
    pairs = [QUERY, "blue", "bird sings"]
    yield "/score", {"text_1": pairs, "text_2": DOCS}, count(pairs, DOCS)
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        yield path, {"query": QUERY, "documents": DOCS}, count([QUERY], DOCS)
    yield "/rerank", {"query": QUERY, "documents": DOCS, "top_n": 1}, count([QUERY], DOCS)
    short = {"query": QUERY, "documents": DOCS, "truncate_prompt_tokens": 4}
    yield "/rerank", short, count([QUERY], DOCS, 4)


def _billed(served: Served) -> list[tuple[str, int, int]]:
    """Endpoint, billed and counted by the tokenizer, for every request that is billed wrong."""
    wrong = []
    for path, body, expected in _requests(served):
        billed = served.usage(path, body)["prompt_tokens"]
        assert served.rise(expected) == expected, f"the engine's own counter disagrees at {path}"
        if billed != expected:
            wrong.append((path, billed, expected))
    return wrong


@pytest.mark.behaviour(PART, wrong=r"/v1/score billed \d+, the tokenizer counts \d+")
@pytest.mark.parametrize(
    "model", ["decoder_embedder", "bi_encoder", "late_interaction"], scope="session"
)
def test_usage_is_what_the_engine_was_given(served: Served) -> None:
    wrong = [f"{path} billed {n}, the tokenizer counts {m}" for path, n, m in _billed(served)]
    assert wrong == [], "; ".join(wrong)


@pytest.mark.parametrize("plugin", ["with", "without"], scope="session")
@pytest.mark.parametrize("model", ["cross_encoder"], scope="session")
@pytest.mark.full
@pytest.mark.area("serving")
def test_cross_encoders_were_right_and_stay_right(release: str, served: Served) -> None:
    assert _billed(served) == []


@pytest.mark.behaviour("SCORE_USAGE.cached_tokens", wrong="None instead of cached tokens")
@pytest.mark.parametrize("model", ["decoder_embedder"], scope="session")
def test_cached_tokens_are_those_of_the_engine(served: Served) -> None:
    query, docs = " ".join([QUERY] * 40), DOCS[:2]
    body = {"text_1": query, "text_2": docs}
    first = served.usage("/score", body)
    before = served.server.metric("vllm:prefix_cache_hits_total")
    second = served.usage("/score", body)
    hits = int(settled_metric(served.server, "vllm:prefix_cache_hits_total", -1) - before)
    assert hits > 0, "the test needs a repeated query to hit the prefix cache"
    told = [usage["prompt_tokens_details"] for usage in (first, second)]
    assert None not in told, "None instead of cached tokens"
    assert [details["cached_tokens"] for details in told] == [0, hits]


@pytest.mark.area("serving")
def test_a_wrong_toggle_stops_the_start_in_one_sentence(tmp_path: Path) -> None:
    model = POOLING_MODELS["bi_encoder"](tmp_path / "model")
    server = serve(model, "0.29.0", tmp_path / "log", env={"VLLM_EXT_SCORE_USAGE": "maybe"})
    server.start()
    code, text = server.wait_exit(120)
    lines = [line for line in text.splitlines() if line.startswith("vllm-ext: ")]
    assert code == 1
    assert len(lines) == 1 and lines[0] == text.strip().splitlines()[-1]
    assert "VLLM_EXT_SCORE_USAGE is 'maybe'" in lines[0]
    assert all(value in lines[0] for value in ("auto", "1 (", "0 ("))
    assert "Traceback" not in text
