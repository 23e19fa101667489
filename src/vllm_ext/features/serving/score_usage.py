"""SCORE_USAGE: /score and /rerank bill the tokens the engine was given (upstream PR 56573)."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from vllm_ext.core.feature import Feature, Judgement, Option, Part, Verdict, effect
from vllm_ext.core.seams import Add, Wrap

_SERVING = "vllm.entrypoints.pooling.scoring.serving:ServingScores"
_BASE = "vllm.entrypoints.pooling.base.serving:PoolingBaseServing"
_PROMPT_LEN = "vllm.entrypoints.serve.engine.serving:BaseServing._extract_prompt_len"
_HELPERS = (
    f"{_SERVING}._request_output_to_score_response",
    f"{_SERVING}._request_output_to_rerank_response",
)


class UsageUnknown(RuntimeError):
    """The engine inputs of a scoring request are gone, so its usage can't be told."""


def count_prompt_tokens(serving: Any, ctx: Any) -> int:
    """Tokens in the engine inputs of a scoring request, each input counted once.

    Token ids, rows of prompt embeddings and expanded multimodal placeholders count, after
    truncation. Raises UsageUnknown if the context holds no engine inputs.
    """
    if not ctx.engine_inputs:
        raise UsageUnknown(
            f"The usage of request {ctx.request_id} can't be told: its context holds no engine "
            "inputs, though one per query and document was expected. Another plugin that replaces "
            "the scoring steps may have dropped them; VLLM_EXT_SCORE_USAGE=0 restores vLLM's count."
        )
    return sum(serving._extract_prompt_len(entry["prompts"]) for entry in ctx.engine_inputs)


def bill_engine_inputs(original: Callable[..., Any], self: Any, ctx: Any) -> Any:
    """Have vLLM build the response from outputs that carry the right number of tokens.

    vLLM sums ``len(prompt_token_ids)`` over the outputs and uses the ids for nothing else, so
    shallow copies of the outputs whose lengths add up to the count are all it takes.
    """
    total = count_prompt_tokens(self, ctx)
    outputs = ctx.final_res_batch
    billed = [copy.copy(output) for output in outputs]
    for at, output in enumerate(billed):
        output.prompt_token_ids = range(total if at == 0 else 0)
    ctx.final_res_batch = billed
    try:
        response = original(self, ctx)
    finally:
        ctx.final_res_batch = outputs
    effect("SCORE_USAGE.prompt_tokens")
    return response


def require_engine_inputs(original: Callable[..., Any], self: Any, ctx: Any) -> Any:
    """Say what is wrong where vLLM would fail with a bare assertion."""
    if not ctx.engine_inputs:
        effect("SCORE_USAGE.missing_inputs")
        count_prompt_tokens(self, ctx)
    return original(self, ctx)


def count_cached_tokens(ctx: Any) -> int:
    """Tokens of the engine's own outputs, one per engine input, found in the prefix cache."""
    outputs = [*(ctx.final_res_batch or ()), *(ctx.query_final_res_batch or ())]
    return sum(max(output.num_cached_tokens or 0, 0) for output in outputs)


def report_cached_tokens(owner: Any) -> Callable[..., Any]:
    """A ``_postprocessing`` for ``owner`` that adds ``usage.prompt_tokens_details``."""

    def _postprocessing(self: Any, io_processor: Any, ctx: Any) -> Any:
        # Counted first: post-processing joins the outputs to pairs, the query's once per document.
        cached = count_cached_tokens(ctx)
        response = super(owner, self)._postprocessing(io_processor, ctx)
        body = json.loads(response.body)
        body["usage"]["prompt_tokens_details"] = {"cached_tokens": cached}
        response.body = response.render(body)
        response.headers["content-length"] = str(len(response.body))
        effect("SCORE_USAGE.cached_tokens")
        return response

    return _postprocessing


def _scoring() -> Any:
    """A ServingScores without an engine: the response is built from the context alone."""
    from vllm.entrypoints.pooling.scoring.serving import ServingScores

    serving = object.__new__(ServingScores)
    serving.models = SimpleNamespace(model_name=lambda: "probe")
    serving.model_config = SimpleNamespace(is_encoder_decoder=False)
    return serving


