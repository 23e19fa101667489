"""Offloading without a model: a real Scheduler and connector, and a worker whose copies succeed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vllm_ext.features.played_scheduler import (
    LENGTH,
    kv_spec,
    make_request,
    make_scheduler,
    output_of,
)

UNIT = 4


class Offload:
    """A scheduler of a model that needs no files, with one of vLLM's CPU offloading connectors.

    ``groups``: one per KV cache group, ``full``, ``window`` and ``chunked`` (of 32 tokens) or
    ``mamba`` (align), with its tokens per block, as ``full:16`` (the default), and
    ``full:16:draft`` if layers of a draft model are in it. ``unit``: tokens per prefix-cache key.
    ``loads``: the request and the number of tokens of each load that was planned.
    """

    def __init__(
        self,
        groups: Sequence[str],
        *,
        connector: str = "OffloadingConnector",
        unit: int | None = None,
        blocks: int = 400,
        batched_tokens: int = LENGTH,
        caching: bool = True,
        overlapped: bool = False,
        **extra: Any,
    ) -> None:
        parts = [group.split(":") for group in groups]
        self.kinds = [kind for kind, *_ in parts]
        self.sizes = [int(next(iter(size), 16)) for _, *size in parts]
        self.drafts = ["draft" in part for part in parts]
        self.unit = unit or min(self.sizes)
        self.blocks_per_chunk = extra.get("blocks_per_chunk", 1)
        how = {"batched_tokens": batched_tokens, "caching": caching, "overlapped": overlapped}
        self.scheduler = self._make(connector, blocks, extra, **how)
        self.connector = self.scheduler.connector
        self.loads: list[tuple[str, int]] = []
        allocated = self.connector.update_state_after_alloc

        def note_load(request: Any, blocks: Any, num_external_tokens: int) -> Any:
            if num_external_tokens:
                self.loads.append((request.request_id, num_external_tokens))
            return allocated(request, blocks, num_external_tokens)

        self.connector.update_state_after_alloc = note_load

    @property
    def offloading(self) -> Any:
        """The scheduler side of OffloadingConnector; None with another connector."""
        return getattr(self.connector, "connector_scheduler", None)

    def _make(self, connector: str, blocks: int, extra: dict[str, Any], **how: Any) -> Any:
        from vllm.config import KVTransferConfig
        from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

        transfer = KVTransferConfig(
            kv_connector=connector,
            kv_role="kv_both",
            kv_connector_extra_config={"cpu_bytes_to_use": 1 << 26, **extra},
        )
        bytes_per_block = 1024
        names = [f"layer.{at}" for at in range(len(self.kinds))]
        specs = [
            KVCacheGroupSpec([name], kv_spec(kind, size), is_eagle_group=draft)
            for name, kind, size, draft in zip(
                names, self.kinds, self.sizes, self.drafts, strict=True
            )
        ]
        tensor = KVCacheTensor(
            size=bytes_per_block * (blocks + 1),
            layers=names,
            layer_stride=0,
            block_stride=bytes_per_block,
            offset=0,
        )
        return make_scheduler(
            self.kinds,
            blocks,
            transfer=transfer,
            kv_cache=KVCacheConfig(blocks + 1, kv_cache_tensors=[tensor], kv_cache_groups=specs),
            block_size=max(self.sizes),
            unit=self.unit,
            **how,
        )

    def request(self, name: str, tokens: Sequence[int], answer: int = 1, **transfer: Any) -> Any:
        """A request of these prompt tokens; ``transfer`` is its ``kv_transfer_params``."""
        return make_request(name, tokens, answer, unit=self.unit, **transfer)

    def store(self, tokens: Sequence[int], *, partial: bool = False) -> None:
        """Put every chunk of a prompt into the CPU tier; ``partial``: every boundary, too."""
        from vllm.v1.kv_offload.base import make_offload_key

        request = self.request("stored", tokens)
        self.connector.on_new_request(request)
        context = self.offloading._req_status.pop("stored").req_context
        keys = [
            make_offload_key(request.block_hashes[end // self.unit - 1], group)
            for group, size in enumerate(self.sizes)
            for end in self._ends(size, len(tokens), partial)
        ]
        manager = self.offloading.manager
        output = manager.prepare_store(keys, context)
        assert len(output.keys_to_store) == len(set(keys))
        manager.complete_store(output.keys_to_store, context)

    def _ends(self, size: int, length: int, partial: bool) -> range:
        step = self.unit if partial else size * self.blocks_per_chunk
        return range(step, length + 1, step)

    def lookup(self, request: Any, local: int) -> int | None:
        """What the connector says can be loaded beyond ``local`` tokens, for a new request."""
        self.connector.on_new_request(request)
        return self.ask(request, local)

    def ask(self, request: Any, local: int) -> int | None:
        """The same for a request that was looked up before."""
        found, _ = self.connector.get_num_new_matched_tokens(request, local)
        # From 0.33.0 on the tiers are locked until the step ends.
        getattr(self.offloading, "_release_step", bool)()
        return found

    def step(self) -> Any:
        """One step of the engine: every copy it starts has succeeded at its end."""
        planned = self.scheduler.schedule()
        self.scheduler.update_from_output(planned, self._output(planned))
        return planned

    def run(self, steps: int = 50) -> None:
        """Steps until no request is left."""
        for _ in range(steps):
            if not self.scheduler.requests:
                # What finished requests still have to store.
                self.step()
                return
            self.step()
        raise RuntimeError(f"unfinished after {steps} steps: {list(self.scheduler.requests)}")

    def forget_local(self) -> None:
        """Empty the prefix cache of the device, not the connector's."""
        self.scheduler.kv_cache_manager.reset_prefix_cache()

    def _output(self, planned: Any) -> Any:
        from vllm.v1.outputs import KVConnectorOutput

        report, loaded = self._copies(planned.kv_connector_metadata)
        copies = KVConnectorOutput(finished_recving=loaded or None, kv_connector_worker_meta=report)
        return output_of(self.scheduler, planned, kv_connector_output=copies)

    def _copies(self, started: Any) -> tuple[Any, set[str]]:
        """The worker's report on the copies of a step, and the requests loaded."""
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading import common
        from vllm.v1.simple_kv_offload import metadata

        if isinstance(started, common.OffloadingConnectorMetadata):
            jobs = {**started.load_jobs, **started.store_jobs}
            report = common.OffloadingWorkerMetadata(completed_jobs=dict.fromkeys(jobs, 1))
            return report, {job.req_id for job in started.load_jobs.values()}
        loaded = {name for names in started.load_event_to_reqs.values() for name in names}
        if started.store_event == metadata.INVALID_JOB_ID:
            return None, loaded
        return metadata.SimpleCPUOffloadWorkerMetadata({started.store_event: 1}), loaded


@contextmanager
def counted_lookups(manager: Any) -> Iterator[list[Any]]:
    """The keys that ``lookup`` of a tier is asked for."""
    asked: list[Any] = []
    lookup = manager.lookup

    def counting(key: Any, context: Any) -> Any:
        asked.append(key)
        return lookup(key, context)

    manager.lookup = counting
    try:
        yield asked
    finally:
        del manager.lookup
