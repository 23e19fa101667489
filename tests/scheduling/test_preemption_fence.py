"""PREEMPTION_FENCE with vLLM's own scheduler and block manager, the pool really full."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from tests.beds.deferred_frees import Load, counted, overtaken, state, trace
from tests.beds.registered import registered
from vllm_ext.features.scheduling import preemption_fence
from vllm_ext.features.scheduling.fence_probe import Pipeline, crowd, log_lines, starve

FOUR = Load("fcfs", 4, 38, 64, 12, 0, (159, 4, 261))
LOADS = (
    Load("fcfs", 4, 20, 64, 12, 0, (121, 3, 160)),
    Load("fcfs", 16, 64, 96, 40, 0, (358, 14, 1069)),
    Load("fcfs", 16, 64, 96, 40, 7, (390, 10, 894)),
    Load("fcfs", 16, 20, 96, 40, 3, (268, 18, 744)),
    Load("priority", 4, 38, 64, 12, 0, (159, 4, 261)),
    Load("priority", 16, 64, 96, 40, 0, (358, 14, 1069)),
    Load("priority", 16, 64, 96, 40, 7, (387, 14, 1183)),
    Load("priority", 16, 20, 96, 40, 3, (250, 12, 601)),
)
NARROW = {"budget": 128, "chunk": 64}


@pytest.fixture
def patched(installed_release: str, plugin: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process with the plugin registered, or as it came; no log line was written yet."""
    import vllm.v1.core.sched.async_scheduler  # noqa: F401

    monkeypatch.setattr(preemption_fence, "RETRIES", preemption_fence.Retries())
    with registered(plugin == "with"):
        yield


@pytest.mark.behaviour("PREEMPTION_FENCE.fence", wrong="0 of 4 requests finished in 3000 steps")
def test_a_full_pool_is_no_livelock(patched: None) -> None:
    assert FOUR.run(3000) == FOUR.expected


@pytest.mark.parametrize("load", LOADS, ids=str)
@pytest.mark.behaviour(
    "PREEMPTION_FENCE.fence",
    wrong=r"\d+ of \d+ requests finished in \d+ steps with \d+ preemptions \([1-9]\d* in vain",
)
def test_steps_and_preemptions_are_those_of_vllm_0_30_0(patched: None, load: Load) -> None:
    """And what is computed again; no request is given up whose blocks don't come free at once."""
    assert load.run(600) == load.expected


@pytest.mark.behaviour("PREEMPTION_FENCE.fence", wrong="in 466 steps with 23 preemptions")
def test_the_scheduler_of_pipeline_parallelism(patched: None) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    load = Load("fcfs", 16, 20, 96, 40, 0, (464, 18, 1068))
    assert load.run(600, Scheduler) == load.expected


@pytest.mark.behaviour("PREEMPTION_FENCE.fence", wrong="0 of 4 requests finished in 600 steps")
def test_a_subclass_sees_only_real_preemptions(patched: None) -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    noted = []

    class Noting(AsyncScheduler):
        def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
            noted.append(request.request_id)
            super()._preempt_request(request, *args, **kwargs)

    assert FOUR.run(600, Noting) == FOUR.expected
    assert len(noted) == FOUR.native[1]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.behaviour("PREEMPTION_FENCE.fence", wrong=r"preempted: \['starving'\]")
def test_a_guarded_step_leaves_everything_as_it_was(patched: None, policy: str) -> None:
    with Pipeline(13, policy, **NARROW) as pipeline:
        pipeline.add("first", 96, 64)
        pipeline.add("starving", 128, 8, arrival=1.0)
        pipeline.schedule()
        before = state(pipeline.scheduler)
        output = pipeline.schedule()
        after = state(pipeline.scheduler)
        assert not output.preempted_req_ids, f"preempted: {sorted(output.preempted_req_ids)}"
        assert dict(output.num_scheduled_tokens) == {"first": 32}
        del before["requests"]["first"], after["requests"]["first"]
        assert after == before
        pipeline.process()
        assert pipeline.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 2


@pytest.mark.behaviour("PREEMPTION_FENCE.fence", wrong=r"preempted: \['high', 'low'\]")
def test_a_victim_scheduled_in_this_step_keeps_its_tokens_and_blocks(patched: None) -> None:
    with Pipeline(16, "priority", **NARROW) as pipeline:
        before, output = overtaken(pipeline)
        assert not output.preempted_req_ids, f"preempted: {sorted(output.preempted_req_ids)}"
        assert dict(output.num_scheduled_tokens) == {"low": 32}
        after = state(pipeline.scheduler)
        assert len(after["requests"]["low"]["blocks"][0]) == 10
        del before["requests"]["low"], after["requests"]["low"]
        assert after == before
        assert pipeline.run(100) == 3


