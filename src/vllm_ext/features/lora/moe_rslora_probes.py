"""What an unpatched vLLM makes of experts' adapters: real classes, tensors of a few numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_ext.core.feature import Judgement, Verdict

MODULE = "model.layers.0.mlp.experts"
HIDDEN, INTERMEDIATE, RANK = 6, 4, 2


def expert(at: int, *, rank: int = RANK, scaling: float = 1.0, value: float = 1.0) -> Any:
    """The LoRA of one projection (0, 1, 2: w1, w2, w3) of an expert, all its numbers ``value``."""
    import torch
    from vllm.lora.lora_weights import LoRALayerWeights

    sizes = (INTERMEDIATE, HIDDEN) if at == 1 else (HIDDEN, INTERMEDIATE)
    return LoRALayerWeights(
        f"{MODULE}.{at}",
        rank,
        4 * rank,
        torch.full((rank, sizes[0]), value),
        torch.full((sizes[1], rank), value),
        scaling,
    )


def pack(loras: Sequence[Any]) -> Any:
    """Experts packed by vLLM."""
    from vllm.lora.lora_weights import PackedLoRALayerWeights

    return PackedLoRALayerWeights.pack_moe(list(loras), MODULE)


def scaling() -> Judgement:
    """Two experts whose w1, w2 and w3 have scalings 2, 3 and 5; alpha / rank is 4."""
    packed = pack(
        [expert(at, scaling=scale) for _ in range(2) for at, scale in enumerate((2, 3, 5))]
    )
    told = ", ".join(f"{scale:g}" for scale in packed.scaling)
    if list(packed.scaling) == [2, 3, 5]:
        return Judgement(Verdict.NATIVE, "each projection of the experts keeps its own scaling")
    return Judgement(
        Verdict.ACTIVE, f"experts whose projections are scaled by 2, 3, 5 are packed with {told}"
    )


def patterns() -> Judgement:
    """An adapter of rank 2 and alpha 4 whose q_proj has alpha 16."""
    import torch
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    config = {"r": 2, "lora_alpha": 4, "target_modules": [], "alpha_pattern": {"q_proj": 16}}
    stem = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{stem}.lora_A.weight": torch.ones(2, 4), f"{stem}.lora_B.weight": torch.ones(4, 2)}
    model = LoRAModel.from_lora_tensors(1, tensors, PEFTHelper.from_dict(config), device="cpu")
    (lora,) = model.loras.values()
    if lora.scaling == 8:
        return Judgement(Verdict.NATIVE, "alpha_pattern and rank_pattern of an adapter count")
    return Judgement(
        Verdict.ACTIVE,
        f"a module with alpha 16 and rank 2 by alpha_pattern is scaled by {lora.scaling:g}, not 8",
    )


def uneven_experts() -> Judgement:
    """Two experts, of which the second has no LoRA."""
    try:
        pack([expert(0), expert(1), expert(2), None, None, None])
    except (AssertionError, AttributeError) as error:
        return Judgement(
            Verdict.ACTIVE,
            f"an adapter without weights for an expert ends in {type(error).__name__}",
        )
    return Judgement(Verdict.NATIVE, "experts without LoRA are packed")
