"""HYBRID_PREFIX_HITS without an engine: real schedulers, a worker that knows what blocks hold."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.beds.registered import counted, registered
from tests.beds.simple_offload import PlayedOffload
from vllm_ext.features.kv.hybrid_prefix_hits_probes import (
    fill_host,
    lose_keys,
    preempt,
    stream,
    unfinished_store,
)
from vllm_ext.features.kv.hybrid_prefix_stores import OUTCOMES

FINE = "HYBRID_PREFIX_HITS.fine_hits"
UNIT = 4
# What a cap leaves of a prompt of 59, where those of 5, 22 and 38 tokens have been before.
CAPS = ((0, 0), (3, 0), (4, 4), (15, 4), (19, 16), (20, 20), (31, 20), (36, 36), (99, 36))
HYBRIDS = (
    ("full:16", "mamba:16"),
    ("full:16", "mamba:16", "mamba:16"),
    ("full:16", "mamba:32"),
    ("full:8", "mamba:32", "full:8"),
    ("full:16", "mamba:16", "window:4"),
)


@pytest.fixture
def patched(installed_release: str, plugin: str) -> Iterator[None]:
    """The process with the plugin registered, or as it came."""
    with _registered(plugin == "with"):
        yield


@pytest.fixture
def active(installed_release: str) -> Iterator[None]:
    """The process with the plugin registered."""
    with _registered(True):
        yield


def _registered(active: bool) -> Any:
    import vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector  # noqa: F401

    return registered(active)


def nothing_wrong(bed: PlayedOffload) -> None:
    """Every read was right, and every key of the host's cache tells what its block holds."""
    assert bed.problems == []
    assert bed.check_host() == []


def nothing_held(bed: PlayedOffload) -> None:
    """No block is held when all requests and copies are done, and the caches can be reset."""
    bed.settle()
    assert bed.held() == (0, 0)
    assert bed.connector.reset_cache() is True


@pytest.mark.behaviour(FINE, wrong=r"loads \d+ of \d+ tokens")
@pytest.mark.parametrize(("length", "end"), [(176, 160), (112, 96), (300, 288), (34, 32)])
def test_a_prompt_is_found_up_to_its_last_key(patched: None, length: int, end: int) -> None:
    """Blocks of 128 tokens, keys of 32, as of an LFM2 with --prefix-match-unit 32."""
    bed = PlayedOffload(["full:128", "mamba:128"], unit=32)
    prompt = list(range(1, length + 1))
    assert bed.serve("first", prompt) == 0
    loaded = bed.serve_again(prompt)
    assert loaded == end, f"loads {loaded} of {end} tokens"
    nothing_wrong(bed)
    nothing_held(bed)


@pytest.mark.behaviour(FINE, wrong=r"loads \d+ of \d+ tokens")
@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize("groups", HYBRIDS, ids="-".join)
def test_all_lengths_in_all_kinds_of_groups(
    patched: None, groups: tuple[str, ...], late: int
) -> None:
    bed = PlayedOffload(groups, unit=UNIT, late=late)
    for length in range(5, 80, 3):
        prompt = [length + 1000, *range(1, length)]
        bed.serve(f"first-{length}", prompt)
        loaded = bed.serve_again(prompt)
        # The last token is always computed; a prompt that ends with a key is another test.
        end = length // UNIT * UNIT
        if end < length:
            assert loaded == end, f"{length}: loads {loaded} of {end} tokens"
    nothing_wrong(bed)
    nothing_held(bed)


@pytest.mark.behaviour(FINE, wrong=r"loads \d+ of \d+ tokens")
def test_a_prompt_that_grows(patched: None) -> None:
    """A conversation: each turn loads what the one before it ended with, and stores its own end."""
    bed = PlayedOffload(["full:16", "mamba:16"], unit=UNIT)
    tokens: list[int] = []
    for turn in range(12):
        end = len(tokens) // UNIT * UNIT
        tokens += range(100 * turn, 100 * turn + 13)
        bed.settle()
        bed.forget_local()
        before = len(tokens) - 13
        loaded = bed.serve(f"turn-{turn}", tokens)
        # From 0.32.0 on the last key ends before the last token.
        if end < before or not turn:
            assert loaded == end, f"loads {loaded} of {end} tokens"
    nothing_wrong(bed)
    nothing_held(bed)