@pytest.mark.behaviour("PREEMPTION_FENCE.fence", wrong=r"\['first'\] are left running")
def test_an_exception_in_the_middle_of_a_guarded_step(patched: None) -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    class Failing(AsyncScheduler):
        """Raises where 0.29.0 has selected its victim and not preempted it yet."""

        failing = False

        @property
        def requires_kv_delivery(self) -> bool:
            if self.failing:
                raise TimeoutError("in the middle of the step")
            return False

        @requires_kv_delivery.setter
        def requires_kv_delivery(self, value: bool) -> None: ...

    with Pipeline(13, scheduler_cls=Failing, **NARROW) as pipeline:
        pipeline.add("first", 96, 64)
        pipeline.add("starving", 128, 8, arrival=1.0)
        pipeline.schedule()
        before = state(pipeline.scheduler)
        pipeline.scheduler.failing = True
        # Later releases stop before they get that far.
        with suppress(TimeoutError):
            pipeline.schedule()
        del pipeline.scheduler.failing
        after = state(pipeline.scheduler)
        assert after["running"] == ["first", "starving"], f"{after['running']} are left running"
        assert (after["attributes"], after["manager"]) == (before["attributes"], before["manager"])


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.behaviour("PREEMPTION_FENCE.no_admission", wrong="'waiting' was admitted past")
def test_nothing_is_admitted_past_a_starving_request(patched: None, policy: str) -> None:
    with Pipeline(13, policy, **NARROW) as pipeline:
        scheduled = starve(pipeline).num_scheduled_tokens
        assert "starving" not in scheduled
        assert list(scheduled) == ["first"], "'waiting' was admitted past 'starving'"
        assert [r.request_id for r in pipeline.scheduler.running] == ["first", "starving"]
        assert [r.request_id for r in pipeline.scheduler.waiting] == ["waiting"]
        assert pipeline.scheduler.pause_state.name == "UNPAUSED"
        assert pipeline.run(200) == 3
        assert pipeline.preemptions == 1, "'waiting' was preempted as well"


@pytest.mark.behaviour("PREEMPTION_FENCE.no_admission", wrong="'waiting' was admitted past")
def test_admission_is_open_again_after_an_exception(patched: None) -> None:
    def fail(output: Any) -> Any:
        raise TimeoutError(", ".join(output.num_scheduled_tokens))

    with Pipeline(13, **NARROW) as pipeline:
        pipeline.add("first", 96, 64)
        pipeline.add("starving", 128, 8, arrival=1.0)
        pipeline.schedule()
        pipeline.add("waiting", 8, 8, arrival=2.0)
        before = state(pipeline.scheduler)
        pipeline.scheduler.connector.build_connector_meta = fail
        with pytest.raises(TimeoutError) as raised:
            pipeline.schedule()
        after = state(pipeline.scheduler)
        assert "waiting" not in str(raised.value), "'waiting' was admitted past 'starving'"
        for name in ("running", "pause state", "attributes", "manager"):
            assert after[name] == before[name]


@pytest.mark.behaviour("PREEMPTION_FENCE.counter", wrong="0 lines about 0 retries")
def test_guarded_retries_are_counted_and_logged_once_a_minute(
    patched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: dict[str, int] = {}
    with Pipeline(40) as pipeline:
        crowd(pipeline, 16, 64, 96)
        with counted(counts), log_lines() as lines:
            pipeline.run(200)
        lines = [line for line in lines if line.startswith("PREEMPTION_FENCE")]
        retries = counts.get("fence", 0) + counts.get("counter", 0)
        assert len(lines) == 1 and retries > 2, f"{len(lines)} lines about {retries} retries"
        assert "1 preemption(s) put off" in lines[0] and "--max-num-seqs" in lines[0]
        monkeypatch.setattr(preemption_fence.RETRIES, "next_line", 0.0)
        with log_lines() as later:
            pipeline.run(600)
        assert any(f" {retries} preemption(s) put off" in line for line in later)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_without_deferred_frees_every_step_is_stock(installed_release: str, policy: str) -> None:
    def steps() -> list[tuple[Any, ...]]:
        with Pipeline(40, policy, deferred=False) as pipeline:
            crowd(pipeline, 16, 20, 96)
            return list(trace(pipeline, 600))

    stock = steps()
    assert any(preempted for _, preempted, _, _ in stock), "the pool never ran full"
    counts: dict[str, int] = {}
    with registered(True), counted(counts):
        assert steps() == stock
    assert not counts


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_roomy_pool_is_stock_with_deferred_frees(installed_release: str, policy: str) -> None:
    def steps() -> list[tuple[Any, ...]]:
        with Pipeline(200, policy) as pipeline:
            crowd(pipeline, 8, 40, 32)
            return list(trace(pipeline, 600))

    stock = steps()
    counts: dict[str, int] = {}
    with registered(True), counted(counts):
        assert steps() == stock
    assert not counts


def test_reset_and_abort_of_requests_in_flight_are_no_guarded_retries(
    installed_release: str,
) -> None:
    from vllm.v1.request import RequestStatus

    counts: dict[str, int] = {}
    with registered(True), counted(counts), Pipeline(100) as pipeline:
        crowd(pipeline, 3, 20, 32)
        pipeline.step()
        pipeline.schedule()
        scheduler = pipeline.scheduler
        scheduler.finish_requests(["r2"], RequestStatus.FINISHED_ABORTED)
        assert scheduler.deferred_frees
        scheduler._preempt_request(scheduler.running.pop(), 0.0)
        assert scheduler.pause_state.name == "UNPAUSED"
        assert scheduler.get_request_counts() == (1, 1)
        pipeline.process()
        while len(pipeline.finished) < 2 and pipeline.steps < 200:
            pipeline.step()
        assert pipeline.finished == {"r0", "r1"}
    assert not counts
