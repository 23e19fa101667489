"""NaN in KV blocks: a real scheduler and block manager, and a worker that is played.

The worker keeps for every slot of every block whether NaN stands in it, and computes as the CPU
kernel does: a token becomes NaN if anything that its request's blocks hold is NaN, also what an
earlier request left behind the last token. So a request without NaN of its own that computes NaN
was given somebody else's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm_ext.features.played_scheduler import (
    BLOCK,
    TOKEN,
    WINDOW,
    make_request,
    make_scheduler,
    output_of,
)
from vllm_ext.features.serving.nan_worker import BLOCKS_TO_WIPE

NAN = 999


class Line:
    """Requests that come, go, and may hold ``NAN`` among their tokens."""

    def __init__(
        self,
        groups: Sequence[str] = ("full",),
        usable: int = 14,
        *,
        overlapped: bool = False,
        **how: Any,
    ) -> None:
        self.groups = groups
        self.scheduler = make_scheduler(groups, usable, overlapped=overlapped, **how)
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.wiped: list[int] = []
        # Requests that computed NaN without having any, and that ended, with the reason.
        self.polluted: set[str] = set()
        self.ended: dict[str, Any] = {}
        # Tokens found in the prefix cache when a request started.
        self.found: dict[str, int] = {}
        # What happens after the next step was carried out and before its report is taken.
        self.meanwhile: Callable[[], None] | None = None
        self._nan: set[tuple[int, int, int]] = set()
        self._depth = 2 if overlapped else 1
        self._flying: list[tuple[Any, Any]] = []

    def add(self, name: str, prompt: Sequence[int], answer: int = 4) -> Any:
        """Add a request."""
        request = make_request(name, prompt, answer)
        self.scheduler.add_request(request)
        return request

    def abort(self, name: str) -> None:
        """Its client leaves."""
        from vllm.v1.request import RequestStatus

        if name in self.scheduler.requests:
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            self.ended[name] = None

    def holds_nan(self, block: int) -> bool:
        """Whether NaN stands anywhere in a block."""
        return any(held == block for _, held, _ in self._nan)

    def run(self, steps: int = 200) -> None:
        """Step until nothing is left to do."""
        for _ in range(steps):
            if not self.scheduler.has_requests() and not self._flying:
                return
            self.step()
        raise AssertionError(f"still running: {sorted(self.scheduler.requests)}")

    def step(self) -> Any:
        """Plan one step and carry it out; overlapped, its report is taken one step later."""
        planned = self.scheduler.schedule()
        self._flying.append((planned, self._execute(planned)))
        if self.meanwhile:
            happen, self.meanwhile = self.meanwhile, None
            happen()
        while len(self._flying) >= (self._depth if planned.num_scheduled_tokens else 1):
            outputs = self.scheduler.update_from_output(*self._flying.pop(0))
            for answer in (one for many in outputs.values() for one in many.outputs):
                if answer.finish_reason is not None:
                    self.ended[answer.request_id] = answer
        return planned

    def _execute(self, planned: Any) -> Any:
        wiped = getattr(planned.scheduled_cached_reqs, BLOCKS_TO_WIPE, [])
        self.wiped += wiped
        self._nan = {slot for slot in self._nan if slot[1] not in wiped}
        starts = {new.req_id: new.num_computed_tokens for new in planned.scheduled_new_reqs}
        self.found |= starts
        cached = planned.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        requests = self.scheduler.requests
        bad, sampled = {}, {}
        for name, count in planned.num_scheduled_tokens.items():
            sampled[name] = [] if requests[name].is_prefill_chunk else [TOKEN]
            first = self._forward(requests[name], starts[name], count)
            if first is not None:
                bad[name] = count - first
        return output_of(self.scheduler, planned, sampled, num_nans_in_logits=bad or None)

    def _forward(self, request: Any, start: int, count: int) -> int | None:
        """Which of the tokens is the first to become NaN, if any."""
        tokens = list(request.all_token_ids)
        tables = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        first = None
        for at in range(start, start + count):
            nan = tokens[at] == NAN if at < len(tokens) else False
            if nan or any(map(self._reads_nan, range(len(tables)), tables, [at] * len(tables))):
                first = at - start if first is None else first
                for group, table in enumerate(tables):
                    self._nan.add((group, table[at // BLOCK], at % BLOCK))
                if NAN not in tokens[: at + 1]:
                    self.polluted.add(request.request_id)
            else:
                for group, table in enumerate(tables):
                    self._nan.discard((group, table[at // BLOCK], at % BLOCK))
        return first

    def _reads_nan(self, group: int, table: Sequence[int], at: int) -> bool:
        window = self.groups[group] == "window"
        start = max(0, at - WINDOW + 1) if window else 0
        blocks = set(table[start // BLOCK : at // BLOCK + 1]) - {0}
        # The token's own slot is written before it is read, and the window cuts exactly.
        read = {
            (held, slot)
            for one, held, slot in self._nan
            if one == group and held in blocks and (held, slot) != (table[at // BLOCK], at % BLOCK)
        }
        first = table[start // BLOCK]
        return any(held != first or slot >= start % BLOCK for held, slot in read)


def prompt(length: int, *, seed: int = 0, nan_at: int | None = None) -> list[int]:
    """A prompt of its own; ``nan_at``: where NaN is."""
    tokens = [(seed * 131 + at * 7) % 900 for at in range(length)]
    if nan_at is not None:
        tokens[nan_at] = NAN
    return tokens
