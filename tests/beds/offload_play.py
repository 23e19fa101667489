"""The play of ``kv_play`` with vLLM's OffloadingConnector: blocks go to host memory and come back.

The connector and its CPU tier are vLLM's own, the copies are played: a store reads its blocks as
late as the connector allows, which is before a step that must not find them unread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tests.beds.kv_play import Play, Step, Transfer
from vllm_ext.features.kv.offload_probe import Offload
from vllm_ext.features.played_scheduler import make_request

CHUNKS = 64
_BYTES = 1024


class OffloadPlay(Play):
    """Requests may name ``max_load_tokens``; the tier has room for 64 blocks."""

    def _make_scheduler(self) -> Any:
        shape = self.shape
        self._offload = Offload(
            shape.groups,
            blocks=shape.blocks,
            batched_tokens=shape.batched_tokens,
            caching=shape.caching,
            overlapped=shape.depth > 1,
            cpu_bytes_to_use=CHUNKS * _BYTES,
        )
        self._chunks: dict[int, list[Any]] = {}
        self._caps: dict[str, int] = {}
        self._jobs: dict[int, Transfer] = {}
        return self._offload.scheduler

    def _request(
        self, name: str, prompt: Sequence[int], answer: int, cap: int | None = None, **wish: Any
    ) -> Any:
        if cap is None:
            return make_request(name, prompt, answer)
        self._caps[name] = cap
        return make_request(name, prompt, answer, max_load_tokens=cap)

    def _begin_transfers(self, step: Step) -> None:
        asked = step.planned.kv_connector_metadata
        for job, entry in asked.store_jobs.items():
            self._begin(job, self._store(step, entry))
        if asked.jobs_to_flush:
            # The worker waits for the device, then for these copies, before it goes on.
            for earlier in self.flying:
                self._carry_out(earlier)
            for job in asked.jobs_to_flush & self._jobs.keys():
                self._jobs[job].after = None
                self._jobs[job].happen()
        for job, entry in asked.load_jobs.items():
            self.counts["loads"] += 1
            load = self._fetch(step, entry)
            if getattr(entry, "sync", False):
                load.kind = "awaited load"
                load.ready = True
                step.loads.append(load)
            self._begin(job, load)

    def _begin(self, job: int, transfer: Transfer) -> None:
        self._jobs[job] = transfer
        self.transfers.append(transfer)

    def _store(self, step: Step, entry: Any) -> Transfer:
        pairs = list(_pairs(entry.src_spec, entry.dst_spec))

        def carry_out() -> None:
            for group, block, chunk in pairs:
                self._chunks[chunk] = self.contents.take(group, block)

        blocks = {block for _, block, _ in pairs}
        return Transfer(entry.req_id, step.number + 1, blocks, carry_out, "store", after=step)

    def _fetch(self, step: Step, entry: Any) -> Transfer:
        pairs = list(_pairs(entry.dst_spec, entry.src_spec))

        def carry_out() -> None:
            for group, block, chunk in pairs:
                self.contents.put(group, block, self._chunks[chunk])

        return Transfer(entry.req_id, step.number, {block for _, block, _ in pairs}, carry_out)

    def _begin_sending(self, step: Step) -> None:
        """Stores don't hold back the blocks of a request that has finished."""

    def _tell_end(self, transfer: Transfer, report: Any) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
            OffloadingWorkerMetadata,
        )

        (job,) = (job for job, one in self._jobs.items() if one is transfer)
        del self._jobs[job]
        done = report.kv_connector_worker_meta or OffloadingWorkerMetadata()
        done.completed_jobs[job] = 1
        report.kv_connector_worker_meta = done
        if transfer.kind == "load":
            super()._tell_end(transfer, report)

    def problems(self) -> list[str]:
        """What ``Play`` finds, and loads beyond a request's cap."""
        return super().problems() + [
            f"{name} loaded {tokens} tokens with a cap of {self._caps[name]}"
            for name, tokens in self._offload.loads
            if tokens > self._caps.get(name, tokens)
        ]


def _pairs(blocks: Any, chunks: Any) -> Iterator[tuple[int, int, int]]:
    """Group, block and chunk of each copy."""
    groups = [group for group, size in enumerate(blocks.group_sizes) for _ in range(size)]
    ids = ([int(number) for number in spec.block_ids] for spec in (blocks, chunks))
    yield from zip(groups, *ids, strict=True)
