"""The scheduler's side of NAN_CONTAINMENT: which KV blocks are dirty, and who gets them next.

A block is dirty from the report of the step that computed it until it changes hands. Dirty blocks
leave the prefix cache at once, and are wiped by the worker in the step that hands them on.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

from vllm_ext.core.feature import effect
from vllm_ext.features.serving.nan_worker import BLOCKS_TO_WIPE

logger = logging.getLogger("vllm.vllm_ext")

_QUARANTINE = "_vllm_ext_quarantine"
_STEP = "_vllm_ext_step"
_DIRTY_FROM = "_vllm_ext_nan_from"
# Groups whose tables have no entry for each so many tokens of the answer.
_NOT_BY_TOKEN = ("CrossAttentionSpec", "CircularBufferSpec", "HiSparseHotSpec")


class Quarantine:
    """Dirty blocks of one block pool, by id.

    Steps are numbered as they are scheduled; their reports come in that order.
    """

    def __init__(self, pool: Any, wipe_unreported: bool, wipe_loading: bool) -> None:
        self._pool = pool
        self._wipe_unreported = wipe_unreported
        self._wipe_loading = wipe_loading
        self._dirty: set[int] = set()
        self._handed_on: list[int] = []
        self._scheduled = self._reported = 0
        # Blocks given up before the reports of the steps in flight, with the last of these steps.
        self._freed: deque[tuple[int, set[int]]] = deque()
        self._known = False
        self._told: deque[str] = deque(maxlen=64)

    def step(self, scheduler: Any, planned: Any) -> None:
        """A step has been planned; it carries what is to be wiped."""
        self._scheduled += 1
        setattr(planned, _STEP, self._scheduled)
        if not self._handed_on:
            return
        # Somebody else may be writing to blocks that wait for a load: a wipe would lose that.
        loading = set() if self._wipe_loading else _loading(scheduler)
        self._dirty |= loading.intersection(self._handed_on)
        if wiped := [block for block in self._handed_on if block not in loading]:
            setattr(planned.scheduled_cached_reqs, BLOCKS_TO_WIPE, wiped)
        self._handed_on = []

    def report(
        self, scheduler: Any, planned: Any, found: Mapping[str, int], others: Set[str]
    ) -> None:
        """A step's report is in; ``found`` has its requests with NaN and their bad tokens.

        ``others`` have it in rejected drafts or failed loads only: it isn't theirs.
        """
        number = getattr(planned, _STEP, self._scheduled)
        if found:
            self._take_in(scheduler, planned, found, others, number)
        if number > self._reported:
            self._reported = number
        while self._freed and self._freed[0][0] <= number:
            self._freed.popleft()

    def leave(self, scheduler: Any, request: Any) -> None:
        """A request gives its blocks up, perhaps while a step that writes to them is in flight."""
        if self.in_flight and request.num_in_flight_tokens > 0:
            first = request.num_computed_tokens - request.num_in_flight_tokens
            first = max(first - _draft_slack(scheduler), 0)
            held = blocks_from(scheduler.kv_cache_manager, request.request_id, first)
            self._freed.append((self._scheduled, held))

    @contextmanager
    def known(self) -> Iterator[None]:
        """What is freed meanwhile is reported, or was named by ``leave``."""
        self._known = True
        try:
            yield
        finally:
            self._known = False

    def freed(self, blocks: Iterable[Any]) -> None:
        """Blocks of a running request are freed, since they have left its window."""
        if not self._known:
            held = {block.block_id for block in blocks if not block.is_null}
            self._freed.append((self._scheduled, held))

    @property
    def in_flight(self) -> bool:
        """Whether the report of a step is still to come."""
        return self._scheduled > self._reported

    def hand_on(self, blocks: Iterable[Any]) -> None:
        """Blocks go from the pool to a request; dirty ones are clean when it runs."""
        unknown = set[int]()
        if self._wipe_unreported:
            unknown = {block for _, held in self._freed for block in held}
        if not self._dirty and not unknown:
            return
        for block in blocks:
            if block.block_id in self._dirty or block.block_id in unknown:
                self._handed_on.append(block.block_id)
                self._dirty.discard(block.block_id)

    def _take_in(
        self,
        scheduler: Any,
        planned: Any,
        found: Mapping[str, int],
        others: Set[str],
        number: int,
    ) -> None:
        dirty = {block for step, held in self._freed if step >= number for block in held}
        starts = first_tokens(planned)
        for name, count in found.items():
            scheduled = planned.num_scheduled_tokens[name]
            first = starts[name] + scheduled - min(count, scheduled)
            # Drafts that were rejected since have moved the request's tokens down.
            first = max(first - _draft_slack(scheduler), 0)
            request = scheduler.requests.get(name)
            if request is not None:
                dirty |= blocks_from(scheduler.kv_cache_manager, name, first)
                _evict_elsewhere(scheduler.kv_cache_manager, name, first)
            if name not in others:
                self._tell(request, name, first)
        pool_size = len(self._pool.blocks)
        dirty = {block for block in dirty if block < pool_size}
        scheduler.kv_cache_manager.evict_blocks(dirty)
        self._dirty |= dirty

    def _tell(self, request: Any, name: str, first: int) -> None:
        if request is not None:
            if getattr(request, _DIRTY_FROM, None) is not None:
                return
            setattr(request, _DIRTY_FROM, first)
        elif name in self._told:
            return
        self._told.append(name)
        logger.warning(
            "Request %s has NaN in its hidden states from token %d on. Its KV blocks from there on "
            "have left the prefix cache and are wiped before another request gets them.",
            name,
            first,
        )
        effect("NAN_CONTAINMENT.contain")


def _draft_slack(scheduler: Any) -> int:
    """How far the scheduler's position of a request may be ahead of the worker's, in tokens."""
    stages = scheduler.vllm_config.parallel_config.pipeline_parallel_size
    return int(scheduler.num_spec_tokens * (stages + 1))


def first_tokens(planned: Any) -> dict[str, int]:
    """Position of the first token that a planned step computes, by request id."""
    starts = {new.req_id: new.num_computed_tokens for new in planned.scheduled_new_reqs}
    cached = planned.scheduled_cached_reqs
    return starts | dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))


def blocks_from(manager: Any, name: str, first: int, pool: Any = None) -> set[int]:
    """Ids of a request's blocks that hold token ``first`` or later ones.

    In every group that takes its blocks from ``pool`` (default: the manager's own).
    """
    pool = pool or manager.block_pool
    null = pool.null_block.block_id
    found: set[int] = set()
    groups = manager.coordinator.single_type_managers
    for group, table in zip(groups, manager.get_block_ids(name), strict=True):
        if group.block_pool is pool:
            skipped = first // group.block_size
            if type(group.kv_cache_spec).__name__ in _NOT_BY_TOKEN or skipped >= len(table):
                skipped = 0
            found.update(block for block in table[skipped:] if block != null)
    return found


def _evict_elsewhere(manager: Any, name: str, first: int) -> None:
    """Have the prefix caches of groups with a pool of their own (HiSparse) forget the blocks."""
    groups = manager.coordinator.single_type_managers
    pools = {id(group.block_pool): group.block_pool for group in groups}
    for pool in pools.values():
        if pool is not manager.block_pool:
            pool.evict_blocks(blocks_from(manager, name, first, pool))


def _loading(scheduler: Any) -> set[int]:
    """Blocks of requests that wait for KV from elsewhere."""
    from vllm.v1.request import RequestStatus

    waiting = RequestStatus.WAITING_FOR_REMOTE_KVS
    return {
        block
        for name, request in scheduler.requests.items()
        if request.status == waiting
        for block in blocks_from(scheduler.kv_cache_manager, name, 0)
    }


def nan_reports(output: Any) -> dict[str, int]:
    """Requests that a model runner's output says have NaN, and in how many tokens."""
    counts = output.num_nans_in_logits
    if not counts:
        return {}
    return {name: count for name, count in counts.items() if count > 0}


def rejected_drafts(planned: Any, output: Any, found: dict[str, int]) -> set[str]:
    """Requests that have NaN in drafts only which were rejected: it isn't theirs.

    Its slots are written anew when the request goes on; until then they are as dirty as others.
    """
    drafted = set()
    for name in found.keys() & planned.scheduled_spec_decode_tokens.keys():
        sampled = output.sampled_token_ids[output.req_id_to_index[name]]
        if planned.num_scheduled_tokens[name] - found[name] >= len(sampled):
            drafted.add(name)
    return drafted


def failed_loads(scheduler: Any, output: Any, found: dict[str, int]) -> set[str]:
    """Requests that read blocks which failed to load: vLLM throws the step away or ends them."""
    told = output.kv_connector_output
    invalid = told.invalid_block_ids if told else None
    if not invalid:
        return set()
    manager = scheduler.kv_cache_manager
    return {
        name
        for name in found.keys() & scheduler.requests.keys()
        if not invalid.isdisjoint(blocks_from(manager, name, 0))
    }


def take_in(scheduler: Any, planned: Any, output: Any) -> set[str]:
    """Put blocks with NaN into quarantine; returns the requests whose NaN it is."""
    quarantine = quarantine_of(scheduler)
    if not output.num_nans_in_logits:
        quarantine.report(scheduler, planned, {}, frozenset())
        return set()
    found = nan_reports(output)
    others = rejected_drafts(planned, output, found) | failed_loads(scheduler, output, found)
    quarantine.report(scheduler, planned, found, others)
    return found.keys() - others


def quarantine_of(scheduler: Any) -> Quarantine:
    """The quarantine of the scheduler's block pool."""
    quarantine: Quarantine | None = getattr(scheduler, _QUARANTINE, None)
    if quarantine is None:
        pool = scheduler.kv_cache_manager.block_pool
        from vllm.platforms import current_platform

        # The kernels of devices read nothing behind a request's last token, so there blocks that
        # may be dirty, or that somebody else fills, can wait for their report.
        on_cpu = current_platform.is_cpu()
        # With asynchronous scheduling nearly every freed block is unreported.
        asynchronous = scheduler.vllm_config.scheduler_config.async_scheduling
        quarantine = Quarantine(
            pool, wipe_unreported=on_cpu and not asynchronous, wipe_loading=on_cpu
        )
        setattr(pool, _QUARANTINE, quarantine)
        setattr(scheduler, _QUARANTINE, quarantine)
    return quarantine


def number_step(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Schedule a step; it takes along which blocks the worker has to wipe."""
    quarantine = quarantine_of(self)
    planned = original(self, *args, **kwargs)
    quarantine.step(self, planned)
    return planned


def read_report(
    original: Callable[..., Any],
    self: Any,
    scheduler_output: Any,
    model_runner_output: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Take in a step's report before requests that end with it give their blocks back."""
    take_in(self, scheduler_output, model_runner_output)
    return original(self, scheduler_output, model_runner_output, *args, **kwargs)


def watch_hand_over(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Notice dirty blocks that a request gets."""
    blocks = original(self, *args, **kwargs)
    quarantine = getattr(self, _QUARANTINE, None)
    if quarantine is not None:
        quarantine.hand_on(blocks)
    return blocks


def leave_blocks(
    original: Callable[..., Any], self: Any, request: Any, *args: Any, **kwargs: Any
) -> Any:
    """A request that ends, is aborted or preempted gives its blocks up."""
    quarantine = quarantine_of(self)
    quarantine.leave(self, request)
    with quarantine.known():
        return original(self, request, *args, **kwargs)


def drain_reported(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Blocks that vLLM kept back until the steps in flight were through are reported."""
    with quarantine_of(self).known():
        return original(self, *args, **kwargs)


def watch_free(
    original: Callable[..., Any],
    self: Any,
    ordered_blocks: Iterable[Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Remember what leaves a window while steps are in flight."""
    quarantine = getattr(self, _QUARANTINE, None)
    if quarantine is not None and quarantine.in_flight:
        ordered_blocks = list(ordered_blocks)
        quarantine.freed(ordered_blocks)
    return original(self, ordered_blocks, *args, **kwargs)


def cache_clean_only(
    original: Callable[..., Any], self: Any, request: Any, *args: Any, **kwargs: Any
) -> Any:
    """Nothing that a request with NaN computes from then on enters the prefix cache."""
    if getattr(request, _DIRTY_FROM, None) is not None:
        return None
    return original(self, request, *args, **kwargs)
