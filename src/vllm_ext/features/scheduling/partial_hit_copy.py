"""PARTIAL_HIT_COPY: a prefix hit inside a block copies all of the block, on hybrid models, too.

Layers of different KV groups lie over each other in one allocation. A state-space layer's view of a
block is narrower than that of the attention layer that shares the memory, and starts at the same
address; vLLM takes the two for one layer and copies what the first of them shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from vllm_ext.core.feature import Feature, Judgement, Part, Verdict, effect
from vllm_ext.core.seams import Wrap

_COPY = "vllm.v1.worker.utils:copy_kv_cache_blocks_inplace"

_BLOCKS, _WIDE, _NARROW = 4, 16, 3


def whole_blocks(
    original: Callable[..., None], kv_caches: Iterable[Any], *args: Any, **kwargs: Any
) -> None:
    """Hand vLLM, of all views that start at one address, only the one with the most bytes."""
    caches = list(kv_caches)
    widest: dict[tuple[Any, int], Any] = {}
    for cache in caches:
        start = (cache.device, cache.data_ptr())
        if start not in widest or _size(widest[start]) < _size(cache):
            widest[start] = cache
    first = {(cache.device, cache.data_ptr()): cache for cache in reversed(caches)}
    if any(_size(first[start]) < _size(cache) for start, cache in widest.items()):
        effect("PARTIAL_HIT_COPY.whole_blocks")
    original(list(widest.values()), *args, **kwargs)


def _size(view: Any) -> int:
    """Bytes a view shows."""
    return int(view.numel() * view.element_size())


def _probe() -> Judgement:
    """Copy a block of two layers that share memory, the narrow one first."""
    import torch
    from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace

    # Twice the memory of one layer: where a view covers its whole allocation vLLM copies that.
    memory = torch.arange(2 * _BLOCKS * _WIDE, dtype=torch.float32).view(2 * _BLOCKS, _WIDE)
    wide, narrow = memory[:_BLOCKS], memory[:_BLOCKS, :_NARROW]
    copy_kv_cache_blocks_inplace([narrow, wide], _BLOCKS, [(1, 2)])
    copied = int((wide[1] == wide[2]).sum())
    if copied == _WIDE:
        return Judgement(Verdict.NATIVE, "all of a block is copied that layers of two groups share")
    return Judgement(
        Verdict.ACTIVE,
        f"{copied} of {_WIDE} values of a block are copied that layers of two groups share",
    )


FEATURE = Feature(
    name="PARTIAL_HIT_COPY",
    area="scheduling",
    summary="A prefix hit inside a block is right on hybrid models, too.",
    why=(
        "With --prefix-match-unit below the block size, a prefix hit may end inside a block, whose "
        "computed part is then copied into a block of the request's own. On hybrid models with at "
        "least two layers per KV group, such as LFM2 with its short convolutions, vLLM copies only "
        "as much of an attention block as the state of a convolution takes: the request attends to "
        "zeros, and its answer is silently wrong."
    ),
    upstream_pr=(),
    parts=(
        Part(
            "whole_blocks",
            "Copies the whole of a block that layers of two KV groups share.",
            (Wrap(_COPY, whole_blocks),),
            _probe,
        ),
    ),
)
