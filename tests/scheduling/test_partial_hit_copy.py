"""PARTIAL_HIT_COPY: what a copied block holds, and what a hybrid engine answers after a hit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.beds.answers import TOLERANCE
from tests.beds.engines import call
from tests.beds.registered import registered

BLOCKS = 6
WHOLE = "PARTIAL_HIT_COPY.whole_blocks"


@pytest.fixture
def patched(installed_release: str, plugin: str) -> Iterator[None]:
    """The process with the plugin registered, or as it came."""
    import vllm.v1.worker.utils  # noqa: F401

    with registered(plugin == "with"):
        yield


@pytest.mark.behaviour(WHOLE, wrong=r"copied \d+ of 64 bytes")
@pytest.mark.parametrize("narrow_first", [True, False], ids=["state-first", "both-orders"])
@pytest.mark.parametrize("layers", [2, 3])
def test_all_of_a_shared_block_is_copied(patched: None, layers: int, narrow_first: bool) -> None:
    """Layers of two groups over each other; blocks that are source and target of one step."""
    import torch
    from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace

    memory = torch.arange(layers * BLOCKS * 16, dtype=torch.float32)
    per_layer = memory.view(layers, BLOCKS, 16)
    before = per_layer.clone()
    states = [per_layer[at].view(torch.uint8)[:, :12] for at in range(layers)]
    attention = [per_layer[at].view(BLOCKS, 2, 8) for at in range(layers)]
    pairs = list(zip(states, attention, strict=True))
    caches = [view for pair in pairs for view in pair]
    if not narrow_first:
        caches = [*pairs[0], *reversed(pairs[1])] + [v for pair in pairs[2:] for v in pair]
    copy_kv_cache_blocks_inplace(caches, BLOCKS, [(1, 2), (2, 4)])
    for at in range(layers):
        for source, target in ((1, 2), (2, 4)):
            equal = before[at, source].view(torch.uint8) == per_layer[at, target].view(torch.uint8)
            assert bool(equal.all()), f"copied {int(equal.sum())} of 64 bytes"
        untouched = [0, 1, 3, 5]
        assert bool((before[at, untouched] == per_layer[at, untouched]).all())


@pytest.mark.full
@pytest.mark.engine
@pytest.mark.behaviour(WHOLE, wrong=r"off by 0\.\d+ after a hit of 160 tokens")
def test_a_hit_inside_a_block_changes_no_answer(release: str, plugin: str, tmp_path: Path) -> None:
    found = call(release, "tests.beds.controls:partial_hit", tmp_path, 176, plugin=plugin)
    assert found["cached_tokens"] == 160
    assert found["hit"] <= TOLERANCE, f"off by {found['hit']} after a hit of 160 tokens"
