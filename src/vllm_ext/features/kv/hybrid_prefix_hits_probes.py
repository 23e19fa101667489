"""What SimpleCPUOffloadConnector of a release stores and finds: real schedulers, played worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_ext.core.feature import Judgement, Verdict
from vllm_ext.features.kv.offload_probe import Offload

SIMPLE = "SimpleCPUOffloadConnector"
UNIT = 4
_BLOCK = 16
# A prompt that ends behind a key in the middle of its second block.
_TOKENS = range(1, 24)
_LAST_KEY = 20
_LONG = range(1, 66)
_STEPS = 50


def make_bed(groups: Sequence[str], **how: Any) -> Offload:
    """A scheduler with this connector."""
    return Offload(groups, connector=SIMPLE, **how)


def _told(native: bool, sentence: str) -> Judgement:
    return Judgement(Verdict.NATIVE if native else Verdict.ACTIVE, sentence)


def _store(bed: Offload, tokens: Sequence[int], answer: int = 4) -> Any:
    request = bed.request("storing", tokens, answer=answer)
    bed.scheduler.add_request(request)
    bed.run()
    return request


def ask_for(bed: Offload, tokens: Sequence[int]) -> Any:
    """A request for these tokens that an operator's cap on loads leaves alone."""
    return bed.request("probe", tokens, max_load_tokens=1 << 20)


def fine_hits() -> Judgement:
    """A prompt whose last key ends inside a block, and the hit of another request with it."""
    bed = make_bed(["full", "mamba"], unit=UNIT)
    _store(bed, _TOKENS)
    found = bed.lookup(ask_for(bed, _TOKENS), 0)
    return _told(
        found == _LAST_KEY,
        f"of {_LAST_KEY} tokens up to a prompt's last key, {found} are found in blocks of {_BLOCK}",
    )


def stepping() -> Judgement:
    """The last request ends while a store of its blocks is under way."""
    bed = make_bed(["full"])
    unfinished_store(bed)
    going_on = bed.scheduler.has_requests()
    how = "goes on stepping" if going_on else "sleeps"
    return _told(going_on, f"an engine without requests {how} while blocks are stored")


def unfinished_store(bed: Offload) -> None:
    """End the only request in the step after one whose store nobody reports."""
    from vllm.v1.request import RequestStatus

    bed.scheduler.add_request(bed.request("storing", _LONG, answer=9))
    bed.step()
    bed.scheduler.schedule()
    bed.scheduler.finish_requests("storing", RequestStatus.FINISHED_ABORTED)
    bed.scheduler.schedule()


def stats() -> Judgement:
    """Whether the connector has the method."""
    bed = make_bed(["full", "mamba"], unit=UNIT)
    told = hasattr(bed.connector, "get_boundary_store_stats")
    how = "tells" if told else "can't tell"
    return _told(told, f"the connector {how} what became of the states it was handed")


def lazy() -> Judgement:
    """The same with lazy offloading, where the second request has to be scheduled."""
    bed = make_bed(["full", "mamba"], unit=UNIT, blocks=40, lazy_offload=True)
    _store(bed, _TOKENS)
    bed.run()
    bed.forget_local()
    bed.scheduler.add_request(ask_for(bed, _TOKENS))
    try:
        bed.run()
    except AssertionError as error:
        return Judgement(Verdict.ACTIVE, f"a prefix that ends inside a block ends in: {error}")
    return Judgement(Verdict.NATIVE, "a prefix that ends inside a block is taken up to the block")


def lost_keys() -> Judgement:
    """Blocks that are taken from the prefix cache while they are copied, as after a failed load."""
    bed = make_bed(["full"])
    request = bed.request("storing", _LONG, answer=4)
    bed.scheduler.add_request(request)
    try:
        lost = lose_keys(bed)
        bed.run()
    except AssertionError:
        return Judgement(
            Verdict.ACTIVE, "a block that loses its key while it is stored ends in AssertionError"
        )
    found = bed.lookup(ask_for(bed, _LONG), 0)
    return _told(
        not found,
        f"of {lost} blocks that lost their keys while they were stored {found} tokens are found",
    )


def lose_keys(bed: Offload) -> int:
    """Steps up to one that stores, in which those blocks lose their keys; how many they are."""
    for _ in range(_STEPS):
        planned = bed.scheduler.schedule()
        stored = planned.kv_connector_metadata.store_gpu_blocks
        bed.scheduler.kv_cache_manager.evict_blocks(set(stored))
        bed.scheduler.update_from_output(planned, bed._output(planned))
        if stored:
            return len(stored)
    raise RuntimeError(f"nothing was stored in {_STEPS} steps")


