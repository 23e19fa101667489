"""Functions that run inside every worker of an engine, called with the worker.

A worker that is watched notes, per step, the tokens of the whole batch and those of its rank.
"""

from __future__ import annotations

import os
from typing import Any

import psutil

STEPS = "vllm_ext_test_steps"


def facts(worker: Any) -> dict[str, Any]:
    """What a worker is: its runner, its kernels, its rank, and the steps it was watched in."""
    from vllm.triton_utils import HAS_TRITON, triton
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    runner = worker.model_runner
    manager = getattr(runner, "pcp_manager", None)
    context = runner.vllm_config.compilation_config.static_forward_context
    return {
        "process": os.getpid(),
        "started": psutil.Process().create_time(),
        "rank": worker.rank,
        "runner_v2": isinstance(runner, GPUModelRunner),
        "triton": HAS_TRITON,
        "interpreted": triton.knobs.runtime.interpret,
        "attention": sorted({layer.get_attn_backend().get_name() for layer in context.values()}),
        "pcp": manager.pcp_world_size if manager else 1,
        "asynchronous": runner.vllm_config.scheduler_config.async_scheduling,
        "steps": getattr(runner, STEPS, []),
    }


def watch(worker: Any) -> None:
    """Note for each step from now on [tokens of the batch, tokens of this rank]."""
    runner = worker.model_runner
    steps: list[list[int]] = []
    setattr(runner, STEPS, steps)
    manager = getattr(runner, "pcp_manager", None)
    if manager is None:
        return
    manager.__dict__.pop("partition_batch", None)
    original = manager.partition_batch

    def partition_batch(input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        local = original(input_batch, *args, **kwargs)
        steps.append([int(input_batch.num_tokens), int(local.num_tokens)])
        return local

    manager.partition_batch = partition_batch


def lose_rows(worker: Any) -> None:
    """Break the partition: what rank 1 computed no longer gets into the KV cache."""
    manager = worker.model_runner.pcp_manager
    original = manager._convert_to_gathered_slot_mappings

    def convert(*args: Any) -> Any:
        slots = original(*args)
        slots[:, slots.shape[1] // 2 :] = -1
        return slots

    manager._convert_to_gathered_slot_mappings = convert


def mend(worker: Any) -> None:
    """Take everything away again that this module put in; also `watch`."""
    for name in ("partition_batch", "_convert_to_gathered_slot_mappings"):
        vars(worker.model_runner.pcp_manager).pop(name, None)
