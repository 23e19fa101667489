"""What an unpatched vLLM puts into an answer for logprobs that are no finite numbers."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Sequence
from math import inf, isfinite, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm_ext.core.feature import Judgement, Verdict
from vllm_ext.features.played_scheduler import (
    make_request,
    make_scheduler,
    output_of,
)

TOKENS = [5, 6]
# vllm-rs up to 0.30.0 holds this text, and stops serving where it says it.
REFUSAL = b"token_ranks must be >= 1 for decoded engine-core logprobs"


def steps(*values: float) -> list[dict[int, Any]]:
    """Engine-side logprobs of TOKENS: the sampled token first, then one more candidate."""
    from vllm.logprobs import Logprob

    first, second = values[0], values[-1]
    return [
        {token: Logprob(first, 0, f"t{token}"), 7: Logprob(second, 1, "t7")} for token in TOKENS
    ]


def completion_answer(values: Iterable[float]) -> Any:
    """What vLLM makes of engine-side logprobs for /v1/completions."""
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion

    serving = object.__new__(OpenAIServingCompletion)
    serving.return_tokens_as_token_ids = False
    return serving._create_completion_logprobs(TOKENS, steps(*values), 1, None)


def chat_answer(values: Iterable[float]) -> Any:
    """What vLLM makes of engine-side logprobs for /v1/chat/completions."""
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat

    serving = object.__new__(OpenAIServingChat)
    serving.return_tokens_as_token_ids = False
    return serving._create_chat_logprobs(TOKENS, steps(*values), None, 2)


def response_answer(values: Iterable[float]) -> Any:
    """What vLLM makes of engine-side logprobs for /v1/responses."""
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses

    serving = object.__new__(OpenAIServingResponses)
    serving.return_tokens_as_token_ids = False
    return serving._create_response_logprobs(TOKENS, steps(*values), None, 2)


def prompt_answer(values: Iterable[float]) -> Any:
    """What vLLM makes of engine-side prompt logprobs."""
    from vllm.entrypoints.generate.base import serving

    return serving.clamp_prompt_logprobs([None, *steps(*values)])


def token_answers(values: Iterable[float]) -> list[Any]:
    """What vLLM makes of engine-side logprobs for /inference/v1/generate, in each of its forms."""
    from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens

    serving = object.__new__(ServingTokens)
    logprobs = steps(*values)
    try:
        answers = [serving._create_tokens_logprobs(TOKENS, logprobs, 2)]
    except TypeError:  # from 0.32.0 on it tells all candidates
        answers = [serving._create_tokens_logprobs(TOKENS, logprobs)]
    if hasattr(serving, "_create_text_logprobs"):
        try:
            answers.append(
                serving._create_text_logprobs(TOKENS, logprobs, num_output_top_logprobs=2)
            )
        except TypeError:  # from 0.33.0 on it does too
            answers.append(serving._create_text_logprobs(TOKENS, logprobs))
    return answers


def segments(values: Iterable[float]) -> list[Any]:
    """What vLLM makes of engine-side logprobs for a verbose transcription of one segment."""
    from vllm.entrypoints.speech_to_text.base.serving import SpeechToTextBaseServing
    from vllm.entrypoints.speech_to_text.transcription.protocol import TranscriptionSegment
    from vllm.logprobs import Logprob

    start, end, word, stop = 100, 150, 5, 99
    serving = object.__new__(SpeechToTextBaseServing)
    serving.tokenizer = SimpleNamespace(
        encode=lambda text, add_special_tokens: [start],
        decode=lambda ids: "word",
        eos_token_id=stop,
    )
    first, *_ = values
    logprobs = [{word: Logprob(first)}, {end: Logprob(-1.0)}, {end: Logprob(-1.0)}]
    return serving._get_verbose_segments(
        (word, end),
        logprobs,
        SimpleNamespace(temperature=0.0),
        TranscriptionSegment,
        start_time=0.0,
    )


def values_of(answer: Any) -> list[float]:
    """All logprobs in an answer."""
    if hasattr(answer, "token_logprobs"):
        return [*answer.token_logprobs, *(v for top in answer.top_logprobs for v in top.values())]
    entries = getattr(answer, "content", answer)
    if any(isinstance(entry, dict) or entry is None for entry in entries):
        return [each.logprob for entry in entries if entry for each in entry.values()]
    each = [e for entry in entries for e in (entry, *(getattr(entry, "top_logprobs", None) or ()))]
    return [e.avg_logprob if hasattr(e, "avg_logprob") else e.logprob for e in each]


def _judge(answers: dict[str, Iterable[Any]]) -> Judgement:
    """ACTIVE if a value is not finite; ``answers`` by what the engine had."""
    for had, told in answers.items():
        values = [value for answer in told for value in values_of(answer)]
        wrong = [value for value in values if not isfinite(value)]
        if wrong:
            return Judgement(
                Verdict.ACTIVE, f"a logprob of {had} goes into the answer as {wrong[0]}"
            )
    return Judgement(Verdict.NATIVE, "logprobs that are not finite go into the answer as numbers")


_NAN, _INF = (nan, nan), (inf, -1.0)


def completions() -> Judgement:
    """Probe of the part."""
    return _judge({"NaN": [completion_answer(_NAN)], "+inf": [completion_answer(_INF)]})


def chat() -> Judgement:
    """Probe of the part."""
    return _judge({"NaN": [chat_answer(_NAN)], "+inf": [chat_answer(_INF)]})


def responses() -> Judgement:
    """Probe of the part."""
    return _judge({"NaN": [response_answer(_NAN)], "+inf": [response_answer(_INF)]})


def prompt_logprobs() -> Judgement:
    """Probe of the part."""
    return _judge({"NaN": [prompt_answer(_NAN)], "+inf": [prompt_answer(_INF)]})


def token_in() -> Judgement:
    """Probe of the part."""
    return _judge({"NaN": token_answers(_NAN)})


def token_in_inf() -> Judgement:
    """Probe of the part."""
    if len(token_answers(_NAN)) == 1:
        return Judgement(Verdict.IDLE, "the part token_in takes +inf along")
    return _judge({"+inf": token_answers(_INF)})


def transcription() -> Judgement:
    """Probe of the part."""
    return _judge({"NaN": [segments(_NAN)], "+inf": [segments(_INF)]})


def rust_ranks() -> Judgement:
    """Probe of the part: by the binary where there is one, else by the frames it was made for."""
    import vllm
    from vllm.v1.engine import EngineCoreOutput

    binary = Path(vllm.__file__).with_name("vllm-rs")
    if binary.is_file():
        refuses, seen = refuses_rank_0(binary), "its vllm-rs"
    else:
        # CPU builds have no binary. Both changed in the same release, which a test compares.
        refuses = "prompt_token_id_logprobs" not in EngineCoreOutput.__struct_fields__
        seen = "the vllm-rs that reads frames of this form"
    if refuses:
        return Judgement(Verdict.ACTIVE, f"{seen} stops serving at the first rank 0")
    return Judgement(Verdict.NATIVE, f"{seen} takes rank 0")


def refuses_rank_0(binary: Path) -> bool:
    """Whether a ``vllm-rs`` gives up at the first rank 0; reads the file, runs nothing."""
    with binary.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as image:
        return image.find(REFUSAL) >= 0


def ranked_step(ranks: Sequence[int]) -> tuple[Any, Any]:
    """A scheduler's step with logprobs of these ranks: what goes to the frontend, and the worker's.

    One request per rank, ``r0`` and so on; ``r0`` also has prompt logprobs, of its rank and 3.
    Returns EngineCoreOutputs and the ModelRunnerOutput that they are made of.
    """
    import numpy as np
    import torch
    from vllm.v1.outputs import LogprobsLists, LogprobsTensors

    scheduler = make_scheduler()
    for at in range(len(ranks)):
        request = make_request(f"r{at}", range(100 * at + 1, 100 * at + 4))
        request.sampling_params.logprobs = 1
        scheduler.add_request(request)
    planned = scheduler.schedule()
    output = output_of(scheduler, planned)
    rows = len(ranks), 2
    sampled = np.array(ranks, dtype=np.int64)
    sampled.flags.writeable = False  # what comes from another process is
    output.logprobs = LogprobsLists(
        np.zeros(rows, dtype=np.int64), np.full(rows, nan, dtype=np.float32), sampled
    )
    of_prompt = torch.tensor([ranks[0], 3])
    output.prompt_logprobs_dict = {
        "r0": LogprobsTensors(torch.zeros(2, 2).long(), torch.full((2, 2), nan), of_prompt)
    }
    (frame,) = scheduler.update_from_output(planned, output).values()
    return frame, output


def rust_ranks_sent() -> Judgement:
    """Check of the part: what goes to a ``vllm-rs`` that stops serving at the first rank 0."""
    from unittest import mock

    from vllm_ext.features.serving.nan_logprobs import rust_frontend_in_use

    lacking = rust_ranks()
    if lacking.verdict is not Verdict.ACTIVE:
        return lacking
    rust_frontend_in_use.cache_clear()
    try:
        with mock.patch.dict(os.environ, VLLM_USE_RUST_FRONTEND="1"):
            (sent,) = ranked_step([0])[0].outputs
    finally:
        rust_frontend_in_use.cache_clear()
    of_prompt = sent.new_prompt_logprobs_tensors.selected_token_ranks
    ranks = [*sent.new_logprobs.sampled_token_ranks.tolist(), *of_prompt.tolist()]
    if ranks == [1, 1, 3]:
        return Judgement(Verdict.NATIVE, "vllm-rs gets ranks from 1 on")
    return Judgement(Verdict.ACTIVE, f"{lacking.reason}, and gets the ranks {ranks}")
