"""An in-process engine with KV offloading and a KV cache so small that every prefix is evicted."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.beds.answers import Answer, ask
from tests.beds.checkpoints import decoders
from tests.beds.checkpoints.checkpoint import Checkpoint
from tests.beds.cpu_faults import cure

PROMPTS = range(5)
LENGTH = 176
ANSWER = 8
# Enough for one prompt and its answer, too few to keep five: all have two groups but Llama.
BLOCKS = {"llama": 14, "gemma3": 14, "lfm2": 8}
HOST_BYTES = 64 * 1024**2


@contextmanager
def engine(folder: Path, model: str, **arguments: Any) -> Iterator[tuple[Any, Checkpoint]]:
    """``vllm.LLM`` of a decoder (``llama``, ``gemma3``, ``lfm2``) with few KV blocks.

    The plugin is there if it is registered already: entry points are not loaded. All is taken down
    at the end, also where the engine doesn't start, so that the next one can.
    """
    checkpoint: Checkpoint = getattr(decoders, model)(folder / model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_PLUGINS", "")
        from vllm import LLM
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        cure()
        llm = None
        given = {
            **checkpoint.arguments,
            "max_model_len": 192,
            "num_gpu_blocks_override": BLOCKS[model],
            "enable_prefix_caching": True,
            "max_logprobs": -1,
            "disable_log_stats": False,
        }
        try:
            llm = LLM(**{**given, **arguments})
            yield llm, checkpoint
        finally:
            if llm is not None:
                llm.llm_engine.engine_core.shutdown()
            del llm
            _drop_connector()
            gc.collect()
            cleanup_dist_env_and_memory()


def _drop_connector() -> None:
    """The worker's connector is a global, which an engine that didn't start leaves behind."""
    from vllm.distributed.kv_transfer import kv_transfer_state

    try:
        kv_transfer_state.ensure_kv_transfer_shutdown()
    finally:
        kv_transfer_state._KV_CONNECTOR_AGENT = None


def transfer_config(connector: str, **extra: Any) -> Any:
    """``KVTransferConfig`` of a connector in both roles."""
    from vllm.config import KVTransferConfig

    return KVTransferConfig(
        kv_connector=connector,
        kv_role="kv_both",
        kv_connector_extra_config={"cpu_bytes_to_use": HOST_BYTES, **extra},
    )


def answers(llm: Any, checkpoint: Checkpoint) -> list[Answer]:
    """What the engine says to each prompt, one after another."""
    return [ask(llm, checkpoint.prompt(LENGTH, seed), ANSWER) for seed in PROMPTS]


def loaded_tokens(llm: Any) -> int:
    """Tokens that came from the connector, by vLLM's own count."""
    name = "vllm:external_prefix_cache_hits"
    return sum(int(metric.value) for metric in llm.get_metrics() if metric.name == name)


def spoil_host_memory(stored: Mapping[str, Any] | list[Any]) -> None:
    """Overwrite what was stored (int8, float32 in fact) with noise."""
    import torch

    generator = torch.Generator().manual_seed(1)
    for tensor in stored.values() if isinstance(stored, Mapping) else stored:
        tensor.view(torch.float32).normal_(generator=generator)
