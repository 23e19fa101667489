"""PREEMPTION_FENCE: no preemption whose blocks come free too late (upstream PR 49675)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from vllm_ext.core.feature import Feature, Judgement, Part, Verdict, effect
from vllm_ext.core.seams import MISSING, Wrap
from vllm_ext.features.scheduling import fence_probe

_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_SCHEDULE = f"{_SCHEDULER}.schedule"
_PREDICATE = f"{_SCHEDULER}._request_blocks_can_be_freed"
_ALLOCATE = "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots"

_ADMISSION = "_vllm_ext_admission"
_MOST_BLOCKS = "_vllm_ext_most_blocks"
_SECONDS_BETWEEN_LINES = 60.0

logger = logging.getLogger("vllm.vllm_ext")


class Retries:
    """Guarded retries of this process, told in at most one log line a minute."""

    def __init__(self) -> None:
        self._untold = 0
        self.next_line = 0.0

    def note(self, scheduler: Any, part_id: str) -> None:
        """Count one retry for a part; say so if a minute has passed since the last line."""
        effect(part_id)
        self._untold += 1
        now = time.monotonic()
        if now < self.next_line:
            return
        self.next_line = now + _SECONDS_BETWEEN_LINES
        running, waiting = scheduler.get_request_counts()
        logger.info(
            "PREEMPTION_FENCE: %d preemption(s) put off until the batches in flight are through, "
            "since their blocks could not be reused before (%d requests running, %d waiting). "
            "If this goes on, the KV cache is too small for the load: lower --max-num-seqs or "
            "raise --gpu-memory-utilization.",
            self._untold,
            running,
            waiting,
        )
        self._untold = 0


RETRIES = Retries()


class StandIn:
    """A function in the place of a method of one object, until it is taken away.

    Never reads the object's ``__dict__``: once that exists, Python reads attributes slower.
    """

    __slots__ = ("_before", "_name", "_owner", "before")

    def __init__(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        self._owner, self._name = owner, name
        self.before = getattr(owner, name)
        method = getattr(self.before, "__func__", None)
        self._before = MISSING if method is getattr(type(owner), name, None) else self.before
        setattr(owner, name, function)

    def remove(self) -> None:
        """Leave the object as it was found."""
        if self._before is MISSING:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._before)


class Guard:
    """One schedule() of a scheduler that defers frees, on a release without the fence.

    It sees which request is refused blocks. If the victim that the policy will choose frees none
    now, it holds: the refused request is then all there is in ``running``, so vLLM selects it as
    the victim, and ``_preempt_request`` preempts nobody. vLLM then stops: the victim was the
    request itself. Methods are replaced on the instances, so that overrides in a user's subclass
    see real preemptions only, and schedulers that defer nothing, or have room, pay nothing.
    """

    __slots__ = ("_allocate", "_allocation", "_preempt", "_running", "_scheduler")

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._running: list[Any] | None = None
        self._allocation = StandIn(
            scheduler.kv_cache_manager, "allocate_slots", self._allocate_slots
        )
        self._allocate = self._allocation.before

    def end(self) -> None:
        """Leave scheduler and block manager as they were, wherever the step ended."""
        self._allocation.remove()
        self._release()

    def _allocate_slots(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        blocks = self._allocate(request, *args, **kwargs)
        # A waiting request that is refused preempts nobody.
        if blocks is None and request.status.name == "RUNNING" and self._in_vain():
            self._hold(request)
        return blocks

    def _in_vain(self) -> bool:
        """Whether the blocks of the policy's victim can't be reused yet."""
        scheduler = self._scheduler
        if scheduler.policy.value == "priority":
            victim = max(scheduler.running, key=attrgetter("priority", "arrival_time"))
        else:
            victim = scheduler.running[-1]
        return victim.last_sched_seq > scheduler.processed_step_seq

    def _hold(self, request: Any) -> None:
        scheduler = self._scheduler
        self._running, scheduler.running = scheduler.running, [request]
        self._preempt = StandIn(scheduler, "_preempt_request", self._preempt_nobody)

    def _release(self) -> None:
        if self._running is not None:
            self._scheduler.running, self._running = self._running, None
            self._preempt.remove()

    def _preempt_nobody(self, *args: Any, **kwargs: Any) -> None:
        self._release()
        RETRIES.note(self._scheduler, "PREEMPTION_FENCE.fence")


def _has_room(scheduler: Any) -> bool:
    """Whether no running request can be refused blocks, whatever this step schedules."""
    try:
        a_step, a_request = getattr(scheduler, _MOST_BLOCKS)
    except AttributeError:
        a_step, a_request = _most_blocks(scheduler)
        setattr(scheduler, _MOST_BLOCKS, (a_step, a_request))
    free: int = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    return free >= a_step + a_request * len(scheduler.running)


def _most_blocks(scheduler: Any) -> tuple[int, int]:
    """The most blocks a step takes for all its tokens, and beside that for each running request.

    A request's share of the tokens ends in one block it fills in part, in each group. Mamba
    layers take one more for a partial hit, one for a checkpoint, and one a speculative token.
    Groups with a pool of their own (HiSparse) may refuse whatever this one has.
    """
    manager = scheduler.kv_cache_manager
    groups = manager.coordinator.single_type_managers
    if any(group.block_pool is not manager.block_pool for group in groups):
        return manager.block_pool.num_gpu_blocks, 0
    size = min((group.kv_cache_spec.block_size for group in groups), default=1)
    lookahead = -(-scheduler.num_lookahead_tokens // size)
    more = max((getattr(one, "num_speculative_blocks", 0) for one in groups), default=0)
    a_step = -(-scheduler.max_num_scheduled_tokens // size)
    return len(groups) * a_step, len(groups) * (lookahead + more + 3)


def guard_step(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Put off what a step would preempt in vain, where freed blocks wait for batches in flight."""
    if not self.defer_block_free or _has_room(self):
        return original(self, *args, **kwargs)
    guard = Guard(self)
    try:
        return original(self, *args, **kwargs)
    finally:
        guard.end()


