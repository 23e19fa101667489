"""MAX_LOAD_TOKENS: at most so many tokens are loaded from an offloading tier (PR 55885).

``kv_transfer_params.max_load_tokens`` of a request counts tokens beyond its local prefix. A
connector looks for hits up to the length of the request, so it is shown a shorter request.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable
from typing import Any

from vllm_ext.core.feature import Feature, Option, Part, effect
from vllm_ext.core.seams import Wrap
from vllm_ext.features.kv import max_load_tokens_probes as probes

_OFFLOADING = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler"
_SCHEDULER = f"{_OFFLOADING}:OffloadingConnectorScheduler"
_STATE = f"{_OFFLOADING}:RequestOffloadState"
_LOOKUP = f"{_SCHEDULER}._lookup"
_SIMPLE = "vllm.v1.simple_kv_offload.manager:SimpleCPUOffloadScheduler"
_REQUESTS = (
    "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest",
    "vllm.entrypoints.openai.completion.protocol:CompletionRequest",
    "vllm.entrypoints.openai.responses.protocol:ResponsesRequest",
)
FIELD = "max_load_tokens"
_COUNTED = "_vllm_ext_capped_admission"
_TOLD = "_vllm_ext_invalid_cap"
_CHUNKS: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()


class ShorterRequest:
    """A request as a connector is to see it while it looks for hits: cut off after some tokens.

    ``num_tokens`` and ``num_prompt_tokens`` are tokens; everything else is the request's own.
    """

    __slots__ = ("_request", "num_prompt_tokens", "num_tokens")

    def __init__(self, request: Any, num_tokens: int, num_prompt_tokens: int) -> None:
        self._request = request
        self.num_tokens = min(request.num_tokens, num_tokens)
        self.num_prompt_tokens = min(request.num_prompt_tokens, num_prompt_tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def named_cap(transfer: Any) -> Any:
    """What ``kv_transfer_params`` name as cap, valid or not; None if nothing."""
    return transfer.get(FIELD) if transfer and isinstance(transfer, dict) else None


def is_cap(value: Any) -> bool:
    """Whether a value is a cap: an int (bool isn't one) of at least 0."""
    return type(value) is int and value >= 0


def cap_of(request: Any) -> int | None:
    """A request's own cap in tokens beyond its local prefix; None if it names no valid one."""
    transfer = request.kv_transfer_params
    # Most requests have none, and are looked up in every step in which they wait.
    if not transfer:
        return None
    named = named_cap(transfer)
    return named if is_cap(named) else None


def count_suppressed(part_id: str, request: Any, local: int, found: int) -> None:
    """Count the tokens that a cap kept from being looked for, once per admission of a request.

    A request that waits for blocks is asked about in every step. Whether the tier holds those
    tokens is not known, since it isn't asked: the count is an upper bound.
    """
    if getattr(request, _COUNTED, None) != request.num_preemptions:
        setattr(request, _COUNTED, request.num_preemptions)
        effect(part_id, request.num_tokens - local - found)


def look_up_within(
    cap: int,
    part_id: str,
    original: Callable[..., Any],
    scheduler: Any,
    state: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """``_lookup`` of OffloadingConnector for at most ``cap`` tokens beyond the local prefix.

    Ends at the last chunk boundary of all groups within the cap, or at the last boundary of the
    prefix cache's keys where tails of chunks can be loaded. A cap of 0 asks no tier anything.
    """
    request, local = state.req, state.num_locally_computed_tokens
    native = getattr(state, FIELD, None)
    windows = bool(scheduler._sliding_window_groups)
    chunk, given_up = _chunk(scheduler)
    end = (local + cap) // chunk * chunk

    def look_up(margin: int = 0) -> Any:
        # Groups with a window look one token less far than the request is long.
        state.req = ShorterRequest(request, end + margin + windows, local + cap + 1)
        return original(scheduler, state, *args, **kwargs)

    if native is not None and not windows:
        # From 0.31.0 on the release's own cap is right on these models.
        found = original(scheduler, state, *args, **kwargs)
    else:
        try:
            if native is not None:
                # It would be applied to the shorter request again, one token too early.
                state.max_load_tokens = None
            if local + cap >= request.num_tokens:
                return original(scheduler, state, *args, **kwargs)
            if cap == 0:
                state.partial_tail_boundary = None
                found = 0
            else:
                found = _longest(look_up, end - local, given_up)
        finally:
            state.req = request
            if native is not None:
                state.max_load_tokens = native
    if found is not None and end - local <= found and local + cap < request.num_tokens:
        count_suppressed(part_id, request, local, found)
    return found


def _chunk(scheduler: Any) -> tuple[int, int]:
    """Tokens per chunk of all groups, and how many tokens of a hit draft layers give up."""
    known = _CHUNKS.get(scheduler)
    if known is None:
        groups = scheduler.config.kv_group_configs
        chunk = math.lcm(*(group.tokens_per_chunk for group in groups))
        # 0.29.0 doesn't look further for them where attention is full.
        drafted = [group.tokens_per_chunk for group in groups if group.is_eagle_group]
        known = _CHUNKS[scheduler] = chunk, max(drafted, default=0)
    return known


def _longest(look_up: Callable[..., Any], allowed: int, margin: int) -> Any:
    """The longest hit that is allowed, where the last ``margin`` tokens of a hit are given up."""
    found = look_up()
    if not margin or found is None or found >= allowed:
        return found
    longer = look_up(margin)
    return longer if longer is None or longer <= allowed else look_up()


def cap_lookup(
    original: Callable[..., Any], self: Any, req_status: Any, *args: Any, **kwargs: Any
) -> Any:
    """Cap lookups on releases that know no cap."""
    cap = cap_of(req_status.req)
    if cap is None:
        return original(self, req_status, *args, **kwargs)
    return look_up_within(cap, "MAX_LOAD_TOKENS.cap", original, self, req_status, *args, **kwargs)


def cap_exactly(
    original: Callable[..., Any], self: Any, req_status: Any, *args: Any, **kwargs: Any
) -> Any:
    """Cap lookups in the release's place, where its own cap loses a chunk."""
    cap = cap_of(req_status.req)
    if cap is None:
        return original(self, req_status, *args, **kwargs)
    return look_up_within(cap, "MAX_LOAD_TOKENS.exact", original, self, req_status, *args, **kwargs)


def cap_by_default(
    original: Callable[..., Any], self: Any, req_status: Any, *args: Any, **kwargs: Any
) -> Any:
    """Cap the lookups of requests that name no valid cap of their own."""
    cap = FEATURE.setting("DEFAULT")
    if cap is None or cap_of(req_status.req) is not None:
        return original(self, req_status, *args, **kwargs)
    return look_up_within(
        cap, "MAX_LOAD_TOKENS.default", original, self, req_status, *args, **kwargs
    )


def cap_simple_cpu(
    original: Callable[..., Any], self: Any, request: Any, num_computed_tokens: int
) -> Any:
    """SimpleCPUOffloadConnector: hits of at most the request's cap, or the server's."""
    cap = cap_of(request)
    if cap is None:
        if request.kv_transfer_params:
            note_invalid(request, told=False)
        cap = FEATURE.setting("DEFAULT")
    local = num_computed_tokens
    if cap is None or local + cap + 1 >= request.num_tokens:
        return original(self, request, num_computed_tokens)
    answers: dict[int, Any] = {}

    def look_up(margin: int = 0) -> Any:
        # The last token of a request is always computed, so one more is shown than may be loaded.
        length = local + cap + margin + 1 if cap else local + 1
        shown = ShorterRequest(request, length, length)
        answers[0] = original(self, shown, num_computed_tokens)
        return answers[0][0]

    groups = self.cpu_kv_cache_config.kv_cache_groups
    drafting = self.vllm_config.speculative_config or any(g.is_eagle_group for g in groups)
    complete = cap // self.block_size * self.block_size
    found = _longest(look_up, complete, self.block_size if drafting and cap else 0)
    if found is not None and found >= complete:
        count_suppressed("MAX_LOAD_TOKENS.simple_cpu", request, local, found)
    return answers[0]


def note_invalid(request: Any, told: bool) -> None:
    """Count a cap that isn't one, once per request, and log it unless the release has done so."""
    named = named_cap(request.kv_transfer_params)
    if named is None or is_cap(named) or hasattr(request, _TOLD):
        return
    setattr(request, _TOLD, True)
    effect("MAX_LOAD_TOKENS.invalid_values")
    if not told:
        logging.getLogger("vllm.v1.request").warning(
            "Request %s: %s, so it is ignored; set %s=1 to refuse such requests.",
            request.request_id,
            what_is_wrong(named),
            FEATURE.variable("STRICT"),
        )


def what_is_wrong(named: Any) -> str:
    """What a cap must be, and what was found."""
    return (
        f"kv_transfer_params.{FIELD} must be an integer of at least 0, found {named!r} "
        f"({type(named).__name__})"
    )


def note_invalid_cap(original: Callable[..., Any], self: Any) -> Any:
    """Count invalid caps where OffloadingConnector makes its state of a request."""
    result = original(self)
    note_invalid(self.req, told=hasattr(self, FIELD))
    return result


def refuse_invalid_cap(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse a request whose cap isn't one. Raises VLLMValidationError, which is HTTP 400."""
    named = named_cap(self.kv_transfer_params)
    if named is not None and not is_cap(named):
        from vllm.exceptions import VLLMValidationError

        effect("MAX_LOAD_TOKENS.strict")
        raise VLLMValidationError(
            f"{what_is_wrong(named)}. Send a JSON integer (0 loads nothing), or leave it out.",
            parameter=f"kv_transfer_params.{FIELD}",
        )
    return original(self, *args, **kwargs)


FEATURE = Feature(
    name="MAX_LOAD_TOKENS",
    area="kv",
    summary="A request, or the server, bounds the tokens loaded from an offloading tier.",
    why=(
        "Loading KV from a CPU or secondary tier can take longer than computing it. "
        "kv_transfer_params.max_load_tokens caps what a request loads beyond its local prefix, in "
        "tokens; 0 asks no tier anything. vLLM 0.29.0 and 0.30.0 ignore it. 0.31.0 to 0.33.0 lose "
        "a whole chunk on models with a sliding window or Mamba layers when the cap is a multiple "
        "of the chunk, and SimpleCPUOffloadConnector ignores it on every release. A value that "
        "is not an integer of at least 0 loads everything, as if there were no cap."
    ),
    upstream_pr=(55885,),
    parts=(
        Part(
            name="cap",
            summary="OffloadingConnector loads at most max_load_tokens.",
            seams=(Wrap(_LOOKUP, cap_lookup),),
            relies_on=(
                f"{_SCHEDULER}._lookup_complete_chunks",
                f"{_SCHEDULER}.get_num_new_matched_tokens",
            ),
            probe=probes.cap,
        ),
        Part(
            name="exact",
            summary="A cap that is a multiple of the chunk loses no chunk on hybrid models.",
            seams=(Wrap(_LOOKUP, cap_exactly),),
            relies_on=(
                f"{_SCHEDULER}._lookup_complete_chunks",
                f"{_SCHEDULER}.get_num_new_matched_tokens",
            ),
            probe=probes.exact,
        ),
        Part(
            name="simple_cpu",
            summary="SimpleCPUOffloadConnector honours max_load_tokens.",
            seams=(Wrap(f"{_SIMPLE}.get_num_new_matched_tokens", cap_simple_cpu),),
            probe=probes.simple_cpu,
        ),
        Part(
            name="default",
            summary="OffloadingConnector caps requests that name no cap of their own.",
            seams=(Wrap(_LOOKUP, cap_by_default),),
            relies_on=(
                f"{_SCHEDULER}._lookup_complete_chunks",
                f"{_SCHEDULER}.get_num_new_matched_tokens",
            ),
            probe=probes.default,
            check=probes.check_default,
            option="DEFAULT",
        ),
        Part(
            name="invalid_values",
            summary="Caps that are none are logged and counted.",
            seams=(Wrap(f"{_STATE}.__post_init__", note_invalid_cap),),
            probe=probes.invalid_values,
            check=probes.check_invalid_values,
        ),
        Part(
            name="strict",
            summary="A cap that is none is HTTP 400, on completions, chat and responses.",
            seams=tuple(
                Wrap(f"{request}.to_sampling_params", refuse_invalid_cap) for request in _REQUESTS
            ),
            probe=probes.strict,
            option="STRICT",
        ),
    ),
    options=(
        Option(
            name="DEFAULT",
            type=int,
            default=None,
            at_least=0,
            summary=(
                "Cap in tokens of requests that name no valid cap of their own, for both "
                "connectors; 0 loads nothing, unset is no cap."
            ),
        ),
        Option(
            name="STRICT",
            type=bool,
            default=False,
            summary="Refuse requests whose max_load_tokens is not an integer of at least 0.",
        ),
    ),
)
