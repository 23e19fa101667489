"""NAN_CONTAINMENT without an engine: real scheduler, real block tables, real sampling step."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.beds.nan_blocks import Line, prompt
from tests.beds.registered import registered
from vllm_ext.core.effects import PAGE
from vllm_ext.features.scheduling.fence_probe import log_lines
from vllm_ext.features.serving import nan_containment_probes as probes
from vllm_ext.features.serving import nan_quarantine, nan_worker

CONTAIN = "NAN_CONTAINMENT.contain"
POLICY = "VLLM_EXT_NAN_CONTAINMENT_POLICY"
POLLUTED = r"innocent requests that computed NaN: \[.*'innocent"
LINES = [(("full",), False), (("full",), True), (("full", "window"), False), (("window",), True)]
_IDS = [f"{'+'.join(groups)}{'-overlapped' if late else ''}" for groups, late in LINES]


@pytest.fixture
def patched(installed_release: str, plugin: str) -> Iterator[None]:
    """The process with the plugin registered, or as it came."""
    import vllm.v1.core.sched.async_scheduler
    import vllm.v1.worker.cpu_model_runner  # noqa: F401

    with registered(plugin == "with"):
        yield


def polluted(line: Line) -> str:
    """Who computed NaN without having any, in words."""
    return f"innocent requests that computed NaN: {sorted(line.polluted)}"


CLEAN = "innocent requests that computed NaN: []"


def _crowd(line: Line, bad: int = 5, innocent: int = 20) -> None:
    for at in range(bad):
        line.add(f"bad-{at}", prompt(70, seed=at, nan_at=37))
    line.run()
    for at in range(innocent):
        line.add(f"innocent-{at}", prompt(9 + 3 * at, seed=100 + at))
    line.run()


@pytest.mark.behaviour(CONTAIN, wrong=POLLUTED)
@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("groups,overlapped", LINES, ids=_IDS)
def test_nobody_inherits_nan(
    patched: None, groups: tuple[str, ...], overlapped: bool, caching: bool
) -> None:
    """5 requests with NaN, then 20 without, in a pool of 14 blocks."""
    line = Line(groups, overlapped=overlapped, caching=caching)
    free = line.pool.get_num_free_blocks()
    _crowd(line)
    assert polluted(line) == CLEAN
    assert len(line.ended) == 25
    assert line.pool.get_num_free_blocks() == free


@pytest.mark.behaviour(CONTAIN, wrong=POLLUTED)
def test_a_block_is_wiped_once_and_before_it_is_used(patched: None) -> None:
    """5 of the request's 5 blocks, the first 2 of which are clean and stay."""
    line = Line(usable=5)
    line.add("bad", prompt(70, nan_at=37))
    line.run()
    dirty = {block.block_id for block in line.pool.blocks if line.holds_nan(block.block_id)}
    assert len(dirty) == 3 and line.wiped == []
    line.add("innocent", prompt(70, seed=1))
    line.run()
    line.add("innocent-too", prompt(70, seed=2))
    line.run()
    assert polluted(line) == CLEAN
    assert sorted(line.wiped) == sorted(dirty)


@pytest.mark.behaviour(CONTAIN, wrong=r"tokens found of a prompt with NaN: \[64, 64\]")
@pytest.mark.parametrize("overlapped", [False, True], ids=["sync", "overlapped"])
def test_nothing_with_nan_is_found_in_the_prefix_cache(patched: None, overlapped: bool) -> None:
    """What stands before the NaN is found, also while the request still runs."""
    line = Line(usable=40, overlapped=overlapped)
    line.add("bad", prompt(70, nan_at=37), 40)
    line.step()
    line.step()
    line.add("meanwhile", prompt(70, nan_at=37), 2)
    line.run()
    line.add("later", prompt(70, nan_at=37), 2)
    line.run()
    found = [line.found["meanwhile"], line.found["later"]]
    assert found == [32, 32], f"tokens found of a prompt with NaN: {found}"


@pytest.mark.behaviour(CONTAIN, wrong=r"tokens found of generated ones: 80")
def test_what_a_request_with_nan_generates_is_not_cached(patched: None) -> None:
    line = Line(usable=40)
    line.add("bad", prompt(50, nan_at=37), 40)
    line.run()
    generated = [*prompt(50, nan_at=37), *[7] * 40]
    line.add("next", generated, 2)
    line.run()
    assert line.found["next"] == 32, f"tokens found of generated ones: {line.found['next']}"


