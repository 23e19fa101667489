"""DeepSeek-V3 with latent attention in the one geometry the CPU has a kernel for; dense MLPs."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from tests.beds.checkpoints.checkpoint import (
    POSITIONS,
    VOCABULARY_SIZE,
    Checkpoint,
    randomise,
)
from tests.beds.tokenizer import END, PAD, START, VOCABULARY, save_tokenizer

_LAYERS = 2
_HIDDEN = VOCABULARY_SIZE
# The rotary operator of the CPU library reads MLA's strided tensors wrongly, so that what a
# request gets depends on its batch; torch's own does not.
NATIVE_ROPE = {"custom_ops": ["none"]}
_BLOCK_SIZE = 16


def mla(path: Path, seed: int = 0, *, draft: bool = False, attention: float = 0.25) -> Checkpoint:
    """Write the model; with ``draft`` also one layer of multi-token prediction.

    The draft reads nothing but hidden states: embeddings are the identity, the head is a
    permutation, and the draft's projection is the same permutation. So how many of its tokens are
    accepted shows whether hidden states reached the right rows. ``attention`` scales the output
    of every attention layer: at 0.25 about half of the drafts hold, at 0.6 none.
    """
    config = DeepseekV3Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=_HIDDEN,
        intermediate_size=2 * _HIDDEN,
        num_hidden_layers=_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=64,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        # No layer has experts; vLLM wants the numbers all the same.
        first_k_dense_replace=_LAYERS + 8,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        n_group=1,
        topk_group=1,
        max_position_embeddings=POSITIONS,
        pad_token_id=VOCABULARY[PAD],
        bos_token_id=VOCABULARY[START],
        eos_token_id=VOCABULARY[END],
        tie_word_embeddings=False,
    )
    model = DeepseekV3ForCausalLM(config)
    randomise(model, seed)
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    written = config.to_dict() | {"architectures": ["DeepseekV3ForCausalLM"], "dtype": "float32"}
    if draft:
        written["num_nextn_predict_layers"] = 1
        weights = _with_draft(weights, seed, attention)
    else:
        written["num_nextn_predict_layers"] = 0
    path.mkdir(parents=True, exist_ok=True)
    contiguous = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(contiguous, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(written, indent=2))
    save_tokenizer(path, POSITIONS, VOCABULARY_SIZE)
    return Checkpoint(
        path,
        norm="model.layers.0.input_layernorm.weight",
        engine={"compilation_config": NATIVE_ROPE, "block_size": _BLOCK_SIZE},
    )


def _with_draft(
    weights: dict[str, torch.Tensor], seed: int, attention: float
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed + 1)
    next_word = torch.eye(_HIDDEN)[torch.randperm(_HIDDEN, generator=generator)]
    changed = dict(weights)
    for name, tensor in weights.items():
        if name.endswith("o_proj.weight"):
            noise = torch.randn(tensor.shape, generator=generator)
            changed[name] = attention * noise / tensor.shape[1] ** 0.5
        elif ".mlp." in name:
            changed[name] = 0.01 * tensor
        elif name.endswith("layernorm.weight"):
            changed[name] = torch.ones_like(tensor)
    changed["model.embed_tokens.weight"] = torch.eye(_HIDDEN)
    changed["model.norm.weight"] = torch.ones(_HIDDEN)
    changed["lm_head.weight"] = next_word
    layer = f"model.layers.{_LAYERS}."
    for name in list(changed):
        if name.startswith("model.layers.0."):
            changed[layer + name.removeprefix("model.layers.0.")] = changed[name].clone()
    ones = torch.ones(_HIDDEN)
    changed |= {
        layer + "enorm.weight": ones.clone(),
        layer + "hnorm.weight": ones.clone(),
        layer + "eh_proj.weight": torch.cat([torch.zeros(_HIDDEN, _HIDDEN), next_word], dim=1),
        layer + "embed_tokens.weight": torch.eye(_HIDDEN),
        layer + "shared_head.norm.weight": ones.clone(),
        layer + "shared_head.head.weight": next_word.clone(),
    }
    return changed
