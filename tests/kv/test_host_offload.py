"""HOST_OFFLOAD without an engine: vLLM's own factory, specs and workers on small tensors."""

from __future__ import annotations

import inspect
import json
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.beds.registered import registered
from tests.conftest import FEATURES
from vllm_ext.connectors import CONNECTORS, HOST_SPEC
from vllm_ext.core.feature import Verdict

PAGE = 8
BLOCKS = 9
CHUNKS = 12


@pytest.fixture
def patched(installed_release: str, plugin: str) -> Iterator[None]:
    """The process with the plugin registered, or as it came."""
    import vllm.v1.kv_offload.factory
    import vllm.v1.simple_kv_offload.worker  # noqa: F401

    with registered(plugin == "with"):
        yield


@pytest.fixture
def active(installed_release: str) -> Iterator[None]:
    """The process with the plugin registered."""
    import vllm.v1.kv_offload.factory
    import vllm.v1.simple_kv_offload.worker  # noqa: F401

    with registered(True):
        yield


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A platform that isn't the CPU: vLLM's own stand-in for an unknown one."""
    import vllm.platforms
    from vllm.platforms.interface import UnspecifiedPlatform
    from vllm.v1.kv_offload.cpu import spec

    from vllm_ext.connectors import host_spec

    for module in (vllm.platforms, spec, host_spec):
        monkeypatch.setattr(module, "current_platform", UnspecifiedPlatform())


def _lanes(copies: Any) -> Any:
    """The threads of a copy engine, by name of the lane."""
    return {str(lane): thread for lane, thread in copies._lanes.items()}


def _told(call: Any, *args: Any) -> str:
    """What the call raised, in words; empty if nothing."""
    try:
        call(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _spec_class(extra: dict[str, Any]) -> Any:
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    return OffloadingSpecFactory.get_spec_cls(extra)


def _caches(pages: list[int]) -> list[Any]:
    import torch

    generator = torch.Generator().manual_seed(len(pages))
    return [
        torch.randint(-128, 128, (BLOCKS, page), generator=generator, dtype=torch.int8)
        for page in pages
    ]


def _canonical(tensors: list[Any], groups: list[list[tuple[int, int]]]) -> Any:
    from vllm.v1.kv_offload.base import (
        CanonicalKVCacheRef,
        CanonicalKVCaches,
        CanonicalKVCacheTensor,
    )

    return CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor, tensor.shape[1]) for tensor in tensors],
        [[CanonicalKVCacheRef(*ref) for ref in refs] for refs in groups],
    )


def _worker(tensors: list[Any], groups: list[list[tuple[int, int]]], blocks_per_chunk: int) -> Any:
    from vllm_ext.connectors.host_spec import HostOffloadingWorker

    return HostOffloadingWorker(_canonical(tensors, groups), blocks_per_chunk, CHUNKS)


def _chunks(ids: list[int]) -> Any:
    return SimpleNamespace(block_ids=np.array(ids, np.int64))


@pytest.mark.behaviour("HOST_OFFLOAD.spec", wrong="Unsupported spec type: HostOffloadingSpec")
def test_the_spec_is_known_by_name(patched: None) -> None:
    told = _told(_spec_class, {"spec_name": HOST_SPEC})
    assert told == "", told
    assert _spec_class({"spec_name": HOST_SPEC}).__name__ == HOST_SPEC


@pytest.mark.behaviour("HOST_OFFLOAD.default_spec", wrong="only supported on CUDA-alike")
def test_the_default_spec_makes_a_worker_on_the_cpu(patched: None) -> None:
    chosen = _spec_class({})
    spec = object.__new__(chosen)
    spec._worker = None
    spec.blocks_per_chunk = 1
    spec.num_blocks = spec.num_chunks = 4
    told = _told(spec.get_worker, _canonical(_caches([PAGE]), [[(0, PAGE)]]))
    assert told == "", told
    spec.get_worker(None).shutdown()


def test_other_specs_are_left_as_they_are(active: None) -> None:
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

    class Mine(CPUOffloadingSpec):  # type: ignore[misc]
        pass

    globals()["Mine"] = Mine
    assert _spec_class({"spec_name": "Mine", "spec_module_path": __name__}) is Mine
    assert _spec_class({"spec_name": "TieringOffloadingSpec"}).__name__ == "TieringOffloadingSpec"


def test_nothing_changes_on_another_platform(active: None, elsewhere: None) -> None:
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

    assert _spec_class({}) is CPUOffloadingSpec
    spec = object.__new__(_spec_class({"spec_name": HOST_SPEC}))
    spec._worker = None
    assert "only supported on CUDA-alike" in _told(spec.get_worker, None)
    worker, caches = _simple_worker()
    assert "priority_range" in _told(worker.register_kv_caches, caches)


def test_verify_finds_no_fault_on_another_platform(active: None, elsewhere: None) -> None:
    shown = {part.name: part.behaviour() for part in FEATURES["HOST_OFFLOAD"].parts}
    assert {judgement.verdict for judgement in shown.values()} == {Verdict.NATIVE}
    for name in ("default_spec", "simple_worker"):
        assert "does not run on the CPU" in shown[name].reason


def test_the_worker_takes_what_this_release_passes(active: None) -> None:
    from vllm.v1.kv_offload.base import OffloadingWorker

    from vllm_ext.connectors.host_spec import HostOffloadingWorker

    for name in ("submit_store", "submit_load", "get_finished", "wait", "shutdown"):
        asked = inspect.signature(getattr(OffloadingWorker, name)).parameters
        taken = inspect.signature(getattr(HostOffloadingWorker, name)).parameters
        assert list(asked) == list(taken)[: len(asked)]


@given(data=st.data())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_blocks_go_to_their_places_in_chunks(installed_release: str, data: Any) -> None:
    """Any groups, any place in the request: what is stored, block by block, is what is loaded."""
    from vllm.v1.kv_offload.base import GPULoadStoreSpec

    per_chunk = data.draw(st.integers(1, 4))
    groups = [[(0, PAGE), (1, PAGE - 3)], [(2, PAGE)], [(0, PAGE - 1)]]
    groups = groups[: data.draw(st.integers(1, 3))]
    sizes = [data.draw(st.integers(0, BLOCKS // len(groups))) for _ in groups]
    firsts = [data.draw(st.integers(0, 9)) for _ in groups]
    block_ids = data.draw(st.permutations(range(BLOCKS)))[: sum(sizes)]
    chunk_ids, expected, at = list(data.draw(st.permutations(range(CHUNKS)))), {}, 0
    used: list[int] = []
    for refs, size, first in zip(groups, sizes, firsts, strict=True):
        places = range(first, first + size)
        mine = {chunk: chunk_ids.pop() for chunk in sorted({p // per_chunk for p in places})}
        used += mine.values()
        for place in places:
            for tensor, page in refs:
                row = mine[place // per_chunk] * per_chunk + place % per_chunk
                expected[tensor, row] = (block_ids[at], page)
            at += 1

    cache = _caches([PAGE] * 3)
    before = [tensor.clone() for tensor in cache]
    worker = _worker(cache, groups, per_chunk)
    for host in worker.host:
        host.zero_()
    blocks = GPULoadStoreSpec(list(block_ids), sizes, firsts)
    assert worker.submit_store(7, blocks, _chunks(used))
    worker.wait({7})
    (result,) = worker.get_finished()
    moved = sum(page for _, page in expected.values())
    assert (result.job_id, result.success, result.transfer_size) == (7, True, moved)
    assert result.transfer_time is not None
    for tensor, host in enumerate(worker.host):
        for row in range(CHUNKS * per_chunk):
            block, page = expected.get((tensor, row), (0, 0))
            assert host[row, :page].tolist() == before[tensor][block, :page].tolist()
            assert not host[row, page:].any()

    for tensor in cache:
        tensor.zero_()
    assert worker.submit_load(8, _chunks(used), blocks)
    worker.wait({8})
    assert [done.job_id for done in worker.get_finished()] == [8]
    worker.shutdown()
    for tensor, mine in enumerate(cache):
        pages = {block: page for (t, _), (block, page) in expected.items() if t == tensor}
        for block in range(BLOCKS):
            page = pages.get(block, 0)
            assert mine[block, :page].tolist() == before[tensor][block, :page].tolist()
            assert not mine[block, page:].any()


def test_a_job_counts_as_finished_when_its_bytes_are_there(installed_release: str) -> None:
    """What waits in a lane is not reported, and ``wait`` waits for it."""
    from vllm.v1.kv_offload.base import GPULoadStoreSpec

    (cache,) = _caches([PAGE])
    worker = _worker([cache], [[(0, PAGE)]], 1)
    release = threading.Event()
    _lanes(worker._copies)["store"].submit(release.wait)
    blocks = GPULoadStoreSpec([3, 4], [2], [0])
    worker.submit_store(1, blocks, _chunks([5, 6]))
    worker.host[0].zero_()
    worker.submit_load(2, _chunks([0, 0]), GPULoadStoreSpec([7, 8], [2], [0]))
    worker.wait({2})
    assert [done.job_id for done in worker.get_finished()] == [2]
    assert not worker.host[0].any()
    threading.Timer(0.05, release.set).start()
    worker.wait({1, 2, 99})
    stored = worker.host[0][[5, 6]].tolist()
    cache.zero_()
    assert stored == _caches([PAGE])[0][[3, 4]].tolist()
    assert [done.job_id for done in worker.get_finished()] == [1]
    worker.shutdown()


def test_a_transfer_whose_numbers_do_not_agree_is_refused(installed_release: str) -> None:
    from vllm.v1.kv_offload.base import GPULoadStoreSpec

    worker = _worker(_caches([PAGE]), [[(0, PAGE)]], 2)
    for chunks in ([0, 1, 2], [0]):
        told = _told(worker.submit_store, 1, GPULoadStoreSpec([3, 4, 5], [3], [0]), _chunks(chunks))
        assert told.startswith(("ValueError: a KV transfer names 3 blocks", "IndexError"))
    told = _told(worker.submit_load, 1, _chunks([CHUNKS]), GPULoadStoreSpec([3], [1], [0]))
    assert f"row {2 * CHUNKS} of host tensor 0 was asked for" in told
    worker.wait({1})
    assert worker.get_finished() == []
    worker.shutdown()


def _simple_worker(**more: Any) -> tuple[Any, dict[str, Any]]:
    """A real SimpleCPUOffloadWorker of 4 host blocks, for two layers of ``BLOCKS`` blocks."""
    import torch
    from vllm.v1.simple_kv_offload.worker import SimpleCPUOffloadWorker

    layer = BLOCKS * PAGE
    tensor = SimpleNamespace(
        size=2 * layer, layers=["a", "b"], layer_stride=layer, block_stride=PAGE, offset=0
    )
    config = SimpleNamespace(num_blocks=BLOCKS, kv_cache_tensors=[tensor])
    worker = SimpleCPUOffloadWorker(None, config, 4 * 2 * PAGE, **more)
    raw = torch.arange(2 * layer, dtype=torch.int32).to(torch.int8)
    caches = {name: raw.view(2, BLOCKS, PAGE)[at] for at, name in enumerate("ab")}
    return worker, caches


def _step(worker: Any, **metadata: Any) -> None:
    """One step as the connector takes it."""
    from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadMetadata

    worker.bind_connector_metadata(SimpleCPUOffloadMetadata(**metadata))
    worker.start_load_kv()
    worker.wait_for_save()


@pytest.mark.behaviour("HOST_OFFLOAD.simple_worker", wrong="priority_range")
def test_the_simple_worker_stores_and_loads(patched: None) -> None:
    worker, caches = _simple_worker()
    told = _told(worker.register_kv_caches, caches)
    assert told == "", told
    before = {name: cache.clone() for name, cache in caches.items()}
    _step(worker, store_event=0, store_gpu_blocks=[7, 2], store_cpu_blocks=[1, 3])
    worker._flush_and_sync_all()
    worker.get_finished(set())
    assert worker.build_connector_worker_meta().completed_store_events == {0: 1}
    for cache in caches.values():
        cache.zero_()
    _step(
        worker,
        load_event=0,
        load_gpu_blocks=[5, 0],
        load_cpu_blocks=[3, 1],
        load_event_to_reqs={0: ["asked"]},
    )
    worker._flush_and_sync_all()
    assert worker.get_finished(set()) == (None, {"asked"})
    for name, cache in caches.items():
        assert cache[[5, 0]].tolist() == before[name][[2, 7]].tolist()
        assert not cache[[1, 2, 3, 4, 6, 7, 8]].any()
    worker._backend.shutdown()


def test_a_flush_waits_for_copies_that_have_not_begun(active: None) -> None:
    """Nothing is left of a preempted request's copies when its blocks are given to another."""
    from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadMetadata

    worker, caches = _simple_worker()
    worker.register_kv_caches(caches)
    before = caches["a"].clone()
    release = threading.Event()
    _lanes(worker._backend._copies)["store"].submit(release.wait)
    _step(worker, store_event=0, store_gpu_blocks=[4], store_cpu_blocks=[0])
    worker.get_finished(set())
    assert worker.build_connector_worker_meta() is None
    threading.Timer(0.05, release.set).start()
    worker.handle_preemptions(SimpleCPUOffloadMetadata(need_flush=True))
    caches["a"].zero_()
    # 0.29.0 names the regions of one allocation in its own way; the first is the first layer's.
    stored = next(iter(worker.cpu_kv_caches.values()))
    assert stored[0].tolist() == before[4].tolist()
    worker._backend.shutdown()


