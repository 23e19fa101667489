"""SCORE_USAGE without an engine: vLLM's own post-processing and response on engine outputs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.beds.registered import registered
from tests.conftest import find_part

QUERY, DOCS = 5, (3, 4, 5)
CACHED = 2


@pytest.fixture
def patched(installed_release: str, plugin: str, request: pytest.FixtureRequest) -> Iterator[None]:
    """The process with the plugin registered and the part's option on, or as it came."""
    import vllm.entrypoints.pooling.scoring.serving  # noqa: F401

    feature, part = find_part(request.node.get_closest_marker("behaviour").args[0])
    option = {feature.variable(part.option): "1"} if part.option else {}
    with registered(plugin == "with", option):
        yield


def _output(length: int, data: Any, cached: int = CACHED) -> Any:
    from vllm.outputs import PoolingOutput, PoolingRequestOutput

    return PoolingRequestOutput(
        f"request-{length}", PoolingOutput(data), list(range(length)), cached, True
    )


def _input(length: int, embeds: bool = False) -> dict[str, Any]:
    import torch

    if embeds:
        return {"prompts": {"type": "embeds", "prompt_embeds": torch.zeros(length, 8)}}
    return {"prompts": {"type": "token", "prompt_token_ids": list(range(length))}}


def _request(kind: str, queries: int, docs: int, top_n: int = 0) -> Any:
    from vllm.entrypoints.pooling.scoring import protocol

    if kind == "rerank":
        return protocol.RerankRequest(query="q", documents=["d"] * docs, top_n=top_n)
    return protocol.ScoreTextRequest.model_construct(text_1=["q"] * queries, text_2=["d"] * docs)


def _answer(
    kind: str, score_type: str, queries: int = 1, embeds: bool = False, top_n: int = 0
) -> dict[str, Any]:
    """The response ServingScores builds from raw engine outputs, post-processing included."""
    import torch
    from vllm.entrypoints.pooling.scoring.io_processor import ScoringIOProcessors
    from vllm.entrypoints.pooling.scoring.serving import ServingScores

    serving = object.__new__(ServingScores)
    serving.models = SimpleNamespace(model_name=lambda: "tiny")
    serving.model_config = SimpleNamespace(is_encoder_decoder=False)
    processor = object.__new__(ScoringIOProcessors[score_type])
    processor.pad_token_id = 0
    ids, docs = [QUERY] * queries, list(DOCS)
    context = SimpleNamespace(
        request=_request(kind, queries, len(docs), top_n),
        request_id="score-test",
        created_time=0,
        model_name="tiny",
        n_queries=queries,
        query_final_res_batch=None,
    )
    generator = torch.Generator().manual_seed(0)
    if score_type == "cross-encoder":
        lengths = [QUERY + length for length in docs]
        context.final_res_batch = [_output(n, torch.rand(1, generator=generator)) for n in lengths]
    elif score_type == "jina-reranking-scoring":
        lengths = [QUERY + sum(docs)]
        context.final_res_batch = [
            _output(lengths[0], torch.rand(1, generator=generator)) for _ in docs
        ]
    else:
        lengths = [*ids, *docs]
        wide = "late" in score_type and "flash" not in score_type
        made = [
            _output(n, torch.rand((n, 8) if wide else (8,), generator=generator)) for n in lengths
        ]
        context.final_res_batch = made
        if score_type == "flash-late-interaction":
            context.query_final_res_batch = made[:queries]
            context.final_res_batch = [_output(n, torch.rand(1, generator=generator)) for n in docs]
    context.engine_inputs = [_input(length, embeds) for length in lengths]
    context.expected = sum(lengths)
    if score_type == "jina-reranking-scoring":
        processor = SimpleNamespace(post_process_online=lambda context: None)
    body = json.loads(serving._postprocessing(processor, context).body)
    return {**body, "expected": context.expected, "inputs": len(lengths)}


SCORE_TYPES = (
    "bi-encoder",
    "cross-encoder",
    "late-interaction",
    "flash-late-interaction",
    "jina-reranking-scoring",
)


