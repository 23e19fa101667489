"""Copies of KV blocks between the KV cache and host memory, where both are memory of the host.

Jobs are carried out by threads of their own, without the interpreter lock. Loads don't wait for
stores: each lane has one thread and keeps the order in which its jobs were submitted.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import torch

from vllm_ext.native import copy_spans

Rows = np.ndarray[Any, np.dtype[np.int64]]


class Lane(StrEnum):
    """Where a job waits its turn; EXPEDITED is for loads that a step waits for."""

    STORE = "store"
    LOAD = "load"
    EXPEDITED = "expedited-load"


@dataclass(frozen=True)
class Move:
    """Rows of one tensor: ``cache_rows[i]`` and ``host_rows[i]`` (int64 [n]) hold the same KV.

    The first ``size`` bytes of each row are copied.
    """

    tensor: int
    cache_rows: Rows
    host_rows: Rows
    size: int


@dataclass(frozen=True)
class Copied:
    """What a finished job did: bytes copied, and the seconds that took."""

    size: int
    seconds: float


class HostCopy:
    """Copies rows between the tensors of a KV cache and tensors of host memory, pair by pair.

    All tensors are int8 of shape [rows, bytes], on the CPU, their rows contiguous.
    Raises ValueError if they aren't.
    """

    def __init__(self, cache: Sequence[torch.Tensor], host: Sequence[torch.Tensor]) -> None:
        if len(cache) != len(host):
            raise ValueError(f"{len(cache)} KV cache tensors for {len(host)} host tensors")
        self._cache = [
            _Region.of(tensor, f"KV cache tensor {at}") for at, tensor in enumerate(cache)
        ]
        self._host = [_Region.of(tensor, f"host tensor {at}") for at, tensor in enumerate(host)]
        self._lanes = {lane: ThreadPoolExecutor(1, f"vllm-ext-{lane}") for lane in Lane}

    def submit(self, moves: Iterable[Move], lane: Lane) -> Future[Copied]:
        """Start to copy, to the host in the lane STORE and from it in the others.

        Rows are checked here: IndexError, and nothing is copied, if one doesn't exist.
        """
        to_host = lane is Lane.STORE
        spans = self._spans(moves, to_host)
        sources, destinations = (self._cache, self._host) if to_host else (self._host, self._cache)
        return self._lanes[lane].submit(
            _copy,
            [region.bytes for region in sources],
            [region.bytes for region in destinations],
            spans,
        )

    def shutdown(self) -> None:
        """Finish what was submitted, and end the threads."""
        for lane in self._lanes.values():
            lane.shutdown()

    def _spans(self, moves: Iterable[Move], to_host: bool) -> Rows:
        wanted = list(moves)
        spans = np.empty((sum(len(move.cache_rows) for move in wanted), 4), np.int64)
        at = 0
        for move in wanted:
            cache, host = self._cache[move.tensor], self._host[move.tensor]
            count = len(move.cache_rows)
            if count != len(move.host_rows):
                raise ValueError(f"{count} KV cache rows for {len(move.host_rows)} host rows")
            block = spans[at : at + count]
            block[:, 0] = move.tensor
            block[:, 1 if to_host else 2] = cache.offsets(move.cache_rows, move.size)
            block[:, 2 if to_host else 1] = host.offsets(move.host_rows, move.size)
            block[:, 3] = move.size
            at += count
        return spans


def _copy(
    sources: list[np.ndarray[Any, Any]],
    destinations: list[np.ndarray[Any, Any]],
    spans: Rows,
) -> Copied:
    start = time.perf_counter()
    size = copy_spans(sources, destinations, spans)
    return Copied(size, time.perf_counter() - start)


@dataclass(frozen=True)
class _Region:
    """A tensor as the bytes it lies in."""

    name: str
    bytes: np.ndarray[Any, np.dtype[np.uint8]]
    rows: int
    stride: int
    width: int

    @classmethod
    def of(cls, tensor: torch.Tensor, name: str) -> _Region:
        if tensor.device.type != "cpu" or tensor.dtype != torch.int8 or tensor.ndim != 2:
            raise ValueError(
                f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; host copies "
                "take int8 tensors of shape [rows, bytes] on the CPU"
            )
        rows, width = tensor.shape
        stride = tensor.stride(0)
        if width and tensor.stride(1) != 1:
            raise ValueError(f"{name} has rows that are not contiguous ({tensor.stride()})")
        extent = (rows - 1) * stride + width if rows else 0
        flat = torch.as_strided(tensor, (extent,), (1,)).view(torch.uint8)
        return cls(name, flat.numpy(), rows, stride, width)

    def offsets(self, rows: Rows, size: int) -> Rows:
        """Offset of each row in bytes."""
        if size > self.width:
            raise IndexError(
                f"{size} bytes of each row of {self.name} were asked for; it has {self.width}"
            )
        if len(rows) and not (rows.min() >= 0 and rows.max() < self.rows):
            wrong = rows[(rows < 0) | (rows >= self.rows)][0]
            raise IndexError(
                f"row {wrong} of {self.name} was asked for; it has {self.rows}, nothing was copied"
            )
        return rows * self.stride