@pytest.mark.behaviour(CONTAIN, wrong=POLLUTED)
def test_a_clean_prefix_is_shared_on(patched: None) -> None:
    """A request that runs beside shares the 32 tokens before the NaN; they are never wiped."""
    line = Line(usable=12)
    shared = prompt(32, seed=5)
    line.add("innocent-beside", [*shared, *prompt(9, seed=6)], 60)
    line.step()
    kept = line.scheduler.kv_cache_manager.get_block_ids("innocent-beside")[0][:2]
    line.add("bad", [*shared, *prompt(30, seed=7, nan_at=5)], 4)
    for _ in range(8):
        line.step()
    line.add("innocent-sharing", [*shared, *prompt(50, seed=8)], 20)
    line.run()
    assert polluted(line) == CLEAN
    assert (line.found["bad"], line.found["innocent-sharing"]) == (32, 32)
    assert not set(kept) & set(line.wiped)


@pytest.mark.behaviour(CONTAIN, wrong=POLLUTED)
@pytest.mark.parametrize("groups,overlapped", LINES, ids=_IDS)
@pytest.mark.parametrize("how", ["aborted", "preempted"])
def test_a_request_that_leaves_before_its_report(
    patched: None, groups: tuple[str, ...], overlapped: bool, how: str
) -> None:
    """Its blocks are free when the scheduler hears of its NaN."""
    line = Line(groups, usable=8, overlapped=overlapped)
    line.add("bad", prompt(60, nan_at=3), 30)

    def meanwhile() -> None:
        if how == "aborted":
            line.abort("bad")
        else:
            line.scheduler._preempt_request(line.scheduler.running.pop(), 0.0)
            # As if the next step had been planned, which is when vLLM preempts.
            line.scheduler.prev_step_scheduled_req_ids.clear()

    line.meanwhile = meanwhile
    line.step()
    line.abort("bad")
    line.step()
    for at in range(6):
        line.add(f"innocent-{at}", prompt(60, seed=1 + at), 3)
        line.run()
    line.add("innocent-again", prompt(3), 2)
    line.run()
    assert polluted(line) == CLEAN


@pytest.mark.behaviour(CONTAIN, wrong=POLLUTED)
def test_a_running_request_is_preempted_for_blocks(patched: None) -> None:
    """vLLM's own preemption, in a pool that is too small, with NaN on both sides."""
    line = Line(usable=8)
    for at in range(3):
        line.add(f"bad-{at}", prompt(20, seed=at, nan_at=18), 60)
        line.add(f"innocent-{at}", prompt(20, seed=10 + at), 60)
    line.run(600)
    assert polluted(line) == CLEAN


@pytest.mark.behaviour(CONTAIN, wrong=POLLUTED)
def test_nan_that_leaves_the_window(patched: None) -> None:
    """The last tokens are clean again; the blocks in between are not."""
    line = Line(("window",), usable=9, batched_tokens=128)
    line.add("bad", prompt(120, nan_at=3), 4)
    line.run()
    line.add("innocent", prompt(100, seed=1), 4)
    line.run()
    assert polluted(line) == CLEAN


def test_without_nan_nothing_changes(installed_release: str) -> None:
    """Same plans, same prefix cache, nothing wiped."""

    def plans() -> list[Any]:
        line = Line(usable=12)
        made = []
        for at in range(6):
            line.add(f"innocent-{at}", prompt(40 + at, seed=at % 3), 30)
        for _ in range(80):
            made.append(dict(line.step().num_scheduled_tokens))
        assert not line.wiped
        return [*made, line.found]

    bare = plans()
    with registered(True):
        assert plans() == bare


operations = st.lists(
    st.one_of(
        st.tuples(st.just("bad"), st.integers(4, 90), st.integers(0, 3)),
        st.tuples(st.just("innocent"), st.integers(1, 90), st.integers(0, 3)),
        st.tuples(st.just("step"), st.integers(1, 5), st.just(0)),
        st.tuples(st.just("abort"), st.integers(0, 30), st.booleans()),
    ),
    max_size=25,
)


