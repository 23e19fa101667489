"""What SimpleCPUOffloadConnector of 0.29.0 leaves unstored, for HYBRID_PREFIX_HITS.

Blocks of attention are found by their place in a request's table. A Mamba table of mode ``align``
has no such places: states in the middle are given back, others move. The block manager hands those
over itself, one (group, block, tokens) for each state that a later request can start from.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress
from types import SimpleNamespace
from typing import Any

from vllm_ext.core.feature import effect

# Outcomes of a hand-off, in the words of vLLM 0.30.0 and later.
_DROPPED = ("dropped_cpu_full", "dropped_request_gone", "dropped_null_block", "dropped_not_hashed")
OUTCOMES = ("published", "stored", "skipped_already_cached", "skipped_in_flight", *_DROPPED)

# Device and host blocks of requests that are finished, to be stored with the next step.
_FINISHED: weakref.WeakKeyDictionary[Any, list[tuple[list[int], list[int]]]] = (
    weakref.WeakKeyDictionary()
)
# The last store that each worker has started.
_STARTED: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def is_fine(scheduler: Any) -> bool:
    """Whether hits may end inside a block of some group: eager mode, Mamba, a finer key."""
    coordinator = scheduler.cpu_coordinator
    return not scheduler._lazy_mode and getattr(coordinator, "enable_partial_hash_hits", False)


def group_sizes(scheduler: Any) -> list[int]:
    """Tokens per block of each KV cache group."""
    return [manager.block_size for manager in scheduler.cpu_coordinator.single_type_managers]


def handoff_counts(scheduler: Any) -> Any:
    """How many hand-offs had which outcome since the last reset; an object with all OUTCOMES."""
    if not hasattr(scheduler, "boundary_store_stats"):
        scheduler.boundary_store_stats = SimpleNamespace(**dict.fromkeys(OUTCOMES, 0))
    return scheduler.boundary_store_stats


def copy_of_counts(scheduler: Any) -> Any:
    """The counts as they are now."""
    return SimpleNamespace(**vars(handoff_counts(scheduler)))


def dropped(counts: Any) -> dict[str, int]:
    """The hand-offs that were not stored and are nowhere else, by outcome."""
    return {outcome: getattr(counts, outcome) for outcome in _DROPPED}


def plan_stores(
    original: Callable[..., Any], self: Any, scheduler_output: Any
) -> tuple[list[int], list[int], list[str]]:
    """A step's stores: what was handed over, what the release finds, what finished requests left.

    Returns device blocks, host blocks and the requests whose stores they are.
    """
    if self._lazy_mode:
        return original(self, scheduler_output)
    handed = _take_handoffs(self, scheduler_output) if is_fine(self) else ([], [], [])
    device, host, names = original(self, scheduler_output)
    for device_left, host_left in _FINISHED.pop(self, ()):
        device, host = device + device_left, host + host_left
    return handed[0] + device, handed[1] + host, list(dict.fromkeys(handed[2] + names))


def _take_handoffs(scheduler: Any, scheduler_output: Any) -> tuple[list[int], list[int], list[str]]:
    state, pool = scheduler_output.kv_connector_block_state, scheduler._gpu_block_pool
    device: list[int] = []
    host: list[int] = []
    names: list[str] = []
    if state is None or pool is None:
        return device, host, names
    counts = handoff_counts(scheduler)
    # Their blocks may belong to others by now.
    gone = {*(scheduler_output.preempted_req_ids or ()), *scheduler_output.finished_req_ids}
    for name, entries in state.boundary_state_offloads.items():
        storing = scheduler._reqs_to_store.get(name)
        alive = storing is not None and not storing.finished and name not in gone
        for _, block_id, _ in entries:
            block = pool.blocks[block_id]
            outcome = _outcome(scheduler, block) if alive else "dropped_request_gone"
            counts.published += 1
            setattr(counts, outcome, getattr(counts, outcome) + 1)
            if outcome == "stored":
                device.append(block_id)
                host.append(_reserve(scheduler, block))
                names.append(name)
    return device, host, names


def _outcome(scheduler: Any, block: Any) -> str:
    """What becomes of a block that is handed over."""
    key = block.block_hash
    if block.is_null:
        return "dropped_null_block"
    if key is None:
        return "dropped_not_hashed"
    if block.block_id in scheduler._in_flight_store_gpu_blocks:
        return "skipped_in_flight"
    if _on_host(scheduler, key):
        return "skipped_already_cached"
    return "stored" if scheduler.cpu_block_pool.get_num_free_blocks() else "dropped_cpu_full"


def _on_host(scheduler: Any, key: Any) -> bool:
    cached = scheduler.cpu_block_pool.cached_block_hash_to_block
    return cached.get_one_block(key) is not None


def _reserve(scheduler: Any, block: Any) -> int:
    """A host block for a device block, which is held until it has been copied."""
    (target,) = scheduler.cpu_block_pool.get_new_blocks(1)
    # The release registers under this key what has been copied.
    target.set_block_hash(block.block_hash, num_tokens=block.block_hash_num_tokens)
    scheduler._in_flight_store_gpu_blocks.add(block.block_id)
    scheduler._gpu_block_pool.touch([block])
    return int(target.block_id)


def scan_tables(original: Callable[..., Any], self: Any, scheduler_output: Any) -> Any:
    """Let the release look for computed blocks by place: to the last key, attention alone."""
    if not is_fine(self):
        return original(self, scheduler_output)
    managers = self.cpu_coordinator.single_type_managers
    moving = {
        at
        for at, manager in enumerate(managers)
        if getattr(manager, "mamba_cache_mode", "") == "align"
    }
    whole = self.block_size
    # Up to here a request counts as computed; what ends at a key can be found.
    self.block_size = self.hash_block_size
    try:
        return original(self, _without_groups(scheduler_output, moving))
    finally:
        self.block_size = whole


def _without_groups(scheduler_output: Any, groups: set[int]) -> Any:
    """The requests of a step as a scan by place is to see them: no new blocks of these groups."""

    def masked(tables: Any) -> Any:
        if not tables:
            return tables
        return tuple([] if at in groups else table for at, table in enumerate(tables))

    new, cached = scheduler_output.scheduled_new_reqs, scheduler_output.scheduled_cached_reqs
    return _step(
        scheduler_output.num_scheduled_tokens,
        [SimpleNamespace(req_id=row.req_id, block_ids=masked(row.block_ids)) for row in new],
        cached.req_ids,
        [masked(tables) for tables in cached.new_block_ids],
        cached.resumed_req_ids,
    )


def _step(
    scheduled: dict[str, int],
    new: Sequence[Any],
    names: Sequence[str],
    tables: Sequence[Any],
    resumed: Iterable[str],
) -> Any:
    """As much of a SchedulerOutput as a scan reads."""
    rows = SimpleNamespace(req_ids=names, new_block_ids=tables, resumed_req_ids=resumed)
    return SimpleNamespace(
        num_scheduled_tokens=scheduled, scheduled_new_reqs=new, scheduled_cached_reqs=rows
    )


def store_what_is_left(
    original: Callable[..., Any],
    self: Any,
    request: Any,
    block_ids: tuple[list[int], ...],
) -> Any:
    """Reserve host blocks for what a request has computed since its last scan, and its tail.

    ``block_ids``: its blocks by KV cache group. They are stored with the next step.
    """
    name = request.request_id
    if name in self._reqs_to_store and self._gpu_block_pool is not None:
        # One more look at the table that was collected, as if a token were scheduled.
        step = _step({name: 1}, (), [name], [None], ())
        device, host, _ = self._prepare_eager_store_specs(step)
        if is_fine(self):
            for block in _tails(self, request, block_ids):
                device.append(block.block_id)
                host.append(_reserve(self, block))
        if device:
            _FINISHED.setdefault(self, []).append((device, host))
    return original(self, request, block_ids)


def _tails(scheduler: Any, request: Any, block_ids: tuple[list[int], ...]) -> Iterator[Any]:
    """Blocks, one of each group, in the middle of which the prompt's last key ends.

    Only such as the device's own prefix cache finds under that key: it knows what is in them.
    """
    unit, pool = scheduler.hash_block_size, scheduler._gpu_block_pool
    end = request.num_prompt_tokens // unit * unit
    computed = request.num_computed_tokens - request.num_output_placeholders
    if not 0 < end <= computed:
        return
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

    for group, (size, table) in enumerate(zip(group_sizes(scheduler), block_ids, strict=True)):
        at = end // size
        if end % size == 0 or at >= len(table):
            continue
        block = pool.blocks[table[at]]
        key = make_block_hash_with_group_id(request.block_hashes[end // unit - 1], group)
        if (
            pool.cached_block_hash_to_block.contain(key, block.block_id)
            and block.block_id not in scheduler._in_flight_store_gpu_blocks
            and not _on_host(scheduler, key)
            and scheduler.cpu_block_pool.get_num_free_blocks()
        ):
            yield block


def register_all_keys(
    original: Callable[..., Any], self: Any, gpu_block_ids: list[int], cpu_block_ids: list[int]
) -> Any:
    """Make copied blocks known under every key of their source, not the first alone."""
    result = original(self, gpu_block_ids, cpu_block_ids)
    keys, pool = self._gpu_block_pool.cached_block_hashes_by_block, self.cpu_block_pool
    for source, target in zip(gpu_block_ids, cpu_block_ids, strict=True):
        for key in keys.get(source, ()):
            pool._insert_block_hash(key, pool.blocks[target], num_tokens=None)
    return result


def drop_lost(
    original: Callable[..., Any],
    self: Any,
    gpu_block_ids: list[int],
    cpu_block_ids: list[int],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Let go of copied blocks whose source has lost its keys: nothing says what is in them.

    Further arguments are lists with an entry for each block, or None.
    """
    from vllm.v1.simple_kv_offload.manager import TransferMeta

    blocks = self._gpu_block_pool.blocks
    known = [blocks[block_id].block_hash is not None for block_id in gpu_block_ids]
    if not all(known):
        lost = [not one for one in known]
        device, host = list(compress(gpu_block_ids, lost)), list(compress(cpu_block_ids, lost))
        self._release_transfer_refs(TransferMeta(device, host))
        effect("HYBRID_PREFIX_HITS.lost_keys", len(device))
        gpu_block_ids = list(compress(gpu_block_ids, known))
        cpu_block_ids = list(compress(cpu_block_ids, known))
        args = tuple(one and list(compress(one, known)) for one in args)
        kwargs = {name: one and list(compress(one, known)) for name, one in kwargs.items()}
    return original(self, gpu_block_ids, cpu_block_ids, *args, **kwargs)


def has_stores(original: Callable[..., bool], self: Any) -> bool:
    """Whether stores are to be planned or under way."""
    return bool(_FINISHED.get(self)) or original(self)


def forget_stores(original: Callable[..., Any], self: Any) -> Any:
    """Give back, before a reset, what was reserved for finished requests."""
    from vllm.v1.simple_kv_offload.manager import TransferMeta

    for device, host in _FINISHED.pop(self, ()):
        self._release_transfer_refs(TransferMeta(device, host))
    if hasattr(self, "boundary_store_stats"):
        del self.boundary_store_stats
    return original(self)


def start_stores_once(original: Callable[..., None], self: Any) -> None:
    """Start a step's stores unless they have been started."""
    metadata = self._connector_metadata
    if metadata is None or metadata.store_event <= _STARTED.get(self, -1):
        return
    _STARTED[self] = metadata.store_event
    original(self)


def start_stores_first(original: Callable[..., None], self: Any) -> None:
    """Start a step's stores also where it has no forward pass, behind which vLLM starts them."""
    self.wait_for_save()
    original(self)
