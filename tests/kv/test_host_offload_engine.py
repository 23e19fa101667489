"""HOST_OFFLOAD on real engines: what was evicted comes back from host memory, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.beds.registered import registered

# Greatest difference of a log-probability that spoilt KV must exceed.
SPOILT = 0.01
REFUSED = "only supported on CUDA-alike|priority_range|Unsupported spec type"


@pytest.fixture
def patched(installed_release: str, plugin: str) -> Iterator[None]:
    """The process with the plugin registered, or as it came."""
    with registered(plugin == "with"):
        yield


@pytest.fixture
def active(installed_release: str) -> Iterator[None]:
    """The process with the plugin registered."""
    with registered(True):
        yield


def _offloaded() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().connector_worker.worker.host


def _simply_offloaded() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().worker_handler.cpu_kv_caches


def _check(
    folder: Path, model: str, stored: Callable[[], Any], least: int = 128, **arguments: Any
) -> list[str]:
    """What is wrong with prefixes that were evicted; the engine's refusal if it doesn't start.

    ``least``: tokens that must come back of each.
    """
    from tests.beds import offload_engine as bed

    try:
        with bed.engine(folder, model, **arguments) as (llm, checkpoint):
            return _differences(llm, checkpoint, stored, least)
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]


def _differences(llm: Any, checkpoint: Any, stored: Callable[[], Any], least: int) -> list[str]:
    from tests.beds import offload_engine as bed

    problems = []
    first = bed.answers(llm, checkpoint)
    if any(answer.cached_tokens for answer in first):
        problems.append("a prompt nobody had asked was cached")
    for _ in range(2):
        before = bed.loaded_tokens(llm)
        again = bed.answers(llm, checkpoint)
        cached = [answer.cached_tokens for answer in again]
        loaded = bed.loaded_tokens(llm) - before
        if min(cached) < least or loaded != sum(cached):
            problems.append(f"cached {cached}, of which {loaded} loaded")
        different = [a.difference(b) for a, b in zip(first, again, strict=True)]
        if max(different) or [a.tokens for a in first] != [a.tokens for a in again]:
            problems.append(f"logprobs differ by {different}")
    bed.spoil_host_memory(stored())
    spoilt = bed.answers(llm, checkpoint)
    hidden = [a.difference(b) for a, b in zip(first, spoilt, strict=True)]
    if min(hidden) < SPOILT:
        problems.append(f"spoilt KV changed logprobs by no more than {hidden}")
    return problems


@pytest.mark.engine
@pytest.mark.area("kv")
@pytest.mark.parametrize("model", ["gemma3", "lfm2"])
def test_offloading_connector(active: None, tmp_path: Path, model: str) -> None:
    """Two KV cache groups each; chunks of two blocks, whose halves are stored and loaded apart."""
    from tests.beds.offload_engine import transfer_config

    config = transfer_config(
        "OffloadingConnector", spec_name="HostOffloadingSpec", blocks_per_chunk=2
    )
    if model == "lfm2":
        config.kv_connector_extra_config["blocks_per_chunk"] = 1
    assert _check(tmp_path, model, _offloaded, kv_transfer_config=config) == []


@pytest.mark.engine
@pytest.mark.area("kv")
@pytest.mark.parametrize("model", ["lfm2", "gemma3"])
def test_simple_cpu_offload_connector(active: None, tmp_path: Path, model: str) -> None:
    """LFM2 with keys of 32 tokens in blocks of 128: prompts of 176 come back up to the last key."""
    from tests.beds.offload_engine import transfer_config

    how: dict[str, Any] = {"kv_transfer_config": transfer_config("SimpleCPUOffloadConnector")}
    if model == "lfm2":
        how |= {"prefix_match_unit": 32, "least": 160}
    assert _check(tmp_path, model, _simply_offloaded, **how) == []


@pytest.mark.engine
@pytest.mark.full
@pytest.mark.behaviour("HOST_OFFLOAD.spec", wrong=REFUSED)
def test_an_engine_with_the_spec_starts(patched: None, tmp_path: Path) -> None:
    from tests.beds.offload_engine import transfer_config

    config = transfer_config("OffloadingConnector", spec_name="HostOffloadingSpec")
    problems = _check(tmp_path, "llama", _offloaded, kv_transfer_config=config)
    assert not problems, problems


@pytest.mark.engine
@pytest.mark.full
@pytest.mark.behaviour("HOST_OFFLOAD.default_spec", wrong=REFUSED)
def test_an_engine_with_an_offloading_size_starts(patched: None, tmp_path: Path) -> None:
    size = {"kv_offloading_size": 0.0625, "kv_offloading_backend": "native"}
    problems = _check(tmp_path, "llama", _offloaded, **size)
    assert not problems, problems


@pytest.mark.engine
@pytest.mark.full
@pytest.mark.behaviour("HOST_OFFLOAD.simple_worker", wrong=REFUSED)
def test_an_engine_with_the_simple_connector_starts(patched: None, tmp_path: Path) -> None:
    from tests.beds.offload_engine import transfer_config

    config = transfer_config("SimpleCPUOffloadConnector")
    problems = _check(tmp_path, "llama", _simply_offloaded, kv_transfer_config=config)
    assert not problems, problems
