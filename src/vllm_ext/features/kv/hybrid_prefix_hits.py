"""HYBRID_PREFIX_HITS: what SimpleCPUOffloadConnector stores and finds on hybrid models (PR 54736).

With ``--prefix-match-unit`` below the block size, the device's prefix cache of a model with Mamba
layers finds prefixes that end inside a block. 0.30.0 brought this to the connector's host tier and
later releases mended what was wrong there; the parts are what each release lacks. How blocks get
into the tier is in ``hybrid_prefix_stores``.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from vllm_ext.core.feature import Feature, Part, effect
from vllm_ext.core.seams import Add, Wrap
from vllm_ext.features.kv import hybrid_prefix_hits_probes as probes
from vllm_ext.features.kv import hybrid_prefix_stores as stores

_MANAGER = "vllm.v1.simple_kv_offload.manager:SimpleCPUOffloadScheduler"
_WORKER = "vllm.v1.simple_kv_offload.worker:SimpleCPUOffloadWorker"
_CONNECTOR = (
    "vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector:"
    "SimpleCPUOffloadConnector"
)
_SECONDS_BETWEEN_LINES = 60.0

# Hand-offs of each scheduler that were dropped when it was last looked at, and when that was told.
_TOLD: weakref.WeakKeyDictionary[Any, tuple[int, float]] = weakref.WeakKeyDictionary()


class FoundHit(tuple):  # type: ignore[type-arg]
    """The release's note of a hit (blocks by group, tokens) that knows where the hit begins.

    ``local``: tokens of the request that the device holds itself.
    """

    local: int


def note_hit(
    original: Callable[..., Any], self: Any, request: Any, num_computed_tokens: int
) -> Any:
    """Remember with each hit behind how many local tokens it was found."""
    # A copy begins with a block, so nothing can be loaded behind a part of one.
    if stores.is_fine(self) and num_computed_tokens % self.block_size:
        drop_pin(self, request.request_id)
        return 0, False
    found = original(self, request, num_computed_tokens)
    pending = self._pending_cpu_hits.get(request.request_id)
    if pending is not None:
        noted = self._pending_cpu_hits[request.request_id] = FoundHit(pending)
        noted.local = num_computed_tokens
    return found


def plan_load(
    original: Callable[..., None], self: Any, request: Any, blocks: Any, num_external_tokens: int
) -> None:
    """Load a hit that may end inside a block; that block is loaded as a whole.

    ``blocks``: KVCacheBlocks of the request. ``num_external_tokens``: a multiple of the tokens per
    key, at most those of the hit.
    """
    name = request.request_id
    hit = self._pending_cpu_hits.get(name)
    if not stores.is_fine(self) or not isinstance(hit, FoundHit):
        return original(self, request, blocks, num_external_tokens)
    if not num_external_tokens:
        # What the device itself holds reaches further, as it may now; no reason for a warning.
        drop_pin(self, name)
        return original(self, request, blocks, num_external_tokens)
    del self._pending_cpu_hits[name]
    # What else the release does for a request that loads nothing has to be done, too.
    original(self, request, blocks, 0)
    sizes = stores.group_sizes(self)
    tables = blocks.get_block_ids()
    host, device = [], []
    for source, target in _pairs(hit, sizes, tables, num_external_tokens):
        host.append(source)
        device.append(self._gpu_block_pool.blocks[target])
    self.cpu_block_pool.touch(host)
    self._gpu_block_pool.touch(device)
    self._free_pending_cpu_hit(hit)

    from vllm.v1.simple_kv_offload.manager import LoadRequestState, TransferMeta

    copies = TransferMeta([one.block_id for one in device], [one.block_id for one in host])
    self._reqs_to_load[name] = LoadRequestState(request=request, transfer_meta=copies)
    if any(num_external_tokens % size for size in sizes):
        effect("HYBRID_PREFIX_HITS.fine_hits")
    return None


def _pairs(
    hit: FoundHit, sizes: list[int], tables: tuple[list[int], ...], tokens: int
) -> Iterator[tuple[Any, int]]:
    """Host block and id of the device block for each block of the first ``tokens`` of a hit."""
    found, _ = hit
    for blocks, size, table in zip(found, sizes, tables, strict=True):
        first = hit.local // size
        for at, block in enumerate(blocks[: -(-tokens // size)]):
            # Windows and states need nothing of what lies before them.
            if not block.is_null:
                yield block, table[first + at]


def drop_pin(scheduler: Any, name: str) -> None:
    """Let go of host blocks that a request has found and not loaded."""
    pending = scheduler._pending_cpu_hits.pop(name, None)
    if pending is not None:
        scheduler._free_pending_cpu_hit(pending)


def _make_has_pending_push_work(owner: Any) -> Callable[[Any], bool]:
    def has_pending_push_work(self: Any) -> bool:
        """Whether the engine must go on stepping until stores are done."""
        return bool(self.has_pending_transfers())

    return has_pending_push_work


def _make_get_boundary_store_stats(owner: Any) -> Callable[[Any], Any]:
    def get_boundary_store_stats(self: Any) -> Any:
        """How many hand-offs of Mamba states had which outcome; None in a worker."""
        manager = self.scheduler_manager
        return None if manager is None else stores.copy_of_counts(manager)

    return get_boundary_store_stats


def end_hits_with_blocks(
    original: Callable[..., None], self: Any, *args: Any, **kwargs: Any
) -> None:
    """Lazy mode: make the tier find whole blocks alone, as all later releases do."""
    original(self, *args, **kwargs)
    coordinator = self.cpu_coordinator
    if self._lazy_mode and getattr(coordinator, "enable_partial_hash_hits", False):
        coordinator.enable_partial_hash_hits = False
        for manager in coordinator.single_type_managers:
            manager.cache_hit_alignment_tokens = coordinator._cache_hit_alignment_tokens
        effect("HYBRID_PREFIX_HITS.lazy")


def read_nothing(
    original: Callable[..., Any], self: Any, request: Any, num_computed_tokens: int
) -> Any:
    """No hit for a request that must compute all of its prompt, as for its prompt logprobs."""
    if not request.skip_reading_prefix_cache:
        return original(self, request, num_computed_tokens)
    drop_pin(self, request.request_id)
    effect("HYBRID_PREFIX_HITS.skip_reading")
    return 0, False


def begin_with_a_chunk(
    original: Callable[..., Any], self: Any, request: Any, num_computed_tokens: int
) -> Any:
    """Chunked local attention: no hit that begins inside a chunk.

    A hit is looked for in the rest of a request, counted from its first token, so chunks would be
    taken to begin elsewhere than they do, and blocks left out that the model attends to.
    """
    for group in self.cpu_kv_cache_config.kv_cache_groups:
        chunk = getattr(group.kv_cache_spec, "attention_chunk_size", None)
        # Full attention has the field, too, where such layers were made part of its group.
        if chunk and _is_chunked(group.kv_cache_spec) and num_computed_tokens % chunk:
            drop_pin(self, request.request_id)
            effect("HYBRID_PREFIX_HITS.chunk_start")
            return 0, False
    return original(self, request, num_computed_tokens)


def _is_chunked(spec: Any) -> bool:
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec

    return isinstance(spec, ChunkedLocalAttentionSpec)


def forget_preempted(original: Callable[..., Any], self: Any, scheduler_output: Any) -> Any:
    """Forget the tables of requests that a step preempts: their blocks are others' now."""
    for name in scheduler_output.preempted_req_ids or ():
        storing = self._reqs_to_store.get(name)
        if storing is not None and any(storing.block_ids):
            storing.block_ids = tuple([] for _ in storing.block_ids)
            storing.num_stored_blocks = [0] * len(storing.block_ids)
            effect("HYBRID_PREFIX_HITS.preempted_rows")
    return original(self, scheduler_output)


