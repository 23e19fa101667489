"""NAN_LOGPROBS: finite numbers in every answer (upstream PR 51026)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from math import isfinite
from typing import Any

from vllm_ext.core.feature import Feature, Part, effect
from vllm_ext.core.seams import Wrap
from vllm_ext.features.serving import nan_logprobs_probes as probes

FLOOR = -9999.0
_OPENAI = "vllm.entrypoints.openai"
_COMPLETIONS = f"{_OPENAI}.completion.serving:OpenAIServingCompletion._create_completion_logprobs"
_CHAT = f"{_OPENAI}.chat_completion.serving:OpenAIServingChat._create_chat_logprobs"
_TOP = f"{_OPENAI}.chat_completion.serving:OpenAIServingChat._get_top_logprobs"
_RESPONSES = f"{_OPENAI}.responses.serving:OpenAIServingResponses._create_response_logprobs"
_TOPK = f"{_OPENAI}.responses.serving:OpenAIServingResponses._topk_logprobs"
_PROMPT = "vllm.entrypoints.generate.base.serving:clamp_prompt_logprobs"
_TOKENS = "vllm.entrypoints.scale_out.token_in_token_out.serving:ServingTokens"
_SPEECH = "vllm.entrypoints.speech_to_text.base.serving:SpeechToTextBaseServing"
_UPDATE = "vllm.v1.core.sched.scheduler:Scheduler.update_from_output"


def finite(value: float) -> float:
    """The value, or -9999.0 in the place of NaN and the infinities."""
    return value if isfinite(value) else FLOOR


def all_finite(steps: Iterable[Any]) -> bool:
    """Whether all engine-side logprobs are: a dict of Logprob (or None) for each position."""
    # A sum of float32 values is finite if and only if all of them are; adding up is cheapest.
    return isfinite(sum([each.logprob for step in steps if step for each in step.values()]))


def clean_completion(logprobs: Any) -> bool:
    """Make a ``CompletionLogProbs`` finite, in place; whether anything was changed.

    The first position of an echoed prompt has no logprob (None), and keeps none.
    """
    values = logprobs.token_logprobs
    tops = [top for top in logprobs.top_logprobs if top]
    if isfinite(sum(filter(None, values)) + sum([sum(top.values()) for top in tops])):
        return False
    values[:] = [None if value is None else finite(value) for value in values]
    for top in tops:
        for token, value in top.items():
            top[token] = finite(value)
    return True


def clean_entries(entries: Iterable[Any]) -> bool:
    """Make the ``logprob`` of each entry and of its ``top_logprobs`` finite, in place.

    ``entries`` have the form of chat, responses and token-in answers, or are Logprobs themselves.
    Whether anything was changed.
    """
    every = [each for entry in entries for each in (entry, *_candidates(entry))]
    wrong = [each for each in every if not isfinite(each.logprob)]
    for each in wrong:
        each.logprob = FLOOR
    return bool(wrong)


def _candidates(entry: Any) -> Iterable[Any]:
    return getattr(entry, "top_logprobs", None) or ()


def _presented(
    part: str,
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str,
) -> Any:
    """What vLLM makes of engine-side logprobs (its third argument, ``name``), made finite."""
    answer = original(*args, **kwargs)
    steps = kwargs[name] if name in kwargs else args[2]
    if not all_finite(steps) and clean_entries(getattr(answer, "content", answer)):
        effect(f"NAN_LOGPROBS.{part}")
    return answer


def _completions(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    logprobs = original(*args, **kwargs)
    if clean_completion(logprobs):
        effect("NAN_LOGPROBS.completions")
    return logprobs


def _chat(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _presented("chat", original, args, kwargs, "top_logprobs")


def _responses(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _presented("responses", original, args, kwargs, "logprobs")


def _token_in(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _presented("token_in", original, args, kwargs, "top_logprobs")


def _token_in_inf(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _presented("token_in_inf", original, args, kwargs, "top_logprobs")


def _prompt_logprobs(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    positions = original(*args, **kwargs)
    if positions and not all_finite(positions):
        clean_entries([each for position in positions if position for each in position.values()])
        effect("NAN_LOGPROBS.prompt_logprobs")
    return positions


def _transcription(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    segments = original(*args, **kwargs)
    wrong = [segment for segment in segments if not isfinite(segment.avg_logprob)]
    for segment in wrong:
        segment.avg_logprob = FLOOR
    if wrong:
        effect("NAN_LOGPROBS.transcription")
    return segments


@functools.cache
def rust_frontend_in_use() -> bool:
    """Whether ``vllm-rs`` reads what this process's engine writes.

    That is so if vLLM was told to start it, and if it started vLLM (``vllm-rs serve``). Asked once
    a process.
    """
    import psutil
    from vllm import envs

    if envs.VLLM_USE_RUST_FRONTEND:
        return True
    try:
        return any(parent.name() == "vllm-rs" for parent in psutil.Process().parents())
    except psutil.Error:
        return False


def _ranks_from_one(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Have no rank 0 in what goes to a ``vllm-rs`` that gives up at the first one.

    Only the frames change: model runner and scheduler keep their arrays as they are.
    """
    outputs = original(*args, **kwargs)
    if not rust_frontend_in_use():
        return outputs
    changed = 0
    for frame in outputs.values():
        for output in frame.outputs:
            changed += raise_ranks(output)
    if changed:
        effect("NAN_LOGPROBS.rust_ranks", changed)
    return outputs


