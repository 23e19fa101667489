"""HOST_OFFLOAD: KV offloading to host memory for models that run on the CPU.

vLLM's offloading managers don't depend on the device, their copy engines do: both need CUDA or XPU.
The engines for the host are in ``vllm_ext.connectors``; here they are put where vLLM looks for one.
Nothing changes on another platform, which is asked when an engine is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vllm_ext.connectors import HOST_SPEC, HOST_SPEC_MODULE
from vllm_ext.core.feature import Feature, Judgement, Part, Verdict, effect
from vllm_ext.core.seams import Register, Wrap

_FACTORY = "vllm.v1.kv_offload.factory:OffloadingSpecFactory"
_SPEC = "vllm.v1.kv_offload.cpu.spec:CPUOffloadingSpec"
_OFFLOADING = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker"
_SIMPLE = "vllm.v1.simple_kv_offload.worker:SimpleCPUOffloadWorker"


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def choose_host_spec(original: Callable[..., type], cls: type, *args: Any, **kwargs: Any) -> type:
    """The host spec where vLLM would take its CPUOffloadingSpec and there is no GPU."""
    chosen = original(cls, *args, **kwargs)
    if not _on_cpu():
        return chosen
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

    if chosen is not CPUOffloadingSpec:
        return chosen
    from vllm_ext.connectors.host_spec import HostOffloadingSpec

    effect("HOST_OFFLOAD.default_spec")
    return HostOffloadingSpec


def register_on_host(
    original: Callable[..., None], self: Any, kv_caches: Any, *args: Any, **kwargs: Any
) -> None:
    """Register KV caches where CUDA streams can't be made.

    Raises ValueError for the disk backend, which copies through CUDA streams.
    """
    if not _on_cpu():
        return original(self, kv_caches, *args, **kwargs)
    if self.disk_mode:
        raise ValueError(
            'kv_offload_backend="disk" of SimpleCPUOffloadConnector needs a GPU, and this vLLM '
            'runs on the CPU; take kv_offload_backend="cpu" in --kv-transfer-config.'
        )
    from vllm_ext.connectors.host_simple import host_streams

    with host_streams():
        return original(self, kv_caches, *args, **kwargs)


def copy_on_host(
    original: Callable[..., None], self: Any, caches: Any, *args: Any, **kwargs: Any
) -> None:
    """Give the worker memory and a copy engine of the host.

    ``caches``: name to int8 [num_blocks, bytes per block].
    """
    if not _on_cpu():
        return original(self, caches, *args, **kwargs)
    import torch

    from vllm_ext.connectors.host_simple import HostCopyBackend

    # Never zeroed: what was not stored is never loaded, and unused memory is never touched.
    self.cpu_kv_caches = {
        name: torch.empty((self.num_cpu_blocks, *cache.shape[1:]), dtype=cache.dtype)
        for name, cache in caches.items()
    }
    self._backend = HostCopyBackend(caches, self.cpu_kv_caches)
    return None


def save_on_host(original: Callable[..., None], self: Any) -> None:
    """Start the step's stores: on the CPU the forward pass is over when this is called.

    0.30.0 calls it twice for some steps.
    """
    if not _on_cpu():
        return original(self)
    metadata = self._connector_metadata
    if metadata is not None and metadata.store_gpu_blocks:
        self._backend.store(metadata, self._store_events)
    return None


def _probe_spec() -> Judgement:
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    try:
        found = OffloadingSpecFactory.get_spec_cls({"spec_name": HOST_SPEC})
    except ValueError as error:
        return Judgement(Verdict.ACTIVE, f"spec_name={HOST_SPEC} ends in ValueError: {error}")
    return Judgement(Verdict.NATIVE, f"spec_name={HOST_SPEC} is {found.__module__}'s")


_ELSEWHERE = Judgement(Verdict.IDLE, "this vLLM does not run on the CPU, where it has an engine")


def _probe_default_spec() -> Judgement:
    if not _on_cpu():
        return _ELSEWHERE
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

    spec = object.__new__(CPUOffloadingSpec)
    spec._worker = None
    # Whatever comes after the platform was accepted has nothing to work with here.
    try:
        spec.get_worker(None)
    except Exception as error:
        if "only supported on" in str(error):
            return Judgement(Verdict.ACTIVE, f"--kv-offloading-size ends in: {error}")
    return Judgement(Verdict.NATIVE, "CPUOffloadingSpec makes a worker on the CPU")


def _check_default_spec() -> Judgement:
    """A worker of the spec that the factory gives, and a block that it stores and loads.

    On another platform: the factory still gives vLLM's own.
    """
    from types import SimpleNamespace

    import torch
    from vllm.v1.kv_offload import base
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    chosen = OffloadingSpecFactory.get_spec_cls({})
    if not _on_cpu():
        native = chosen is CPUOffloadingSpec
        told = f"{_ELSEWHERE.reason}; --kv-offloading-size makes a {chosen.__name__} there"
        return Judgement(Verdict.NATIVE if native else Verdict.ACTIVE, told)
    spec = object.__new__(chosen)
    spec._worker = None
    # 0.29.0 calls chunks blocks.
    spec.blocks_per_chunk, spec.num_blocks, spec.num_chunks = 1, 4, 4
    cache = torch.arange(4 * 64, dtype=torch.int16).to(torch.int8).view(4, 64)
    tensors = [base.CanonicalKVCacheTensor(cache, 64)]
    caches = base.CanonicalKVCaches(tensors, [[base.CanonicalKVCacheRef(0, 64)]])
    try:
        worker = spec.get_worker(caches)
    except Exception as error:
        if "only supported on" not in str(error):
            raise
        return Judgement(Verdict.ACTIVE, f"--kv-offloading-size ends in: {error}")
    block, chunk = base.GPULoadStoreSpec([2], [1], [0]), SimpleNamespace(block_ids=[3])
    expected = cache.clone()
    worker.submit_store(0, block, chunk)
    worker.wait({0})
    cache[2] = 0
    worker.submit_load(1, chunk, block)
    worker.wait({1})
    worker.get_finished()  # raises what a copy raised
    worker.shutdown()
    if not torch.equal(cache, expected):
        return Judgement(Verdict.ACTIVE, f"{chosen.__name__} loads other bytes than it stored")
    return Judgement(Verdict.NATIVE, f"{chosen.__name__} stores and loads a block on the CPU")


def _check_simple_worker() -> Judgement:
    """The probe; on another platform nothing is to be shown."""
    return _probe_simple_worker() if _on_cpu() else replace(_ELSEWHERE, verdict=Verdict.NATIVE)


def _probe_simple_worker() -> Judgement:
    if not _on_cpu():
        return _ELSEWHERE
    worker, caches = _simple_worker()
    try:
        worker.register_kv_caches(caches)
    except (AttributeError, RuntimeError, AssertionError, ImportError) as error:
        if not worker.num_cpu_blocks:
            raise  # it never came to the streams
        return Judgement(
            Verdict.ACTIVE, f"SimpleCPUOffloadConnector ends in {type(error).__name__}: {error}"
        )
    return Judgement(Verdict.NATIVE, "SimpleCPUOffloadConnector's worker starts on the CPU")


def _simple_worker() -> tuple[Any, dict[str, Any]]:
    """A real worker for one layer of 4 blocks of 64 bytes, and its KV cache."""
    from types import SimpleNamespace

    import torch
    from vllm.v1.simple_kv_offload.worker import SimpleCPUOffloadWorker

    tensor = SimpleNamespace(
        size=256, layers=["layer"], layer_stride=256, block_stride=64, offset=0
    )
    config = SimpleNamespace(num_blocks=4, kv_cache_tensors=[tensor])
    worker = SimpleCPUOffloadWorker(None, config, 4 * 64)
    return worker, {"layer": torch.zeros((4, 64), dtype=torch.int8)}


FEATURE = Feature(
    name="HOST_OFFLOAD",
    area="kv",
    summary="KV offloading works on the CPU: OffloadingConnector and SimpleCPUOffloadConnector.",
    why=(
        "No vLLM release can start a model with KV offloading on the CPU: the copy engines behind "
        "OffloadingConnector (and --kv-offloading-size) and SimpleCPUOffloadConnector need CUDA or "
        "XPU. Here blocks are copied between the KV cache and host memory by compiled code in "
        "threads of its own, off the interpreter lock; managers, policies, metrics and sizes are "
        "vLLM's. So a prefix cache larger than the KV cache, and any work on connectors, can be "
        "had and tested without a GPU. Nothing changes on other platforms. "
        "docs/kv-offload.md tells how to use it."
    ),
    upstream_pr=(),
    parts=(
        Part(
            name="spec",
            summary=f'OffloadingConnector takes "spec_name":"{HOST_SPEC}".',
            seams=(
                Register(
                    f"{_FACTORY}._registry[{HOST_SPEC}]",
                    f"{_FACTORY}.register_spec",
                    (HOST_SPEC, HOST_SPEC_MODULE, HOST_SPEC),
                ),
            ),
            relies_on=(
                f"{_FACTORY}.get_spec_cls",
                f"{_SPEC}.__init__",
                f"{_SPEC}.get_worker",
                "vllm.v1.kv_offload.base:OffloadingWorker",
                "vllm.v1.kv_offload.base:OffloadingWorker.submit_store",
                "vllm.v1.kv_offload.base:OffloadingWorker.submit_load",
                "vllm.v1.kv_offload.base:GPULoadStoreSpec.__init__",
                f"{_OFFLOADING}:OffloadingConnectorWorker.get_finished",
                f"{_OFFLOADING}:OffloadingConnectorWorker.handle_preemptions",
                f"{_OFFLOADING}:OffloadingConnectorWorker.start_kv_transfers",
            ),
            probe=_probe_spec,
        ),
        Part(
            name="default_spec",
            summary="--kv-offloading-size N works on the CPU as it stands.",
            seams=(Wrap(f"{_FACTORY}.get_spec_cls", choose_host_spec),),
            relies_on=(f"{_SPEC}.get_worker", f"{_FACTORY}.create_spec"),
            probe=_probe_default_spec,
            check=_check_default_spec,
        ),
        Part(
            name="simple_worker",
            summary="SimpleCPUOffloadConnector's worker starts on the CPU, and copies there.",
            seams=(
                Wrap(f"{_SIMPLE}.register_kv_caches", register_on_host),
                Wrap(f"{_SIMPLE}._init_cpu_mode", copy_on_host),
                Wrap(f"{_SIMPLE}.wait_for_save", save_on_host),
            ),
            relies_on=(
                f"{_SIMPLE}.start_load_kv",
                f"{_SIMPLE}.get_finished",
                f"{_SIMPLE}._flush_and_sync_all",
                f"{_SIMPLE}._poll_stream_events",
            ),
            probe=_probe_simple_worker,
            check=_check_simple_worker,
        ),
    ),
)