def replace_tables(original: Callable[..., Any], self: Any, scheduler_output: Any) -> Any:
    """Forget what is known of a table that a step's row states as a whole again."""
    for row in scheduler_output.scheduled_new_reqs:
        storing = self._reqs_to_store.get(row.req_id)
        if storing is not None and any(storing.block_ids):
            storing.block_ids = tuple([] for _ in storing.block_ids)
            effect("HYBRID_PREFIX_HITS.full_rows")
    return original(self, scheduler_output)


def drop_pins_first(original: Callable[..., Any], self: Any) -> Any:
    """Let go of found blocks before a reset, which fails while any host block is held."""
    for name in list(self._pending_cpu_hits):
        drop_pin(self, name)
        effect("HYBRID_PREFIX_HITS.reset_pins")
    return original(self)


def tell_dropped(original: Callable[..., Any], self: Any, scheduler_output: Any) -> Any:
    """Count and log, at most once a minute, the hand-offs that a step has dropped."""
    planned = original(self, scheduler_output)
    counts = getattr(self, "boundary_store_stats", None)
    if counts is None:
        return planned
    by_reason = stores.dropped(counts)
    total = sum(by_reason.values())
    before, told = _TOLD.get(self, (0, -_SECONDS_BETWEEN_LINES))
    # A reset starts them anew.
    added = total - before if total >= before else total
    if added:
        effect("HYBRID_PREFIX_HITS.counters", added)
        now = time.monotonic()
        if now - told >= _SECONDS_BETWEEN_LINES:
            told = now
            logging.getLogger("vllm.v1.simple_kv_offload.manager").warning(
                "HYBRID_PREFIX_HITS: %d of %d Mamba states at the ends of prefixes were not stored "
                "on the host (%s), so prompts with these prefixes are computed again. If most of "
                "them are dropped_cpu_full, raise cpu_bytes_to_use in --kv-transfer-config.",
                total,
                counts.published,
                ", ".join(f"{reason} {number}" for reason, number in by_reason.items()),
            )
    _TOLD[self] = total, told
    return planned


