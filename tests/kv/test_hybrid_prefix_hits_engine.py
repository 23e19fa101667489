"""HYBRID_PREFIX_HITS on real engines: how much of an evicted prompt comes back, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.beds.registered import registered

TOGGLE = "VLLM_EXT_HYBRID_PREFIX_HITS"
SPOILT = 0.01
UNIT = 32


@pytest.fixture
def patched(installed_release: str, plugin: str) -> Iterator[None]:
    """The plugin, which the CPU needs for this connector, with this feature or without it."""
    with registered(True, {} if plugin == "with" else {TOGGLE: "0"}):
        yield


def _loaded(folder: Path, length: int, **extra: Any) -> dict[str, Any]:
    """Tokens loaded of five evicted prompts, by prompt, and what loading did to logprobs."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from tests.beds import offload_engine as bed
    from tests.beds.answers import ask

    config = bed.transfer_config("SimpleCPUOffloadConnector", **extra)
    with bed.engine(folder, "lfm2", kv_transfer_config=config, prefix_match_unit=UNIT) as (
        llm,
        checkpoint,
    ):

        def answers() -> list[Any]:
            prompts = [checkpoint.prompt(length, seed) for seed in bed.PROMPTS]
            return [ask(llm, prompt, bed.ANSWER) for prompt in prompts]

        first = answers()
        before = bed.loaded_tokens(llm)
        again = answers()
        loaded = bed.loaded_tokens(llm) - before
        bed.spoil_host_memory(get_kv_transfer_group().worker_handler.cpu_kv_caches)
        spoilt = answers()
    return {
        "first": [answer.cached_tokens for answer in first],
        "again": [answer.cached_tokens for answer in again],
        "loaded": loaded,
        "difference": max(a.difference(b) for a, b in zip(first, again, strict=True)),
        "spoilt": [a.difference(b) for a, b in zip(first, spoilt, strict=True)],
    }


@pytest.mark.engine
@pytest.mark.full
@pytest.mark.behaviour("HYBRID_PREFIX_HITS.fine_hits", wrong=r"loads (640|0) of \d+ tokens")
@pytest.mark.parametrize(("length", "end"), [(176, 160), (112, 96)])
def test_evicted_prompts_come_back_up_to_their_last_key(
    patched: None, tmp_path: Path, length: int, end: int
) -> None:
    found = _loaded(tmp_path, length)
    whole = end * len(found["again"])
    assert found["loaded"] == whole, f"loads {found['loaded']} of {whole} tokens"
    assert found["first"] == [0] * 5
    assert found["again"] == [end] * 5
    assert found["difference"] == 0.0
    assert min(found["spoilt"]) > SPOILT


@pytest.mark.engine
@pytest.mark.full
@pytest.mark.behaviour("HYBRID_PREFIX_HITS.lazy", wrong=r"the engine died")
def test_a_lazy_engine_lives(patched: None, tmp_path: Path) -> None:
    try:
        found = _loaded(tmp_path, 176, lazy_offload=True)
    except AssertionError as error:
        found = {"died": str(error)}
    assert "died" not in found, f"the engine died: {found['died']}"
    # Lazy mode stores what is next to be evicted, and comes too late for some in so small a cache.
    assert set(found["again"]) <= {0, 128}
    assert found["loaded"] == sum(found["again"]) >= 128
    assert found["difference"] == 0.0
    assert max(found["spoilt"]) > SPOILT