@pytest.mark.behaviour(FINE, wrong=r"loads \d+ of \d+ tokens")
@pytest.mark.parametrize("groups", [["full"], ["full", "window"]])
def test_what_a_request_computes_last_is_stored(patched: None, groups: list[str]) -> None:
    """Also of models without Mamba: a request that ends in the step that fills its last block."""
    bed = PlayedOffload(groups)
    prompt = list(range(1, 66))
    bed.serve("first", prompt, answer=1)
    loaded = bed.serve_again(prompt, answer=1)
    assert loaded == 64, f"loads {loaded} of 64 tokens"
    nothing_wrong(bed)
    nothing_held(bed)


@pytest.mark.behaviour("HYBRID_PREFIX_HITS.stepping", wrong="sleeps with a store under way")
def test_an_engine_without_requests_finishes_its_stores(patched: None) -> None:
    bed = PlayedOffload(["full"], late=3)
    unfinished_store(bed)
    assert bed.manager.has_pending_stores()
    assert bed.scheduler.has_requests(), "sleeps with a store under way"


@pytest.mark.behaviour("HYBRID_PREFIX_HITS.stats", wrong="no method tells")
def test_the_connector_tells_what_became_of_states(patched: None) -> None:
    """Under the names of 0.30.0 and later, and as a copy."""
    bed = PlayedOffload(["full:16", "mamba:16"], unit=UNIT)
    tell = getattr(bed.connector, "get_boundary_store_stats", None)
    assert tell, "no method tells"
    before = tell()
    assert set(OUTCOMES) == set(vars(before))
    assert not any(vars(before).values())
    bed.serve("first", list(range(1, 71)))
    assert tell().published == tell().stored == 2
    assert not before.stored
    bed.connector.reset_cache()
    assert not tell().stored


def test_a_state_at_the_very_end_of_a_prompt(active: None, installed_release: str) -> None:
    """A prompt that ends with a key, one token answered: nobody hands its state over."""
    bed = PlayedOffload(["full:16", "mamba:16"], unit=UNIT)
    prompt = list(range(1, 21))
    bed.serve("first", prompt, answer=1)
    loaded = bed.serve_again([*prompt, 7, 8])
    # From 0.30.0 on this is vLLM's own business, and it finds the block before alone.
    assert loaded == (20 if installed_release == "0.29.0" else 16)
    nothing_wrong(bed)


def _traffic(bed: PlayedOffload, seed: int, requests: int = 40) -> None:
    """Requests that share prefixes, several at a time, more than the device has blocks for."""
    chance = random.Random(seed)
    stems = [[stem * 1000 + at for at in range(60)] for stem in range(5)]
    for at in range(requests):
        stem = chance.choice(stems)
        tokens = stem[: chance.randrange(10, 60)] + [chance.randrange(9)] * chance.randrange(12)
        request = bed.request(f"{seed}-{at}", tokens, answer=chance.randrange(1, 30))
        bed.scheduler.add_request(request)
        for _ in range(chance.randrange(6)):
            bed.step()
        if chance.random() < 0.1 and bed.scheduler.running:
            from vllm.v1.request import RequestStatus

            victim = chance.choice(bed.scheduler.running).request_id
            bed.scheduler.finish_requests(victim, RequestStatus.FINISHED_ABORTED)
        if chance.random() < 0.1 and bed.scheduler.running:
            preempt(bed, bed.scheduler.running[-1])
        assert bed.check_host() == []
    bed.run(600)