FEATURE = Feature(
    name="HYBRID_PREFIX_HITS",
    area="kv",
    summary="SimpleCPUOffloadConnector stores and finds prefixes of hybrid models where they end.",
    why=(
        "With --prefix-match-unit below the block size, a prefix of a model with Mamba layers may "
        "end inside a block. On 0.29.0 SimpleCPUOffloadConnector stores whole blocks alone: "
        "prompts below a block are never found and longer ones lose their end; with lazy_offload "
        "the engine dies when such a prefix is found; and what a request computes in its last "
        "steps is not stored, whatever the model. On every release a block that loses its key "
        "while it is copied, as after a failed load, ends the engine, or is found though it is "
        "invalid (0.29.0). Later releases repaired what all before them have: loads for requests "
        "that must compute their prompt (0.30.0), tables that are wrong after a preemption "
        "(0.32.0), resets that fail (0.32.0), blocks left out of loads with chunked local "
        "attention and tables that are stated twice (0.33.0)."
    ),
    upstream_pr=(54736, 53532, 54998, 57816),
    parts=(
        Part(
            name="fine_hits",
            summary="Prefixes that end inside a block are stored and found, and so is all else "
            "that a request has computed when it ends.",
            seams=(
                Wrap(f"{_MANAGER}.get_num_new_matched_tokens", note_hit),
                Wrap(f"{_MANAGER}.update_state_after_alloc", plan_load),
                Wrap(f"{_MANAGER}.prepare_store_specs", stores.plan_stores),
                Wrap(f"{_MANAGER}._prepare_eager_store_specs", stores.scan_tables),
                Wrap(f"{_MANAGER}.request_finished_all_groups", stores.store_what_is_left),
                Wrap(f"{_MANAGER}._process_store_completion", stores.register_all_keys),
                Wrap(f"{_MANAGER}.has_pending_stores", stores.has_stores),
                Wrap(f"{_MANAGER}.reset", stores.forget_stores),
                Wrap(f"{_WORKER}.wait_for_save", stores.start_stores_once),
                Wrap(f"{_WORKER}.clear_connector_metadata", stores.start_stores_first),
            ),
            relies_on=(
                f"{_MANAGER}.build_connector_meta",
                f"{_MANAGER}._free_pending_cpu_hit",
                f"{_MANAGER}._release_transfer_refs",
                "vllm.v1.core.kv_cache_manager:KVCacheManager.take_boundary_state_offloads",
                "vllm.v1.core.block_pool:BlockPool._insert_block_hash",
            ),
            probe=probes.fine_hits,
        ),
        Part(
            name="stepping",
            summary="The engine goes on stepping until stores are done, also without requests.",
            seams=(Add(f"{_CONNECTOR}.has_pending_push_work", _make_has_pending_push_work),),
            relies_on=(f"{_CONNECTOR}.has_pending_transfers", f"{_MANAGER}.has_pending_stores"),
            probe=probes.stepping,
        ),
        Part(
            name="stats",
            summary="The connector tells what became of Mamba states, as later releases do.",
            seams=(Add(f"{_CONNECTOR}.get_boundary_store_stats", _make_get_boundary_store_stats),),
            relies_on=(f"{_CONNECTOR}.__init__",),
            probe=probes.stats,
        ),
        Part(
            name="lazy",
            summary="With lazy_offload, a prefix that ends inside a block doesn't end the engine.",
            seams=(Wrap(f"{_MANAGER}.__init__", end_hits_with_blocks),),
            relies_on=(
                f"{_MANAGER}.update_state_after_alloc",
                "vllm.v1.core.kv_cache_coordinator:HybridKVCacheCoordinator.find_longest_cache_hit",
            ),
            probe=probes.lazy,
        ),
        Part(
            name="lost_keys",
            summary="A block that loses its key while it is stored is let go, and ends no engine.",
            seams=(Wrap(f"{_MANAGER}._process_store_completion", stores.drop_lost),),
            relies_on=(f"{_MANAGER}._release_transfer_refs",),
            probe=probes.lost_keys,
        ),
        Part(
            name="skip_reading",
            summary="A request that must compute its whole prompt loads nothing.",
            seams=(Wrap(f"{_MANAGER}.get_num_new_matched_tokens", read_nothing),),
            probe=probes.skip_reading,
        ),
        Part(
            name="chunk_start",
            summary="Chunked local attention: what is loaded begins with a chunk.",
            seams=(Wrap(f"{_MANAGER}.get_num_new_matched_tokens", begin_with_a_chunk),),
            probe=probes.chunk_start,
        ),
        Part(
            name="preempted_rows",
            summary="What a request computes after a preemption is stored (V2 model runner).",
            seams=(Wrap(f"{_MANAGER}.build_connector_meta", forget_preempted),),
            relies_on=(f"{_MANAGER}._prepare_eager_store_specs",),
            probe=probes.preempted_rows,
        ),
        Part(
            name="full_rows",
            summary="What a request with streamed input computes after its first part is stored.",
            seams=(Wrap(f"{_MANAGER}.build_connector_meta", replace_tables),),
            relies_on=(f"{_MANAGER}._prepare_eager_store_specs",),
            probe=probes.full_rows,
        ),
        Part(
            name="reset_pins",
            summary="A cache reset succeeds while a request waits with a hit it has found.",
            seams=(Wrap(f"{_MANAGER}.reset", drop_pins_first),),
            relies_on=(f"{_MANAGER}._free_pending_cpu_hit",),
            probe=probes.reset_pins,
        ),
        Part(
            name="counters",
            summary="Mamba states that could not be stored are counted and logged.",
            seams=(Wrap(f"{_MANAGER}.build_connector_meta", tell_dropped),),
            probe=probes.counters,
            check=probes.counted_drop,
        ),
    ),
)
