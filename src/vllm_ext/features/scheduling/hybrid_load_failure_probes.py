"""What an unpatched scheduler does when KV loads fail: a real Scheduler, no model, no worker."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from vllm_ext.core.feature import Judgement, Verdict

BLOCK = 16
WINDOW = 32
_TOKEN = 7


@functools.cache
def connector_class() -> type:
    """A KV connector whose hits are set by hand; its loads are kept for whoever plays the worker.

    ``hits``: tokens that can be loaded, by request id. ``loads``: the loads asked for since the
    last step, as (request id, block ids per group, first token, number of tokens).
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        SupportsHMA,
    )

    class HandSetConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(vllm_config, *args, **kwargs)
            self.hits: dict[str, int] = {}
            self.loads: list[tuple[str, tuple[list[int], ...], int, int]] = []
            extra = vllm_config.kv_transfer_config.kv_connector_extra_config
            self._asynchronous = extra["asynchronous"]
            self._local: dict[str, int] = {}

        def get_num_new_matched_tokens(
            self, request: Any, num_computed_tokens: int
        ) -> tuple[int, bool]:
            found = max(self.hits.get(request.request_id, 0) - num_computed_tokens, 0)
            self._local[request.request_id] = num_computed_tokens
            return found, bool(found) and self._asynchronous

        def update_state_after_alloc(
            self, request: Any, blocks: Any, num_external_tokens: int
        ) -> None:
            if num_external_tokens:
                name = request.request_id
                tables = blocks.get_block_ids()
                self.loads.append((name, tables, self._local[name], num_external_tokens))

        def build_connector_meta(self, scheduler_output: Any) -> Any:
            return KVConnectorMetadata()

        def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
            return False, None

        request_finished = request_finished_all_groups

        def start_load_kv(self, *args: Any, **kwargs: Any) -> None: ...

        def wait_for_layer_load(self, *args: Any, **kwargs: Any) -> None: ...

        def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...

        def wait_for_save(self) -> None: ...

    return HandSetConnector


def __getattr__(name: str) -> Any:
    # vLLM's connector factory reads the class from the module; importing vLLM above is too early.
    if name == "HandSetConnector":
        return connector_class()
    raise AttributeError(f"module {__name__} has no attribute {name}")


def make_scheduler(
    groups: Sequence[str],
    blocks: int,
    *,
    asynchronous: bool,
    policy: str = "recompute",
    overlapped: bool = False,
    batched_tokens: int = 64,
) -> Any:
    """A scheduler with ``blocks`` usable blocks of 16 tokens, for a model that needs no files.

    ``groups``: one of ``full``, ``window`` (32 tokens) and ``mamba`` (align) per KV cache group.
    ``overlapped``: an AsyncScheduler, with two batches in flight.
    """
    from vllm.config import CacheConfig, KVTransferConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    length = 512
    config = VllmConfig(
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=batched_tokens,
            max_model_len=length,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        kv_transfer_config=KVTransferConfig(
            kv_connector="HandSetConnector",
            kv_connector_module_path=__name__,
            kv_role="kv_both",
            kv_load_failure_policy=policy,
            kv_connector_extra_config={"asynchronous": asynchronous},
        ),
    )
    # Set afterwards: the platform of this machine has no say in what a scheduler decides.
    config.scheduler_config.async_scheduling = overlapped
    config.cache_config.block_size = BLOCK
    config.cache_config.num_gpu_blocks = blocks + 1
    config.cache_config.mamba_cache_mode = "align" if "mamba" in groups else "none"
    config.model_config = SimpleNamespace(
        max_model_len=length,
        runner_type="generate",
        architecture="LlamaForCausalLM",
        architectures=["LlamaForCausalLM"],
        multimodal_config=None,
        enforce_eager=True,
        **dict.fromkeys(
            (
                "uses_mrope",
                "uses_xdrope_dim",
                "is_encoder_decoder",
                "is_diffusion",
                "is_hybrid",
                "is_multimodal_model",
                "enable_return_routed_experts",
                "return_sampling_mask",
                "supports_multimodal_inputs",
                "uses_xdrope",
            ),
            False,
        ),
    )
    specs = [KVCacheGroupSpec([kind], _spec(kind)) for kind in groups]
    return (AsyncScheduler if overlapped else Scheduler)(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(blocks + 1, kv_cache_tensors=[], kv_cache_groups=specs),
        structured_output_manager=SimpleNamespace(
            should_advance=lambda *args, **kwargs: False,
            accept_tokens=lambda *args, **kwargs: True,
        ),
        block_size=BLOCK,
        mm_registry=SimpleNamespace(supports_multimodal_inputs=lambda config: False),
    )


def _spec(kind: str) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

    if kind == "mamba":
        return MambaSpec(
            block_size=BLOCK,
            shapes=((2 * BLOCK,),),
            dtypes=(torch.float32,),
            mamba_cache_mode="align",
        )
    shape = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    if kind == "window":
        return SlidingWindowSpec(sliding_window=WINDOW, **shape)
    return FullAttentionSpec(**shape)


