"""Requests that wait for KV loads, or with what they have loaded: in which order they go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm_ext.core.feature import effect

_STUCK = "_vllm_ext_stuck"


def release_own_reservation(
    original: Callable[..., Any], self: Any, request: Any, *args: Any, **kwargs: Any
) -> Any:
    """Forget what a request had reserved for the load that failed.

    vLLM admits an asynchronous load only beside the blocks that loads in flight still need, and
    would count the request's own first load among them.
    """
    failed = request.request_id in self.failed_recving_kv_req_ids
    result = original(self, request, *args, **kwargs)
    if failed and request.num_computed_tokens == 0 and request in self._inflight_prefills:
        self._inflight_prefills.discard(request)
        effect("HYBRID_LOAD_FAILURE.inflight_reservation")
    return result


def requeue_failed_loads(
    original: Callable[..., Any], self: Any, kv_connector_output: Any, *args: Any, **kwargs: Any
) -> Any:
    """Free the blocks of loads that failed as soon as the connector has ended them.

    vLLM does that when it reaches the request in its queue, which may be behind one that lacks
    those very blocks; and it keeps the request in the queue of those that hold blocks, where all
    others wait until it has been admitted.
    """
    result = original(self, kv_connector_output, *args, **kwargs)
    for name in self.failed_recving_kv_req_ids & self.finished_recving_kv_req_ids:
        request = self.requests[name]
        # One group may have lost only the end of its load, and goes on with the rest.
        if not request.num_computed_tokens:
            self._update_waiting_for_remote_kv(request)
            status = type(request.status)
            request.status = status.PREEMPTED if request.num_preemptions else status.WAITING
            wait_behind_loaded(self, request)
    return result


def wait_behind_loaded(scheduler: Any, request: Any) -> None:
    """Put a request that has lost its blocks before those that have none, behind those with some.

    Requests that are loaded can only be admitted, which needs few blocks, and then end.
    """
    holding = getattr(scheduler, "kv_holding_waiting", None)
    if holding is None:
        holding = scheduler.skipped_waiting
    else:
        scheduler.deferred_waiting.discard(request)
    if request in holding:
        holding.remove_requests([request])
        scheduler.waiting.prepend_request(request)


def admit_loaded_first(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """After a step that could schedule nothing, try those that hold loaded blocks alone.

    vLLM stops at the first request that finds no room. Where nothing runs, only the loaded ones
    behind it can ever make some.
    """
    if getattr(self, _STUCK, False):
        delattr(self, _STUCK)
        with _others_hidden(self, _loaded(self)):
            planned = original(self, *args, **kwargs)
        if planned.num_scheduled_tokens:
            effect("HYBRID_LOAD_FAILURE.loaded_first", len(planned.num_scheduled_tokens))
        return planned
    planned = original(self, *args, **kwargs)
    if not (self.running or planned.num_scheduled_tokens) and _is_stuck(self):
        setattr(self, _STUCK, True)
    return planned


def _is_stuck(scheduler: Any) -> bool:
    waiting = len(scheduler.waiting) + len(scheduler.skipped_waiting)
    return scheduler._pause_state.name == "UNPAUSED" and 0 < len(_loaded(scheduler)) < waiting


def _loaded(scheduler: Any) -> list[Any]:
    """The waiting requests that hold what they have loaded, in their order."""
    finished = scheduler.finished_recving_kv_req_ids
    return [
        request
        for request in scheduler.skipped_waiting
        if request.num_computed_tokens
        and (
            request.status.name == "WAITING"
            or (request.status.name == "WAITING_FOR_REMOTE_KVS" and request.request_id in finished)
        )
    ]


@contextmanager
def _others_hidden(scheduler: Any, shown: list[Any]) -> Iterator[None]:
    """Have one schedule() see no waiting requests but these, which stand first afterwards."""
    from vllm.v1.core.sched.request_queue import create_request_queue

    waiting, skipped = scheduler.waiting, scheduler.skipped_waiting
    # Of the classes that vLLM itself makes for one step.
    scheduler.waiting, scheduler.skipped_waiting = (
        create_request_queue(scheduler.policy) for _ in range(2)
    )
    skipped.remove_requests(shown)
    for request in shown:
        scheduler.skipped_waiting.add_request(request)
    try:
        yield
    finally:
        for all_of_them, seen in (
            (waiting, scheduler.waiting),
            (skipped, scheduler.skipped_waiting),
        ):
            for request in reversed(list(seen)):
                all_of_them.prepend_request(request)
        scheduler.waiting, scheduler.skipped_waiting = waiting, skipped


def reserve_drafts(original: Callable[..., int], self: Any, *args: Any, **kwargs: Any) -> int:
    """Leave room for draft tokens beside a new load: its own, and those of each load in flight.

    vLLM asks for it when it admits a request that is loaded; without, all of them wait for ever.
    """
    reserved = original(self, *args, **kwargs)
    drafts = self.num_spec_tokens + self.num_lookahead_tokens
    if not drafts:
        return reserved
    groups = self.kv_cache_manager.coordinator.single_type_managers
    # A Mamba group counts its speculative states itself.
    a_request = sum(
        -(-(1 + drafts) // group.block_size)
        for group in groups
        if not hasattr(group, "num_speculative_blocks")
    )
    effect("HYBRID_LOAD_FAILURE.reserved_drafts")
    return reserved + a_request * (1 + len(self._inflight_prefills))
