"""LORA_BASE_REQUESTS: on the CPU a request without an adapter gets none (upstream PR 48421)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm_ext.core.feature import Feature, Judgement, Part, Verdict, effect
from vllm_ext.core.seams import Wrap

_OPS = "vllm.lora.ops.torch_ops.lora_ops"
_LOGITS = "vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU.add_lora_logits"
_PROMPTS = "vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_prompt_logprobs_dict"

# The last hidden states of the step whose prompt logprobs are being made, [tokens, hidden size].
_hidden_states: Any = None


def skip_base_rows(
    original: Callable[..., None],
    inputs: Any,
    weights: Any,
    output: Any,
    indices: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Compute an adapter's product, and leave the output rows as they are that have none.

    ``indices`` has the LoRA slot of each row, -1 for none, which Python takes for the last slot.
    """
    base = (indices < 0).nonzero().flatten()
    if not len(base):
        return original(inputs, weights, output, indices, *args, **kwargs)
    effect("LORA_BASE_REQUESTS.base_rows", len(base))
    if len(base) == len(indices):
        return None
    kept = output[base]
    original(inputs, weights, output, indices, *args, **kwargs)
    output[base] = kept
    return None


def note_hidden_states(
    original: Callable[..., Any], self: Any, hidden_states: Any, *args: Any, **kwargs: Any
) -> Any:
    """Remember the rows that prompt logprobs are made of, for as long as that takes."""
    global _hidden_states
    _hidden_states = hidden_states
    try:
        return original(self, hidden_states, *args, **kwargs)
    finally:
        _hidden_states = None


def map_prompt_rows(
    original: Callable[..., None], self: Any, y: Any, x: Any, *args: Any, **kwargs: Any
) -> None:
    """Take the adapters of the prompt's tokens for the logits of a prompt.

    vLLM takes those of the requests that sample, one row each: another number of rows ends the
    engine, the same number gives them another request's adapter.
    """
    if _hidden_states is None:
        return original(self, y, x, *args, **kwargs)
    rows = x.view(-1, x.shape[-1])
    first = (rows.data_ptr() - _hidden_states.data_ptr()) // _hidden_states[:1].nbytes
    tokens = self.token_lora_indices[first : first + len(rows)]
    effect("LORA_BASE_REQUESTS.prompt_rows", len(rows))
    with _sampling(self, tokens):
        return original(self, y, x, *args, **kwargs)


@contextmanager
def _sampling(wrapper: Any, indices: Any) -> Iterator[None]:
    """``indices`` in the place of the sampling requests' slots."""
    kept, lengths = wrapper._sampler_indices, list(wrapper.indices_len)
    wrapper._sampler_indices = indices
    wrapper.indices_len[1] = len(indices)
    try:
        yield
    finally:
        wrapper._sampler_indices = kept
        wrapper.indices_len[:] = lengths


def _probe_base_rows() -> Judgement:
    """Two slots; the first row has no adapter, the second the first slot's."""
    import torch
    from vllm.lora.ops.torch_ops import lora_ops

    weights = torch.tensor([[[2.0]], [[3.0]]])
    output = torch.zeros(2, 1)
    lora_ops.bgmv_expand(torch.ones(2, 1), weights, output, torch.tensor([-1, 0]), True)
    if output.flatten().tolist() == [0.0, 2.0]:
        return Judgement(Verdict.NATIVE, "a row without an adapter gets none")
    return Judgement(
        Verdict.ACTIVE, "a row without an adapter gets the adapter of the last of 2 slots"
    )


class _Asking:
    """A runner that, while it makes prompt logprobs, asks for the logits of some rows."""

    def __init__(self, ask: Callable[[], None]) -> None:
        self._ask = ask

    @property
    def num_prompt_logprobs(self) -> dict[str, int]:
        self._ask()
        return {}


def _probe_prompt_rows() -> Judgement:
    """Logits of the prompt of a request with slot 1, beside the one token of a request with 0."""
    import torch
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    wrapper = PunicaWrapperCPU(16, 4, "cpu")
    wrapper._token_lora_indices[:4] = torch.tensor([0, 1, 1, 1])
    wrapper._sampler_indices[:2] = torch.tensor([0, 1])
    wrapper.indices_len[:2] = [4, 2]
    hidden, down = torch.ones(4, 2), torch.ones(2, 1, 1, 2)
    up = torch.tensor([2.0, 3.0]).view(2, 1, 1, 1)
    for rows in (2, 3):
        logits = torch.zeros(rows, 1)

        def ask(logits: Any = logits) -> None:
            wrapper.add_lora_logits(logits, hidden[1 : 1 + len(logits)], down, up, 1.0)

        try:
            GPUModelRunner._get_prompt_logprobs_dict(_Asking(ask), hidden, {})
        except (RuntimeError, IndexError) as error:
            told = str(error).partition(".")[0]
            return Judgement(Verdict.ACTIVE, f"logits of a prompt end the engine: {told[:80]}")
        if (logits != 6).any():
            return Judgement(
                Verdict.ACTIVE,
                "the first token of a prompt gets the adapter of another request, which samples",
            )
    return Judgement(Verdict.NATIVE, "logits of a prompt's tokens get its adapter")


FEATURE = Feature(
    name="LORA_BASE_REQUESTS",
    area="lora",
    summary="On the CPU build a request has the adapter it asks for, or none.",
    why=(
        "The CPU build of vLLM 0.29.0 to 0.32.0 marks rows without an adapter with -1 and takes "
        "that for the last LoRA slot: a request for the base model, computed beside others with "
        "adapters, is silently answered by one of them once all slots are taken. On every release "
        "a request for prompt logprobs with an adapter ends the engine, since the adapters of the "
        "sampling requests are taken for the rows of the prompt. GPUs use other kernels and are "
        "not touched."
    ),
    upstream_pr=(48421,),
    parts=(
        Part(
            name="base_rows",
            summary="Rows without an adapter are left as the base model computes them.",
            seams=tuple(
                Wrap(f"{_OPS}:{name}", skip_base_rows)
                for name in ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice")
            ),
            probe=_probe_base_rows,
        ),
        Part(
            name="prompt_rows",
            summary="Prompt logprobs of a request with an adapter are that adapter's.",
            seams=(Wrap(_LOGITS, map_prompt_rows), Wrap(_PROMPTS, note_hidden_states)),
            relies_on=(
                "vllm.lora.punica_wrapper.punica_base:PunicaWrapperBase.sampler_indices",
                "vllm.lora.punica_wrapper.punica_base:PunicaWrapperBase.token_lora_indices",
            ),
            probe=_probe_prompt_rows,
        ),
    ),
)
