"""PREEMPTION_FENCE on real engines: four answers outgrow the KV cache, two batches in flight."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.beds.registered import registered

pytestmark = [pytest.mark.engine, pytest.mark.full]

# 11 usable blocks of 32 tokens: two for each prompt, five at the end of each answer.
BLOCKS, REQUESTS, LENGTH, ANSWER = 12, 4, 40, 100
STEPS = 600


@pytest.fixture
def patched(installed_release: str, plugin: str) -> Iterator[None]:
    """The process with the plugin registered, or as it came."""
    with registered(plugin == "with"):
        yield


def _crowd(folder: Path, role: str, policy: str) -> tuple[str, list[Any], list[Any]]:
    """What came of four requests, their answers, and those of each alone."""
    from vllm.config import KVTransferConfig

    from tests.beds.answers import ask, ask_all
    from tests.beds.deferred_frees import noting, spent, told
    from tests.beds.kv_store import transfer_config
    from tests.beds.offload_engine import engine
    from tests.beds.overlap import asynchronous_scheduling

    transfer = KVTransferConfig(**transfer_config(folder / "store", role=role))
    with (
        asynchronous_scheduling(),
        engine(
            folder,
            "llama",
            kv_transfer_config=transfer,
            num_gpu_blocks_override=BLOCKS,
            enable_prefix_caching=False,
            scheduling_policy=policy,
            scheduler_cls=noting(),
        ) as (llm, checkpoint),
    ):
        core = llm.llm_engine.engine_core.engine_core
        assert core.batch_queue_size == 2 and core.scheduler.defer_block_free
        prompts = [checkpoint.prompt(LENGTH, seed) for seed in range(REQUESTS)]
        begun = core.scheduler.current_step
        try:
            answers = ask_all(llm, prompts, ANSWER, steps=STEPS)
        except TimeoutError as error:
            return f"{error} with {spent(core.scheduler.given_up)}", [], []
        steps = core.scheduler.current_step - begun
        found = told(REQUESTS, REQUESTS, steps, core.scheduler.given_up)
        return found, answers, [ask(llm, prompt, ANSWER) for prompt in prompts]


@pytest.mark.behaviour("PREEMPTION_FENCE.fence", wrong=r"with \d+ preemptions \([1-9]\d* in vain")
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("role", ["kv_consumer", "kv_both"])
def test_a_full_cache_preempts_nobody_in_vain(
    patched: None, tmp_path: Path, role: str, policy: str
) -> None:
    """``kv_consumer`` never finds anything; ``kv_both`` finds the prompts of who was preempted."""
    from tests.beds.answers import TOLERANCE

    found, answers, alone = _crowd(tmp_path, role, policy)
    print(found)
    assert "(0 in vain" in found, found
    assert f"{REQUESTS} of {REQUESTS} requests finished" in found
    different = [a.difference(b) for a, b in zip(answers, alone, strict=True)]
    assert max(different) <= TOLERANCE
    assert [a.tokens for a in answers] == [b.tokens for b in alone]