@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("groups", [("full",), ("full", "window")], ids="+".join)
def test_nobody_inherits_nan_whatever_happens(
    installed_release: str, groups: tuple[str, ...], caching: bool
) -> None:
    """Any order of requests, steps and aborts, also between a step and its report."""
    import vllm.v1.core.sched.async_scheduler  # noqa: F401

    @settings(
        max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    @given(operations)
    def play(asked: list[tuple[str, int, int]]) -> None:
        line = Line(groups, usable=14, caching=caching)
        names: list[str] = []
        for kind, size, which in asked:
            if kind == "step":
                for _ in range(size):
                    line.step()
            elif kind == "abort" and names:
                name = names[size % len(names)]
                if which:
                    line.meanwhile = lambda name=name: line.abort(name)
                else:
                    line.abort(name)
            elif kind != "abort":
                names.append(f"{kind}-{len(names)}")
                nan = size * (which + 1) // 5 if kind == "bad" else None
                line.add(names[-1], prompt(size, seed=which, nan_at=nan), 20)
        line.run(1000)
        assert polluted(line) == CLEAN

    with registered(True):
        play()


@pytest.mark.behaviour("NAN_CONTAINMENT.error_policy", wrong=r"ended: \{'bad': 'length'")
@pytest.mark.parametrize("overlapped", [False, True], ids=["sync", "overlapped"])
def test_policy_error_ends_the_request_alone(
    patched: None, overlapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(POLICY, "error")
    line = Line(usable=12, overlapped=overlapped)
    free = line.pool.get_num_free_blocks()
    line.add("bad", prompt(40, nan_at=37), 8)
    line.add("innocent", prompt(20, seed=1), 8)
    line.run()
    ended = {name: str(answer.finish_reason) for name, answer in line.ended.items()}
    assert ended == {"bad": "error", "innocent": "length"}, f"ended: {ended}"
    sentence = line.ended["bad"].stop_reason
    assert "Request bad " in sentence and "logits are NaN" in sentence and POLICY in sentence
    assert line.pool.get_num_free_blocks() == free
    line.add("innocent-later", prompt(150, seed=2), 8)
    line.run()
    assert polluted(line) == CLEAN


@pytest.mark.parametrize("count,own", [(3, True), (2, True), (1, False)])
def test_nan_in_a_rejected_draft_is_not_the_requests(count: int, own: bool) -> None:
    """One token and 3 drafts are computed; 2 drafts are accepted, the last ``count`` tokens bad."""
    planned = SimpleNamespace(
        num_scheduled_tokens={"a": 4, "b": 4}, scheduled_spec_decode_tokens={"a": [1, 2, 3]}
    )
    output = SimpleNamespace(req_id_to_index={"a": 0}, sampled_token_ids=[[1, 9, 5]])
    drafted = nan_quarantine.rejected_drafts(planned, output, {"a": count, "b": 4})
    assert drafted == (set() if own else {"a"})


@pytest.mark.behaviour(CONTAIN, wrong=r"marked: \[None, None\]")
def test_a_name_that_is_used_again_is_another_request(patched: None) -> None:
    line = Line(usable=40)
    requests = []
    for seed in range(2):
        requests.append(line.add("bad", prompt(40, seed=seed, nan_at=37), 4))
        line.run()
    marked = [getattr(request, "_vllm_ext_nan_from", None) for request in requests]
    assert marked == [37, 37], f"marked: {marked}"


@pytest.mark.parametrize("hit", [True, False])
def test_nan_of_a_failed_load_is_not_the_requests(installed_release: str, hit: bool) -> None:
    """vLLM throws such a step away, and computes it anew or ends the request itself."""
    line = Line(usable=12)
    line.add("loaded", prompt(40))
    line.step()
    held = line.scheduler.kv_cache_manager.get_block_ids("loaded")[0]
    invalid = {held[1]} if hit else {max(held) + 1}
    output = SimpleNamespace(kv_connector_output=SimpleNamespace(invalid_block_ids=invalid))
    failed = nan_quarantine.failed_loads(line.scheduler, output, {"loaded": 3, "gone": 1})
    assert failed == ({"loaded"} if hit else set())


@pytest.mark.parametrize("elsewhere", [True, False])
def test_blocks_that_somebody_else_fills_are_wiped_later(
    installed_release: str, elsewhere: bool
) -> None:
    """On a device, where another instance may write to them: when they change hands again."""
    from vllm.v1.request import RequestStatus

    line = Line(usable=12)
    request = line.add("loading", prompt(40))
    line.step()
    held = line.scheduler.kv_cache_manager.get_block_ids("loading")[0]
    dirty = [line.pool.blocks[held[1]]]
    quarantine = nan_quarantine.Quarantine(line.pool, False, wipe_loading=not elsewhere)
    quarantine._dirty = {held[1]}
    wiped = []
    for status in (RequestStatus.WAITING_FOR_REMOTE_KVS, RequestStatus.RUNNING):
        request.status = status
        planned = SimpleNamespace(scheduled_cached_reqs=SimpleNamespace())
        quarantine.hand_on(dirty)
        quarantine.step(line.scheduler, planned)
        wiped.append(getattr(planned.scheduled_cached_reqs, nan_worker.BLOCKS_TO_WIPE, []))
    assert wiped == ([[], [held[1]]] if elsewhere else [[held[1]], []])


def test_blocks_of_groups_that_are_no_plain_tables() -> None:
    """Rings have one block for all tokens; a group with a pool of its own has ids of its own."""

    class CircularBufferSpec: ...

    class FullAttentionSpec: ...

    def pool() -> Any:
        evicted: set[int] = set()
        null = SimpleNamespace(block_id=0)
        return SimpleNamespace(null_block=null, evicted=evicted, evict_blocks=evicted.update)

    device, host = pool(), pool()
    groups = [
        SimpleNamespace(block_pool=device, block_size=16, kv_cache_spec=FullAttentionSpec()),
        SimpleNamespace(block_pool=device, block_size=8, kv_cache_spec=CircularBufferSpec()),
        SimpleNamespace(block_pool=host, block_size=16, kv_cache_spec=FullAttentionSpec()),
    ]
    manager = SimpleNamespace(
        block_pool=device,
        coordinator=SimpleNamespace(single_type_managers=groups),
        get_block_ids=lambda name: ([1, 2, 3, 0], [9], [2, 5, 6]),
    )
    assert nan_quarantine.blocks_from(manager, "any", 20) == {2, 3, 9}
    nan_quarantine._evict_elsewhere(manager, "any", 20)
    assert host.evicted == {5, 6} and not device.evicted


@pytest.mark.parametrize("shape", [(), (4,)])
def test_hidden_states_without_rows_are_let_alone(shape: tuple[int, ...]) -> None:
    import torch

    assert nan_worker.look(torch.full(shape, torch.nan), 1, scheduled={"a": 1}) is None


@pytest.mark.behaviour(CONTAIN, wrong=r"0 lines for 2 requests")
def test_one_line_and_one_count_per_request(patched: None) -> None:
    counted = PAGE.read().get(CONTAIN, 0)
    line = Line(usable=40)
    for at in range(2):
        line.add(f"bad-{at}", prompt(40, seed=at, nan_at=37), 10)
    line.add("innocent", prompt(20, seed=9), 10)
    with log_lines() as lines:
        line.run()
    told = [text.partition(".")[0] for text in lines if "has NaN" in text]
    assert len(told) == 2, f"{len(told)} lines for 2 requests"
    assert sorted(told) == [
        f"Request bad-{at} has NaN in its hidden states from token 37 on" for at in (0, 1)
    ]
    assert PAGE.read()[CONTAIN] - counted == 2


@pytest.mark.behaviour("NAN_CONTAINMENT.notice", wrong=r"told: \{\}|told: None")
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_sampling_step_tells_who_has_nan(patched: None, value: str, dtype: str) -> None:
    """In the first, a middle and the last of a request's tokens; the padding isn't looked at."""
    import torch

    scheduled = {"a": 3, "b": 1, "c": 4, "d": 2}
    hidden = torch.ones(16, 8, dtype=getattr(torch, dtype))
    hidden[[2, 5, 9, 12], 3] = float(value)
    told = probes.sample(probes.make_runner(list(scheduled)), hidden, scheduled).num_nans_in_logits
    assert told == {"a": 1, "c": 3, "d": 1}, f"told: {told}"


@pytest.mark.behaviour("NAN_CONTAINMENT.notice", wrong=r"told: \{\}|told: None")
def test_infinities_that_cancel_are_noticed(patched: None) -> None:
    import torch

    hidden = torch.ones(2, 8)
    hidden[0, 0], hidden[1, 0] = float("inf"), float("-inf")
    told = probes.sample(probes.make_runner(["a", "b"]), hidden, {"a": 1, "b": 1})
    assert told.num_nans_in_logits == {"a": 1, "b": 1}, f"told: {told.num_nans_in_logits}"


def test_finite_hidden_states_tell_nothing(installed_release: str) -> None:
    """Also the largest that float16 has, whose sum it can't hold."""
    import torch
    import vllm.v1.worker.cpu_model_runner  # noqa: F401

    with registered(True):
        hidden = torch.full((4, 4096), 65504.0, dtype=torch.float16)
        output = probes.sample(probes.make_runner(["a", "b"]), hidden, {"a": 1, "b": 3})
    assert not output.num_nans_in_logits
    assert output.sampled_token_ids == [[7], [7]]


def test_an_output_on_its_way_tells_when_it_is_read() -> None:
    """As both runners' asynchronous outputs, which need a GPU."""
    import torch

    read = []

    class Output:
        def get_output(self) -> Any:
            read.append(True)
            return SimpleNamespace(req_ids=["a", "b"], num_nans_in_logits={"a": 0, "b": 0})

    hidden = torch.ones(5, 4)
    hidden[3] = torch.nan
    batch = SimpleNamespace(num_reqs=2, num_tokens=5, query_start_loc=torch.tensor([0, 2, 5, 5]))
    state = SimpleNamespace(hidden_states=hidden, input_batch=batch)
    runner = SimpleNamespace(execute_model_state=state, pcp_manager=None)
    output = nan_worker.watch_second_runner(lambda self: Output(), runner)
    assert not read
    told = nan_worker.tell_when_read(Output.get_output, output)
    assert told.num_nans_in_logits == {"a": 0, "b": 2}
    assert vars(output) == {}


def test_a_stage_that_is_not_the_last_has_nothing_to_look_at() -> None:
    """Its hidden states are somebody else's input, or there is no step at all."""
    batch = SimpleNamespace(num_reqs=1, num_tokens=1, query_start_loc=[0, 1])
    for state in (None, SimpleNamespace(hidden_states=None, input_batch=batch)):
        runner = SimpleNamespace(execute_model_state=state, pcp_manager=None)
        assert nan_worker.watch_second_runner(lambda self: "sent on", runner) == "sent on"


@pytest.mark.parametrize("rows", [1, 4])
def test_wiping_takes_the_named_blocks_in_every_layer(rows: int) -> None:
    """Kernels' blocks may be smaller than the scheduler's, by a factor; states of Mamba too."""
    import torch

    blocks = 6
    caches = [torch.full((blocks * rows, 2, 3), torch.nan) for _ in range(2)]
    states = [torch.full((blocks, 5), torch.nan), torch.full((blocks, 2), torch.nan)]
    halves = torch.full((blocks * rows, 4), torch.nan).to(torch.float8_e4m3fn)
    layers = [*(SimpleNamespace(kv_cache=one) for one in (*caches, halves, states))]
    layers += [SimpleNamespace(kv_cache=torch.tensor([])), SimpleNamespace()]
    layers += [SimpleNamespace(kv_cache=torch.empty((blocks, 2), device="meta"))]
    runner = SimpleNamespace(
        device=torch.device("cpu"),
        kv_cache_config=SimpleNamespace(num_blocks=blocks),
        compilation_config=SimpleNamespace(static_forward_context=dict(enumerate(layers))),
    )
    nan_worker.wipe(runner, [1, 4])
    for cache in (*caches, *states, halves.float()):
        per = cache.shape[0] // blocks
        clean = cache.reshape(blocks, per, -1).isnan().logical_not().all(-1).all(-1)
        dirty = cache.reshape(blocks, per, -1).isnan().all(-1).all(-1)
        assert clean.tolist() == [at in (1, 4) for at in range(blocks)]
        assert dirty.tolist() == [at not in (1, 4) for at in range(blocks)]
