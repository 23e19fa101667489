"""HostOffloadingSpec: OffloadingConnector's CPU offloading for models that run on the CPU.

Imports vLLM: it is loaded by vLLM's OffloadingSpecFactory when the spec is selected.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Future, wait
from typing import Any

import numpy as np
import torch
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from vllm_ext.connectors.host_copy import Copied, HostCopy, Lane, Move, Rows
from vllm_ext.core.feature import effect

logger = logging.getLogger("vllm.vllm_ext")


class HostOffloadingSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """vLLM's CPUOffloadingSpec (manager, policies, sizes, metrics) over a host copy engine.

    On other platforms than CPU it is CPUOffloadingSpec.
    """

    _host_worker: HostOffloadingWorker | None = None

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """This process's worker, made of ``kv_caches`` (CanonicalKVCaches) at the first call."""
        if not current_platform.is_cpu():
            return super().get_worker(kv_caches)
        if self._host_worker is None:
            self._host_worker = HostOffloadingWorker(
                kv_caches, self.blocks_per_chunk, self._chunks()
            )
        return self._host_worker

    def _chunks(self) -> int:
        # 0.29.0 calls chunks blocks.
        chunks = getattr(self, "num_chunks", None)
        count = int(self.num_blocks if chunks is None else chunks)
        if not count:
            logger.warning(
                "cpu_bytes_to_use=%s holds no KV at all: one chunk of %d block(s) takes %d bytes. "
                "Raise --kv-offloading-size, or cpu_bytes_to_use in --kv-transfer-config.",
                self.extra_config.get("cpu_bytes_to_use"),
                self.blocks_per_chunk,
                self.kv_bytes_per_chunk,
            )
        return count


class HostOffloadingWorker(OffloadingWorker):  # type: ignore[misc]
    """Stores KV blocks to chunks of ordinary memory and loads them, beside the forward pass.

    ``kv_caches.tensors[i].tensor`` is int8 [num_blocks, page bytes]; its chunks are int8
    [num_chunks * blocks_per_chunk, page bytes], so that a chunk is ``blocks_per_chunk`` rows.
    """

    def __init__(self, kv_caches: Any, blocks_per_chunk: int, num_chunks: int) -> None:
        cache = [entry.tensor for entry in kv_caches.tensors]
        # Never zeroed: what was not stored is never loaded, and unused memory is never touched.
        self.host = [
            torch.empty((num_chunks * blocks_per_chunk, tensor.shape[1]), dtype=torch.int8)
            for tensor in cache
        ]
        self._refs = kv_caches.group_data_refs
        self._blocks_per_chunk = blocks_per_chunk
        self._copies = HostCopy(cache, self.host)
        self._jobs: dict[int, Future[Copied]] = {}
        logger.info(
            "KV offloading on the host: %d chunks of %d block(s), %d tensors, %.2f GiB",
            num_chunks,
            blocks_per_chunk,
            len(cache),
            sum(tensor.nbytes for tensor in self.host) / 1024**3,
        )

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Start to store blocks (GPULoadStoreSpec) into chunks."""
        return self._submit(job_id, src_spec, dst_spec, Lane.STORE)

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
    ) -> bool:
        """Start to load chunks into blocks (GPULoadStoreSpec).

        ``expedited`` loads (0.33.0 and later) don't queue behind the others.
        """
        return self._submit(job_id, dst_spec, src_spec, Lane.EXPEDITED if expedited else Lane.LOAD)

    def get_finished(self) -> list[TransferResult]:
        """The jobs that finished since the last call; raises what a copy raised."""
        finished = [job_id for job_id, job in self._jobs.items() if job.done()]
        results = []
        for job_id in finished:
            copied = self._jobs.pop(job_id).result()
            effect("HOST_OFFLOAD.spec")
            results.append(TransferResult(job_id, True, copied.size, copied.seconds))
        return results

    def wait(self, job_ids: set[int]) -> None:
        """Return when these jobs are finished; ``get_finished`` still tells them."""
        wait([self._jobs[job_id] for job_id in job_ids if job_id in self._jobs])

    def shutdown(self) -> None:
        """Finish what was submitted."""
        self._copies.shutdown()

    def _submit(self, job_id: int, blocks: Any, chunks: Any, lane: Lane) -> bool:
        self._jobs[job_id] = self._copies.submit(self._moves(blocks, chunks.block_ids), lane)
        return True

    def _moves(self, blocks: Any, chunk_ids: Any) -> Iterator[Move]:
        block_ids = np.asarray(blocks.block_ids, np.int64)
        chunk_ids = np.asarray(chunk_ids, np.int64)
        block_at = chunk_at = 0
        groups = zip(blocks.group_sizes, blocks.block_indices, self._refs, strict=True)
        for size, first_block, refs in groups:
            if not size:
                continue
            skipped = first_block % self._blocks_per_chunk
            chunks = -(-(skipped + size) // self._blocks_per_chunk)
            rows = chunk_rows(
                chunk_ids[chunk_at : chunk_at + chunks], self._blocks_per_chunk, skipped, size
            )
            for ref in refs:
                yield Move(
                    ref.tensor_idx,
                    block_ids[block_at : block_at + size],
                    rows,
                    ref.page_size_bytes,
                )
            block_at += size
            chunk_at += chunks
        if (block_at, chunk_at) != (len(block_ids), len(chunk_ids)):
            raise ValueError(
                f"a KV transfer names {len(block_ids)} blocks and {len(chunk_ids)} chunks, but its "
                f"groups take {block_at} and {chunk_at}"
            )


def chunk_rows(chunk_ids: Rows, blocks_per_chunk: int, skipped: int, size: int) -> Rows:
    """Host rows of ``size`` blocks in a row that start ``skipped`` blocks into the first chunk."""
    at = np.arange(skipped, skipped + size)
    return chunk_ids[at // blocks_per_chunk] * blocks_per_chunk + at % blocks_per_chunk
