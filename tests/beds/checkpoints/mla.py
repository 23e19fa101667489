"""A DeepSeek-V3 with two dense layers and one MTP module, made so that wrong rows show.

Embeddings are one-hot, and the head is a fixed permutation of the vocabulary: the model says the
successor of its last token, unless what attention adds (random, ``attention`` says how much) says
otherwise. So every logprob depends on the whole context.

The MTP module is given the embedding and the target's hidden state and looks at the hidden state
alone: it drafts right only if the state of the right row reaches it. ``attention`` steers how often:
near 0 nearly every draft is accepted, from about 0.6 on none is.

The sizes of the latent cache (512 + 64) are the only ones vLLM's CPU decode kernel knows.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import DeepseekV3Config

# Also the hidden size: embeddings are one-hot.
VOCABULARY = 128
POSITIONS = 512
_LAYERS = 2
_HEADS = 2
_Q_RANK, _KV_RANK = 64, 512
_NOPE, _ROPE, _VALUE = 64, 64, 64
_MLP = 128


def write_mla(folder: Path, *, attention: float = 0.25, seed: int = 0) -> Path:
    """Write the checkpoint (float32, config and weights, no tokenizer); return ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    _config().save_pretrained(folder)
    save_file(_weights(attention, seed), folder / "model.safetensors", {"format": "pt"})
    return folder


def successor(seed: int = 0) -> torch.Tensor:
    """The token the model says after each token where attention doesn't matter: int64 [128]."""
    return torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(seed))


def _config() -> DeepseekV3Config:
    return DeepseekV3Config(
        architectures=["DeepseekV3ForCausalLM"],
        dtype="float32",
        vocab_size=VOCABULARY,
        hidden_size=VOCABULARY,
        intermediate_size=_MLP,
        moe_intermediate_size=_MLP,
        num_hidden_layers=_LAYERS,
        # Experts are never reached, not even by the MTP module, whose layer follows the others.
        first_k_dense_replace=_LAYERS + 1,
        n_routed_experts=2,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=1,
        num_nextn_predict_layers=1,
        num_attention_heads=_HEADS,
        num_key_value_heads=_HEADS,
        q_lora_rank=_Q_RANK,
        kv_lora_rank=_KV_RANK,
        qk_nope_head_dim=_NOPE,
        qk_rope_head_dim=_ROPE,
        v_head_dim=_VALUE,
        max_position_embeddings=POSITIONS,
        rope_theta=10_000.0,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )


def _weights(attention: float, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed + 1)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * gain / columns**0.5

    one_hot = torch.eye(VOCABULARY)
    step = successor(seed)
    # Row j of the head answers to the hidden state of the token whose successor is j.
    head = one_hot[step.argsort()]
    found = {"model.embed_tokens.weight": one_hot, "lm_head.weight": head}
    for at in range(_LAYERS + 1):
        layer = f"model.layers.{at}."
        shapes = {
            "self_attn.q_a_proj": (_Q_RANK, VOCABULARY, 1.0),
            "self_attn.q_b_proj": (_HEADS * (_NOPE + _ROPE), _Q_RANK, 2.0),
            "self_attn.kv_a_proj_with_mqa": (_KV_RANK + _ROPE, VOCABULARY, 1.0),
            "self_attn.kv_b_proj": (_HEADS * (_NOPE + _VALUE), _KV_RANK, 1.0),
            "self_attn.o_proj": (VOCABULARY, _HEADS * _VALUE, attention),
            "mlp.gate_proj": (_MLP, VOCABULARY, 1.0),
            "mlp.up_proj": (_MLP, VOCABULARY, 1.0),
            "mlp.down_proj": (VOCABULARY, _MLP, 0.02),
        }
        for name, (rows, columns, gain) in shapes.items():
            found[f"{layer}{name}.weight"] = matrix(rows, columns, gain)
        sizes = {
            "input_layernorm": VOCABULARY,
            "post_attention_layernorm": VOCABULARY,
            "self_attn.q_a_layernorm": _Q_RANK,
            "self_attn.kv_a_layernorm": _KV_RANK,
        }
        found |= {f"{layer}{name}.weight": torch.ones(size) for name, size in sizes.items()}
    found["model.norm.weight"] = torch.ones(VOCABULARY)
    module = f"model.layers.{_LAYERS}."
    found |= {f"{module}{name}.weight": torch.ones(VOCABULARY) for name in ("enorm", "hnorm")}
    # The state of one token becomes that of its successor; the embedding, in front, counts nothing.
    onward = torch.cat([torch.zeros_like(one_hot), head], dim=1)
    found[f"{module}eh_proj.weight"] = onward / VOCABULARY**0.5
    found[f"{module}shared_head.norm.weight"] = torch.ones(VOCABULARY)
    found[f"{module}shared_head.head.weight"] = head
    found[f"{module}embed_tokens.weight"] = one_hot
    return {name: tensor.clone().contiguous() for name, tensor in found.items()}
