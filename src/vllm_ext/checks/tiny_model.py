"""A Llama too small to matter: a config and a tokenizer on disk; vLLM makes up the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WORDS = tuple(a + b for a in "bdfghklmnprstvz" for b in ("a", "e", "i", "o"))
_SPECIALS = ("<unk>", "<s>", "</s>")
_POSITIONS = 256
# Attention kernels of GPUs want heads of 64.
_HEADS, _HEAD = 2, 64

ARGUMENTS = ("--load-format", "dummy", "--enforce-eager", "--max-model-len", str(_POSITIONS))


def write_tiny_model(folder: Path) -> Path:
    """Write the model into ``folder``: two layers, 63 words, each word one token.

    It needs ``ARGUMENTS`` on the command line of ``vllm serve``: there are no weights.
    """
    vocabulary = {word: at for at, word in enumerate((*_SPECIALS, *WORDS))}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": _HEADS * _HEAD,
        "intermediate_size": 2 * _HEADS * _HEAD,
        "max_position_embeddings": _POSITIONS,
        "num_attention_heads": _HEADS,
        "num_hidden_layers": 2,
        "num_key_value_heads": _HEADS,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        # Every GPU computes in it.
        "torch_dtype": "float16",
        "vocab_size": len(vocabulary),
        "bos_token_id": vocabulary["<s>"],
        "eos_token_id": vocabulary["</s>"],
    }
    special = [
        {
            "id": vocabulary[word],
            "content": word,
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for word in _SPECIALS
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": _POSITIONS,
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, Any] = {
        "config.json": config,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": about,
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1))
    return folder