@pytest.mark.parametrize("late", [0, 3])
@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("groups", HYBRIDS, ids="-".join)
def test_every_byte_is_right_under_pressure(
    active: None, groups: tuple[str, ...], lazy: bool, late: int
) -> None:
    """Evictions on both sides, preemptions, aborts, hits on the device and behind them."""
    loads = 0
    for seed in range(3):
        bed = PlayedOffload(
            groups,
            unit=UNIT,
            late=late,
            blocks=60,
            batched_tokens=64,
            cpu_bytes_to_use=60 * 1024,
            lazy_offload=lazy,
        )
        _traffic(bed, seed)
        assert bed.problems == []
        loads += len(bed.loads)
        nothing_held(bed)
    assert loads, "nothing was loaded, so nothing was shown"


@pytest.mark.parametrize("what", ["stored", "loaded", "early"])
def test_the_bed_notices_wrong_bytes(
    active: None, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative controls: spoilt host blocks, loads to the wrong place, blocks given away early."""
    bed = PlayedOffload(["full:16", "mamba:16"], unit=UNIT, late=3 if what == "early" else 0)
    prompt = list(range(1, 71))
    if what == "early":
        # A held block is given to others only if nobody holds it.
        monkeypatch.setattr(bed.manager._gpu_block_pool, "touch", lambda blocks: None)
        monkeypatch.setattr(bed.manager._gpu_block_pool, "free_blocks", lambda blocks: None)
        bed.scheduler.add_request(bed.request("first", prompt))
        bed.step()
        bed.step()
        for held in bed.device.values():
            held.clear()
        bed.settle()
        assert bed.check_host()
        return
    bed.serve("first", prompt)
    bed.settle()
    if what == "stored":
        for held in bed.host.values():
            held.update(dict.fromkeys(held, 0))
        assert bed.check_host()
    else:
        monkeypatch.setattr(
            bed, "_start", lambda *args: PlayedOffload._start(bed, *args[:-1], args[-1][::-1])
        )
    assert bed.serve_again(prompt) == 68
    assert bed.problems


@pytest.mark.behaviour("MAX_LOAD_TOKENS.simple_cpu", wrong=r"cap \d+ loads \d+")
def test_a_cap_inside_a_block(patched: None) -> None:
    """kv_transfer_params.max_load_tokens, by MAX_LOAD_TOKENS, which finds what is stored below."""
    bed = PlayedOffload(["full:16", "mamba:16"], unit=UNIT)
    for end in (6, 23, 39):
        bed.serve(f"first-{end}", list(range(1, end)))
    bed.settle()
    for cap, end in CAPS:
        bed.forget_local()
        loaded = bed.serve(f"cap-{cap}", [*range(1, 39), *[cap + 100] * 21], max_load_tokens=cap)
        assert loaded == end, f"cap {cap} loads {loaded}"
    nothing_wrong(bed)


@pytest.mark.behaviour("HYBRID_PREFIX_HITS.lazy", wrong=r"not aligned to group 0 block_size=16")
def test_lazy_mode_survives_a_prefix_that_ends_inside_a_block(patched: None) -> None:
    bed = PlayedOffload(["full:16", "mamba:16"], unit=UNIT, blocks=40, lazy_offload=True)
    prompt = list(range(1, 24))
    bed.serve("first", prompt)
    for _ in range(3):
        bed.step()
    assert bed.serve_again(prompt) == 16
    nothing_wrong(bed)


@pytest.mark.behaviour(
    "HYBRID_PREFIX_HITS.lost_keys", wrong=r"ended in AssertionError|\d+ tokens are found"
)
def test_blocks_that_lose_their_keys_while_they_are_stored(patched: None) -> None:
    """A failed load takes them from the prefix cache: nobody must find them."""
    bed = PlayedOffload(["full"])
    prompt = list(range(1, 66))
    bed.scheduler.add_request(bed.request("first", prompt, answer=4))
    before, died = counted("HYBRID_PREFIX_HITS.lost_keys"), ""
    try:
        lost = lose_keys(bed)
        bed.run()
    except AssertionError as error:
        died = f"ended in AssertionError{error}"
    assert not died, died
    loaded = bed.serve_again(prompt)
    assert loaded == 0, f"{loaded} tokens are found"
    assert counted("HYBRID_PREFIX_HITS.lost_keys") - before == lost
    nothing_held(bed)


@pytest.mark.behaviour("HYBRID_PREFIX_HITS.skip_reading", wrong=r"loads \d+ tokens of a prompt")
def test_prompt_logprobs_load_nothing(patched: None) -> None:
    bed = PlayedOffload(["full"])
    prompt = list(range(1, 66))
    bed.serve("first", prompt)
    bed.settle()
    bed.forget_local()
    request = bed.request("probe", prompt)
    request.sampling_params.prompt_logprobs = 1
    request.skip_reading_prefix_cache = True
    bed.scheduler.add_request(request)
    bed.run()
    loaded = bed.external.get("probe", 0)
    assert loaded == 0, f"loads {loaded} tokens of a prompt that must be computed"
    nothing_held(bed)


@pytest.mark.behaviour("HYBRID_PREFIX_HITS.chunk_start", wrong=r"reads wrong KV of group 1")
def test_chunked_local_attention_reads_what_it_needs(patched: None) -> None:
    """Half a chunk is on the device, the rest of the prompt on the host."""
    bed = PlayedOffload(["full", "chunked"])
    prompt = list(range(1, 61))
    bed.serve("first", prompt)
    bed.settle()
    bed.forget_local()
    bed.serve("half", [*prompt[:16], 0, 0])
    bed.serve("whole", prompt)
    assert bed.problems == [], bed.problems
    nothing_held(bed)


def _found(bed: PlayedOffload, request: Any) -> tuple[int, int]:
    tokens = list(request.all_token_ids)
    return bed.lookup(bed.request("probe", tokens), 0) or 0, (len(tokens) - 1) // 16 * 16


@pytest.mark.behaviour("HYBRID_PREFIX_HITS.preempted_rows", wrong=r"\d+ of \d+ tokens are stored")
@pytest.mark.parametrize("steps", [3, 10, 30])
def test_what_comes_after_a_preemption_is_stored(patched: None, steps: int) -> None:
    bed = PlayedOffload(["full"])
    bed.scheduler.use_v2_model_runner = True
    request = bed.request("storing", list(range(1, 41)), answer=60)
    bed.scheduler.add_request(request)
    for _ in range(steps):
        bed.step()
    preempt(bed, request)
    bed.forget_local()
    bed.run(100)
    found, whole = _found(bed, request)
    assert found == whole, f"{found} of {whole} tokens are stored"
    nothing_wrong(bed)


@pytest.mark.behaviour("HYBRID_PREFIX_HITS.full_rows", wrong=r"\d+ of \d+ tokens are stored")
def test_what_comes_with_streamed_input_is_stored(patched: None) -> None:
    bed = PlayedOffload(["full"])
    request = stream(bed, [range(1, 34), range(50, 130), range(200, 260)])
    found, whole = _found(bed, request)
    assert found == whole, f"{found} of {whole} tokens are stored"
    nothing_wrong(bed)


@pytest.mark.behaviour("HYBRID_PREFIX_HITS.reset_pins", wrong=r"returned False")
def test_a_reset_while_a_hit_is_pending(patched: None) -> None:
    bed = PlayedOffload(["full"])
    prompt = list(range(1, 66))
    bed.serve("first", prompt, answer=4)
    bed.settle()
    request = bed.request("probe", prompt)
    assert bed.lookup(request, 0) == 64
    done = bed.connector.reset_cache()
    assert done is True, f"reset_cache returned {done}"
    assert bed.lookup(request, 0) == 0
    bed.connector.request_finished_all_groups(request, ([],))
    nothing_held(bed)


@pytest.mark.parametrize("late", [0, 2])
def test_a_reset_at_any_time_leaves_nothing_held(active: None, late: int) -> None:
    """Also while finished requests still have something to store."""
    prompt = list(range(1, 24))
    for steps in range(12):
        bed = PlayedOffload(["full:16", "mamba:16"], unit=UNIT, late=late)
        bed.scheduler.add_request(bed.request("first", prompt))
        for _ in range(steps):
            bed.step()
        bed.connector.reset_cache()
        bed.run(100)
        bed.settle()
        assert bed.check_host() == []
        bed.forget_local()
        bed.serve("second", prompt)
        assert bed.problems == []
        nothing_held(bed)


@pytest.mark.behaviour("HYBRID_PREFIX_HITS.counters", wrong="told by no metric and no line")
def test_states_that_find_no_room_are_told(patched: None, logged: list[str]) -> None:
    """By a line of ours on 0.29.0 and 0.30.0, by vLLM's metrics later."""
    before = counted("HYBRID_PREFIX_HITS.counters")
    bed = PlayedOffload(["full:16", "mamba:16"], unit=UNIT)
    told = fill_host(bed)
    bed.serve("first", list(range(1, 100)))
    bed.serve("second", list(range(100, 200)))
    bed.connector.get_kv_connector_stats()
    lines = [line for line in logged if line.startswith("HYBRID_PREFIX_HITS: ")]
    metrics = any("dropped_cpu_full" in stats for stats in told)
    assert metrics or lines, "told by no metric and no line"
    kept = bed.connector.get_boundary_store_stats()
    assert kept.published == kept.dropped_cpu_full >= 2
    if not metrics:
        assert counted("HYBRID_PREFIX_HITS.counters") - before == kept.dropped_cpu_full
        assert len(lines) == 1
        assert "raise cpu_bytes_to_use in --kv-transfer-config" in lines[0]


def test_handed_over_blocks_of_requests_that_are_gone(active: None) -> None:
    """They may be others' by now, so they are counted and not stored."""
    bed = PlayedOffload(["full:16", "mamba:16"], unit=UNIT)
    bed.scheduler.add_request(bed.request("first", list(range(1, 24)), answer=9))
    taken = bed.scheduler.kv_cache_manager.take_boundary_state_offloads
    offers: list[Any] = []

    def keep() -> Any:
        offers.append(taken())
        return offers[-1]

    bed.scheduler.kv_cache_manager.take_boundary_state_offloads = keep
    while not any(offers):
        bed.step()
    offered = next(filter(None, offers))
    bed.scheduler.kv_cache_manager.take_boundary_state_offloads = lambda: offered
    before = bed.connector.get_boundary_store_stats()
    preempt(bed, bed.scheduler.running[0])
    bed.step()
    after = bed.connector.get_boundary_store_stats()
    assert after.dropped_request_gone - before.dropped_request_gone == len(offered["first"])
    assert after.stored == before.stored


@pytest.mark.behaviour(FINE, wrong="no store was started")
def test_stores_of_a_step_without_a_forward_pass(
    patched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before 0.31.0 nobody calls wait_for_save there, as somebody does in all other steps."""
    import torch
    from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadMetadata
    from vllm.v1.simple_kv_offload.worker import SimpleCPUOffloadWorker
    from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

    told = inspect.signature(KVConnectorModelRunnerMixin._get_kv_connector_output).parameters
    always = "wait_for_save" not in told
    started: list[int] = []
    # Stands for the copies alone, which need CUDA streams.
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    worker = SimpleCPUOffloadWorker(None, SimpleNamespace(), 1024)
    # Like HOST_OFFLOAD's, this one is told twice of some stores and starts them once.
    worker._backend = SimpleNamespace(
        store=lambda step, events: started.extend({step.store_event} - set(started)),
        launch_copy=lambda *args, event_idx, **more: started.append(event_idx),
    )
    worker._store_compute_done = SimpleNamespace(record=lambda stream: None)
    for event, forward in ((0, False), (1, True)):
        worker.bind_connector_metadata(
            SimpleCPUOffloadMetadata(store_event=event, store_gpu_blocks=[1], store_cpu_blocks=[1])
        )
        worker.start_load_kv()
        if forward or always:
            worker.wait_for_save()
        worker.get_finished(set())
        worker.clear_connector_metadata()
        assert event in started, "no store was started"
    assert started == [0, 1]
