"""The consumer's side of Mooncake pulls: failures are reported, layers are counted.

Everything here runs on the receiver loop; one task pulls from one producer worker.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Collection, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from vllm_ext.core.feature import effect

FAILED, UNREPORTED = "MOONCAKE_HETERO_PP.failed_pulls", "MOONCAKE_HETERO_PP.unreported"
_INVALID = "_vllm_ext_invalid_blocks"


@dataclass
class Pull:
    """One pull from one producer worker: where from, and what has been reported."""

    address: str
    engine: str
    reported: set[str] = field(default_factory=set)


PULL: ContextVar[Pull | None] = ContextVar("pull", default=None)


def log(worker: Any) -> Any:
    """vLLM's logger of the connector."""
    import logging

    return logging.getLogger(type(worker).__module__)


def _invalid_blocks(worker: Any) -> queue.SimpleQueue[set[int]]:
    """Blocks whose load failed: from the receiver loop to the worker's thread."""
    held: queue.SimpleQueue[set[int]] = vars(worker).setdefault(_INVALID, queue.SimpleQueue())
    return held


def fail(worker: Any, pull_metas: dict[str, Any], requests: Collection[str], reason: str) -> None:
    """Report failed loads, so that the scheduler recomputes or ends their requests.

    Where the release can't, a request's blocks are given up when all its pulls have ended, as
    0.33.0 does: another producer may still be writing into them.
    """
    if hasattr(worker, "_handle_failed_recv"):
        worker._handle_failed_recv(pull_metas, requests, reason)
        return
    newly = []
    for request in requests:
        meta = pull_metas.get(request)
        if meta is None:
            continue
        blocks = {block for group in meta.local_block_ids for block in group}
        if not vars(meta).get("failed"):
            meta.failed = True
            newly.append(request)
            _invalid_blocks(worker).put(blocks)
        meta.pull_tasks_count = max(meta.pull_tasks_count - 1, 0)
        # A pull without blocks is no load: it lets the producer free its own.
        if meta.pull_tasks_count == 0 and blocks:
            worker.finished_recving_reqs.add(meta.d_req_id)
    if newly:
        log(worker).error("pulling kv_caches for %s failed: %s", newly, reason)
        effect(FAILED, len(newly))


def block_ids_with_load_errors(owner: Any) -> Callable[..., Any]:
    """``get_block_ids_with_load_errors`` for a connector that has none of its own."""

    def get_block_ids_with_load_errors(self: Any) -> set[int]:
        found: set[int] = set()
        waiting = _invalid_blocks(self.connector_worker)
        while not waiting.empty():
            found |= waiting.get_nowait()
        return found

    return get_block_ids_with_load_errors


