"""Tiny generating models with seeded random weights: one KV cache group, and two.

Weights are large enough for logprobs to depend on every token of the context, so that wrong KV
shows in them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from tests.beds.tokenizer import VOCABULARY, save_tokenizer

POSITIONS = 256
WINDOW = 64
_SHAPE = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": POSITIONS,
}
SERVE_ARGS = (
    *("--dtype", "float32", "--enforce-eager", "--max-model-len", str(POSITIONS)),
    *("--block-size", "32", "--enable-prompt-tokens-details"),
    *("--chat-template", "{{ messages[0]['content'] }}"),
)


def _save(model: PreTrainedModel, path: Path) -> None:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "norm" not in name:
                # Tied embeddings are the logits, too: larger ones make every answer certain.
                scale = 0.1 if "embed" in name else 0.25
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    model.save_pretrained(path)
    save_tokenizer(path, POSITIONS)


def llama(path: Path) -> None:
    """Write a Llama of two layers: full attention only."""
    _save(LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **_SHAPE)), path)


def gemma3(path: Path) -> None:
    """Write a Gemma 3 of two layers: one with a sliding window, one with full attention."""
    config = Gemma3TextConfig(
        num_hidden_layers=2,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
        **_SHAPE,
    )
    _save(Gemma3ForCausalLM(config), path)


GENERATING_MODELS: dict[str, Callable[[Path], None]] = {"llama": llama, "gemma3": gemma3}
