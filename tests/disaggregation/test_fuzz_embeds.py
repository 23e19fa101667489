"""Embedding parts as a client must not send them: none ends an engine, none is HTTP 500."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import FEATURES
from tests.disaggregation.embedding_requests import WIDTH, Consumer, consumer, packed

EXAMPLES = 300
# What is wrong with uuids themselves is that feature's to mend: paths, and one for two sizes.
WILD = "MM_UUIDS" in FEATURES

_numbers = st.sampled_from([-4, -1, 0, 1, 1, 1, 2, 2, 3, 4, 4, 8, 2**31])
_grids = st.one_of(
    st.sampled_from([(1, 4, 4), (1, 2, 2), (1, 2, 8), (2, 4, 4)]),
    st.tuples(_numbers, _numbers, _numbers),
    st.lists(_numbers, max_size=4).map(tuple),
)
_dtypes = st.sampled_from(
    [torch.float32] * 4 + [torch.bfloat16, torch.int64, torch.bool, torch.complex64]
)
_shapes = st.one_of(
    st.tuples(st.integers(0, 9), st.just(WIDTH)),
    st.tuples(st.integers(0, 9), st.sampled_from([0, 1, WIDTH - 1, 2 * WIDTH])),
    st.lists(st.integers(0, 4), max_size=4).map(tuple),
)


@st.composite
def _tensors(draw: st.DrawFn) -> Any:
    """A packed tensor, or something in its place."""
    other = draw(st.sampled_from([None] * 12 + ["", "AAAA", "no base64!", 3, [[1.0]]]))
    if other is not None:
        return other
    tensor = torch.ones(draw(_shapes)) * draw(st.sampled_from([1.0, 0.5, float("nan"), 1e38]))
    return packed(tensor.to(draw(_dtypes)))


@st.composite
def _metadata(draw: st.DrawFn, grid: tuple[int, ...]) -> Any:
    kind = draw(st.sampled_from(["tensor"] * 6 + ["list", "rows", "float", "null"]))
    tensor = torch.tensor(grid)
    return {
        "tensor": lambda: packed(tensor),
        "list": lambda: list(grid),
        "rows": lambda: packed(tensor[None]),
        "float": lambda: packed(tensor.float()),
        "null": lambda: None,
    }[kind]()


@st.composite
def _parts(draw: st.DrawFn) -> dict[str, Any]:
    """An embedding part, with and without a uuid."""
    kind = draw(st.sampled_from(["image"] * 6 + ["video", "audio"]))
    grid = draw(_grids)
    held: Any = {}
    if draw(st.integers(0, 9)):
        held[f"{kind}_grid_thw"] = draw(_metadata(grid))
    if draw(st.booleans()):
        held[f"{kind}_embeds"] = draw(_tensors())
    if not draw(st.integers(0, 5)):
        held[draw(st.sampled_from(["pixel_values", "extra", "second_per_grid_ts"]))] = draw(
            _tensors()
        )
    held = draw(st.sampled_from([held] * 8 + [None, "", draw(_tensors())]))
    part = {"type": f"{kind}_embeds", f"{kind}_embeds": held}
    # "\ud800" is half a surrogate pair; JSON can say it.
    uuid = draw(
        st.one_of(st.none(), st.sampled_from(["", "a", "b", "\ud800"]), st.text(max_size=9))
    )
    if uuid is not None:
        safe = f"{uuid.encode('utf-8', 'backslashreplace').hex()}-{'-'.join(map(str, grid))}"
        part["uuid"] = uuid if WILD or "\ud800" in uuid else safe
    return part


_requests = st.tuples(st.lists(_parts(), min_size=1, max_size=3), st.booleans())


def _check(served: Consumer, parts: list[dict[str, Any]], stream: bool) -> None:
    reply = served.ask(*parts, stream=stream)
    assert reply.status_code < 500, f"HTTP {reply.status_code}: {reply.text}"
    assert '"code":500' not in reply.text.replace(" ", "")


@pytest.mark.full
@pytest.mark.engine
@pytest.mark.area("disaggregation")
@pytest.mark.parametrize("role", ["kv_both", "ec_consumer"])
def test_no_embedding_part_ends_an_engine(release: str, role: str, tmp_path: Path) -> None:
    """300 requests, the same in every run; a known one is answered right after every 20."""
    with consumer(release, role, tmp_path) as served:
        done = itertools.count(1)

        @settings(
            max_examples=EXAMPLES,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(_requests)
        def ask(request: tuple[list[dict[str, Any]], bool]) -> None:
            _check(served, *request)
            if next(done) % 20 == 0:
                served.check()

        ask()
        served.check()
        assert next(done) > EXAMPLES