def skip_reading() -> Judgement:
    """A request that must compute all of a prompt that is stored."""
    bed = make_bed(["full"])
    _store(bed, _LONG)
    request = ask_for(bed, _LONG)
    request.skip_reading_prefix_cache = True
    found = bed.lookup(request, 0)
    return _told(not found, f"a request that must compute its prompt loads {found} tokens of it")


def chunk_start() -> Judgement:
    """A hit behind 16 local tokens, half a chunk."""
    bed = make_bed(["full", "chunked"])
    _store(bed, _LONG)
    found = bed.lookup(ask_for(bed, _LONG), _BLOCK)
    return _told(not found, f"{found} tokens load behind half a chunk of local attention")


def preempted_rows() -> Judgement:
    """A request that is preempted and resumed as the V2 model runner wants it: as a new one."""
    bed = make_bed(["full"])
    bed.scheduler.use_v2_model_runner = True
    request = bed.request("storing", range(1, 41), answer=60)
    bed.scheduler.add_request(request)
    for _ in range(10):
        bed.step()
    preempt(bed, request)
    bed.forget_local()
    bed.run(100)
    return _found_of_all(bed, request, "a request that was preempted")


def preempt(bed: Offload, request: Any) -> None:
    """As the scheduler does it when blocks are scarce."""
    bed.scheduler.running.remove(request)
    bed.scheduler._preempt_request(request, 0.0)


def full_rows() -> Judgement:
    """A session with two parts, whose table is stated anew when the second comes."""
    bed = make_bed(["full"])
    request = stream(bed, [range(1, 34), range(50, 130)])
    return _found_of_all(bed, request, "a request with streamed input")


def stream(bed: Offload, parts: Sequence[Sequence[int]], answer: int = 2) -> Any:
    """Run a request whose input comes in parts, to its end."""
    first = None
    for tokens in parts:
        part = bed.request("storing", tokens, answer=answer)
        part.resumable = True
        bed.scheduler.add_request(part)
        first = first or part
        for _ in range(_STEPS):
            if first.status.name == "WAITING_FOR_STREAMING_REQ":
                break
            bed.step()
    last = bed.request("storing", [1], answer=answer)
    bed.scheduler.add_request(last)
    bed.run()
    return first


def _found_of_all(bed: Offload, request: Any, who: str) -> Judgement:
    tokens = list(request.all_token_ids)
    whole = (len(tokens) - 1) // _BLOCK * _BLOCK
    found = bed.lookup(ask_for(bed, tokens), 0)
    return _told(found == whole, f"{found} of {whole} tokens in blocks of {who} are stored")


def reset_pins() -> Judgement:
    """A cache reset after a lookup that no load has followed."""
    bed = make_bed(["full"])
    _store(bed, _LONG)
    found = bed.lookup(ask_for(bed, _LONG), 0)
    done = bed.connector.reset_cache()
    return _told(bool(done), f"a reset with a hit of {found} tokens pending returns {done}")


def counters() -> Judgement:
    """A request with states to store, and a host tier without room."""
    from vllm_ext.core.effects import PAGE

    name = "HYBRID_PREFIX_HITS.counters"
    before = PAGE.read().get(name, 0)
    bed = make_bed(["full", "mamba"], unit=UNIT)
    told = fill_host(bed)
    _store(bed, _LONG)
    counted = PAGE.read().get(name, 0) - before
    if counted:
        return Judgement(Verdict.NATIVE, f"{counted} states that were not stored are counted")
    if any("dropped_cpu_full" in stats for stats in told):
        return Judgement(Verdict.NATIVE, "states that were not stored are among vLLM's metrics")
    return Judgement(Verdict.ACTIVE, "states that were not stored are told by no metric")


def counted_drop() -> Judgement:
    """Check of the part: it counts a drop that the connector's scheduler has noted."""
    from vllm_ext.core.effects import PAGE
    from vllm_ext.features.kv.hybrid_prefix_stores import handoff_counts

    name = "HYBRID_PREFIX_HITS.counters"
    bed = make_bed(["full", "mamba"], unit=UNIT)
    before = PAGE.read().get(name, 0)
    handoff_counts(bed.connector.scheduler_manager).dropped_cpu_full += 1
    bed.step()
    counted = PAGE.read().get(name, 0) - before
    return _told(counted == 1, f"{counted} of 1 state that was not stored is counted")


def fill_host(bed: Offload) -> list[str]:
    """Leave no host block free. What the connector reports as metrics from now on, as text."""
    pool = bed.connector.scheduler_manager.cpu_block_pool
    pool.get_new_blocks(pool.get_num_free_blocks())
    told: list[str] = []
    report = bed.connector.get_kv_connector_stats

    def note() -> Any:
        stats = report()
        told.append(repr(stats))
        return stats

    bed.connector.get_kv_connector_stats = note
    return told
