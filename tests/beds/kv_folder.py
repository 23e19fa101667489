"""A KV connector whose store is a folder: loads sync or async, and faults that tests arm.

Out of tree, as users' connectors are; ``kv_store`` has what a test says to it. Every engine with
the same folder shares the store, so one can prefill for another.

A unit is the least common multiple of all groups' block sizes. Complete units of a prompt are
saved when they have been computed, and found by the tokens up to their end.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from tests.beds.kv_store import Fault, armed_faults, note_load

_GARBAGE = 3.0


@dataclass
class Transfer:
    """One unit of one request: its key, and its blocks per KV group (0: there is none)."""

    request: str
    key: str
    blocks: list[list[int]]


@dataclass
class Step(KVConnectorMetadata):  # type: ignore[misc]
    """What the worker is to do in one step."""

    loads: list[Transfer] = field(default_factory=list)
    saves: list[Transfer] = field(default_factory=list)


class KVFolder(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """See the module."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        self._folder = Path(extra["folder"])
        self._folder.mkdir(parents=True, exist_ok=True)
        self._asynchronous = bool(extra.get("asynchronous"))
        groups = kv_cache_config.kv_cache_groups
        self._sizes = [group.kv_cache_spec.block_size for group in groups]
        self._unit = math.lcm(*self._sizes)
        self._layers = [list(group.layer_names) for group in groups]
        self._blocks = kv_cache_config.num_blocks
        # Scheduler: requests, their block tables, and the loads of the step that is planned.
        self._requests: dict[str, Any] = {}
        self._tables: dict[str, list[list[int]]] = {}
        self._found: dict[str, int] = {}
        self._loads: list[Transfer] = []
        # Worker: caches by layer, what to report.
        self._caches: dict[str, list[torch.Tensor]] = {}
        self._invalid: set[int] = set()
        self._arrived: set[str] = set()
        self._every = int(extra.get("fails_every", 0))
        self._carried_out = 0

    # Scheduler

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Tokens of complete stored units beyond the computed ones; one token is left over."""
        self._requests[request.request_id] = request
        if num_computed_tokens % self._unit or not self._kv_transfer_config.is_kv_consumer:
            return 0, False
        end = num_computed_tokens
        while (
            end + self._unit < request.num_tokens
            and self._path(_key(request, end + self._unit)).exists()
        ):
            end += self._unit
        self._found[request.request_id] = num_computed_tokens
        found = end - num_computed_tokens
        return found, self._asynchronous and found > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan the load of what was found."""
        tables = [list(table) for table in blocks.get_block_ids()]
        self._tables[request.request_id] = tables
        if num_external_tokens:
            start = self._found[request.request_id]
            self._loads += self._transfers(request, start, start + num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        """Plan to save what this step completes; the loads were planned before."""
        step = Step(loads=self._loads)
        self._loads = []
        computed = {}
        for new in scheduler_output.scheduled_new_reqs:
            self._tables[new.req_id] = [list(table) for table in new.block_ids]
            computed[new.req_id] = new.num_computed_tokens
        cached = scheduler_output.scheduled_cached_reqs
        for name, tokens, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            computed[name] = tokens
            if blocks is None:
                continue
            if name in cached.resumed_req_ids:
                self._tables[name] = [list(table) for table in blocks]
            else:
                for table, more in zip(self._tables[name], blocks, strict=True):
                    table += more
        if self._kv_transfer_config.is_kv_producer:
            for name, scheduled in scheduler_output.num_scheduled_tokens.items():
                request, start = self._requests[name], computed[name]
                end = min(start + scheduled, request.num_prompt_tokens)
                first = start // self._unit * self._unit
                transfers = self._transfers(request, first, end // self._unit * self._unit)
                step.saves += [t for t in transfers if not self._path(t.key).exists()]
        return step

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """Forget the request."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        """Forget the request; nothing is sent any more, so its blocks are free."""
        for known in (self._requests, self._tables, self._found):
            known.pop(request.request_id, None)
        return False, None

    def _transfers(self, request: Any, start: int, end: int) -> list[Transfer]:
        tables = self._tables[request.request_id]
        return [
            Transfer(
                request.request_id,
                _key(request, at + self._unit),
                [
                    table[at // size : (at + self._unit) // size]
                    for table, size in zip(tables, self._sizes, strict=True)
                ],
            )
            for at in range(start, end, self._unit)
        ]

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.pt"

    # Worker

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Take the caches of all layers; each has its blocks in the first dimension."""
        self._caches = {name: list(_tensors(cache)) for name, cache in kv_caches.items()}

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Carry the loads out, with the fault that is due."""
        loads = self._get_connector_metadata().loads
        for name in dict.fromkeys(load.request for load in loads):
            mine = [load for load in loads if load.request == name]
            fault = self._next_fault()
            for load in mine:
                self._load(load)
            if fault and fault.kind != "lose":
                filled = [block for load in mine for block in load.blocks[fault.group] if block]
                self._spoil(filled[fault.at], fault)
            if self._asynchronous and not (fault and fault.kind == "lose"):
                self.arrived(name)

    def arrived(self, request: str) -> None:
        """Report with the next step that a request's load has ended."""
        self._arrived.add(request)

    def _next_fault(self) -> Fault | None:
        """What an armed fault, or else the rate of failures, does to the next load."""
        self._carried_out += 1
        with armed_faults(self._folder) as armed:
            fault = Fault(**armed.pop(0)) if armed else None
        if self._every:
            turn, due = divmod(self._carried_out, self._every)
            if fault is None and due == 0:
                fault = Fault("fail", turn % len(self._layers))
            note_load(self._folder, fault)
        return fault

    def _load(self, load: Transfer) -> None:
        stored = torch.load(self._path(load.key), weights_only=True)
        for group, blocks in enumerate(load.blocks):
            for at, block in enumerate(blocks):
                if not block:
                    continue
                rows = stored[group][at]
                if rows is None:
                    raise RuntimeError(f"{load.key} has no block {at} of group {group}")
                for cache, row in zip(self._rows(group, block), rows, strict=True):
                    cache.copy_(row)

    def _spoil(self, block: int, fault: Fault) -> None:
        for cache in self._rows(fault.group, block):
            cache.view(torch.uint8).fill_(0)
            cache.copy_(torch.full_like(cache, _GARBAGE))
        if fault.kind == "fail":
            self._invalid.add(block)

    def wait_for_save(self) -> None:
        """Save what the step has completed; a unit appears in the store when it is whole."""
        for save in self._get_connector_metadata().saves:
            rows = [
                [
                    [cache.clone() for cache in self._rows(group, block)] if block else None
                    for block in blocks
                ]
                for group, blocks in enumerate(save.blocks)
            ]
            partial = self._path(save.key).with_suffix(f".{os.getpid()}")
            torch.save(rows, partial)
            partial.rename(self._path(save.key))

    def _rows(self, group: int, block: int) -> list[torch.Tensor]:
        """The memory of one block of one group, layer by layer."""
        found = []
        for layer in self._layers[group]:
            for cache in self._caches.get(layer, ()):
                per_block = cache.shape[0] // self._blocks
                found.append(cache[block * per_block : (block + 1) * per_block])
        return found

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str] | None]:
        """Asynchronous loads are reported after the step in which they were carried out."""
        arrived, self._arrived = self._arrived, set()
        return None, arrived or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of failed loads, once."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are carried out as a whole, before the first layer."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Units are saved as a whole, after the last layer."""


def _key(request: Any, end: int) -> str:
    """What a unit is found by: the tokens up to its end, the adapter and the media before it."""
    said = [list(request.all_token_ids[:end])]
    lora = request.lora_request.lora_name if request.lora_request else ""
    media: Sequence[Any] = getattr(request, "mm_features", None) or ()
    seen = [item.identifier for item in media if item.mm_position.offset < end]
    return hashlib.sha256(json.dumps([said, lora, seen]).encode()).hexdigest()[:32]


def _tensors(nested: Any) -> Iterable[torch.Tensor]:
    if isinstance(nested, torch.Tensor):
        yield nested
        return
    for part in nested:
        yield from _tensors(part)
