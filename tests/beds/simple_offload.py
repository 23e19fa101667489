"""SimpleCPUOffloadConnector with a worker that knows what every block holds.

Scheduler, connector and block pools are vLLM's own. The played worker writes into each slot of a
block which prefix stands there, copies blocks when and where it is told to, and looks at all that a
model would read. What it finds wrong is in ``problems``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from vllm_ext.features.kv.offload_probe import Offload
from vllm_ext.features.played_scheduler import CHUNK, WINDOW

STATE = "state"


def prefix(tokens: Sequence[int], length: int) -> int:
    """What stands for the first ``length`` tokens."""
    return hash(tuple(tokens[:length]))


class PlayedOffload(Offload):
    """``Offload`` with this connector. ``late``: steps until a copy is done, and reported.

    A copy reads its source when it is done, so whoever hands a block on too early spoils it.
    ``problems``: what was read that isn't there. ``external``: tokens loaded, by request.
    """

    def __init__(self, groups: Sequence[str], *, late: int = 0, **how: Any) -> None:
        super().__init__(groups, connector="SimpleCPUOffloadConnector", **how)
        self.late = late
        self.problems: list[str] = []
        self.device: dict[int, dict[Any, int]] = defaultdict(dict)
        self.host: dict[int, dict[Any, int]] = defaultdict(dict)
        self.prefixes: dict[bytes, list[int]] = {}
        self._tables: dict[str, list[list[int]]] = {}
        self._pending: list[tuple[int, str, int, list[tuple[int, int]]]] = []
        self._done: list[tuple[str, int]] = []
        self._now = 0

    @property
    def manager(self) -> Any:
        """The connector's scheduler side."""
        return self.connector.scheduler_manager

    @property
    def external(self) -> dict[str, int]:
        """Tokens loaded, by request."""
        return dict(self.loads)

    def serve(self, name: str, tokens: Sequence[int], answer: int = 4, **transfer: Any) -> int:
        """Run one request to its end; tokens of it that were loaded."""
        self.scheduler.add_request(self.request(name, tokens, answer=answer, **transfer))
        self.run(200)
        return self.external.get(name, 0)

    def serve_again(self, tokens: Sequence[int], **how: Any) -> int:
        """The same with nothing left of it on the device."""
        self.settle()
        self.forget_local()
        return self.serve(f"again-{len(self.loads)}-{self._now}", tokens, **how)

    def settle(self) -> None:
        """Steps until one leaves nothing to copy."""
        for _ in range(50):
            self.step()
            if not self.manager.has_pending_stores() and not self._pending:
                return
        raise RuntimeError("copies that don't end")

    def check_host(self) -> list[str]:
        """What is wrong with keys of the host's prefix cache: their blocks hold other prefixes."""
        from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id

        wrong = []
        for key, block in self.host_keys():
            tokens, group = self.prefixes[get_block_hash(key)], get_group_id(key)
            end, size = len(tokens), self.sizes[group]
            held = self.host[block]
            if self.kinds[group] == "mamba":
                good = held.get(STATE) == prefix(tokens, end)
            else:
                first = (end - 1) // size * size
                good = all(
                    held.get(at % size) == prefix(tokens, at + 1) for at in range(first, end)
                )
            if not good:
                wrong.append(f"host block {block} does not hold {end} tokens of group {group}")
        return wrong

    def host_keys(self) -> Iterator[tuple[bytes, int]]:
        """Keys of the host's prefix cache and their blocks."""
        for key, blocks in self.manager.cpu_block_pool.cached_block_hash_to_block._cache.items():
            for block in blocks.values() if isinstance(blocks, dict) else [blocks]:
                yield key, block.block_id

    def held(self) -> tuple[int, int]:
        """Blocks of device and host that somebody holds, less the two null blocks."""
        device, host = self.scheduler.kv_cache_manager.block_pool, self.manager.cpu_block_pool
        held = [pool.num_gpu_blocks - 1 - pool.get_num_free_blocks() for pool in (device, host)]
        return held[0], held[1]

    def _output(self, planned: Any) -> Any:
        self._now += 1
        started = planned.kv_connector_metadata
        if started.need_flush:
            self._copy(everything=True)
        self._take_rows(planned)
        for block in planned.new_block_ids_to_zero or ():
            self.device[block] = {}
        for source, target in planned.kv_cache_block_copies or ():
            self.device[target] = dict(self.device[source])
        for name, number in planned.num_scheduled_tokens.items():
            self._forward(self.scheduler.requests[name], number)
        self._start("load", started.load_event, started.load_cpu_blocks, started.load_gpu_blocks)
        self._start(
            "store", started.store_event, started.store_gpu_blocks, started.store_cpu_blocks
        )
        self._copy()
        return super()._output(planned)

    def _start(self, what: str, event: int, sources: list[int], targets: list[int]) -> None:
        if event >= 0:
            pairs = list(zip(sources, targets, strict=True))
            self._pending.append((self._now + self.late, what, event, pairs))

    def _copy(self, everything: bool = False) -> None:
        """Carry out the copies that are due, and keep what is to be reported of them."""
        for entry in list(self._pending):
            due, what, event, pairs = entry
            if due <= self._now or everything:
                self._pending.remove(entry)
                source, target = (
                    (self.host, self.device) if what == "load" else (self.device, self.host)
                )
                for one, other in pairs:
                    target[other] = dict(source[one])
                self._done.append((what, event))

    def _copies(self, started: Any) -> tuple[Any, set[str]]:
        from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata

        done, self._done = self._done, []
        loaded = {
            name
            for what, event in done
            if what == "load"
            for name in started.load_event_to_reqs.get(event, ())
        }
        stored = {event: 1 for what, event in done if what == "store"}
        return SimpleCPUOffloadWorkerMetadata(stored) if stored else None, loaded

    def _take_rows(self, planned: Any) -> None:
        """Keep block tables as a worker does."""
        for row in planned.scheduled_new_reqs:
            self._tables[row.req_id] = [list(ids) for ids in row.block_ids]
        rows = planned.scheduled_cached_reqs
        for name, added in zip(rows.req_ids, rows.new_block_ids, strict=True):
            if name in rows.resumed_req_ids:
                self._tables[name] = [[] for _ in self.kinds]
            for table, ids in zip(
                self._tables[name], added or [[] for _ in self.kinds], strict=True
            ):
                table.extend(ids)

    def _forward(self, request: Any, number: int) -> None:
        tokens, end = request.all_token_ids, request.num_computed_tokens
        start = end - number
        for at, key in enumerate(request.block_hashes):
            self.prefixes.setdefault(key, list(tokens[: (at + 1) * self.unit]))
        groups = zip(self.kinds, self.sizes, self._tables[request.request_id], strict=True)
        for group, (kind, size, table) in enumerate(groups):
            if kind == "mamba":
                wrong = start and self._at(table, start - 1, size).get(STATE) != prefix(
                    tokens, start
                )
                self._at(table, end - 1, size)[STATE] = prefix(tokens, end)
            else:
                first = {"window": max(start - WINDOW + 1, 0), "chunked": start // CHUNK * CHUNK}
                wrong = any(
                    self._at(table, at, size).get(at % size) != prefix(tokens, at + 1)
                    for at in range(first.get(kind, 0), start)
                )
                for at in range(start, end):
                    self._at(table, at, size)[at % size] = prefix(tokens, at + 1)
            if wrong:
                self.problems.append(
                    f"{request.request_id} reads wrong KV of group {group} behind {start} tokens"
                )

    def _at(self, table: list[int], token: int, size: int) -> dict[Any, int]:
        """What the block of a token holds; nothing stays in the null block."""
        block = table[token // size]
        return self.device[block] if block else {}
