"""A real scheduler and block manager, with the worker and the connector's transfers played.

Steps are carried out as late as a device may (when their result is taken, with two batches in
flight), transfers as early as one may, or as late: what is freed too early is then overwritten.
Every token a request gets depends on all the KV it read, see ``kv_contents``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.beds.block_accounts import imbalances
from tests.beds.ending import died_of
from tests.beds.kv_contents import GARBAGE, Contents, Text, answer_to
from vllm_ext.features.played_scheduler import BLOCK, make_request, make_scheduler, output_of


@dataclass(frozen=True)
class Shape:
    """A server: KV cache groups, blocks, batches in flight, and how failed loads are told."""

    groups: tuple[str, ...]
    blocks: int = 40
    depth: int = 1
    caching: bool = True
    policy: str = "recompute"
    by_request: bool = False
    batched_tokens: int = 64


@dataclass
class Asked:
    """A request, what is due to it, and what it has got."""

    prompt: list[int]
    answer: int
    faults: list[int] = field(default_factory=list)
    request: Any = None
    tokens: list[int] = field(default_factory=list)
    reason: str = ""
    noted: int = 0


@dataclass
class Transfer:
    """A load or a hand-off that takes its time; reported with step ``since`` at the earliest.

    ``blocks``: what it fills or reads. ``invalid``: blocks it will report as failed, when it is
    ``ready`` or, if there is a ``warning``, before.
    """

    request: str
    since: int
    blocks: set[int]
    carry_out: Callable[[], None]
    kind: str = "load"
    invalid: set[int] = field(default_factory=set)
    by_request: bool = False
    after: Step | None = None
    carried_out: bool = False
    warning: bool = False
    ready: bool = False

    def happen(self) -> None:
        """Move the data, once, and not before the step ``after`` was carried out."""
        if self.after is not None and self.after.sampled is None:
            return
        if not self.carried_out:
            self.carried_out = True
            self.carry_out()


@dataclass
class Share:
    """One request in one step: positions, block tables, and whether a token is due."""

    request: str
    tables: tuple[list[int], ...]
    start: int
    end: int
    sampled: bool
    length: int
    restored: list[int] | None

    @property
    def written(self) -> set[int]:
        """The blocks this step writes."""
        places = range(self.start // BLOCK, (self.end - 1) // BLOCK + 1)
        return {table[at] for table in self.tables for at in places} - {0}


@dataclass
class Step:
    """A planned step: who takes part, the loads before it, and what came of it."""

    number: int
    planned: Any
    shares: list[Share]
    loads: list[Transfer]
    sampled: dict[str, list[int]] | None = None


class Play:
    """Requests come and go; ``tick`` is one turn of the engine's loop."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.contents = Contents(shape.groups)
        self.asked: dict[str, Asked] = {}
        self.flying: list[Step] = []
        self.transfers: list[Transfer] = []
        self.dead = False
        self.counts = dict.fromkeys(("steps", "loads", "failed", "preempted", "aborted"), 0)
        self._texts: dict[str, Text] = {}
        self._meaning: dict[bytes, tuple[Text, int]] = {}
        self._number = 0
        with self.engine():
            self.scheduler = self._make_scheduler()
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.usable = self.pool.get_num_free_blocks()

    @contextmanager
    def engine(self) -> Iterator[None]:
        """What vLLM raises ends an engine, so it fails a test as a wrong answer does."""
        try:
            yield
        except Exception as error:
            self.dead = True
            raise AssertionError(died_of(error)) from error

    def _make_scheduler(self) -> Any:
        from vllm.config import KVTransferConfig

        return make_scheduler(
            self.shape.groups,
            self.shape.blocks,
            overlapped=self.shape.depth > 1,
            caching=self.shape.caching,
            batched_tokens=self.shape.batched_tokens,
            transfer=KVTransferConfig(
                kv_connector="PlayedConnector",
                kv_connector_module_path="tests.beds.played_connector",
                kv_role="kv_both",
                kv_load_failure_policy=self.shape.policy,
            ),
        )

    def add(
        self, prompt: Sequence[int], answer: int, faults: Sequence[int] = (), **wish: Any
    ) -> str:
        """A request; each of its first loads meets one fault: a number that chooses a block.

        ``wish`` is the connector's, see ``played_connector``.
        """
        name = f"r{len(self.asked)}"
        request = self._request(name, prompt, answer, **wish)
        self.asked[name] = Asked(list(prompt), answer, list(faults), request)
        self._texts[name] = Text(prompt)
        with self.engine():
            self.scheduler.add_request(request)
        return name

    def _request(
        self, name: str, prompt: Sequence[int], answer: int, cap: int | None = None, **wish: Any
    ) -> Any:
        from tests.beds.played_connector import Wish

        wish["stored"] = min(wish.get("stored", 0), len(prompt) - 1) // BLOCK * BLOCK
        self.scheduler.connector.wishes[name] = Wish(**wish)
        return make_request(name, prompt, answer)

    def abort(self, name: str) -> None:
        """The client has left."""
        from vllm.v1.request import RequestStatus

        if not self.asked[name].reason:
            self.asked[name].reason = "abort"
            self.counts["aborted"] += 1
            with self.engine():
                self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def forget(self) -> None:
        """Empty the prefix cache, if nothing is in use."""
        with self.engine():
            self.scheduler.reset_prefix_cache()

    @property
    def unfinished(self) -> list[str]:
        """Requests without an end, in the order in which they came."""
        return [name for name, asked in self.asked.items() if not asked.reason]

    def tick(self) -> None:
        """Plan a step; take a result if the pipeline is full, all if there was nothing to plan."""
        room = self.shape.depth if self.plan() else 1
        while len(self.flying) >= room:
            self.take()

    def plan(self) -> bool:
        """Plan one step; whether it has any tokens."""
        with self.engine():
            planned = self.scheduler.schedule()
        self._number += 1
        self.counts["steps"] += 1
        self.counts["preempted"] += len(planned.preempted_req_ids or ())
        step = Step(self._number, planned, self._shares(planned), [])
        self._begin_transfers(step)
        self.flying.append(step)
        if self.shape.depth == 1:
            self._carry_out(step)
        return bool(planned.num_scheduled_tokens)

    def _shares(self, planned: Any) -> list[Share]:
        cached = planned.scheduled_cached_reqs
        known = dict(zip(cached.req_ids, cached.num_output_tokens, strict=True))
        shares = []
        for name, scheduled in planned.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            end = request.num_computed_tokens
            resumed = name in cached.resumed_req_ids
            shares.append(
                Share(
                    name,
                    tuple(map(list, self.scheduler.kv_cache_manager.get_block_ids(name))),
                    end - scheduled,
                    end,
                    not request.is_prefill_chunk,
                    request.num_prompt_tokens + known.get(name, 0),
                    # As vLLM's V1 model runner, which dropped the state of a preempted request.
                    list(cached.all_token_ids[name]) if resumed else None,
                )
            )
        return shares

    def _begin_transfers(self, step: Step) -> None:
        connector = self.scheduler.connector
        for name, tables, start, tokens in connector.loads:
            self.counts["loads"] += 1
            load = self._load(step, name, tables, start, tokens)
            load.by_request = self.shape.by_request and connector.wishes[name].asynchronous
            (self.transfers if connector.wishes[name].asynchronous else step.loads).append(load)
        connector.loads.clear()

    def _load(
        self, step: Step, name: str, tables: tuple[list[int], ...], start: int, tokens: int
    ) -> Transfer:
        places = range(start // BLOCK, (start + tokens - 1) // BLOCK + 1)
        filled = [table[at] for table in tables for at in places if table[at]]
        faults = self.asked[name].faults
        failing = {filled[faults.pop(0) % len(filled)]} if faults else set()
        text = Text(self.asked[name].prompt)
        return Transfer(
            name,
            step.number,
            set(filled),
            lambda: self.contents.load(tables, text, start, tokens, failing),
            invalid=failing,
        )

    def take(self) -> None:
        """Take the result of the oldest step in flight, if there is one."""
        if not self.flying:
            return
        step = self.flying.pop(0)
        self._carry_out(step)
        output = self._output(step)
        with self.engine():
            outputs = self.scheduler.update_from_output(step.planned, output)
        for produced in (one for many in outputs.values() for one in many.outputs):
            asked = self.asked[produced.request_id]
            asked.tokens += produced.new_token_ids
            if produced.finish_reason is not None:
                asked.reason = str(produced.finish_reason)
        self._begin_sending(step)
        self._note_meaning()

    def _begin_sending(self, step: Step) -> None:
        connector = self.scheduler.connector
        for name in connector.sending:
            held = self.scheduler.kv_cache_manager.get_block_ids(name)
            blocks = {block for table in held for block in table} - {0}
            self.transfers.append(Transfer(name, step.number + 1, blocks, lambda: None, "send"))
        connector.sending.clear()

    def _carry_out(self, step: Step) -> None:
        if step.sampled is not None:
            return
        for load in step.loads:
            load.happen()
        step.sampled = {share.request: self._compute(share) for share in step.shares}

    def _compute(self, share: Share) -> list[int]:
        text = self._texts[share.request]
        if share.restored is not None:
            text.cut(0)
            text.extend(share.restored)
        # Tokens the scheduler did not take are dropped.
        text.cut(share.length)
        good = self.contents.compute(share.tables, text, share.start, share.end)
        if not share.sampled:
            return []
        text.extend([text.following if good else GARBAGE])
        return text.tokens[-1:]

    def _output(self, step: Step) -> Any:
        from vllm.v1.outputs import KVConnectorOutput

        report = KVConnectorOutput()
        for load in step.loads:
            self._tell(load, report)
        due = [transfer for transfer in self.transfers if transfer.since <= step.number]
        for transfer in due:
            if transfer.warning:
                self._tell(transfer, report)
            if not transfer.ready:
                continue
            transfer.happen()
            self.transfers.remove(transfer)
            self._tell(transfer, report)
            self._tell_end(transfer, report)
        told = None if report.is_empty() else report
        return output_of(self.scheduler, step.planned, step.sampled, kv_connector_output=told)

    def _tell_end(self, transfer: Transfer, report: Any) -> None:
        name = "finished_sending" if transfer.kind == "send" else "finished_recving"
        setattr(report, name, (getattr(report, name) or set()) | {transfer.request})

    def _tell(self, load: Transfer, report: Any) -> None:
        if not load.invalid:
            return
        self.counts["failed"] += 1
        if load.by_request:
            report.failed_recving.add(load.request)
        else:
            report.invalid_block_ids |= load.invalid
            load.invalid = set()

    def _note_meaning(self) -> None:
        for asked in self.asked.values():
            keys = asked.request.block_hashes
            if len(keys) > asked.noted:
                text = Text(asked.request.all_token_ids)
                for at in range(asked.noted, len(keys)):
                    self._meaning[keys[at]] = text, (at + 1) * BLOCK
                asked.noted = len(keys)

    def problems(self) -> list[str]:
        """What is wrong now: the books, who writes where, answers, and the prefix cache."""
        found = imbalances(self.scheduler)
        free = {block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()}
        for transfer in self.transfers:
            if transfer.kind != "store" and (lost := transfer.blocks & free):
                told = f"{transfer.request} has a {transfer.kind} in flight"
                found.append(f"blocks {sorted(lost)} are free while {told}")
        if self.scheduler.defer_block_free:
            for share in (share for step in self.flying for share in step.shares):
                if lost := share.written & free:
                    found.append(f"blocks {sorted(lost)} are free while a step writes them")
        found += [
            f"{name} got wrong tokens {asked.tokens}"
            for name, asked in self.asked.items()
            if asked.tokens != answer_to(asked.prompt, len(asked.tokens))
            or (asked.reason == "length") != (len(asked.tokens) == asked.answer)
            or (asked.reason == "error" and not self._may_fail)
        ]
        return found + ([] if self.flying else self._poisoned())

    @property
    def _may_fail(self) -> bool:
        return self.shape.policy == "fail" and bool(self.counts["failed"])

    def _poisoned(self) -> list[str]:
        """Blocks of the prefix cache that don't hold what their key says, unless it will be."""
        from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id

        due = {
            block
            for request in self.scheduler.requests.values()
            for table in self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
            for block in table[request.num_computed_tokens // BLOCK :]
            if not request.is_finished()
        }
        found = []
        for block in self.pool.blocks:
            if block.block_hash is None or block.block_id in due:
                continue
            text, end = self._meaning[get_block_hash(block.block_hash)]
            group = get_group_id(block.block_hash)
            if not self.contents.holds(group, block.block_id, text.states[end - BLOCK : end]):
                found.append(
                    f"block {block.block_id} of group {group} is cached as tokens "
                    f"{end - BLOCK} to {end} and holds something else"
                )
        return found

    def finish(self) -> list[str]:
        """Let all transfers end until every request has; what is wrong then.

        One after another they take some 70 steps each; twice that is the bound.
        """
        for _ in range(200 + 150 * len(self.unfinished)):
            for transfer in self.transfers:
                transfer.ready = True
            if not (self.unfinished or self.flying or self.transfers or self.scheduler.requests):
                break
            self.tick()
        else:
            return [f"never ended: {', '.join(self.unfinished or self.scheduler.requests)}"]
        lost = self.usable - self.pool.get_num_free_blocks()
        return self.problems() + ([f"{lost} blocks leaked"] if lost else [])