def raise_ranks(output: Any) -> bool:
    """Raise ranks below 1 of an EngineCoreOutput to 1; whether there were any.

    Ranks are int64 [positions], numpy for generated tokens and torch for those of a prompt.
    """
    changed = False
    sampled, prompt = output.new_logprobs, output.new_prompt_logprobs_tensors
    # One rank as a rule: a list of it costs a tenth of what an array operation does.
    if sampled is not None and min(sampled.sampled_token_ranks.tolist(), default=1) < 1:
        ranks = sampled.sampled_token_ranks.clip(min=1)
        output.new_logprobs = sampled._replace(sampled_token_ranks=ranks)
        changed = True
    if prompt is not None and bool((prompt.selected_token_ranks < 1).any()):
        ranks = prompt.selected_token_ranks.clamp(min=1)
        output.new_prompt_logprobs_tensors = prompt._replace(selected_token_ranks=ranks)
        changed = True
    return changed


FEATURE = Feature(
    name="NAN_LOGPROBS",
    area="serving",
    summary="A request whose logits are NaN or infinite gets finite logprobs in a valid answer.",
    why=(
        "One NaN in the logits makes every logprob of that step NaN. vLLM's Python frontend then "
        "blames the client (HTTP 400, 'Out of range float values are not JSON compliant') and "
        "drops the other choices of the request with it, or streams null where clients expect a "
        "number. Upstream repaired the Rust frontend only; that of 0.29.0 and 0.30.0 answers HTTP "
        "500 to everything from the first such request on."
    ),
    upstream_pr=(51026,),
    parts=(
        Part(
            name="completions",
            summary="/v1/completions: -9999.0 for a logprob that is not finite.",
            seams=(Wrap(_COMPLETIONS, _completions),),
            probe=probes.completions,
        ),
        Part(
            name="chat",
            summary="/v1/chat/completions and its batch form: -9999.0 likewise.",
            seams=(Wrap(_CHAT, _chat),),
            probe=probes.chat,
            relies_on=(_TOP,),
        ),
        Part(
            name="responses",
            summary="/v1/responses: -9999.0 likewise.",
            seams=(Wrap(_RESPONSES, _responses),),
            probe=probes.responses,
            relies_on=(_TOPK,),
        ),
        Part(
            name="prompt_logprobs",
            summary="prompt_logprobs of every endpoint: -9999.0 likewise.",
            seams=(Wrap(_PROMPT, _prompt_logprobs),),
            probe=probes.prompt_logprobs,
        ),
        Part(
            name="token_in",
            summary="/inference/v1/generate: -9999.0 for NaN.",
            seams=(Wrap(f"{_TOKENS}._create_tokens_logprobs", _token_in),),
            probe=probes.token_in,
        ),
        Part(
            name="token_in_inf",
            summary="/inference/v1/generate: -9999.0 for +inf, which raw logits can be.",
            seams=(
                Wrap(f"{_TOKENS}._create_tokens_logprobs", _token_in_inf),
                Wrap(f"{_TOKENS}._create_text_logprobs", _token_in_inf),
            ),
            probe=probes.token_in_inf,
        ),
        Part(
            name="transcription",
            summary="Segments of verbose transcriptions: -9999.0 for avg_logprob likewise.",
            seams=(Wrap(f"{_SPEECH}._get_verbose_segments", _transcription),),
            probe=probes.transcription,
        ),
        Part(
            name="rust_ranks",
            summary="A vllm-rs that stops serving at the first rank 0 gets ranks from 1 on.",
            seams=(Wrap(_UPDATE, _ranks_from_one),),
            probe=probes.rust_ranks,
            check=probes.rust_ranks_sent,
        ),
    ),
)
