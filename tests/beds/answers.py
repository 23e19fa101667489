"""What an in-process engine answers, and what becomes of it when weights or KV are changed in it.

For processes with ``VLLM_ENABLE_V1_MULTIPROCESSING=0``: engine and worker live in this process, so
a control needs no second engine. Everything is undone when its ``with`` block ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

# Two runs of one engine on the same input agree exactly; other batches may round differently.
TOLERANCE = 1e-4

_numbers = itertools.count()


@dataclass(frozen=True)
class Answer:
    """Greedy tokens and, for each, the log-probability of every token of the vocabulary."""

    tokens: tuple[int, ...]
    logprobs: tuple[Mapping[int, float], ...]
    cached_tokens: int

    def difference(self, other: Answer) -> float:
        """Greatest difference of a log-probability, as long as both have said the same."""
        greatest = 0.0
        for at, (mine, others) in enumerate(zip(self.logprobs, other.logprobs, strict=True)):
            if self.tokens[:at] != other.tokens[:at]:
                break
            greatest = max(greatest, *(abs(mine[token] - others[token]) for token in mine))
        return greatest


def ask(
    llm: Any,
    prompt: Any,
    tokens: int = 4,
    *,
    after: Mapping[int, Callable[[], None]] | None = None,
    params: Mapping[str, Any] | None = None,
    lora: Any = None,
) -> Answer:
    """Generate greedily, one engine step after another.

    ``prompt`` is a list of token ids or any prompt vLLM takes. ``after[n]`` is called when ``n``
    tokens have been generated. ``params`` go to ``SamplingParams``. Raises ``RuntimeError`` if the
    request ends in an error. The engine must have been started with ``max_logprobs=-1``.
    """
    (answer,) = ask_all(llm, [prompt], tokens, after=after, params=params, loras=[lora])
    return answer


def ask_all(
    llm: Any,
    prompts: Sequence[Any],
    tokens: int = 4,
    *,
    after: Mapping[int, Callable[[], None]] | None = None,
    params: Mapping[str, Any] | None = None,
    loras: Sequence[Any] = (),
    steps: int = 0,
) -> list[Answer]:
    """``ask`` for prompts that are computed in one batch; ``after`` counts the first one's.

    ``steps``: after so many the requests are aborted and ``TimeoutError`` is raised; 0 waits for
    ever.
    """
    told = _asked(llm, prompts, tokens, after or {}, params or {}, loras, steps)
    return [_answer(output) for output in told]


def outcomes(
    llm: Any, prompts: Sequence[Any], tokens: int = 4, *, steps: int = 0
) -> list[Answer | str]:
    """``ask_all`` where requests may end in an error: their finish reason in an answer's place."""
    told = _asked(llm, prompts, tokens, {}, {}, (), steps)
    return [_reason(output) if _failed(output) else _answer(output) for output in told]


def _asked(
    llm: Any,
    prompts: Sequence[Any],
    tokens: int,
    after: Mapping[int, Callable[[], None]],
    params: Mapping[str, Any],
    loras: Sequence[Any],
    steps: int,
) -> list[Any]:
    """The last output of each request."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=tokens,
        ignore_eos=True,
        logprobs=-1,
        detokenize=False,
        **params,
    )
    engine = llm.llm_engine
    names = [f"asked-{next(_numbers)}" for _ in prompts]
    for at, (name, prompt) in enumerate(zip(names, prompts, strict=True)):
        given = {"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt
        engine.add_request(name, given, sampling, lora_request=loras[at] if loras else None)
    pending, taken = dict(after), 0
    finished: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        taken += 1
        if steps and taken > steps:
            engine.abort_request([name for name in names if name not in finished])
            raise TimeoutError(f"{len(names) - len(finished)} not finished after {steps} steps")
        for output in engine.step():
            if output.request_id == names[0] and (
                happen := pending.pop(len(output.outputs[0].token_ids), None)
            ):
                happen()
            if output.finished:
                finished[output.request_id] = output
    return [finished[name] for name in names]


def _reason(output: Any) -> str:
    return str(output.outputs[0].finish_reason)


def _failed(output: Any) -> bool:
    return _reason(output) == "error" or not output.outputs[0].logprobs


def _answer(output: Any) -> Answer:
    (told,) = output.outputs
    if _failed(output):
        raise RuntimeError(f"{output.request_id} ended with {_reason(output)}")
    logprobs = tuple({t: p.logprob for t, p in place.items()} for place in told.logprobs)
    return Answer(tuple(told.token_ids), logprobs, output.num_cached_tokens or 0)


def runner(llm: Any) -> Any:
    """The model runner of the only worker."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


@contextmanager
def changed_weight(llm: Any, name: str, by: float = 0.5) -> Iterator[None]:
    """One parameter, named as vLLM names it, with its first half scaled by ``1 + by``.

    The first half, because what scales a whole vector may be taken away by the next norm.
    """
    import torch

    parameter = runner(llm).get_model().get_parameter(name)
    before = parameter.detach().clone()
    with torch.no_grad():
        parameter[: parameter.shape[0] // 2] *= 1.0 + by
    try:
        yield
    finally:
        with torch.no_grad():
            parameter.copy_(before)


def spoil_cache(llm: Any, seed: int = 0) -> None:
    """Overwrite the whole KV cache, states of state-space layers included, with noise."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for tensor in _tensors(runner(llm).kv_caches):
        noise = torch.randn(tensor.shape[-1:], generator=generator)
        tensor.copy_(noise.to(tensor.dtype).expand_as(tensor))


def _tensors(nested: Any) -> Iterator[Any]:
    if isinstance(nested, list | tuple):
        for part in nested:
            yield from _tensors(part)
    else:
        yield nested
