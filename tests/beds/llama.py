"""A real vLLM Llama without an engine: its modules with unset weights, in a world of one rank."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def llama(folder: Path, layers: int, hidden: int, dtype: str = "bfloat16") -> Iterator[Any]:
    """vLLM's LlamaForCausalLM on the CPU: 8 heads, vocabulary 1000, all weights ``dtype``.

    Sets up vLLM's distributed state (gloo, one rank) and takes it away at the end.
    """
    import torch
    from vllm.config import (
        DeviceConfig,
        LoadConfig,
        ModelConfig,
        VllmConfig,
        set_current_vllm_config,
    )
    from vllm.distributed import parallel_state
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.llama import LlamaForCausalLM

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": hidden * 11 // 4,
        "max_position_embeddings": 256,
        "num_attention_heads": 8,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "vocab_size": 1000,
    }
    (folder / "config.json").write_text(json.dumps(config))
    before, entry = torch.get_default_dtype(), ModelRegistry.models["LlamaForCausalLM"]
    try:
        # A class that is registered itself is inspected here instead of in a process of its own.
        ModelRegistry.register_model("LlamaForCausalLM", LlamaForCausalLM)
        whole = VllmConfig(
            model_config=ModelConfig(str(folder), skip_tokenizer_init=True, dtype=dtype),
            load_config=LoadConfig(load_format="dummy"),
            device_config=DeviceConfig("cpu"),
        )
        with set_current_vllm_config(whole):
            store = f"file://{folder / 'store'}"
            parallel_state.init_distributed_environment(1, 0, store, 0, "gloo")
            parallel_state.ensure_model_parallel_initialized(1, 1)
            torch.set_default_dtype(getattr(torch, dtype))
            model = initialize_model(whole)
        torch.set_default_dtype(before)
        yield model
    finally:
        torch.set_default_dtype(before)
        ModelRegistry.models["LlamaForCausalLM"] = entry
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


def load_dummy(model: Any) -> None:
    """vLLM's own load of a module with load_format=dummy."""
    from vllm.config import LoadConfig
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    DummyModelLoader(LoadConfig(load_format="dummy")).load_weights(model, None)
