"""Tiny scoring models with seeded random weights, one for each way of scoring that vLLM serves.

Each builder writes a complete float32 checkpoint (config, tokenizer, weights) into a folder and
returns what a test needs to serve it and to know, independently of the server, how many prompt
tokens a request has.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from tests.beds.tokenizer import END, PAD, START, VOCABULARY, load_tokenizer, save_tokenizer

ScoreType = Literal["bi-encoder", "cross-encoder", "late-interaction"]

BERT_POSITIONS = 128
DECODER_POSITIONS = 512
DECODER_BLOCK_SIZE = 32
_HIDDEN = 64
# vLLM's CPU attention has kernels for head sizes from 32 on.
_HEADS = 2
_COLBERT_DIM = 16


@dataclass(frozen=True)
class PoolingModel:
    """A checkpoint on disk, how to serve it, and an independent count of its prompt tokens."""

    path: Path
    score_type: ScoreType
    serve_args: tuple[str, ...]
    max_model_len: int

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer, loaded without the server."""
        return load_tokenizer(self.path)

    def token_count(self, text: str, pair: str | None = None) -> int:
        """Count the tokens of a text or of a joined pair, special tokens included."""
        return len(self.tokenizer.encode(text, pair).ids)

    def input_lengths(self, queries: Sequence[str], documents: Sequence[str]) -> list[int]:
        """Return the length of every prompt the engine has to process for a 1:N or N:N request."""
        if self.score_type == "cross-encoder":
            paired = list(queries) * len(documents) if len(queries) == 1 else queries
            return [self.token_count(q, d) for q, d in zip(paired, documents, strict=True)]
        return [self.token_count(text) for text in (*queries, *documents)]

    def prompt_tokens(
        self, queries: Sequence[str], documents: Sequence[str], truncate: int | None = None
    ) -> int:
        """Return the prompt tokens that usage must report, after `truncate_prompt_tokens`."""
        lengths = self.input_lengths(queries, documents)
        return sum(lengths if truncate is None else (min(n, truncate) for n in lengths))

    def joined_tokens(
        self, queries: Sequence[str], documents: Sequence[str], truncate: int | None = None
    ) -> int:
        """Return what a server reports that counts joined pairs: the query each time, and a pad."""
        if self.score_type == "cross-encoder":
            return self.prompt_tokens(queries, documents, truncate)
        paired = list(queries) * len(documents) if len(queries) == 1 else queries
        pairs = zip(paired, documents, strict=True)
        return sum(self.prompt_tokens([q], [d], truncate) + 1 for q, d in pairs)


def _randomise(model: nn.Module, seed: int, gain: float) -> None:
    """Give every parameter a seeded value, in an order that no library version decides.

    Matrices get `gain / sqrt(fan_in)`: large enough that attention tells texts apart.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if "embed" in name and parameter.dim() == 2:
                parameter.copy_(noise)
            elif parameter.dim() == 2:
                parameter.copy_(noise * gain / parameter.shape[1] ** 0.5)
            elif "norm" in name.lower() and name.endswith("weight"):
                parameter.copy_(1.0 + 0.1 * noise)
            else:
                parameter.copy_(0.1 * noise)


def _bert_config(**options: object) -> BertConfig:
    return BertConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=_HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=_HEADS,
        intermediate_size=2 * _HIDDEN,
        max_position_embeddings=BERT_POSITIONS,
        pad_token_id=VOCABULARY[PAD],
        **options,
    )


def _finish(
    path: Path, score_type: ScoreType, max_model_len: int, *extra_args: str
) -> PoolingModel:
    save_tokenizer(path, max_model_len)
    serve_args = (
        "--runner",
        "pooling",
        "--dtype",
        "float32",
        "--enforce-eager",
        "--max-model-len",
        str(max_model_len),
        *extra_args,
    )
    return PoolingModel(path, score_type, serve_args, max_model_len)


def bi_encoder(path: Path, seed: int = 1) -> PoolingModel:
    """Write a BERT embedding model (first-token pooling): cosine of two embeddings."""
    model = BertModel(_bert_config(), add_pooling_layer=False)
    _randomise(model, seed, gain=2.0)
    model.save_pretrained(path)
    return _finish(path, "bi-encoder", BERT_POSITIONS)


def decoder_embedder(path: Path, seed: int = 2) -> PoolingModel:
    """Write a causal embedding model (last-token pooling), whose prompts vLLM caches by prefix."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=_HIDDEN,
            num_hidden_layers=2,
            num_attention_heads=_HEADS,
            num_key_value_heads=_HEADS,
            intermediate_size=2 * _HIDDEN,
            max_position_embeddings=DECODER_POSITIONS,
            pad_token_id=VOCABULARY[PAD],
            bos_token_id=VOCABULARY[START],
            eos_token_id=VOCABULARY[END],
            tie_word_embeddings=True,
        )
    )
    _randomise(model, seed, gain=2.0)
    model.save_pretrained(path)
    return _finish(
        path,
        "bi-encoder",
        DECODER_POSITIONS,
        "--convert",
        "embed",
        "--block-size",
        str(DECODER_BLOCK_SIZE),
        "--enable-prefix-caching",
    )


def cross_encoder(path: Path, seed: int = 3) -> PoolingModel:
    """Write a BERT classifier with one label: the score of a joined pair."""
    model = BertForSequenceClassification(_bert_config(num_labels=1))
    _randomise(model, seed, gain=2.0)
    model.save_pretrained(path)
    return _finish(path, "cross-encoder", BERT_POSITIONS)


def late_interaction(path: Path, seed: int = 4) -> PoolingModel:
    """Write a ColBERT model: the sum over query tokens of the best document token."""
    model = BertModel(_bert_config(), add_pooling_layer=False)
    _randomise(model, seed, gain=2.0)
    generator = torch.Generator().manual_seed(seed + 1)
    projection = torch.randn(_COLBERT_DIM, _HIDDEN, generator=generator) / _HIDDEN**0.5
    weights = {f"bert.{name}": tensor for name, tensor in model.state_dict().items()}
    # 0.29.0 can't take the projection's size from the config; every release reads it off this.
    weights["linear.weight"] = projection
    path.mkdir(parents=True, exist_ok=True)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict() | {"architectures": ["HF_ColBERT"], "dtype": "float32"}
    (path / "config.json").write_text(json.dumps(config, indent=2))
    return _finish(path, "late-interaction", BERT_POSITIONS)


POOLING_MODELS: dict[str, Callable[[Path], PoolingModel]] = {
    builder.__name__: builder
    for builder in (bi_encoder, decoder_embedder, cross_encoder, late_interaction)
}
