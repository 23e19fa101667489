"""What producer and consumer tell each other of their stages, and what they do with it.

With a pull a consumer worker sends ``[engine, stage, ask, limit]``: a number for its instance, its
pipeline rank, whether it doesn't know yet which layers the two have in common, and the number of
layers of its model (0 if there may be a draft model's behind them). The producer
answers ``[layers, excused]``: the common layers if asked, and whether this worker needn't pull
here any more. Both are a field ``vllm_ext`` that other peers leave aside.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any

from vllm_ext.core.feature import effect
from vllm_ext.features.disaggregation.mooncake_peers import ledger_of, of_both
from vllm_ext.features.disaggregation.mooncake_pulls import (
    PULL,
    Pull,
    count_layers,
    producers_of,
    release_elsewhere,
    target_layers,
)
from vllm_ext.features.disaggregation.mooncake_wire import extend, vllm_type

PART = "MOONCAKE_HETERO_PP.stages"
_FIELD = ("vllm_ext", list[Any] | None, None)
_SERVED: ContextVar[Any] = ContextVar("served", default=None)


def exchange_stages(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    """Have the worker send and understand the field."""
    original(self, *args, **kwargs)
    # Data-parallel ranks, and instances that were given one id by mistake, are apart.
    config = self.vllm_config
    rank = config.parallel_config.data_parallel_index
    name = f"{self.engine_id} {getattr(config, 'instance_id', '')} {rank}"
    number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest())
    limit = target_layers(self) or 0

    def introduce(message: Any) -> list[Any] | None:
        pull = PULL.get()
        if pull is None:
            return None
        ask = (pull.engine, pull.address) not in producers_of(self).shared
        return [number, self.pp_rank, ask, limit]

    def answer(message: Any) -> list[Any] | None:
        meta = _SERVED.get()
        if meta is None or message.status.name not in ("FINISH", "CONTINUE"):
            return None
        ledger = ledger_of(self)
        return [ledger.shared(meta) if meta.vllm_ext[2] else None, ledger.excuse(meta)]

    extend(self, "_xfer_meta_decoder", _FIELD, introduce)
    extend(self, "_xfer_resp_decoder", _FIELD, answer)


async def serve_stage(
    original: Callable[..., Any],
    self: Any,
    identity: bytes,
    sock: Any,
    meta: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Serve a pull of a consumer that tells its stage.

    One that has no layer in common gets its answer at once if the producer can do without it:
    there is nothing to wait for, and the request may be gone.
    """
    if not getattr(meta, "vllm_ext", None):
        return await original(self, identity, sock, meta, *args, **kwargs)
    token = _SERVED.set(meta)
    try:
        ledger = ledger_of(self)
        ledger.meet(meta)
        if meta.req_blocks and ledger.excuse(meta):
            response = _all_well(self, meta.req_blocks)
            await sock.send_multipart((identity, self._encoder.encode(response)))
            return None
        return await original(self, identity, sock, meta, *args, **kwargs)
    finally:
        _SERVED.reset(token)


def _all_well(worker: Any, requests: Iterable[str]) -> Any:
    """vLLM's response that all requests have been transferred."""
    kind = vllm_type(worker._xfer_resp_decoder.type)
    status = sys.modules[kind.__module__].MooncakeXferResponseStatus
    return kind(status.FINISH, ok_reqs=list(requests))


def align_shared(
    original: Callable[..., Any],
    local_regions: list[Any],
    remote_regions: list[Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Leave out layers that the peer lacks, if it is one that counts what it gets."""
    if _SERVED.get() is not None:
        local_regions = of_both(local_regions, remote_regions)
    return original(local_regions, remote_regions, *args, **kwargs)


async def pull_stage(
    original: Callable[..., Any],
    self: Any,
    worker_addr: str,
    pull_metas: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Pull, unless the producer worker has said that it shares no layer with this one."""
    engine = next(iter(pull_metas.values())).remote_engine_id
    pull = PULL.get()
    if pull is None or pull.address != worker_addr:
        PULL.set(pull := Pull(worker_addr, engine))
    if (engine, worker_addr) not in producers_of(self).skipped:
        result = await original(self, worker_addr, pull_metas, *args, **kwargs)
        release_elsewhere(self, pull, pull_metas)
        return result
    effect(PART)
    self.process_pulling_result(_all_well(self, pull_metas), pull_metas.copy())


def take_result(
    original: Callable[..., Any],
    self: Any,
    response: Any,
    pull_metas: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Take a producer's answer; the last one counts only if all layers have come."""
    count_layers(self, response, pull_metas, PART)
    return original(self, response, pull_metas, *args, **kwargs)