def _spared(scheduler: Any, request: Any) -> bool:
    """Whether a request whose blocks can't be freed is a victim that vLLM spares.

    A request that is really given up has left ``running`` or its status by then.
    """
    return request.status.name == "RUNNING" and request in scheduler.running


def hold_admission(original: Callable[..., Any], self: Any, request: Any) -> bool:
    """Admit nothing for the rest of a schedule() that spares a victim: a running request starves.

    vLLM reads ``_pause_state`` once more in it, to decide whether it admits.
    """
    free = original(self, request)
    if not free and getattr(self, _ADMISSION, None) == [] and _spared(self, request):
        getattr(self, _ADMISSION).append(self._pause_state)
        self._pause_state = type(self._pause_state).PAUSED_ALL
        if self.get_request_counts()[1]:
            effect("PREEMPTION_FENCE.no_admission")
    return free


def open_admission(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Admission is held within one schedule() at most, also if it raises."""
    if not self.defer_block_free or _has_room(self):
        return original(self, *args, **kwargs)
    held: list[Any] = []
    setattr(self, _ADMISSION, held)
    try:
        return original(self, *args, **kwargs)
    finally:
        delattr(self, _ADMISSION)
        if held:
            self._pause_state = held[0]


def count_spared(original: Callable[..., Any], self: Any, request: Any) -> bool:
    """Count the victims that vLLM's own fence spares."""
    free = original(self, request)
    if not free and _spared(self, request):
        RETRIES.note(self, "PREEMPTION_FENCE.counter")
    return free


def _probe_fence() -> Judgement:
    with fence_probe.Pipeline(12) as pipeline:
        fence_probe.crowd(pipeline, requests=4, prompt=38, outputs=64)
        finished = pipeline.run(400)
        told = (
            f"{finished} of 4 requests finished in {pipeline.steps} steps "
            f"with {pipeline.preemptions} preemptions"
        )
    return Judgement(Verdict.NATIVE if finished == 4 else Verdict.ACTIVE, told)


def _probe_no_admission() -> Judgement:
    with fence_probe.Pipeline(13, budget=128, chunk=64) as pipeline:
        output = fence_probe.starve(pipeline)
    if output.preempted_req_ids:
        return Judgement(
            Verdict.IDLE, "a step in which this release gives up a request admits nothing"
        )
    if "waiting" in output.num_scheduled_tokens:
        return Judgement(
            Verdict.ACTIVE,
            "a request that came later was admitted while a running one lacked 2 of 4 blocks",
        )
    return Judgement(Verdict.NATIVE, "nothing is admitted while a running request lacks blocks")


def _probe_counter() -> Judgement:
    RETRIES.next_line = 0.0  # a line is due, whatever was told just before
    with (
        fence_probe.Pipeline(13, budget=128, chunk=64) as pipeline,
        fence_probe.log_lines() as lines,
    ):
        output = fence_probe.starve(pipeline)
    if output.preempted_req_ids:
        return Judgement(Verdict.IDLE, "this release puts no preemption off; fence counts its own")
    if lines:
        return Judgement(Verdict.NATIVE, f"a preemption put off is logged: {lines[0]}")
    return Judgement(Verdict.ACTIVE, "a preemption is put off without a line in the log")


_READ = (
    f"{_SCHEDULER}.__init__",
    f"{_SCHEDULER}._preempt_request",
    f"{_SCHEDULER}._free_request_blocks",
    f"{_SCHEDULER}._update_after_schedule",
    f"{_SCHEDULER}.update_from_output",
    f"{_SCHEDULER}.get_request_counts",
)

FEATURE = Feature(
    name="PREEMPTION_FENCE",
    area="scheduling",
    summary="No request is preempted for blocks that can't be reused before a batch in flight.",
    why=(
        "With asynchronous scheduling or pipeline parallelism and a KV connector that loads, the "
        "blocks of a preempted request stay fenced until the batches in flight are through. vLLM "
        "0.29.0 then preempts the next request as well, and the whole running queue, again in "
        "every step: 0 tokens a second under a full KV cache. With the fence a step that could "
        "only preempt in vain stops there and changes nothing, as from 0.30.0 on. Those releases "
        "admit waiting requests in that step, past the running one that lacks blocks, and tell "
        "nobody; here nothing is admitted, and such retries are counted (as fence on 0.29.0, as "
        "counter on later ones) and logged once a minute. FCFS and priority scheduling, all "
        "schedulers that inherit vLLM's schedule()."
    ),
    upstream_pr=(49675,),
    parts=(
        Part(
            name="fence",
            summary="A preemption that frees no block now is put off.",
            seams=(Wrap(_SCHEDULE, guard_step),),
            relies_on=(_ALLOCATE, *_READ),
            probe=_probe_fence,
        ),
        Part(
            name="no_admission",
            summary="Nothing is admitted in a step in which a running request lacks blocks.",
            seams=(Wrap(_SCHEDULE, open_admission), Wrap(_PREDICATE, hold_admission)),
            relies_on=_READ,
            probe=_probe_no_admission,
        ),
        Part(
            name="counter",
            summary="Preemptions that vLLM's own fence puts off are counted and logged.",
            seams=(Wrap(_PREDICATE, count_spared),),
            relies_on=(_SCHEDULE, *_READ),
            probe=_probe_counter,
        ),
    ),
)
