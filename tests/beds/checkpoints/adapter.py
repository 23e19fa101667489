"""A LoRA adapter for any checkpoint of this package, as PEFT writes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.beds.checkpoints.checkpoint import Checkpoint


@dataclass(frozen=True)
class Adapter:
    """A folder with an adapter; ``number`` is what vLLM tells adapters apart by."""

    path: Path
    number: int = 1

    def request(self) -> Any:
        """``vllm.lora.request.LoRARequest`` for it."""
        from vllm.lora.request import LoRARequest

        return LoRARequest(f"adapter-{self.number}", self.number, str(self.path))


def write_adapter(
    path: Path,
    checkpoint: Checkpoint,
    number: int = 1,
    *,
    rank: int = 4,
    alpha: int = 8,
    ranks: Mapping[str, int] | None = None,
    **config: Any,
) -> Adapter:
    """Write an adapter of all projections the checkpoint's family adapts; ``number`` seeds it.

    Scaling is ``alpha / rank``; its weights are large enough that log-probabilities move by whole
    numbers. ``ranks``: other ranks, by the ends of module names. ``config`` is added to the
    adapter's configuration.
    """
    generator = torch.Generator().manual_seed(number)
    weights: dict[str, torch.Tensor] = {}
    with safe_open(checkpoint.path / "model.safetensors", "pt") as stored:
        for name in sorted(stored.keys()):
            module = name.removesuffix(".weight")
            if not module.endswith(checkpoint.adapts) or "vision" in module or "visual" in module:
                continue
            rows, columns = stored.get_slice(name).get_shape()
            inner = next((r for end, r in (ranks or {}).items() if module.endswith(end)), rank)
            down = torch.randn(inner, columns, generator=generator) / columns**0.5
            up = torch.randn(rows, inner, generator=generator) / inner**0.5
            weights[f"base_model.model.{module}.lora_A.weight"] = down
            weights[f"base_model.model.{module}.lora_B.weight"] = up
    if not weights:
        raise ValueError(f"{checkpoint.path} has no module that ends in {checkpoint.adapts}")
    written = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(checkpoint.adapts),
        "bias": "none",
        "use_rslora": False,
        **config,
    }
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps(written, indent=2))
    save_file(weights, path / "adapter_model.safetensors", metadata={"format": "pt"})
    return Adapter(path, number)
