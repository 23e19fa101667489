"""A real scheduler over a real block manager, for a model that needs no files.

For probes and checks. The worker is played: `report_of` makes its outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

BLOCK = 16
WINDOW = 32
TOKEN = 7
LENGTH = 512


def _spec(kind: str) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    shape = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 2, "dtype": torch.float32}
    if kind == "window":
        return SlidingWindowSpec(sliding_window=WINDOW, **shape)
    return FullAttentionSpec(**shape)


def cache_config(groups: Sequence[str], blocks: int) -> Any:
    """KV cache groups ``full`` or ``window`` (32 tokens), over ``blocks`` blocks in all."""
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    specs = [KVCacheGroupSpec([kind], _spec(kind)) for kind in groups]
    return KVCacheConfig(blocks, kv_cache_tensors=[], kv_cache_groups=specs)


def _model_config() -> Any:
    answers = {
        "max_model_len": LENGTH,
        "runner_type": "generate",
        "architecture": "LlamaForCausalLM",
        "architectures": ["LlamaForCausalLM"],
        "multimodal_config": None,
        "enforce_eager": True,
    }
    no = "uses_mrope uses_xdrope_dim uses_xdrope is_encoder_decoder is_diffusion is_hybrid"
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
) -> Any:
    """A scheduler with ``usable`` blocks of 16 tokens, for a model that needs no files.

    ``overlapped``: an AsyncScheduler, which plans a step before the last one's report is in.
    """
    from vllm.config import CacheConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    config = VllmConfig(
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=caching),
        scheduler_config=SchedulerConfig(
            max_model_len=LENGTH,
            max_num_seqs=8,
            max_num_batched_tokens=batched_tokens,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
        ),
    )
    # What the platform of this machine would have changed.
    config.scheduler_config.async_scheduling = overlapped
    config.cache_config.block_size = BLOCK
    config.cache_config.num_gpu_blocks = usable + 1
    config.model_config = _model_config()
    return (AsyncScheduler if overlapped else Scheduler)(
        config,
        cache_config(groups, usable + 1),
        SimpleNamespace(
            should_advance=lambda *args, **kwargs: False,
            accept_tokens=lambda *args, **kwargs: True,
        ),
        BLOCK,
        mm_registry=SimpleNamespace(supports_multimodal_inputs=lambda config: False),
    )


def make_request(name: str, prompt: Sequence[int], answer: int = 4) -> Any:
    """A request of these prompt tokens, for ``answer`` new ones."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    return Request(
        name,
        list(prompt),
        SamplingParams(max_tokens=answer, ignore_eos=True, temperature=0.0),
        None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )


def report_of(
    scheduler: Any, planned: Any, bad: Mapping[str, int], due: Mapping[str, bool] | None = None
) -> Any:
    """A worker's output: token 7 for who is due one, and ``bad`` tokens by request with NaN."""
    from vllm.v1.outputs import ModelRunnerOutput

    names = list(planned.num_scheduled_tokens)
    if due is None:
        due = {name: not scheduler.requests[name].is_prefill_chunk for name in names}
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: at for at, name in enumerate(names)},
        sampled_token_ids=[[TOKEN] if due[name] else [] for name in names],
        num_nans_in_logits=dict(bad) or None,
    )
