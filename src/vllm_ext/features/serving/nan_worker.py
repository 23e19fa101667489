"""The worker's side of NAN_CONTAINMENT: noticing NaN without logprobs, and wiping KV blocks.

Each token's hidden state after the last layer is looked at, for all tokens of a step. A layer adds
to the residual stream, so what is NaN or infinite in any layer of a token stays so to the end, and
a token's attention reads its own key and value: a token whose last hidden state is finite has left
no value in the KV cache, in any layer, that could reach another request. One sum a token and step.

Both model runners: vLLM's older one (GPUModelRunner, which CPU and XPU inherit), and
``vllm.v1.worker.gpu``, which has no CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm_ext.core.feature import effect

# Carries block ids from the scheduler to the worker, on an object that every executor passes on
# and that dataclasses.replace() of the whole output (n-gram drafts on GPUs) keeps.
BLOCKS_TO_WIPE = "vllm_ext_blocks_to_wipe"
_WATCH = "_vllm_ext_watch"


class Watch:
    """Sums of the hidden states of one step, float32 ``[num_tokens]``, on their way to the host.

    ``scheduled`` gives the number of tokens by request id, in the order of the output's requests;
    ``bounds`` gives it as offsets, int ``[num_requests + 1]``, on the device.
    """

    def __init__(
        self, sums: Any, scheduled: Mapping[str, int] | None = None, bounds: Any = None
    ) -> None:
        import torch

        self._scheduled = scheduled
        self._event = None
        device = sums.device.type
        if device != "cpu":
            # In the order of the stream, so it has arrived when the sampled tokens have.
            sums = sums.to("cpu", non_blocking=True)
            bounds = bounds if bounds is None else bounds.to("cpu", non_blocking=True)
            self._event = torch.cuda.Event() if device == "cuda" else torch.Event(device)
            self._event.record()
        self._sums, self._bounds = sums, bounds

    def tell(self, output: Any) -> None:
        """Put the requests with NaN into ``output.num_nans_in_logits``.

        The count is that of the step's tokens from the first bad one on.
        """
        if self._event is not None:
            self._event.synchronize()
        bad = (~self._sums.isfinite()).nonzero().flatten().tolist()
        if not bad:
            return
        found = dict(output.num_nans_in_logits or {})
        found |= first_bad(bad, output.req_ids, self._ends(output.req_ids))
        output.num_nans_in_logits = found

    def _ends(self, names: Sequence[str]) -> list[int]:
        if self._bounds is not None:
            return list(self._bounds.tolist()[1:])
        assert self._scheduled is not None
        ends, end = [], 0
        for name in names:
            end += self._scheduled[name]
            ends.append(end)
        return ends


def first_bad(bad: Sequence[int], names: Sequence[str], ends: Sequence[int]) -> dict[str, int]:
    """Number of tokens from a request's first bad one to its last, for those that have one.

    ``bad``: indices of bad tokens, ascending. ``ends``: where each request's tokens end.
    """
    found: dict[str, int] = {}
    rest = iter(bad)
    at = next(rest, None)
    for name, end in zip(names, ends, strict=True):
        if at is not None and at < end:
            found[name] = end - at
        while at is not None and at < end:
            at = next(rest, None)
    return found


def look(hidden: Any, tokens: int, **where: Any) -> Watch | None:
    """A watch over the first ``tokens`` rows of hidden states ``[num_tokens, ...]``, any dtype.

    None if there is nothing to tell: no hidden states (a pipeline stage that isn't the last), or,
    on a CPU, where nothing waits for the answer, if all of them are finite.
    """
    # Opposite infinities make NaN, so a finite sum has nothing bad in it, padding included.
    if getattr(hidden, "is_cpu", False) and math.isfinite(hidden.sum().item()):
        return None
    import torch

    if not isinstance(hidden, torch.Tensor) or hidden.dim() < 2 or not 0 < tokens <= len(hidden):
        return None
    return Watch(hidden[:tokens].flatten(1).sum(-1, dtype=torch.float32), **where)


def _pass_on(watch: Watch, output: Any) -> Any:
    """Tell now, or when an output that is still on its way is read."""
    if output is None:
        return None
    if hasattr(output, "get_output"):
        setattr(output, _WATCH, watch)
    else:
        watch.tell(output)
    return output


def watch_sampling(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Look at the hidden states of all tokens of the step that is sampled."""
    state, watch = self.execute_model_state, None
    if state is not None:
        plan = state.scheduler_output
        watch = look(
            state.hidden_states,
            plan.total_num_scheduled_tokens,
            scheduled=plan.num_scheduled_tokens,
        )
    output = original(self, *args, **kwargs)
    return output if watch is None else _pass_on(watch, output)


def watch_pooling(
    original: Callable[..., Any],
    self: Any,
    hidden_states: Any,
    num_scheduled_tokens: int,
    num_scheduled_tokens_np: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The same for a step of a pooling model."""
    counts = dict(zip(self.input_batch.req_ids, num_scheduled_tokens_np.tolist(), strict=True))
    watch = look(hidden_states, num_scheduled_tokens, scheduled=counts)
    output = original(
        self, hidden_states, num_scheduled_tokens, num_scheduled_tokens_np, *args, **kwargs
    )
    return output if watch is None else _pass_on(watch, output)


def watch_second_runner(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Sampling and pooling of ``vllm.v1.worker.gpu``, unless context parallelism splits rows."""
    state, watch = self.execute_model_state, None
    if state is not None and self.pcp_manager is None:
        batch = state.input_batch
        bounds = batch.query_start_loc[: batch.num_reqs + 1]
        watch = look(state.hidden_states, batch.num_tokens, bounds=bounds)
    output = original(self, *args, **kwargs)
    return output if watch is None else _pass_on(watch, output)


def tell_when_read(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """An asynchronous output tells when vLLM waits for it, so no further wait is added."""
    output = original(self, *args, **kwargs)
    watch = vars(self).pop(_WATCH, None)
    if watch is not None:
        watch.tell(output)
    return output


def wipe(runner: Any, blocks: Sequence[int]) -> None:
    """Zero what these blocks hold, in all layers of all KV cache groups.

    A layer's cache has the blocks in its first dimension, several rows each where the kernel's
    blocks are smaller than the scheduler's.
    """
    import torch

    total = runner.kv_cache_config.num_blocks
    for layer in runner.compilation_config.static_forward_context.values():
        held = getattr(layer, "kv_cache", None)
        for cache in held if isinstance(held, (list, tuple)) else (held,):
            if not isinstance(cache, torch.Tensor) or not cache.numel() or cache.shape[0] % total:
                continue
            if cache.device.type != runner.device.type:  # HiSparse's pages on the host
                continue
            rows = cache.shape[0] // total
            for block in blocks:
                cache[block * rows : (block + 1) * rows].zero_()


def wipe_handed_on(
    original: Callable[..., Any], self: Any, scheduler_output: Any, *args: Any, **kwargs: Any
) -> Any:
    """Wipe blocks that change hands in this step, before anything of it runs.

    On a device this is in the order of the stream, so behind the steps that still write to them.
    """
    blocks = getattr(scheduler_output.scheduled_cached_reqs, BLOCKS_TO_WIPE, None)
    if blocks:
        import torch

        wipe(self, blocks)
        if self.device.type != "cpu":
            # Loads of a KV connector into these blocks run on a stream of their own.
            torch.accelerator.synchronize()
        effect("NAN_CONTAINMENT.wipe", len(blocks))
    return original(self, scheduler_output, *args, **kwargs)
