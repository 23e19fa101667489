"""Faults of vLLM's CPU build that tests would blame on us, and their cures, for tests alone.

What each fault is, and how it was found, is told in docs/testing.md.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any


def cure() -> None:
    """Cure what can be cured in this process; before an engine is made in it, any number of times.

    Raises nothing where a release has no such fault.
    """
    _convolutions_in_any_dtype()
    _base_rows_without_adapter()


def _convolutions_in_any_dtype() -> None:
    """Keep short convolutions from being packed, which fails for all but bfloat16.

    On a CPU with AVX512-BF16 every release packs the weights of a short convolution for a kernel
    that takes bfloat16 alone; LFM2 in float32 then dies while it is loaded.
    """
    import torch

    torch.cpu._is_avx512_bf16_supported = lambda: False


def _base_rows_without_adapter() -> None:
    """Keep requests without an adapter, whose index is -1, from getting that of the last slot.

    What enters the second half of an adapter is zero for them, and so is what comes out; 0.33.0
    masks them itself.
    """
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    for name in ("bgmv_expand", "bgmv_expand_slice"):
        original = getattr(lora_ops, name)
        if hasattr(original, "masks_base_rows"):
            continue
        masking = _masking(original)
        for module in (lora_ops, punica_cpu, sys.modules[lora_ops.__package__]):
            if getattr(module, name, None) is original:
                setattr(module, name, masking)


def _masking(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def masking(
        inputs: Any, weights: Any, output: Any, indices: Any, *rest: Any, **more: Any
    ) -> None:
        base = (indices < 0).unsqueeze(-1)
        original(inputs.masked_fill(base, 0), weights, output, indices, *rest, **more)

    masking.masks_base_rows = True  # type: ignore[attr-defined]
    return masking
