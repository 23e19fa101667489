"""HYBRID_LOAD_FAILURE: a failed KV load costs a recomputation, not the engine (PR 50388, 56855).

A KV connector reports blocks whose load failed (``invalid_block_ids``), or whole requests
(``failed_recving``). Block ids come from one pool that all KV cache groups share, so they can be
found in the tables of all groups.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm_ext.core.feature import Feature, Option, Part, effect
from vllm_ext.core.seams import Wrap
from vllm_ext.features.scheduling import hybrid_load_failure_probes as probes
from vllm_ext.features.scheduling.waiting_loads import (
    admit_loaded_first,
    release_own_reservation,
    requeue_failed_loads,
    reserve_drafts,
    wait_behind_loaded,
)

_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_MANAGER = "vllm.v1.core.kv_cache_manager:KVCacheManager"
_POOL = "vllm.v1.core.block_pool:BlockPool"
_CACHE = "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.cache_blocks"
_INVALID = f"{_SCHEDULER}._handle_invalid_blocks"
_RESUME = f"{_SCHEDULER}._update_waiting_for_remote_kv"
_FINISHED = f"{_SCHEDULER}._update_from_kv_xfer_finished"

# Requests of any scheduler whose external lookups are suppressed; those that end vanish from it.
_LOCAL_ONLY: weakref.WeakSet[Any] = weakref.WeakSet()
_FAILED_LOADS = "_vllm_ext_failed_loads"


def affected_requests(scheduler: Any, invalid_block_ids: set[int]) -> dict[Any, int]:
    """Unfinished requests that hold an invalid block, with the first token it makes invalid.

    What a request holds from there on may be computed from the invalid block, and whoever shares
    that is affected, too. The null block stands for positions a group keeps nothing for; every
    request holds it, and it can't fail.
    """
    manager = scheduler.kv_cache_manager
    null = manager.block_pool.null_block.block_id
    invalid = set(invalid_block_ids)
    held = {
        request: [one for one in _blocks(manager, request) if one[0] != null]
        for request in scheduler.requests.values()
        if not request.is_finished()
    }
    found: dict[Any, int] = {}
    spreading = True
    while spreading:
        spreading = False
        for request, blocks in held.items():
            first = min((start for block, start, _ in blocks if block in invalid), default=None)
            if first is not None and first < found.get(request, first + 1):
                found[request] = first
                invalid |= {block for block, _, end in blocks if end > first}
                spreading = True
    return found


def _blocks(manager: Any, request: Any) -> Iterator[tuple[int, int, int]]:
    """Every block of a request in every group: its id, and the tokens it spans."""
    groups = manager.coordinator.single_type_managers
    for group, table in zip(groups, manager.get_block_ids(request.request_id), strict=True):
        size = group.block_size
        for at, block in enumerate(table):
            yield block, at * size, (at + 1) * size


def forget_invalid_prefixes(
    scheduler: Any, invalid_block_ids: set[int], affected: dict[Any, int], scheduled: Iterable[str]
) -> None:
    """Take from the prefix cache what failed and all that was, or would be, computed from it.

    Blocks that end before the first invalid token were loaded or computed right and stay. If the
    request that loaded a block has lost it since (aborted or preempted while the step was carried
    out), nobody knows what else it computed: then the whole prefix cache goes, and so does the
    output of the step for the preempted ones.
    """
    manager = scheduler.kv_cache_manager
    # Groups with a host pool of their own (HiSparse) have ids beyond this one.
    pool = {block.block_id for block in manager.block_pool.blocks if not block.is_null}
    lost = pool & set(invalid_block_ids)
    evicted = set(lost)
    for request, first in affected.items():
        blocks = list(_blocks(manager, request))
        lost -= {block for block, _, _ in blocks}
        evicted |= {block for block, _, end in blocks if end > first}
    gone = [name for name in scheduled if not _is_running(scheduler, name)]
    if lost and gone:
        evicted = pool
        for name in gone:
            if name in scheduler.requests:
                scheduler.requests[name].drop_stale_output = True
    manager.evict_blocks(evicted & pool)


def _is_running(scheduler: Any, name: str) -> bool:
    request = scheduler.requests.get(name)
    return request is not None and request.status.name == "RUNNING"


def recover_from_invalid_blocks(
    original: Callable[..., Any],
    self: Any,
    invalid_block_ids: set[int],
    num_scheduled_tokens: dict[str, int],
) -> Any:
    """Send every affected request back to the start, if there are several groups.

    A table in use has the null block where a group had nothing to load, and recomputing into it
    mixes the requests' tokens: only new blocks are right.
    """
    if not _several_groups(self) or not self.recompute_kv_load_failures:
        return original(self, invalid_block_ids, num_scheduled_tokens)
    affected = affected_requests(self, invalid_block_ids)
    if affected:
        effect("HYBRID_LOAD_FAILURE.block_reports", len(affected))
    return _start_over(self, affected, invalid_block_ids, num_scheduled_tokens)


def recover_one_group(
    original: Callable[..., Any],
    self: Any,
    invalid_block_ids: set[int],
    num_scheduled_tokens: dict[str, int],
) -> Any:
    """Let vLLM turn back what one group has computed, where that is enough; else start over.

    It isn't where a step has been planned further already, or a token counted, which vLLM would
    take for this step's, nor where others hold the failed block, running or loading: they go on as
    if somebody recomputed it before they read it; nor where what comes before the failed block
    isn't there any more (windows, states). In any case vLLM leaves the failed blocks in the prefix
    cache, with policy ``fail`` as well.
    """
    if _several_groups(self):
        return original(self, invalid_block_ids, num_scheduled_tokens)
    affected = affected_requests(self, invalid_block_ids)
    running = [request for request in self.running if request in affected]
    entangled = len(running) > 1 or _share_or_lack(self.kv_cache_manager, affected)
    ahead = entangled or any(
        # What this step computed is in flight until its output is taken. A token of its answer that
        # is counted already would be computed as part of the prompt.
        request.num_in_flight_tokens > num_scheduled_tokens.get(request.request_id, 0)
        or request.num_output_placeholders
        for request in running
    )
    if ahead and self.recompute_kv_load_failures:
        effect("HYBRID_LOAD_FAILURE.one_group", len(affected))
        return _start_over(self, affected, invalid_block_ids, num_scheduled_tokens)
    forget_invalid_prefixes(self, invalid_block_ids, affected, num_scheduled_tokens)
    if self.recompute_kv_load_failures:
        for request, first in affected.items():
            _cache_again(self, request, first)
    return original(self, invalid_block_ids, num_scheduled_tokens)


def _share_or_lack(manager: Any, requests: Iterable[Any]) -> bool:
    """Whether two of the requests hold a block in common, or one has the null block."""
    seen = {manager.block_pool.null_block.block_id}
    for request in requests:
        held = {block for block, _, _ in _blocks(manager, request)}
        if seen & held:
            return True
        seen |= held
    return False


def _cache_again(scheduler: Any, request: Any, first: int) -> None:
    """Have a request's blocks from a token on cached once they are computed again.

    vLLM counts how many blocks of a request are in the prefix cache, and adds those beyond.
    """
    for group in scheduler.kv_cache_manager.coordinator.single_type_managers:
        cached = group.num_cached_block.get(request.request_id, 0)
        if cached * group.block_size > first:
            group.num_cached_block[request.request_id] = first // group.block_size


def _start_over(
    scheduler: Any,
    affected: dict[Any, int],
    invalid_block_ids: set[int],
    num_scheduled_tokens: dict[str, int],
) -> set[str]:
    """Take all blocks from the affected requests; the ids whose output of this step is skipped."""
    forget_invalid_prefixes(scheduler, invalid_block_ids, affected, num_scheduled_tokens)
    running = [request for request in scheduler.running if request in affected]
    scheduler.running = [request for request in scheduler.running if request not in affected]
    # From the last to the first: each goes to the head of the waiting queue.
    for request in reversed(running):
        scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        # The worker drops the request's state, so it needs all tokens again (V1 model runner).
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
        note_failed_load(request)
    for request in affected.keys() - set(running):
        _send_back_waiting(scheduler, request)
    if affected:
        _log(scheduler).warning(
            "KV load failure: %d request(s) of a model with %d KV cache group(s) start over: %s",
            len(affected),
            len(scheduler.kv_cache_config.kv_cache_groups),
            ", ".join(sorted(request.request_id for request in affected)),
        )
    return {request.request_id for request in running}


def _send_back_waiting(scheduler: Any, request: Any) -> None:
    request.num_computed_tokens = 0
    if request.status.name == "WAITING_FOR_REMOTE_KVS":
        # The blocks are freed once the connector says that it writes to them no more.
        scheduler.failed_recving_kv_req_ids.add(request.request_id)
    else:
        # Loaded already, but not admitted yet.
        scheduler._inflight_prefills.discard(request)
        scheduler._free_request_blocks(request)
        wait_behind_loaded(scheduler, request)
        note_failed_load(request)


def fail_affected_requests(
    original: Callable[..., Any],
    self: Any,
    invalid_block_ids: set[int],
    num_scheduled_tokens: dict[str, int],
) -> Any:
    """Policy ``fail``: name the affected requests, which vLLM then ends with FINISHED_ERROR."""
    if not _several_groups(self) or self.recompute_kv_load_failures:
        return original(self, invalid_block_ids, num_scheduled_tokens)
    affected = affected_requests(self, invalid_block_ids)
    forget_invalid_prefixes(self, invalid_block_ids, affected, num_scheduled_tokens)
    names = {request.request_id for request in affected}
    if names:
        _log(self).error(
            "KV load failure: %d request(s) fail (kv_load_failure_policy=fail): %s",
            len(names),
            ", ".join(sorted(names)),
        )
        effect("HYBRID_LOAD_FAILURE.fail_policy", len(names))
    return names


def _several_groups(scheduler: Any) -> bool:
    return len(scheduler.kv_cache_config.kv_cache_groups) > 1


def _log(scheduler: Any) -> Any:
    import logging

    return logging.getLogger(type(scheduler).__module__)


def note_failed_load(request: Any) -> None:
    """Count a failed load of a request that will be looked up again."""
    failures = getattr(request, _FAILED_LOADS, 0) + 1
    setattr(request, _FAILED_LOADS, failures)
    if 0 < FEATURE.setting("RETRIES") <= failures:
        _LOCAL_ONLY.add(request)


def count_failed_load(
    original: Callable[..., Any], self: Any, request: Any, *args: Any, **kwargs: Any
) -> Any:
    """Count the failures of asynchronous loads, when their requests are looked up again."""
    failed = request.request_id in self.failed_recving_kv_req_ids
    result = original(self, request, *args, **kwargs)
    if failed and request.num_computed_tokens == 0:
        note_failed_load(request)
    return result


def schedule_with_bounded_retries(
    original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any
) -> Any:
    """Schedule while the connector finds nothing for requests whose loads keep failing."""
    # Loads that failed are counted within the step that looks their requests up again.
    if self.connector is None or not (_LOCAL_ONLY or self.failed_recving_kv_req_ids):
        return original(self, *args, **kwargs)
    with _lookups_suppressed(self.connector):
        return original(self, *args, **kwargs)


@contextmanager
def _lookups_suppressed(connector: Any) -> Iterator[None]:
    """The connector is asked as ever, so that it keeps its books, but its hit isn't taken.

    Connectors know that: vLLM drops a hit that isn't longer than the local one. "Not known yet"
    (None) is passed on.
    """
    lookup = connector.get_num_new_matched_tokens

    def get_num_new_matched_tokens(request: Any, *args: Any, **kwargs: Any) -> Any:
        found = lookup(request, *args, **kwargs)
        if request not in _LOCAL_ONLY or not found[0]:
            return found
        effect("HYBRID_LOAD_FAILURE.bounded_retries")
        return 0, False

    with _method(connector, "get_num_new_matched_tokens", get_num_new_matched_tokens):
        yield


@contextmanager
def _method(connector: Any, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """``method`` in a connector's place for one call of the scheduler.

    In the instance, since connectors are classes of third parties.
    """
    own = vars(connector).get(name)
    setattr(connector, name, method)
    try:
        yield
    finally:
        delattr(connector, name)
        if own is not None:
            setattr(connector, name, own)


def drop_late_reports(
    original: Callable[..., Any], self: Any, kv_connector_output: Any, *args: Any, **kwargs: Any
) -> Any:
    """Have the scheduler see no finished transfer of a request that it has already ended.

    The connector still sees all of them, and first, as it may sort them out itself.
    """
    connector = self.connector
    if connector is None or not _late(self, kv_connector_output):
        return original(self, kv_connector_output, *args, **kwargs)
    update = connector.update_connector_output

    def update_connector_output(report: Any, *args: Any, **kwargs: Any) -> Any:
        result = update(report, *args, **kwargs)
        late = _late(self, report)
        if late:
            report.finished_recving = set(report.finished_recving or ()) - late
            report.finished_sending = set(report.finished_sending or ()) - late
            _log(self).warning(
                "KV transfers finished for requests that had ended before: %s",
                ", ".join(sorted(late)),
            )
            effect("HYBRID_LOAD_FAILURE.late_reports", len(late))
        return result

    with _method(connector, "update_connector_output", update_connector_output):
        return original(self, kv_connector_output, *args, **kwargs)


def _late(scheduler: Any, report: Any) -> set[str]:
    finished = {*(report.finished_recving or ()), *(report.finished_sending or ())}
    return finished - scheduler.requests.keys()


FEATURE = Feature(
    name="HYBRID_LOAD_FAILURE",
    area="scheduling",
    summary="Failed KV loads are recomputed on models with several KV cache groups, too.",
    why=(
        "A KV connector that can't load blocks reports them, and vLLM recomputes what they held. "
        "With more than one KV cache group (sliding window, Mamba) 0.29.0 and 0.31.0 to 0.33.0 "
        "end the engine with every request on it instead (the repair of upstream PR 50388 was "
        "reverted by 56855); 0.30.0 recomputes synchronous loads into the null block, which gives "
        "wrong tokens and a wrong prefix cache. On every release a request whose asynchronous "
        "load failed counts its own first load as reserved, and is never admitted again when "
        "blocks are scarce, nor is any that was loaded behind it; or it loads and fails for ever. "
        "On 0.29.0 and 0.30.0 a request that waits for blocks may stand before those whose loads "
        "are through and hold them, and with speculative decoding loads are admitted beside each "
        "other that can't go on beside each other: all wait for ever. "
        "A transfer that a connector reports as finished after its request failed ends the "
        "engine. Models with one group keep vLLM's "
        "handling of block reports where it is right; it isn't where a second batch is in flight "
        "(asynchronous scheduling: the batch planned on the failed load gives a wrong token, or "
        "ends the engine for want of one to begin with), where requests share the failed block, "
        "and in what it leaves in the prefix cache."
    ),
    upstream_pr=(50388, 56855),
    parts=(
        Part(
            name="block_reports",
            summary="Reported blocks of any group send their requests, and no others, back.",
            seams=(Wrap(_INVALID, recover_from_invalid_blocks),),
            relies_on=(
                f"{_SCHEDULER}._preempt_request",
                f"{_SCHEDULER}._free_request_blocks",
                f"{_SCHEDULER}.update_from_output",
                _RESUME,
                f"{_MANAGER}.get_block_ids",
                f"{_MANAGER}.evict_blocks",
                f"{_POOL}.evict_blocks",
            ),
            probe=probes.block_reports,
        ),
        Part(
            name="fail_policy",
            summary="kv_load_failure_policy=fail ends the affected requests only.",
            seams=(Wrap(_INVALID, fail_affected_requests),),
            relies_on=(
                f"{_SCHEDULER}.update_from_output",
                f"{_SCHEDULER}.finish_requests",
                f"{_MANAGER}.get_block_ids",
                f"{_MANAGER}.evict_blocks",
                f"{_POOL}.evict_blocks",
            ),
            probe=probes.fail_policy,
        ),
        Part(
            name="one_group",
            summary="With one group, too, nothing computed on a failed load is given or found.",
            seams=(Wrap(_INVALID, recover_one_group),),
            relies_on=(
                _CACHE,
                f"{_SCHEDULER}._preempt_request",
                f"{_SCHEDULER}._free_request_blocks",
                f"{_SCHEDULER}._update_after_schedule",
                f"{_SCHEDULER}.update_from_output",
                _RESUME,
                f"{_MANAGER}.get_block_ids",
                f"{_MANAGER}.evict_blocks",
                f"{_POOL}.evict_blocks",
            ),
            probe=probes.one_group,
        ),
        Part(
            name="inflight_reservation",
            summary="A request whose load failed waits for no blocks that a load still holds.",
            seams=(Wrap(_RESUME, release_own_reservation), Wrap(_FINISHED, requeue_failed_loads)),
            relies_on=(
                f"{_SCHEDULER}._inflight_prefill_reserved_blocks",
                f"{_SCHEDULER}.schedule",
            ),
            probe=probes.inflight_reservation,
        ),
        Part(
            name="loaded_first",
            summary="Requests that are loaded are admitted where those before them find no room.",
            seams=(Wrap(f"{_SCHEDULER}.schedule", admit_loaded_first),),
            relies_on=(_RESUME, f"{_SCHEDULER}._select_waiting_queue_for_scheduling"),
            probe=probes.loaded_first,
        ),
        Part(
            name="reserved_drafts",
            summary="Loads are admitted beside the blocks that draft tokens of others will take.",
            seams=(Wrap(f"{_SCHEDULER}._inflight_prefill_reserved_blocks", reserve_drafts),),
            relies_on=(f"{_SCHEDULER}.schedule", f"{_SCHEDULER}._request_remaining_blocks"),
            probe=probes.reserved_drafts,
        ),
        Part(
            name="bounded_retries",
            summary="A request whose loads keep failing is computed locally.",
            seams=(
                Wrap(_RESUME, count_failed_load),
                Wrap(f"{_SCHEDULER}.schedule", schedule_with_bounded_retries),
            ),
            probe=probes.bounded_retries,
        ),
        Part(
            name="late_reports",
            summary="A transfer that finishes after its request failed doesn't end the engine.",
            seams=(Wrap(_FINISHED, drop_late_reports),),
            probe=probes.late_reports,
        ),
    ),
    options=(
        Option(
            name="RETRIES",
            type=int,
            default=1,
            summary=(
                "Failed loads of a request after which it is computed locally instead of loaded "
                "again; 0: no bound, as in vLLM."
            ),
        ),
    ),
)
