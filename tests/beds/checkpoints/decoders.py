"""Text decoders: Llama, Gemma-3 (window + full), LFM2 (convolution + full), Qwen3 with experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.beds.checkpoints.checkpoint import (
    POSITIONS,
    VOCABULARY_SIZE,
    Checkpoint,
    randomise,
)
from tests.beds.tokenizer import END, PAD, START, VOCABULARY, save_tokenizer

HIDDEN = 64
HEADS = 2
# vLLM's CPU attention has kernels for head sizes from 32 on, and for blocks of 32 tokens.
HEAD_DIM = 32
BLOCK_SIZE = 32
WINDOW = 64
LFM2_BLOCK_SIZE = 128


def shape(**more: Any) -> dict[str, Any]:
    """What the configs of all decoders have in common: two layers of two heads of 32."""
    common = {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": POSITIONS,
        "pad_token_id": VOCABULARY[PAD],
        "bos_token_id": VOCABULARY[START],
        "eos_token_id": VOCABULARY[END],
        "tie_word_embeddings": False,
    }
    return {**common, **more}


def _finish(
    path: Path,
    model: PreTrainedModel,
    seed: int,
    norm: str,
    embedding: float = 1.0,
    **engine: Any,
) -> Checkpoint:
    randomise(model, seed, embedding=embedding)
    model.save_pretrained(path)
    save_tokenizer(path, POSITIONS, VOCABULARY_SIZE)
    return Checkpoint(path, norm, {"block_size": BLOCK_SIZE, **engine})


def llama(path: Path, seed: int = 0) -> Checkpoint:
    """Write a Llama: one KV group."""
    model = LlamaForCausalLM(LlamaConfig(**shape()))
    return _finish(path, model, seed, "model.layers.0.input_layernorm.weight")


def gemma3(path: Path, seed: int = 0) -> Checkpoint:
    """Write a text Gemma-3: a layer with a window of 64 and a full one, so two KV groups."""
    config = Gemma3TextConfig(
        **shape(),
        head_dim=HEAD_DIM,
        query_pre_attn_scalar=HEAD_DIM,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=WINDOW,
    )
    # Gemma multiplies embeddings by the square root of their size.
    model = Gemma3ForCausalLM(config)
    return _finish(
        path, model, seed, "model.layers.0.input_layernorm.weight", embedding=HIDDEN**-0.5
    )


def lfm2(path: Path, seed: int = 0) -> Checkpoint:
    """Write an LFM2: two short convolutions and two full layers, so a state group and a KV group.

    The engine caches prefixes of states at block ends ("align"), 128 tokens apart, and looks
    prefixes of attention up every 32 tokens.
    """
    config = Lfm2Config(
        **shape(
            num_hidden_layers=4,
            layer_types=["conv", "full_attention", "conv", "full_attention"],
            block_auto_adjust_ff_dim=False,
            # The one width the CPU library packs.
            conv_L_cache=4,
        ),
        # Names vLLM reads that are not in the config class.
        conv_dim=HIDDEN,
        conv_dim_out=HIDDEN,
        block_dim=HIDDEN,
        block_ff_dim=2 * HIDDEN,
        block_mlp_init_scale=1.0,
    )
    return _finish(
        path,
        Lfm2ForCausalLM(config),
        seed,
        "model.layers.0.operator_norm.weight",
        block_size=LFM2_BLOCK_SIZE,
        mamba_cache_mode="align",
        enable_prefix_caching=True,
    )


def qwen3_moe(path: Path, seed: int = 0) -> Checkpoint:
    """Write a Qwen3 with four experts per layer, of which a token takes two."""
    config = Qwen3MoeConfig(
        **shape(
            head_dim=HEAD_DIM,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=HIDDEN,
            decoder_sparse_step=1,
            norm_topk_prob=True,
        )
    )
    model = Qwen3MoeForCausalLM(config)
    return _finish(path, model, seed, "model.layers.0.input_layernorm.weight")