def make_request(name: str, prompt: Sequence[int], answer: int) -> Any:
    """A request of these prompt tokens, for exactly ``answer`` new tokens."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    params = SamplingParams(max_tokens=answer, ignore_eos=True, temperature=0.0)
    return Request(
        request_id=name,
        prompt_token_ids=list(prompt),
        sampling_params=params,
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )


def output_of(
    scheduler: Any,
    planned: Any,
    *,
    sampled: dict[str, list[int]] | None = None,
    invalid: set[int] | None = None,
    failed: set[str] | None = None,
    finished: set[str] | None = None,
) -> Any:
    """What a worker would return for a planned step (default: token 7 where one is due)."""
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

    names = list(planned.num_scheduled_tokens)
    if sampled is None:
        sampled = {
            name: [] if scheduler.requests[name].is_prefill_chunk else [_TOKEN] for name in names
        }
    transfers = KVConnectorOutput(
        invalid_block_ids=invalid or set(), finished_recving=finished or None
    )
    if failed:
        transfers.failed_recving = failed
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: at for at, name in enumerate(names)},
        sampled_token_ids=[sampled[name] for name in names],
        kv_connector_output=None if transfers.is_empty() else transfers,
    )


def _loading(groups: Sequence[str], blocks: int, tokens: int, **how: Any) -> tuple[Any, Any, Any]:
    """A scheduler that has just planned the load of a request's whole blocks, and both."""
    scheduler = make_scheduler(groups, blocks, **how)
    request = make_request("probe", range(1, tokens + 1), 4)
    scheduler.connector.hits["probe"] = (tokens - 1) // BLOCK * BLOCK
    scheduler.add_request(request)
    return scheduler, request, scheduler.schedule()


def block_reports() -> Judgement:
    """A synchronous load of 128 tokens into two groups fails: what becomes of the request?"""
    scheduler, request, planned = _loading(("full", "window"), 40, 140, asynchronous=False)
    _, tables, _, _ = scheduler.connector.loads[0]
    try:
        scheduler.update_from_output(
            planned, output_of(scheduler, planned, invalid={tables[1][-1]})
        )
    except Exception as error:
        return Judgement(Verdict.ACTIVE, f"a failed load ends the engine: {_told(error)}")
    null = scheduler.kv_cache_manager.block_pool.null_block.block_id
    kept = scheduler.kv_cache_manager.get_block_ids("probe")[1]
    if request.num_computed_tokens == 0 and null in kept:
        lost = kept.count(null) * BLOCK
        return Judgement(
            Verdict.ACTIVE,
            f"after a failed load {lost} tokens are recomputed into the null block of all requests",
        )
    return Judgement(Verdict.NATIVE, "a failed load is recomputed into blocks of the request")


def fail_policy() -> Judgement:
    """The same load fails under kv_load_failure_policy=fail."""
    scheduler, request, planned = _loading(
        ("full", "window"), 40, 140, asynchronous=False, policy="fail"
    )
    _, tables, _, _ = scheduler.connector.loads[0]
    try:
        scheduler.update_from_output(
            planned, output_of(scheduler, planned, invalid={tables[1][-1]})
        )
    except Exception as error:
        return Judgement(Verdict.ACTIVE, f"a failed load ends the engine: {_told(error)}")
    if request.status.name == "FINISHED_ERROR":
        return Judgement(Verdict.NATIVE, "a failed load ends its request with FINISHED_ERROR")
    return Judgement(Verdict.ACTIVE, f"a failed load leaves its request {request.status.name}")


def inflight_reservation() -> Judgement:
    """One request in an otherwise empty pool: is it admitted again after its load failed?"""
    scheduler, request, planned = _loading(("full",), 15, 140, asynchronous=True)
    _, tables, _, _ = scheduler.connector.loads.pop()
    report = output_of(scheduler, planned, invalid={tables[0][0]}, finished={"probe"})
    scheduler.update_from_output(planned, report)
    for _ in range(5):
        planned = scheduler.schedule()
        if scheduler.connector.loads or planned.num_scheduled_tokens:
            return Judgement(Verdict.NATIVE, "a request whose load failed is admitted again")
        scheduler.update_from_output(planned, output_of(scheduler, planned))
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    need = -(-request.num_tokens // BLOCK)
    return Judgement(
        Verdict.ACTIVE,
        f"a request of {need} blocks whose load failed is not admitted to {free} free blocks, "
        "because its first load stays reserved",
    )


def bounded_retries() -> Judgement:
    """Every load of one request fails: how often is it tried?"""
    scheduler, _, planned = _loading(("full",), 40, 140, asynchronous=True)
    for tried in range(8):
        if not scheduler.connector.loads:
            return Judgement(
                Verdict.NATIVE, f"a request is computed locally after {tried} failed loads"
            )
        _, tables, _, _ = scheduler.connector.loads.pop()
        report = output_of(scheduler, planned, invalid={tables[0][0]}, finished={"probe"})
        scheduler.update_from_output(planned, report)
        planned = scheduler.schedule()
    return Judgement(Verdict.ACTIVE, "a request is loaded for the 9th time after 8 failed loads")


def late_reports() -> Judgement:
    """A load fails under policy ``fail`` and is reported as finished one step later."""
    scheduler, _, planned = _loading(("full",), 40, 140, asynchronous=False, policy="fail")
    _, tables, _, _ = scheduler.connector.loads[0]
    scheduler.update_from_output(planned, output_of(scheduler, planned, invalid={tables[0][0]}))
    planned = scheduler.schedule()
    try:
        scheduler.update_from_output(planned, output_of(scheduler, planned, finished={"probe"}))
    except Exception as error:
        told = str(error) or "no text"
        return Judgement(
            Verdict.ACTIVE,
            f"a transfer finished after its request failed ends the engine: "
            f"{type(error).__name__} ({told})",
        )
    return Judgement(Verdict.NATIVE, "a transfer finished after its request failed is ignored")


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition('.')[0]}"
