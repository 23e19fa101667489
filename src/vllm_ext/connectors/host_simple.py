"""What SimpleCPUOffloadConnector's worker needs on the CPU: streams that are none, and copies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from vllm_ext.connectors.host_copy import Copied, HostCopy, Lane, Move
from vllm_ext.core.feature import effect


class HostStream:
    """Stands for a CUDA stream where there is none."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """The lowest and the highest priority."""
        return 0, 0


class HostEvent:
    """A copy, in the form of the event that vLLM records behind it."""

    def __init__(self, job: Future[Copied]) -> None:
        self._job = job

    def query(self) -> bool:
        """Whether the copy is finished; raises what it raised."""
        return self._job.done() and bool(self._job.result())

    def synchronize(self) -> None:
        """Wait for the copy; raises what it raised."""
        self._job.result()


class HostCopyBackend:
    """The copies of one SimpleCPUOffloadWorker, between blocks of the same names.

    ``cache`` and ``host`` map a name to int8 [blocks, bytes per block].
    """

    def __init__(self, cache: Mapping[str, torch.Tensor], host: Mapping[str, torch.Tensor]) -> None:
        names = list(cache)
        self._widths = [cache[name].shape[1] for name in names]
        self._copies = HostCopy([cache[name] for name in names], [host[name] for name in names])
        # vLLM numbers its stores upwards.
        self.last_store = -1

    def launch_copy(
        self,
        src_blocks: Sequence[int],
        dst_blocks: Sequence[int],
        is_store: bool,
        event_idx: int,
        events_list: list[tuple[int, HostEvent]],
        wait_event: Any = None,
    ) -> None:
        """Start to copy blocks and append (``event_idx``, its event) to ``events_list``.

        The event is there when this returns, so that a flush can't overlook it.
        """
        cache, host = (src_blocks, dst_blocks) if is_store else (dst_blocks, src_blocks)
        cache_rows, host_rows = np.asarray(cache, np.int64), np.asarray(host, np.int64)
        moves = (Move(at, cache_rows, host_rows, width) for at, width in enumerate(self._widths))
        job = self._copies.submit(moves, Lane.STORE if is_store else Lane.LOAD)
        events_list.append((event_idx, HostEvent(job)))
        effect("HOST_OFFLOAD.simple_worker")

    def store(self, step: Any, events: list[tuple[int, HostEvent]]) -> None:
        """Start the stores of a step (SimpleCPUOffloadMetadata), unless they have been started."""
        if step.store_event > self.last_store:
            self.last_store = step.store_event
            blocks = step.store_gpu_blocks, step.store_cpu_blocks
            self.launch_copy(*blocks, True, step.store_event, events)

    def shutdown(self) -> None:
        """Finish what was submitted."""
        self._copies.shutdown()


@contextmanager
def host_streams() -> Iterator[None]:
    """``torch.cuda.Stream`` that a CPU can make, for the length of a call."""
    stream = torch.cuda.Stream
    torch.cuda.Stream = HostStream
    try:
        yield
    finally:
        torch.cuda.Stream = stream
