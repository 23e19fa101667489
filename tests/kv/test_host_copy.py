"""The host copy engine, compiled and not, against one line of numpy."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ext import native
from vllm_ext.connectors.host_copy import Copied, HostCopy, Lane, Move

ENGINES = ("compiled", "streaming", "python")


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest) -> Iterator[None]:
    """The compiled copy, or what takes over where it was not built."""
    assert native.status()["_C"] == "built"
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "python":
            patch.setattr(native, "_buffers", lambda: None)
        if request.param == "streaming":
            patch.setattr(native.copy_spans, "__defaults__", (0,))
        yield


def _noise(rows: int, width: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, (rows, width), generator=generator, dtype=torch.int8)


def _memory(view: torch.Tensor) -> Any:
    """All bytes that a view is taken from."""
    return torch.empty(0, dtype=torch.uint8).set_(view.untyped_storage()).numpy().copy()


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
@given(data=st.data())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_rows_go_where_they_belong_and_nothing_else_changes(engine: None, data: Any) -> None:
    # Up to some lines of a cache, and beyond the reach of what is fetched ahead.
    width = data.draw(st.integers(1, 40) | st.integers(100, 300) | st.integers(4000, 9000))
    rows = data.draw(st.integers(1, 12))
    size = data.draw(st.integers(0, width))
    count = data.draw(st.integers(0, rows))
    pick = st.permutations(range(rows))
    cache_rows, host_rows = (np.array(data.draw(pick)[:count], np.int64) for _ in range(2))
    lane = data.draw(st.sampled_from(Lane))
    # Rows of a cache may lie apart, between those of other layers.
    apart = data.draw(st.integers(0, 7))
    cache, host = _noise(rows, width + apart, 1)[:, :width], _noise(rows, width, 2)
    expected_cache, expected_host = cache.numpy().copy(), host.numpy().copy()
    if lane is Lane.STORE:
        expected_host[host_rows, :size] = expected_cache[cache_rows, :size]
    else:
        expected_cache[cache_rows, :size] = expected_host[host_rows, :size]
    before = _memory(cache)

    copies = HostCopy([cache], [host])
    copied = copies.submit([Move(0, cache_rows, host_rows, size)], lane).result()
    copies.shutdown()

    assert copied.size == count * size and copied.seconds >= 0
    assert np.array_equal(cache.numpy(), expected_cache)
    assert np.array_equal(host.numpy(), expected_host)
    between = np.arange(before.size) % (width + apart) >= width
    assert np.array_equal(_memory(cache)[between], before[between])


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
def test_several_tensors_are_copied_in_one_job(engine: None) -> None:
    cache = [_noise(4, width, width) for width in (3, 8, 5)]
    host = [torch.zeros(6, width, dtype=torch.int8) for width in (3, 8, 5)]
    rows, chunks = np.array([3, 0]), np.array([5, 4])
    copies = HostCopy(cache, host)
    moves = [Move(at, rows, chunks, tensor.shape[1]) for at, tensor in enumerate(cache)]
    assert copies.submit(moves, Lane.STORE).result().size == 2 * (3 + 8 + 5)
    copies.shutdown()
    for mine, theirs in zip(cache, host, strict=True):
        assert torch.equal(theirs[[5, 4]], mine[[3, 0]])
        assert not theirs[:4].any()


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
@pytest.mark.parametrize(
    ("spans", "told"),
    [
        ([[0, 0, 0, 4], [0, 6, 0, 3]], "3 bytes at offset 6 of source buffer 0, which has 8 bytes"),
        ([[0, 0, 0, 4], [0, 0, 7, 2]], "2 bytes at offset 7 of destination buffer 0, which has 8"),
        ([[0, 0, 0, 4], [0, -1, 0, 1]], "1 bytes at offset -1 of source buffer 0"),
        ([[0, 0, 0, 4], [0, 0, 0, -1]], "-1 bytes at offset 0 of source buffer 0"),
        ([[0, 0, 0, 4], [0, 2**63 - 1, 0, 2]], "of source buffer 0"),
        ([[0, 0, 0, 4], [1, 0, 0, 1]], "names buffer 1 of 1"),
        ([[0, 0, 0, 4], [-1, 0, 0, 1]], "names buffer -1 of 1"),
    ],
)
def test_a_span_outside_its_buffers_copies_nothing(
    engine: None, spans: list[list[int]], told: str
) -> None:
    source, destination = np.arange(8, dtype=np.uint8), np.zeros(8, np.uint8)
    with pytest.raises(IndexError, match=told) as raised:
        native.copy_spans([source], [destination], np.array(spans, np.int64))
    assert "nothing was copied" in str(raised.value)
    assert not destination.any()


@pytest.mark.parametrize("engine", ENGINES[:1], indirect=True)
def test_the_compiled_copy_takes_no_other_shape(engine: None) -> None:
    source, destination = np.arange(8, dtype=np.uint8), np.zeros(8, np.uint8)
    for spans in (np.zeros((1, 4), np.int32), np.zeros(3, np.int64), np.zeros((1, 4))):
        with pytest.raises(ValueError, match=r"int64 array of shape \[n, 4\]"):
            native.copy_spans([source], [destination], spans)
    with pytest.raises(ValueError, match="1 source buffers and 0 destination buffers"):
        native.copy_spans([source], [], np.zeros((0, 4), np.int64))
    destination.flags.writeable = False
    with pytest.raises((ValueError, BufferError)):
        native.copy_spans([source], [destination], np.zeros((1, 4), np.int64))


def test_a_row_that_does_not_exist_is_refused_at_once() -> None:
    copies = HostCopy([_noise(4, 8, 1)], [_noise(6, 8, 2)])
    rows = np.array([0, 4])
    with pytest.raises(IndexError, match="row 4 of KV cache tensor 0 was asked for; it has 4"):
        copies.submit([Move(0, rows, rows, 8)], Lane.STORE)
    with pytest.raises(IndexError, match="row 6 of host tensor 0 was asked for; it has 6"):
        copies.submit([Move(0, np.array([0]), np.array([6]), 8)], Lane.LOAD)
    with pytest.raises(IndexError, match="9 bytes of each row of KV cache tensor 0"):
        copies.submit([Move(0, rows[:1], rows[:1], 9)], Lane.LOAD)
    with pytest.raises(ValueError, match="2 KV cache rows for 1 host rows"):
        copies.submit([Move(0, rows, rows[:1], 8)], Lane.LOAD)
    copies.shutdown()


def test_tensors_that_are_no_rows_of_bytes_are_refused() -> None:
    good = _noise(4, 8, 1)
    for wrong in (good.float(), good[0], good.T):
        with pytest.raises(ValueError, match="KV cache tensor 0"):
            HostCopy([wrong], [good])


def test_loads_do_not_wait_for_stores_and_each_lane_keeps_its_order() -> None:
    copies = HostCopy([_noise(4, 8, 1)], [_noise(4, 8, 2)])
    release, started = threading.Event(), threading.Event()

    def hold() -> Copied:
        started.set()
        release.wait()
        return Copied(0, 0.0)

    held = copies._lanes[Lane.STORE].submit(hold)
    started.wait()
    row = np.array([0])
    behind = copies.submit([Move(0, row, row, 8)], Lane.STORE)
    assert copies.submit([Move(0, row, row, 8)], Lane.LOAD).result().size == 8
    assert copies.submit([Move(0, row, row, 8)], Lane.EXPEDITED).result().size == 8
    assert not held.done() and not behind.done()
    release.set()
    assert behind.result().size == 8
    assert held.done()
    copies.shutdown()
