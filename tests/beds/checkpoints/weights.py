"""Random weights that make a model pay attention."""

from __future__ import annotations

import torch
from torch import nn


def randomise(model: nn.Module, seed: int, gain: float = 2.0, embedding: float = 1.0) -> None:
    """Give every parameter a seeded value, in an order that no library version decides.

    Embeddings get N(0, embedding), matrices N(0, gain / sqrt(fan_in)): large enough that attention
    tells texts apart. Norm weights vary round 1, or round 0 where the model adds 1 itself.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if "embed" in name and parameter.dim() == 2:
                parameter.copy_(noise * embedding)
            elif parameter.dim() >= 2:
                fan_in = parameter[0].numel() if parameter.dim() != 3 else parameter.shape[-1]
                parameter.copy_(noise * gain / fan_in**0.5)
            elif "norm" in name.lower() and name.endswith("weight"):
                parameter.copy_(_norm_centre(model) + 0.1 * noise)
            else:
                parameter.copy_(0.1 * noise)


def _norm_centre(model: nn.Module) -> float:
    return 0.0 if "gemma" in type(model).__name__.lower() else 1.0
