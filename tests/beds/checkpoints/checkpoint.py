"""What every family writes: a folder vLLM can serve, whose answers depend on all that is in it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.beds.tokenizer import VOCABULARY

VOCABULARY_SIZE = 128
POSITIONS = 512


@dataclass(frozen=True)
class Checkpoint:
    """A float32 checkpoint with seeded random weights, config and tokenizer.

    ``engine`` are the keyword arguments of ``vllm.LLM`` besides the model, ``norm`` is vLLM's name
    of one norm weight on the way of every token, ``needs`` the test-only packages its vLLM module
    imports (see ``tests.beds.vision``).
    """

    path: Path
    norm: str
    engine: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()

    @property
    def arguments(self) -> dict[str, Any]:
        """All keyword arguments of ``vllm.LLM`` for a small, eager, seeded engine on a CPU."""
        common = {
            "model": str(self.path),
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": POSITIONS,
            "max_num_seqs": 4,
            "seed": 0,
        }
        return {**common, **self.engine}

    def prompt(self, length: int = 40, seed: int = 0) -> list[int]:
        """``length`` token ids of words, the same for the same seed."""
        first, last = 4, len(VOCABULARY) - 1
        drawn = random.Random(seed)
        return [drawn.randint(first, last) for _ in range(length)]


def randomise(model: nn.Module, seed: int, gain: float = 2.0, embedding: float = 1.0) -> None:
    """Give every parameter a seeded value, in an order that no library version decides.

    Embeddings get N(0, embedding), matrices N(0, gain / sqrt(fan_in)): large enough that attention tells
    texts apart. Norm weights vary round 1, or round 0 where the model adds 1 itself.
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
