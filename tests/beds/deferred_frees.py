"""Loads that outgrow the KV pool while freed blocks wait for the batches in flight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.beds.block_accounts import comes_free
from vllm_ext.core.effects import PAGE
from vllm_ext.features.scheduling.fence_probe import Pipeline, crowd


@dataclass(frozen=True)
class Load:
    """Requests of ``prompt`` and ``outputs`` tokens, all at once or one every ``every`` steps.

    ``native``: steps, preemptions and tokens to recompute of the unpatched vLLM 0.30.0.
    """

    policy: str
    requests: int
    prompt: int
    outputs: int
    blocks: int
    every: int
    native: tuple[int, int, int]

    def run(self, steps: int, scheduler_cls: Any = None) -> str:
        """Run it for at most ``steps`` steps; what came of it, in one sentence."""
        with Pipeline(self.blocks, self.policy, scheduler_cls=noting(scheduler_cls)) as pipeline:
            self.fill(pipeline)
            finished = pipeline.run(steps)
            given_up = pipeline.scheduler.given_up
            assert len(given_up) == pipeline.preemptions
            return told(finished, self.requests, pipeline.steps, given_up)

    def fill(self, pipeline: Pipeline) -> None:
        """Add the requests, stepping in between where they arrive one by one."""
        if not self.every:
            crowd(pipeline, self.requests, self.prompt, self.outputs)
            return
        for number in range(self.requests):
            pipeline.add(
                f"r{number}", self.prompt, self.outputs, priority=number % 2, arrival=float(number)
            )
            for _ in range(self.every):
                pipeline.step()

    @property
    def expected(self) -> str:
        """The sentence for a run that ends as in vLLM 0.30.0."""
        steps, preemptions, tokens = self.native
        given_up = [GivenUp(tokens, True)] + [GivenUp(0, True)] * (preemptions - 1)
        return told(self.requests, self.requests, steps, given_up)

    def __str__(self) -> str:
        arrivals = f"-every-{self.every}" if self.every else ""
        return f"{self.policy}-{self.requests}x{self.prompt}+{self.outputs}{arrivals}"


@dataclass(frozen=True)
class GivenUp:
    """A preemption: the tokens that are to be computed again, and whether blocks came free."""

    tokens: int
    free: bool


def noting(scheduler_cls: Any = None) -> Any:
    """A subclass of a scheduler (AsyncScheduler, if none is named) that notes what it gives up.

    Its instances have ``given_up``, a list of ``GivenUp``.
    """
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    class Noting(scheduler_cls or AsyncScheduler):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.given_up: list[GivenUp] = []

        def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
            free = comes_free(self, request)
            self.given_up.append(GivenUp(request.num_computed_tokens, free))
            super()._preempt_request(request, *args, **kwargs)

    return Noting


def told(finished: int, requests: int, steps: int, given_up: Sequence[GivenUp]) -> str:
    """``4 of 4 requests finished in 9 steps with 4 preemptions (0 in vain, 300 tokens again)``."""
    return f"{finished} of {requests} requests finished in {steps} steps with {spent(given_up)}"


def spent(given_up: Sequence[GivenUp]) -> str:
    """``4 preemptions (0 in vain, 300 tokens again)``."""
    vain = sum(not one.free for one in given_up)
    tokens = sum(one.tokens for one in given_up)
    return f"{len(given_up)} preemptions ({vain} in vain, {tokens} tokens again)"


def overtaken(pipeline: Pipeline) -> tuple[dict[str, Any], Any]:
    """PRIORITY: the victim stands before the refused request and has been scheduled in this step.

    ``low`` takes 4, 4 and 2 of 15 blocks, ``high`` comes a step later, takes 4 and is refused 2.
    Returns the state before the third step, and its output. Needs 16 blocks, chunks of 64.
    """
    # A second request in the first step: alone, a prompt isn't cut into chunks from 0.31.0 on.
    pipeline.add("short", 8, 1)
    pipeline.add("low", 160, 8, priority=1)
    pipeline.step()
    pipeline.add("high", 96, 8, arrival=1.0)
    pipeline.step()
    before = state(pipeline.scheduler)
    return before, pipeline.schedule()


def state(scheduler: Any) -> dict[str, Any]:
    """What a step that preempts nobody must leave alone, as plain values."""
    return {
        "running": [request.request_id for request in scheduler.running],
        "preempted": sorted(scheduler.reset_preempted_req_ids),
        "deferred frees": len(scheduler.deferred_frees),
        "pause state": scheduler.pause_state,
        "attributes": sorted(vars(scheduler)),
        "manager": sorted(vars(scheduler.kv_cache_manager)),
        "requests": {name: _request(scheduler, r) for name, r in scheduler.requests.items()},
    }


def _request(scheduler: Any, request: Any) -> dict[str, Any]:
    return {
        "status": request.status.name,
        "computed": request.num_computed_tokens,
        "preemptions": request.num_preemptions,
        "placeholders": request.num_output_placeholders,
        "stale": request.num_stale_output_tokens,
        "blocks": scheduler.kv_cache_manager.get_block_ids(request.request_id),
    }


def trace(pipeline: Pipeline, steps: int) -> Iterator[tuple[Any, ...]]:
    """Every step until all have finished: what is scheduled, given up, finished and free."""
    while len(pipeline.finished) < len(pipeline.tokens) and pipeline.steps < steps:
        output = pipeline.step()
        pool = pipeline.scheduler.kv_cache_manager.block_pool
        yield (
            dict(output.num_scheduled_tokens),
            sorted(output.preempted_req_ids or ()),
            sorted(pipeline.finished),
            pool.get_num_free_blocks(),
        )


@contextmanager
def counted(into: dict[str, int]) -> Iterator[None]:
    """What the feature counts meanwhile, by part."""
    before = PAGE.read()
    yield
    for name, count in PAGE.read().items():
        if name.startswith("PREEMPTION_FENCE.") and count != before.get(name, 0):
            into[name.partition(".")[2]] = count - before.get(name, 0)