def test_a_store_is_started_once_a_step(active: None) -> None:
    worker, caches = _simple_worker()
    worker.register_kv_caches(caches)
    _step(worker, store_event=0, store_gpu_blocks=[4], store_cpu_blocks=[0])
    worker.wait_for_save()
    assert [event for event, _ in worker._store_events] == [0]
    worker._flush_and_sync_all()
    worker.get_finished(set())
    worker.get_finished(set())
    worker.get_finished(set())
    assert worker.build_connector_worker_meta().completed_store_events == {0: 1}
    assert worker._backend.last_store == 0
    assert worker._store_events == []
    worker._backend.shutdown()


def test_the_disk_backend_is_refused_in_a_sentence(active: None) -> None:
    worker, caches = _simple_worker(kv_offload_backend="disk", disk_path="/nowhere")
    told = _told(worker.register_kv_caches, caches)
    assert told.startswith('ValueError: kv_offload_backend="disk"') and "needs a GPU" in told


def test_every_listed_configuration_is_one_vllm_takes(active: None) -> None:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for connector in CONNECTORS:
        config = KVTransferConfig(**json.loads(connector.config))
        assert KVConnectorFactory.get_connector_class(config).__name__ == connector.connector
        assert _spec_class(config.kv_connector_extra_config) is not None
