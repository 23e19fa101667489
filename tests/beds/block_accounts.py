"""Who holds the blocks of a scheduler's pool, and whether that adds up."""

from __future__ import annotations

from collections import Counter
from typing import Any

# 0.29.0 and 0.30.0 have skipped_waiting, later releases kv_holding_waiting.
_QUEUES = ("running", "waiting", "skipped_waiting", "kv_holding_waiting")


def holders(scheduler: Any) -> Counter[int]:
    """How often each block is held, by the tables of requests and by frees that wait."""
    held: Counter[int] = Counter()
    for group in scheduler.kv_cache_manager.coordinator.single_type_managers:
        for table in group.req_to_blocks.values():
            held.update(block.block_id for block in table if not block.is_null)
    for _, blocks in scheduler.deferred_frees:
        held.update(block.block_id for block in blocks if not block.is_null)
    return held


def comes_free(scheduler: Any, request: Any) -> bool:
    """Whether a request's blocks can be reused at once, if it is preempted now."""
    return not scheduler.defer_block_free or request.last_sched_seq <= scheduler.processed_step_seq


def imbalances(scheduler: Any) -> list[str]:
    """What is wrong with the books of the pool and of the queues, in sentences."""
    pool = scheduler.kv_cache_manager.block_pool
    held = holders(scheduler)
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    blocks = [block for block in pool.blocks if not block.is_null]
    often = {number: times for number, times in Counter(free).items() if times > 1}
    found = [f"block {number} is free {times} times" for number, times in often.items()]
    found += [f"block {number} is free and held" for number in sorted(held.keys() & set(free))]
    found += [
        f"block {block.block_id} is counted {block.ref_cnt} times and held {held[block.block_id]}"
        for block in blocks
        if block.ref_cnt != held[block.block_id]
    ]
    lost = {block.block_id for block in blocks} - set(free) - held.keys()
    found += [f"block {number} is lost: neither free nor held" for number in sorted(lost)]
    if len(free) != pool.get_num_free_blocks():
        found.append(f"{len(free)} blocks are free, counted {pool.get_num_free_blocks()}")
    return found + _owners(scheduler) + _queues(scheduler)


def _owners(scheduler: Any) -> list[str]:
    return [
        f"{name} is gone and holds {len(table)} blocks of group {at}"
        for at, group in enumerate(scheduler.kv_cache_manager.coordinator.single_type_managers)
        for name, table in group.req_to_blocks.items()
        if table and name not in scheduler.requests
    ]


def _queues(scheduler: Any) -> list[str]:
    """Every unfinished request is in one queue, once."""
    queues = (getattr(scheduler, name, ()) for name in _QUEUES)
    places = Counter(request.request_id for queue in queues for request in queue)
    found = [
        f"{name} is in {places[name]} queues"
        for name, request in scheduler.requests.items()
        if places[name] != (0 if request.is_finished() else 1)
    ]
    gone = places.keys() - scheduler.requests.keys()
    return found + [f"{name} is queued and gone" for name in gone]
