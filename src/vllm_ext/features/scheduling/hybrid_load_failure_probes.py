"""What an unpatched scheduler does when KV loads fail: a real Scheduler, no model, no worker."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_ext.core.feature import Judgement, Verdict
from vllm_ext.features import played_scheduler
from vllm_ext.features.played_scheduler import BLOCK, make_request


@functools.cache
def connector_class() -> type:
    """A KV connector whose hits are set by hand; its loads are kept for whoever plays the worker.

    ``hits``: tokens that can be loaded, by request id; None: not known yet. ``loads``: the loads
    asked for since the last step, as (request id, block ids per group, first token, tokens).
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        SupportsHMA,
    )

    class HandSetConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(vllm_config, *args, **kwargs)
            self.hits: dict[str, int | None] = {}
            self.loads: list[tuple[str, tuple[list[int], ...], int, int]] = []
            extra = vllm_config.kv_transfer_config.kv_connector_extra_config
            self._asynchronous = extra["asynchronous"]
            self._local: dict[str, int] = {}

        def get_num_new_matched_tokens(
            self, request: Any, num_computed_tokens: int
        ) -> tuple[int | None, bool]:
            stored = self.hits.get(request.request_id, 0)
            if stored is None:
                return None, False
            found = max(stored - num_computed_tokens, 0)
            self._local[request.request_id] = num_computed_tokens
            return found, bool(found) and self._asynchronous

        def update_state_after_alloc(
            self, request: Any, blocks: Any, num_external_tokens: int
        ) -> None:
            if num_external_tokens:
                name = request.request_id
                tables = blocks.get_block_ids()
                self.loads.append((name, tables, self._local[name], num_external_tokens))

        def build_connector_meta(self, scheduler_output: Any) -> Any:
            return KVConnectorMetadata()

        def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
            return False, None

        request_finished = request_finished_all_groups

        def start_load_kv(self, *args: Any, **kwargs: Any) -> None: ...

        def wait_for_layer_load(self, *args: Any, **kwargs: Any) -> None: ...

        def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...

        def wait_for_save(self) -> None: ...

    return HandSetConnector


def __getattr__(name: str) -> Any:
    # vLLM's connector factory reads the class from the module; importing vLLM above is too early.
    if name == "HandSetConnector":
        return connector_class()
    raise AttributeError(f"module {__name__} has no attribute {name}")


def make_scheduler(
    groups: Sequence[str],
    blocks: int,
    *,
    asynchronous: bool,
    policy: str = "recompute",
    overlapped: bool = False,
    caching: bool = True,
    batched_tokens: int = 64,
    order: str = "fcfs",
) -> Any:
    """A scheduler with ``blocks`` usable blocks of 16 tokens, for a model that needs no files.

    ``groups``: one of ``full``, ``window`` (32 tokens) and ``mamba`` (align) per KV cache group.
    ``overlapped``: an AsyncScheduler, with two batches in flight. ``caching``: of prefixes.
    ``order``: the policy of its queues.
    """
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(
        kv_connector="HandSetConnector",
        kv_connector_module_path=__name__,
        kv_role="kv_both",
        kv_load_failure_policy=policy,
        kv_connector_extra_config={"asynchronous": asynchronous},
    )
    return played_scheduler.make_scheduler(
        groups,
        blocks,
        overlapped=overlapped,
        caching=caching,
        batched_tokens=batched_tokens,
        order=order,
        transfer=transfer,
    )


def output_of(
    scheduler: Any,
    planned: Any,
    *,
    sampled: Mapping[str, list[int]] | None = None,
    invalid: set[int] | None = None,
    failed: set[str] | None = None,
    finished: set[str] | None = None,
) -> Any:
    """What a worker would return for a planned step (default: token 7 where one is due)."""
    from vllm.v1.outputs import KVConnectorOutput

    transfers = KVConnectorOutput(
        invalid_block_ids=invalid or set(), finished_recving=finished or None
    )
    if failed:
        transfers.failed_recving = failed
    told = None if transfers.is_empty() else transfers
    return played_scheduler.output_of(scheduler, planned, sampled, kv_connector_output=told)


def _loading(groups: Sequence[str], blocks: int, tokens: int, **how: Any) -> tuple[Any, Any, Any]:
    """A scheduler that has just planned the load of a request's whole blocks, and both."""
    scheduler = make_scheduler(groups, blocks, **how)
    request = make_request("probe", range(1, tokens + 1), 4)
    scheduler.connector.hits["probe"] = (tokens - 1) // BLOCK * BLOCK
    scheduler.add_request(request)
    return scheduler, request, scheduler.schedule()


def _failed_load(**how: Any) -> tuple[Any, Any, Judgement | None]:
    """A synchronous load of 128 tokens into two groups fails: scheduler, request, and its end."""
    scheduler, request, planned = _loading(("full", "window"), 40, 140, asynchronous=False, **how)
    _, tables, _, _ = scheduler.connector.loads[0]
    try:
        scheduler.update_from_output(
            planned, output_of(scheduler, planned, invalid={tables[1][-1]})
        )
    except Exception as error:
        ended = Judgement(Verdict.ACTIVE, f"a failed load ends the engine: {_told(error)}")
        return scheduler, request, ended
    return scheduler, request, None


def block_reports() -> Judgement:
    """What becomes of a request whose load failed?"""
    scheduler, request, ended = _failed_load()
    if ended:
        return ended
    null = scheduler.kv_cache_manager.block_pool.null_block.block_id
    kept = scheduler.kv_cache_manager.get_block_ids("probe")[1]
    if request.num_computed_tokens == 0 and null in kept:
        lost = kept.count(null) * BLOCK
        return Judgement(
            Verdict.ACTIVE,
            f"after a failed load {lost} tokens are recomputed into the null block of all requests",
        )
    return Judgement(Verdict.NATIVE, "a failed load is recomputed into blocks of the request")