def _billed(answers: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    billed = [answer["usage"]["prompt_tokens"] for answer in answers]
    totals = [answer["usage"]["total_tokens"] for answer in answers]
    assert billed == totals
    return billed, [answer["expected"] for answer in answers]


@pytest.mark.behaviour(
    "SCORE_USAGE.prompt_tokens", wrong=r"\[30, 27, 30, 30, 51\] != \[17, 27, 17, 17, 17"
)
def test_one_query_many_documents(patched: None) -> None:
    billed, expected = _billed([_answer("score", score_type) for score_type in SCORE_TYPES])
    assert billed == expected, f"{billed} != {expected}"


@pytest.mark.behaviour("SCORE_USAGE.prompt_tokens", wrong=r"\[30, 30, 30\] != \[27, 27, 27\]")
def test_pairs(patched: None) -> None:
    types = [name for name in SCORE_TYPES if "late" in name or name == "bi-encoder"]
    billed, expected = _billed([_answer("score", name, queries=3) for name in types])
    assert billed == expected, f"{billed} != {expected}"


@pytest.mark.behaviour(
    "SCORE_USAGE.prompt_tokens", wrong=r"\[30, 27, 30, 30, 51\] != \[17, 27, 17, 17, 17"
)
def test_rerank_keeps_scores_and_order(patched: None) -> None:
    answers = [_answer("rerank", score_type) for score_type in SCORE_TYPES]
    for answer in answers:
        scores = [result["relevance_score"] for result in answer["results"]]
        assert scores == sorted(scores, reverse=True) and len(scores) == len(DOCS)
    billed, expected = _billed(answers)
    assert billed == expected, f"{billed} != {expected}"


@pytest.mark.behaviour(
    "SCORE_USAGE.prompt_tokens", wrong=r"\[30, 27, 30, 30, 51\] != \[17, 27, 17, 17, 17"
)
def test_top_n_does_not_reduce_usage(patched: None) -> None:
    answers = [_answer("rerank", score_type, top_n=1) for score_type in SCORE_TYPES]
    assert all(len(answer["results"]) == 1 for answer in answers)
    billed, expected = _billed(answers)
    assert billed == expected, f"{billed} != {expected}"


@pytest.mark.behaviour(
    "SCORE_USAGE.prompt_tokens", wrong=r"\[30, 27, 30, 30, 51\] != \[17, 27, 17, 17, 17"
)
def test_rows_of_prompt_embeddings_count(patched: None) -> None:
    billed, expected = _billed([_answer("score", name, embeds=True) for name in SCORE_TYPES])
    assert billed == expected, f"{billed} != {expected}"


@pytest.mark.behaviour("SCORE_USAGE.missing_inputs", wrong="AssertionError without a text")
def test_missing_engine_inputs_get_an_explicit_error(patched: None) -> None:
    from vllm.entrypoints.pooling.scoring.serving import ServingScores

    serving = object.__new__(ServingScores)
    serving.models = SimpleNamespace(model_name=lambda: "tiny")
    context = SimpleNamespace(
        request=_request("score", 1, 1),
        request_id="score-lost",
        created_time=0,
        model_name="tiny",
        engine_inputs=None,
        final_res_batch=[],
    )
    try:
        serving._build_response(context)
        raised = "no error"
    except Exception as error:
        raised = f"{type(error).__name__} {error or 'without a text'}"
        raised = raised if str(error) else f"{type(error).__name__} without a text"
    assert "score-lost" in raised and "engine inputs" in raised, raised


@pytest.mark.behaviour("SCORE_USAGE.cached_tokens", wrong="None for prompt_tokens_details")
def test_cached_tokens_are_counted_once_per_input(patched: None) -> None:
    for kind in ("score", "rerank"):
        for score_type in SCORE_TYPES[:4]:
            answer = _answer(kind, score_type)
            details = answer["usage"].get("prompt_tokens_details")
            assert details is not None, f"None for prompt_tokens_details of {kind}, {score_type}"
            assert details["cached_tokens"] == CACHED * answer["inputs"]
