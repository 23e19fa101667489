"""Tiny checkpoints with random weights, big enough that logprobs tell right from wrong.

Families that generate; scoring models are in ``tests.beds.pooling_models``.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.beds.checkpoints.checkpoint import Checkpoint

# Family and the module that writes it; the modules import models of transformers, so not here.
FAMILIES = {
    "llama": "decoders",
    "gemma3": "decoders",
    "lfm2": "decoders",
    "qwen3_moe": "decoders",
    "mla": "mla",
    "idefics3": "pictures",
    "qwen25_vl": "pictures",
    "nemotron_vl": "nemotron_vl",
}


def write(family: str, path: Path, seed: int = 0) -> Checkpoint:
    """Write the checkpoint of a family into a folder; the same seed gives the same weights."""
    module = importlib.import_module(f"{__name__}.{FAMILIES[family]}")
    checkpoint: Checkpoint = getattr(module, family)(path, seed)
    return checkpoint