def fail_policy() -> Judgement:
    """The same load fails under kv_load_failure_policy=fail."""
    _, request, ended = _failed_load(policy="fail")
    if ended:
        return ended
    if request.status.name == "FINISHED_ERROR":
        return Judgement(Verdict.NATIVE, "a failed load ends its request with FINISHED_ERROR")
    return Judgement(Verdict.ACTIVE, f"a failed load leaves its request {request.status.name}")


def one_group() -> Judgement:
    """A load of a model with one group fails when the next step has been planned on it."""
    scheduler, request, planned = _loading(("full",), 40, 140, asynchronous=False, overlapped=True)
    ahead = scheduler.schedule()
    _, tables, _, _ = scheduler.connector.loads[0]
    report = output_of(scheduler, planned, invalid={tables[0][0]})
    scheduler.update_from_output(planned, report)
    scheduler.update_from_output(ahead, output_of(scheduler, ahead))
    if request.num_output_tokens:
        return Judgement(
            Verdict.ACTIVE,
            "the first token is that of a step planned on blocks that failed to load",
        )
    return Judgement(
        Verdict.NATIVE, "no token of a step planned on blocks that failed to load is given"
    )


def inflight_reservation() -> Judgement:
    """One request in an otherwise empty pool: is it admitted again after its load failed?"""
    scheduler, request, planned = _loading(("full",), 15, 140, asynchronous=True)
    _, tables, _, _ = scheduler.connector.loads.pop()
    report = output_of(scheduler, planned, invalid={tables[0][0]}, finished={"probe"})
    scheduler.update_from_output(planned, report)
    for _ in range(5):
        planned = scheduler.schedule()
        if scheduler.connector.loads or planned.num_scheduled_tokens:
            return Judgement(Verdict.NATIVE, "a request whose load failed is admitted again")
        scheduler.update_from_output(planned, output_of(scheduler, planned))
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    need = -(-request.num_tokens // BLOCK)
    return Judgement(
        Verdict.ACTIVE,
        f"a request of {need} blocks whose load failed is not admitted to {free} free blocks, "
        "because its first load stays reserved",
    )


def loaded_first() -> Judgement:
    """A request that needs half of the pool comes before one whose load holds three quarters."""
    scheduler = make_scheduler(("full",), 8, asynchronous=True)
    scheduler.connector.hits |= {"first": None, "probe": 96}
    for name, tokens in (("first", 60), ("probe", 100)):
        scheduler.add_request(make_request(name, range(1, tokens + 1), 4))
    planned = scheduler.schedule()
    # The first is skipped as long as the connector doesn't know what it has of it.
    scheduler.connector.hits["first"] = 0
    scheduler.update_from_output(planned, output_of(scheduler, planned, finished={"probe"}))
    for _ in range(5):
        planned = scheduler.schedule()
        if planned.num_scheduled_tokens:
            return Judgement(Verdict.NATIVE, "who is loaded goes on past who waits for blocks")
        scheduler.update_from_output(planned, output_of(scheduler, planned))
    return Judgement(
        Verdict.ACTIVE,
        "a request that waits for 4 blocks stands before one that is loaded and holds 6 of 8, "
        "and neither is ever admitted",
    )


def reserved_drafts() -> Judgement:
    """Two loads of 8 blocks each into 17; with its drafts each request needs 10 to go on."""
    scheduler = make_scheduler(("full",), 17, asynchronous=True, batched_tokens=256)
    scheduler.num_spec_tokens, scheduler.num_lookahead_tokens = 3, 4
    for name in ("first", "second"):
        scheduler.connector.hits[name] = 128
        start = 1 if name == "first" else 1001
        scheduler.add_request(make_request(name, range(start, start + 142), 4))
    scheduler.schedule()
    if len(scheduler.connector.loads) == 1:
        return Judgement(Verdict.NATIVE, "a load waits for those whose drafts need its blocks")
    return Judgement(
        Verdict.ACTIVE,
        "two loads are admitted to 17 blocks of which each request needs 10 with its drafts, so "
        "neither is ever computed",
    )


def bounded_retries() -> Judgement:
    """Every load of one request fails: how often is it tried?"""
    scheduler, _, planned = _loading(("full",), 40, 140, asynchronous=True)
    for tried in range(8):
        if not scheduler.connector.loads:
            return Judgement(
                Verdict.NATIVE, f"a request is computed locally after {tried} failed loads"
            )
        _, tables, _, _ = scheduler.connector.loads.pop()
        report = output_of(scheduler, planned, invalid={tables[0][0]}, finished={"probe"})
        scheduler.update_from_output(planned, report)
        planned = scheduler.schedule()
    return Judgement(Verdict.ACTIVE, "a request is loaded for the 9th time after 8 failed loads")


def late_reports() -> Judgement:
    """A load fails under policy ``fail`` and is reported as finished one step later."""
    scheduler, _, planned = _loading(("full",), 40, 140, asynchronous=False, policy="fail")
    _, tables, _, _ = scheduler.connector.loads[0]
    scheduler.update_from_output(planned, output_of(scheduler, planned, invalid={tables[0][0]}))
    planned = scheduler.schedule()
    try:
        scheduler.update_from_output(planned, output_of(scheduler, planned, finished={"probe"}))
    except Exception as error:
        told = str(error) or "no text"
        return Judgement(
            Verdict.ACTIVE,
            f"a transfer finished after its request failed ends the engine: "
            f"{type(error).__name__} ({told})",
        )
    return Judgement(Verdict.NATIVE, "a transfer finished after its request failed is ignored")


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition('.')[0]}"
