"""KV loads that fail: a real Scheduler and KVCacheManager, and what comes of the tokens.

The worker is played, with the blocks of ``kv_contents``: a token is sampled right only if all a
layer of each group reads is there, so wrong block tables, poisoned prefixes and writes into the
null block show as wrong tokens, as they would on a device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.beds.block_accounts import comes_free
from tests.beds.ending import died_of
from tests.beds.kv_contents import GARBAGE, Contents, Text, answer_to
from vllm_ext.features.played_scheduler import BLOCK, make_request
from vllm_ext.features.scheduling.hybrid_load_failure_probes import make_scheduler, output_of


def prompt(seed: int, length: int = 140) -> list[int]:
    """A prompt that shares no prefix with that of another seed."""
    return [seed * 1000 + at for at in range(length)]


@dataclass(frozen=True)
class Load:
    """A load the connector asked for: destination blocks per group, first token, tokens."""

    request: str
    tables: tuple[list[int], ...]
    start: int
    tokens: int


# Which blocks of a load fail; an empty set: none.
Fault = Callable[[Load], set[int]]


def last_block_of(group: int, at: int = -1) -> Fault:
    """A fault in one of the blocks a load fills in one group (counted among those not null)."""

    def fault(load: Load) -> set[int]:
        return {[block for block in _loaded(load, group) if block][at]}

    return fault


def _loaded(load: Load, group: int) -> list[int]:
    return load.tables[group][load.start // BLOCK : -(-(load.start + load.tokens) // BLOCK)]


@dataclass
class Result:
    """What became of a request."""

    tokens: list[int] = field(default_factory=list)
    reason: str = ""


class Bed:
    """A scheduler, its worker, and requests that come and go."""

    def __init__(
        self,
        groups: Sequence[str],
        blocks: int = 60,
        *,
        asynchronous: bool,
        by_request: bool = False,
        overlapped: bool = False,
        **how: Any,
    ) -> None:
        self.groups = groups
        self.scheduler = make_scheduler(
            groups, blocks, asynchronous=asynchronous, overlapped=overlapped, **how
        )
        self.connector = self.scheduler.connector
        self.results: dict[str, Result] = {}
        self.faults: list[Fault] = []
        self.loads: list[Load] = []
        # Requests that were preempted for their blocks, and whether those came free at once.
        self.preempted: list[tuple[str, bool]] = []
        # Tokens computed per request, over all steps.
        self.computed: Counter[str] = Counter()
        # What happens after the next step was carried out and before its result is taken.
        self.meanwhile: Callable[[], None] | None = None
        # Requests whose transfers are reported as finished with the next step, whatever they are.
        self.late: set[str] = set()
        # Blocks reported as invalid with the next step, whoever holds them.
        self.invalid: set[int] = set()
        self._asynchronous = asynchronous
        self._by_request = by_request
        self._depth = 2 if overlapped else 1
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self._usable = self.pool.get_num_free_blocks()
        self._texts: dict[str, Text] = {}
        self._contents = Contents(groups)
        self._landing: list[tuple[Load, set[int]]] = []
        self._flying: list[tuple[Any, Any]] = []

    @property
    def free_blocks(self) -> tuple[int, int]:
        """Free blocks now, and when the scheduler was new."""
        return self.pool.get_num_free_blocks(), self._usable

    def add(self, name: str, tokens: Sequence[int], answer: int = 6, stored: int = 0) -> Any:
        """Add a request; ``stored``: tokens of its prompt that the connector can load."""
        self.results[name] = Result()
        self._texts[name] = Text(tokens)
        self.connector.hits[name] = stored // BLOCK * BLOCK
        request = make_request(name, tokens, answer)
        self.scheduler.add_request(request)
        return request

    def problems(self, asked: Mapping[str, tuple[Sequence[int], int]], died: str) -> list[str]:
        """What went wrong: ``asked`` are prompts and lengths of answers by request."""
        if died:
            return [died]
        found = [
            f"{name} got wrong tokens {self.results[name].tokens}"
            for name, (tokens, length) in asked.items()
            if self.results[name].tokens != answer_to(tokens, length)
        ]
        free, usable = self.free_blocks
        return found + ([f"{usable - free} blocks leaked"] if free != usable else [])

    def run(self, steps: int = 120) -> str:
        """Run until every request has ended; the exception's or the hanging requests' names."""
        try:
            for _ in range(steps):
                if all(result.reason for result in self.results.values()) and not self._flying:
                    self.step()
                    return ""
                self.step()
        except Exception as error:
            return died_of(error)
        waiting = sorted(name for name, result in self.results.items() if not result.reason)
        return f"never finished: {', '.join(waiting)}"

    def step(self) -> None:
        """Plan one step and carry it out; with overlapped batches its result is one step late."""
        with self._noting_preemptions():
            planned = self.scheduler.schedule()
        self._flying.append((planned, self._execute(planned)))
        if self.meanwhile:
            happen, self.meanwhile = self.meanwhile, None
            happen()
        idle = not planned.num_scheduled_tokens
        while len(self._flying) >= (1 if idle else self._depth):
            planned, output = self._flying.pop(0)
            outputs = self.scheduler.update_from_output(planned, output)
            for produced in (one for many in outputs.values() for one in many.outputs):
                result = self.results[produced.request_id]
                result.tokens += produced.new_token_ids
                result.reason = str(produced.finish_reason or "")

    @contextmanager
    def _noting_preemptions(self) -> Iterator[None]:
        """Those of schedule() alone: what else preempts isn't after blocks."""
        scheduler = self.scheduler
        preempt = scheduler._preempt_request

        def note(request: Any, *args: Any, **kwargs: Any) -> None:
            self.preempted.append((request.request_id, comes_free(scheduler, request)))
            preempt(request, *args, **kwargs)

        scheduler._preempt_request = note
        try:
            yield
        finally:
            del scheduler._preempt_request

    def _execute(self, planned: Any) -> Any:
        self._restore(planned)
        invalid, self.invalid = self.invalid, set()
        failed: set[str] = set()
        finished, self.late = self.late, set()
        for load, blocks in self._landing:
            finished.add(load.request)
            self._report(load, blocks, invalid, failed)
        self._landing.clear()
        for load in (Load(*asked) for asked in self.connector.loads):
            self.loads.append(load)
            blocks = self.faults.pop(0)(load) if self.faults else set()
            self.fill(load, blocks)
            if self._asynchronous:
                self._landing.append((load, blocks))
            else:
                self._report(load, blocks, invalid, failed)
        self.connector.loads.clear()
        sampled = {name: self._forward(name, n) for name, n in planned.num_scheduled_tokens.items()}
        return output_of(
            self.scheduler,
            planned,
            sampled=sampled,
            invalid=invalid,
            failed=failed,
            finished=finished,
        )

    def _restore(self, planned: Any) -> None:
        cached = planned.scheduled_cached_reqs
        for name, known in zip(cached.req_ids, cached.num_output_tokens, strict=True):
            if name in cached.resumed_req_ids:
                # As vLLM's V1 model runner, which has dropped the state of a preempted request.
                self._texts[name] = Text(cached.all_token_ids[name])
            # Tokens the scheduler did not take are dropped.
            self._texts[name].cut(self.scheduler.requests[name].num_prompt_tokens + known)

    def _report(self, load: Load, blocks: set[int], invalid: set[int], failed: set[str]) -> None:
        if blocks and self._by_request:
            failed.add(load.request)
        else:
            invalid |= blocks

    def fill(self, load: Load, failing: set[int]) -> None:
        """Carry a load out, with garbage in the failing blocks."""
        text = self._texts[load.request]
        self._contents.load(load.tables, text, load.start, load.tokens, failing)

    def _forward(self, name: str, scheduled: int) -> list[int]:
        request = self.scheduler.requests[name]
        end = request.num_computed_tokens
        self.computed[name] += scheduled
        text = self._texts[name]
        tables = self.scheduler.kv_cache_manager.get_block_ids(name)
        good = self._contents.compute(tables, text, end - scheduled, end)
        if request.is_prefill_chunk:
            return []
        text.extend([text.following if good else GARBAGE])
        return text.tokens[-1:]
