"""A real scheduler over a real block manager, for a model that needs no files.

For probes and checks of all areas. The worker is played: `output_of` makes what it returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

BLOCK = 16
WINDOW = 32
CHUNK = 32
TOKEN = 7
LENGTH = 512


def kv_spec(kind: str, size: int = BLOCK) -> Any:
    """The KVCacheSpec of a layer.

    ``kind``: ``full``, ``window`` (32 tokens), ``chunked`` (local, 32 tokens) or ``mamba`` (align).
    ``size``: tokens per block.
    """
    import torch
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        MambaSpec,
        SlidingWindowSpec,
    )

    if kind == "mamba":
        return MambaSpec(
            block_size=size,
            shapes=((2 * size,),),
            dtypes=(torch.float32,),
            mamba_cache_mode="align",
        )
    shape = {"block_size": size, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    if kind == "window":
        return SlidingWindowSpec(sliding_window=WINDOW, **shape)
    if kind == "chunked":
        return ChunkedLocalAttentionSpec(attention_chunk_size=CHUNK, **shape)
    return FullAttentionSpec(**shape)


def cache_config(groups: Sequence[str], blocks: int) -> Any:
    """A KVCacheConfig with a group for each of these kinds, over ``blocks`` blocks in all."""
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    specs = [KVCacheGroupSpec([kind], kv_spec(kind)) for kind in groups]
    return KVCacheConfig(blocks, kv_cache_tensors=[], kv_cache_groups=specs)


def _model_config() -> Any:
    import torch

    answers = {
        "model": "probe",
        "dtype": torch.float32,
        "max_model_len": LENGTH,
        "runner_type": "generate",
        "architecture": "LlamaForCausalLM",
        "architectures": ["LlamaForCausalLM"],
        "multimodal_config": None,
        "enforce_eager": True,
        "get_total_num_kv_heads": lambda: 1,
    }
    no = "uses_mrope uses_xdrope_dim uses_xdrope is_encoder_decoder is_diffusion is_hybrid use_mla"
    no += " is_multimodal_model supports_multimodal_inputs"
    no += " enable_return_routed_experts return_sampling_mask"
    return SimpleNamespace(**answers, **dict.fromkeys(no.split(), False))


def make_scheduler(
    groups: Sequence[str] = ("full",),
    usable: int = 40,
    *,
    overlapped: bool = False,
    caching: bool = True,
    batched_tokens: int = 64,
    order: str = "fcfs",
    transfer: Any = None,
    kv_cache: Any = None,
    block_size: int = BLOCK,
    unit: int | None = None,
) -> Any:
    """A scheduler with ``usable`` blocks, for a model that needs no files.

    ``groups``: kinds of its KV cache groups. ``overlapped``: an AsyncScheduler, which plans a step
    before the last one's report is in. ``order``: the policy of its queues. ``transfer``: the
    KVTransferConfig of its connector. ``kv_cache``: its KVCacheConfig, if it isn't one of blocks of
    16 tokens. ``unit``: tokens per key of the prefix cache, if not those of a block.
    """
    from vllm.config import CacheConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    config = VllmConfig(
        cache_config=CacheConfig(block_size=block_size, enable_prefix_caching=caching),
        scheduler_config=SchedulerConfig(
            max_model_len=LENGTH,
            max_num_seqs=8,
            max_num_batched_tokens=batched_tokens,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            policy=order,
        ),
        kv_transfer_config=transfer,
    )
    # Set afterwards: the platform of this machine has no say in what a scheduler decides.
    config.scheduler_config.async_scheduling = overlapped
    config.cache_config.block_size = block_size
    config.cache_config.num_gpu_blocks = usable + 1
    config.cache_config.mamba_cache_mode = "align" if "mamba" in groups else "none"
    if unit:
        config.cache_config.prefix_match_unit = unit
    config.model_config = _model_config()
    return (AsyncScheduler if overlapped else Scheduler)(
        vllm_config=config,
        kv_cache_config=kv_cache or cache_config(groups, usable + 1),
        structured_output_manager=SimpleNamespace(
            should_advance=lambda *args, **kwargs: False,
            accept_tokens=lambda *args, **kwargs: True,
        ),
        block_size=block_size,
        **({"hash_block_size": unit} if unit else {}),
        mm_registry=SimpleNamespace(supports_multimodal_inputs=lambda config: False),
    )


def make_request(
    name: str, prompt: Sequence[int], answer: int = 4, *, unit: int = BLOCK, **transfer: Any
) -> Any:
    """A request of these prompt tokens, for exactly ``answer`` new ones.

    ``unit``: tokens per key of the prefix cache. ``transfer`` is its ``kv_transfer_params``.
    """
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    params = SamplingParams(max_tokens=answer, ignore_eos=True, temperature=0.0)
    if transfer:
        params.extra_args = {"kv_transfer_params": transfer}
    return Request(
        request_id=name,
        prompt_token_ids=list(prompt),
        sampling_params=params,
        pooling_params=None,
        block_hasher=get_request_block_hasher(unit, sha256),
    )


def output_of(
    scheduler: Any, planned: Any, sampled: Mapping[str, list[int]] | None = None, **more: Any
) -> Any:
    """The ModelRunnerOutput of a planned step; ``more`` are further fields of it.

    ``sampled``: tokens by request (default: token 7 for who is due one).
    """
    from vllm.v1.outputs import ModelRunnerOutput

    names = list(planned.num_scheduled_tokens)
    if sampled is None:
        requests = scheduler.requests
        sampled = {name: [] if requests[name].is_prefill_chunk else [TOKEN] for name in names}
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: at for at, name in enumerate(names)},
        sampled_token_ids=[sampled[name] for name in names],
        **more,
    )