def _context(engine_inputs: list[dict[str, Any]] | None) -> Any:
    """A 1:2 bi-encoder request: query of 5 tokens, documents of 3 and 4, pad token between."""
    import torch
    from vllm.entrypoints.pooling.scoring.protocol import ScoreTextRequest
    from vllm.outputs import PoolingRequestOutput

    def output(length: int) -> Any:
        ids = list(range(length))
        return PoolingRequestOutput("probe", torch.tensor(0.5), ids, 0, True)

    request = ScoreTextRequest.model_construct(text_1="query", text_2=["one", "two"])
    return SimpleNamespace(
        request=request,
        request_id="score-probe",
        created_time=0,
        model_name="probe",
        engine_inputs=engine_inputs,
        final_res_batch=[output(5 + 1 + 3), output(5 + 1 + 4)],
        query_final_res_batch=None,
    )


def _inputs() -> list[dict[str, Any]]:
    return [
        {"prompts": {"type": "token", "prompt_token_ids": list(range(length))}}
        for length in (5, 3, 4)
    ]


def _probe_prompt_tokens() -> Judgement:
    response = _scoring()._build_response(_context(_inputs()))
    billed = json.loads(response.body)["usage"]["prompt_tokens"]
    if billed == 12:
        return Judgement(Verdict.NATIVE, "a 1:2 request of 12 tokens is billed as 12")
    return Judgement(
        Verdict.ACTIVE,
        f"a 1:2 request of 12 tokens is billed as {billed}, with query and pad token in each pair",
    )


def _probe_missing_inputs() -> Judgement:
    scoring, context = _scoring(), _context(None)
    try:
        scoring._build_response(context)
    except AssertionError as error:
        return Judgement(
            Verdict.ACTIVE,
            f"missing engine inputs end in a bare assertion ({str(error) or 'no text'})",
        )
    except Exception as error:
        return Judgement(Verdict.NATIVE, f"missing engine inputs end in {type(error).__name__}")
    return Judgement(
        Verdict.IDLE,
        "this release never asserts on the engine inputs; prompt_tokens brings the error along",
    )


def _probe_cached_tokens() -> Judgement:
    context = _context(_inputs())
    for output in context.final_res_batch:
        output.num_cached_tokens = 4
    processor = SimpleNamespace(post_process_online=lambda ctx: None)
    response = _scoring()._postprocessing(processor, context)
    details = json.loads(response.body)["usage"].get("prompt_tokens_details")
    if details:
        return Judgement(Verdict.NATIVE, "cached tokens of scoring requests are reported")
    return Judgement(Verdict.ACTIVE, "prompt_tokens_details of a scoring request is always null")


FEATURE = Feature(
    name="SCORE_USAGE",
    area="serving",
    summary="Usage of /score and /rerank counts every token given to the engine exactly once.",
    why=(
        "vLLM 0.29.0 sums the tokens of query-document pairs: a query against N documents is "
        "billed N times, plus a synthetic separator per pair, though the engine computed it once. "
        "Scores, order, top_n and ids stay as they are; usage equals the rise of "
        "vllm:prompt_tokens_total. Applies to /score, /v1/score, /rerank, /v1/rerank and "
        "/v2/rerank, for bi-encoders, cross-encoders, late interaction (also on the workers) and "
        "rerankers that take all documents in one prompt."
    ),
    upstream_pr=(56573,),
    parts=(
        Part(
            name="prompt_tokens",
            summary="usage.prompt_tokens and total_tokens count the engine's inputs.",
            seams=(Wrap(f"{_SERVING}._build_response", bill_engine_inputs),),
            relies_on=(*_HELPERS, _PROMPT_LEN),
            probe=_probe_prompt_tokens,
        ),
        Part(
            name="missing_inputs",
            summary="A request whose engine inputs are gone gets an error that says so.",
            seams=(Wrap(f"{_SERVING}._build_response", require_engine_inputs),),
            relies_on=(_PROMPT_LEN,),
            probe=_probe_missing_inputs,
        ),
        Part(
            name="cached_tokens",
            summary="usage.prompt_tokens_details.cached_tokens tells prefix-cache hits.",
            seams=(Add(f"{_SERVING}._postprocessing", report_cached_tokens),),
            relies_on=(f"{_BASE}._postprocessing",),
            probe=_probe_cached_tokens,
            option="CACHED_TOKENS",
        ),
    ),
    options=(
        Option(
            name="CACHED_TOKENS",
            type=bool,
            default=False,
            summary="Report usage.prompt_tokens_details.cached_tokens over query and documents.",
        ),
    ),
)
