"""Faults of vLLM's CPU build that tests would blame on us, and their cures, for tests alone.

What each fault is, and how it was found, is told in docs/testing.md.
"""

from __future__ import annotations


def convolutions_in_any_dtype() -> None:
    """Keep short convolutions from being packed, which fails for all but bfloat16.

    On a CPU with AVX512-BF16 every release packs the weights of a short convolution for a kernel
    that takes bfloat16 alone; LFM2 in float32 then dies while it is loaded.
    """
    import torch

    torch.cpu._is_avx512_bf16_supported = lambda: False