async def end_pull(
    original: Callable[..., Any],
    self: Any,
    worker_addr: str,
    pull_metas: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Pull; what has no result at the end, for whatever reason, has failed."""
    return await _pull(original, self, worker_addr, pull_metas, FAILED, *args, **kwargs)


async def end_unreported(
    original: Callable[..., Any],
    self: Any,
    worker_addr: str,
    pull_metas: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The same on releases that report failures, but not what the producer is silent about."""
    return await _pull(original, self, worker_addr, pull_metas, UNREPORTED, *args, **kwargs)


async def _pull(
    original: Callable[..., Any],
    self: Any,
    worker_addr: str,
    pull_metas: dict[str, Any],
    part: str,
    *args: Any,
    **kwargs: Any,
) -> Any:
    pull = PULL.get()
    if pull is None or pull.address != worker_addr:
        engine = next(iter(pull_metas.values())).remote_engine_id
        PULL.set(pull := Pull(worker_addr, engine))
    result = await original(self, worker_addr, pull_metas, *args, **kwargs)
    silent = [
        request
        for request, meta in pull_metas.items()
        if request not in pull.reported and (part == FAILED or not meta.failed)
    ]
    # A closed context means that the worker is being shut down.
    if silent and not self.async_zmq_ctx.closed:
        fail(self, pull_metas, silent, f"{worker_addr} reported no result for it")
        if part == UNREPORTED:
            effect(UNREPORTED, len(silent))
    return result


def note_results(
    original: Callable[..., Any],
    self: Any,
    response: Any,
    pull_metas: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Take a producer's answer; on 0.29.0 report the failures that vLLM only logs."""
    pull = PULL.get()
    failed = response.err_reqs or []
    if pull is not None:
        pull.reported.update(response.ok_reqs or (), failed)
    result = original(self, response, pull_metas, *args, **kwargs)
    if failed and not hasattr(self, "_handle_failed_recv"):
        fail(self, pull_metas, failed, response.err_msg or "no reason given")
    return result


async def meet_engine(
    original: Callable[..., Any],
    self: Any,
    remote_engine_id: str,
    pull_metas: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Ask the bootstrap server for a producer; one that isn't there is a failed load."""
    result = await original(self, remote_engine_id, pull_metas, *args, **kwargs)
    if remote_engine_id not in self._remote_agents:
        reason = f"the bootstrap server knows no producer {remote_engine_id}"
        fail(self, pull_metas, list(pull_metas), reason)
    return result


def start_pulls(
    original: Callable[..., Any],
    self: Any,
    remote_engine_id: str,
    pull_metas: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Start the pulls; a producer that doesn't fit is a failed load, not a task that ended."""
    try:
        return original(self, remote_engine_id, pull_metas, *args, **kwargs)
    except Exception as error:
        fail(self, pull_metas, list(pull_metas), f"{type(error).__name__}: {error}")


# What the consumer knows of producers, by engine and address of the worker.
_PRODUCERS = "_vllm_ext_producers"


@dataclass
class Producers:
    """The layers each producer worker shares with this one, and those that needn't be asked."""

    shared: dict[tuple[str, str], frozenset[str]] = field(default_factory=dict)
    skipped: set[tuple[str, str]] = field(default_factory=set)


def producers_of(worker: Any) -> Producers:
    """What the worker knows of producers."""
    known: Producers = vars(worker).setdefault(_PRODUCERS, Producers())
    return known


def missing_layers(worker: Any, addresses: Iterable[tuple[str, str]]) -> list[str] | None:
    """Layers of this worker that no producer worker has; None if one of them doesn't tell."""
    covered: set[str] = set()
    for address in addresses:
        shared = producers_of(worker).shared.get(address)
        if shared is None:
            return None
        covered |= shared
    return [name for name in dict.fromkeys(worker.registered_layer_names) if name not in covered]


def target_layers(worker: Any) -> int | None:
    """Number of layers of the worker's model; None if a draft model may have some behind them."""
    if getattr(worker.vllm_config, "speculative_config", None):
        return None
    count: int = worker.model_config.get_total_num_hidden_layers()
    return count


def _of_target(worker: Any, names: list[str]) -> list[str]:
    """Those layers that aren't a draft model's, whose KV only costs acceptance."""
    if target_layers(worker) is not None:
        return names
    indices = dict(zip(worker.registered_layer_names, worker.registered_layer_indices, strict=True))
    count = worker.model_config.get_total_num_hidden_layers()
    return [name for name in names if indices[name] < count]


def _other_addresses(worker: Any, engine: str, contacted: set[tuple[str, str]]) -> list[str]:
    """Workers of the producer that the request has not been pulled from."""
    ranks = worker.transfer_topo.handshake_target_ranks(worker._tp_size[engine])
    stages = worker._remote_agents[engine]
    known = producers_of(worker).shared
    return [
        address
        for rank in ranks
        for address in stages[rank].values()
        if (engine, address) not in contacted and known.get((engine, address)) != frozenset()
    ]


def count_layers(worker: Any, response: Any, pull_metas: dict[str, Any], part: str) -> None:
    """Before the last answer counts: pull what is missing elsewhere, or fail the load."""
    pull = PULL.get()
    if pull is None:
        return
    place = (pull.engine, pull.address)
    told = getattr(response, "vllm_ext", None)
    if told:
        known = producers_of(worker)
        if told[0] is not None:
            known.shared[place] = frozenset(told[0])
        if told[1]:
            known.skipped.add(place)
    lacking: dict[str, list[str]] = {}
    for request in response.ok_reqs or ():
        meta = pull_metas.get(request)
        if meta is None or vars(meta).get("failed"):
            continue
        contacted: set[tuple[str, str]] = vars(meta).setdefault("_vllm_ext_contacted", set())
        contacted.add(place)
        if meta.pull_tasks_count != 1:
            continue
        missing = missing_layers(worker, contacted)
        if not missing:
            continue
        others = _other_addresses(worker, pull.engine, contacted)
        meta.pull_tasks_count += len(others)
        for address in others:
            task = asyncio.create_task(
                worker.receive_kv_from_single_worker(address, {request: meta})
            )
            vars(meta).setdefault("_vllm_ext_tasks", []).append(task)
        if others:
            effect(part)
        elif not any(meta.local_block_ids):
            # No load, but a message that lets the producer free its blocks.
            continue
        elif left := _of_target(worker, missing):
            lacking[request] = left
        else:
            log(worker).warning("No prefill worker has the draft layers %s", missing)
    if lacking:
        _fail_uncovered(worker, response, pull_metas, lacking)
        effect(part, len(lacking))


def release_elsewhere(worker: Any, pull: Pull, pull_metas: dict[str, Any]) -> None:
    """After a failed pull: tell the producers of further layers that nothing more is pulled.

    Needed with the same number of stages in another partition alone: there they are asked last.
    """
    stages = worker._remote_agents.get(pull.engine, {}).values()
    place = (pull.engine, pull.address)
    if not all(len(stage) == worker.pp_size > 1 for stage in stages):
        return
    for request, meta in pull_metas.items():
        if not vars(meta).get("failed") or vars(meta).get("_vllm_ext_released"):
            continue
        meta._vllm_ext_released = True
        if not any(meta.local_block_ids) or not missing_layers(worker, [place]):
            continue
        # A pull without blocks; its count never gets to 0, so that nothing is reported for it.
        empty = replace(meta, local_block_ids=[], pull_tasks_count=2)
        contacted = vars(meta).get("_vllm_ext_contacted", set()) | {place}
        meta._vllm_ext_tasks = [
            asyncio.create_task(worker.receive_kv_from_single_worker(address, {request: empty}))
            for address in _other_addresses(worker, pull.engine, contacted)
        ]


def _fail_uncovered(
    worker: Any, response: Any, pull_metas: dict[str, Any], lacking: dict[str, list[str]]
) -> None:
    names = sorted({name for missing in lacking.values() for name in missing})
    response.ok_reqs = [request for request in response.ok_reqs if request not in lacking]
    pull = PULL.get()
    if pull is not None:
        pull.reported.update(lacking)
    fail(
        worker,
        pull_metas,
        list(lacking),
        f"no prefill worker holds {', '.join(names)}, which this decode worker needs; serve the "
        "same model on both sides and set VLLM_PP_LAYER_PARTITION so that each layer is in a stage",
    )
