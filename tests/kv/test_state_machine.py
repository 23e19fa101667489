"""Requests arrive, load, fail, are preempted, finish and are aborted in any order there is.

A hypothesis state machine over vLLM's own Scheduler and KVCacheManager. After every rule the books
of the block pool balance, no request holds or fills a free block, answers are right and the prefix
cache holds what its keys say; at the end every request ends and every block comes back.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.beds.kv_play import Play, Shape
from tests.beds.registered import registered
from vllm_ext.core.seams import locate

GROUPS = (("full",), ("full", "window"), ("full", "mamba"), ("full", "window", "mamba"))
# Machines a test, in `make test`: more where there is most and least to patch.
EXAMPLES = {"0.29.0": 15, "0.33.0": 15}
FEW = 4
# Requests at once from which on no more come.
MOST = 8
# What the machine found in vLLM and nothing here repairs; with () it does all that, too.
LEFT_OUT = (
    "state-space layers: a synchronous load takes a block more than vLLM counts, and the engine "
    "ends when that was the last (Cannot get 1 free blocks from the pool)",
)
# Machines within which a fault must have been found.
FOUND_WITHIN = 200
DIED = "died of (ValueError: too many values|RuntimeError: A KV connector reported)"
_POOL = "vllm.v1.core.block_pool:BlockPool"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"


class Machine(RuleBasedStateMachine):
    """``groups``: KV cache groups; ``faults``: whether loads fail; ``crowds``: whether requests
    come that outgrow the pool together. The rest is drawn.

    ``left_out``: what vLLM itself gets wrong.
    """

    groups: tuple[str, ...] = ("full",)
    faults = True
    crowds = True
    left_out: tuple[str, ...] = LEFT_OUT
    play_class: type[Play] = Play

    @initialize(
        depth=st.sampled_from([1, 2]),
        caching=st.booleans(),
        policy=st.sampled_from(["recompute", "fail"]),
        by_request=st.booleans(),
        blocks=st.sampled_from([12, 16, 24, 48]),
        batched_tokens=st.sampled_from([32, 64]),
    )
    def start(self, by_request: bool, blocks: int, **how: Any) -> None:
        """A server."""
        by_request = by_request and tells_requests()
        extra = 8 * (len(self.groups) - 1)
        self.play = self.play_class(
            Shape(self.groups, blocks + extra, by_request=by_request, **how)
        )

    @precondition(lambda self: len(self.play.unfinished) < MOST)
    @rule(
        seed=st.integers(1, 2),
        length=st.integers(10, 110),
        answer=st.integers(1, 40),
        stored=st.sampled_from([112, 64, 32, 0]),
        asynchronous=st.booleans(),
        undecided=st.sampled_from([0, 0, 2]),
        sent=st.booleans(),
        cap=st.sampled_from([None, None, 0, 16, 40, 64]),
        faults=st.lists(st.integers(0, 15), max_size=2) | st.just([5]),
    )
    def add(self, seed: int, length: int, answer: int, **wish: Any) -> None:
        """A request comes; those of one seed share a prefix."""
        shape = self.play.shape
        if not self.faults:
            wish["faults"] = []
        if self.left_out == LEFT_OUT:
            # vLLM's own faults, see LEFT_OUT.
            wish["asynchronous"] |= "mamba" in shape.groups
        self.play.add([seed * 1000 + at for at in range(length)], answer, **wish)

    @precondition(lambda self: self.crowds and len(self.play.unfinished) < MOST)
    @rule(seed=st.integers(0, 1), answer=st.integers(30, 64))
    def crowd(self, seed: int, answer: int) -> None:
        """Four requests that fit when they come and outgrow a small pool together."""
        for at in range(4):
            start = 10_000 * (1 + at + 4 * seed)
            self.play.add(range(start, start + 38), answer)

    @rule(times=st.integers(1, 6))
    def tick(self, times: int) -> None:
        """The engine's loop turns."""
        for _ in range(times):
            self.play.tick()

    @precondition(lambda self: self.play.flying)
    @rule()
    def take(self) -> None:
        """A batch comes back before the next is planned."""
        self.play.take()

    @precondition(lambda self: self.play.transfers)
    @rule(which=st.integers(0, 7), how=st.sampled_from(["moves", "warns", "ends"]))
    def transfer(self, which: int, how: str) -> None:
        """A transfer moves its data, tells of its failure, or is through."""
        transfer = self.play.transfers[which % len(self.play.transfers)]
        transfer.warning = how == "warns"
        transfer.ready = how == "ends"
        transfer.happen()

    @precondition(lambda self: self.play.unfinished)
    @rule(which=st.integers(0, 7))
    def abort(self, which: int) -> None:
        """A client leaves."""
        self.play.abort(self.play.unfinished[which % len(self.play.unfinished)])

    @rule()
    def forget(self) -> None:
        """The prefix cache is emptied."""
        self.play.forget()

    @invariant()
    def nothing_is_wrong(self) -> None:
        """Books, blocks, answers and prefix cache."""
        self._check(self.play.problems())

    def teardown(self) -> None:
        """Every request ends, and every block comes back."""
        if hasattr(self, "play") and not self.play.dead:
            self._check(self.play.finish())

    def _check(self, problems: list[str]) -> None:
        self.play.dead = bool(problems)
        assert not problems, "; ".join(problems)


def tells_requests() -> bool:
    """Whether this release takes failures by request; 0.29.0 does not."""
    from vllm.v1.outputs import KVConnectorOutput

    return "failed_recving" in KVConnectorOutput.__dataclass_fields__


def explore(examples: int, steps: int = 30, *, shrink: bool = True, **fixed: Any) -> None:
    """Run so many machines of up to ``steps`` rules, the same ones each time."""
    phases = [Phase.generate, *([Phase.shrink] if shrink else [])]
    how = settings(
        max_examples=examples,
        stateful_step_count=steps,
        derandomize=True,
        database=None,
        deadline=None,
        phases=phases,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    log = logging.getLogger("vllm")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        run_state_machine_as_test(type("Machine", (Machine,), fixed), settings=how)
    finally:
        log.setLevel(level)


@pytest.fixture
def active(installed_release: str) -> Iterator[None]:
    """The process with the plugin registered."""
    import vllm.v1.core.sched.async_scheduler  # noqa: F401

    with registered(True):
        yield


@pytest.mark.area("kv")
@pytest.mark.parametrize("groups", GROUPS, ids="+".join)
def test_no_block_is_lost_and_every_request_ends(
    active: None, installed_release: str, groups: tuple[str, ...]
) -> None:
    explore(EXAMPLES.get(installed_release, FEW), groups=groups)


@pytest.mark.area("kv")
@pytest.mark.parametrize("groups", GROUPS, ids="+".join)
def test_no_block_is_lost_with_an_offloading_tier(
    active: None, installed_release: str, groups: tuple[str, ...]
) -> None:
    """Caps hold, too, and what comes back from the tier is what went there."""
    from tests.beds.offload_play import OffloadPlay

    explore(EXAMPLES.get(installed_release, FEW), groups=groups, play_class=OffloadPlay)


@pytest.fixture
def patched(installed_release: str, plugin: str) -> Iterator[None]:
    """The process with the plugin registered, or as it came."""
    import vllm.v1.core.sched.async_scheduler  # noqa: F401

    with registered(plugin == "with"):
        yield


@pytest.mark.behaviour("HYBRID_LOAD_FAILURE.block_reports", wrong=f"{DIED}|wrong tokens")
def test_the_machine_finds_what_failed_loads_do_to_several_groups(
    patched: None, plugin: str
) -> None:
    explore(40, groups=GROUPS[1], shrink=plugin == "with")


@pytest.mark.behaviour("HYBRID_LOAD_FAILURE.one_group", wrong="wrong tokens")
def test_the_machine_finds_what_failed_loads_do_to_one_group(patched: None, plugin: str) -> None:
    explore(100, groups=GROUPS[0], crowds=False, shrink=plugin == "with")


@pytest.mark.behaviour("PREEMPTION_FENCE.fence", wrong=r"never ended: r\d")
def test_the_machine_finds_a_livelock(patched: None, plugin: str) -> None:
    with_plugin = plugin == "with"
    explore(40 if with_plugin else FOUND_WITHIN, faults=False, shrink=with_plugin)


def _lose_a_block(original: Any, self: Any, blocks: Any) -> None:
    original(self, list(blocks)[:-1])


def _free_a_block_twice(original: Any, self: Any, blocks: Any) -> None:
    blocks = list(blocks)
    original(self, blocks + [block for block in blocks if block.ref_cnt > 1][:1])


def _free_at_once(original: Any, self: Any, request: Any) -> None:
    self.kv_cache_manager.free(request)


def _wait_for_no_transfer(original: Any, self: Any, request: Any, **how: Any) -> Any:
    return original(self, request)


FAULTS = {
    "a-block-is-lost": (f"{_POOL}.free_blocks", _lose_a_block, r"counted \d times and held \d"),
    "a-block-is-freed-twice": (
        f"{_POOL}.free_blocks",
        _free_a_block_twice,
        r"free and held|counted \d times and held \d",
    ),
    "freed-before-the-batch-is-through": (
        f"{_SCHEDULER}._free_request_blocks",
        _free_at_once,
        "are free while a step writes them",
    ),
    "freed-before-the-load-is-through": (
        f"{_SCHEDULER}._free_request",
        _wait_for_no_transfer,
        "are free while r. has a (load|send) in flight|died of",
    ),
}


@pytest.mark.area("kv")
@pytest.mark.parametrize("fault", FAULTS)
def test_the_machine_finds_what_is_broken(
    active: None, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One function of vLLM goes wrong: the machine sees it, and says what it saw."""
    target, wrong, told = FAULTS[fault]
    place = locate(target)
    original = place.read()

    def broken(*args: Any, **kwargs: Any) -> Any:
        return wrong(original, *args, **kwargs)

    monkeypatch.setattr(place.owner, place.name, broken)
    with pytest.raises(AssertionError, match=told):
        explore(FOUND_WITHIN, shrink=False)


@pytest.mark.area("kv")
def test_what_is_left_out_is_still_wrong(active: None) -> None:
    """If this fails on every release, remove what it is about from LEFT_OUT."""
    with pytest.raises(AssertionError, match="Cannot get 1 free blocks"):
        explore(FOUND_WITHIN, groups=("full", "mamba"), left_out=(), shrink=False)


@pytest.mark.area("kv")
@pytest.mark.full
@pytest.mark.parametrize("played", ["PlayedConnector", "OffloadingConnector"])
@pytest.mark.parametrize("groups", GROUPS, ids="+".join)
def test_long_lives(active: None, groups: tuple[str, ...], played: str) -> None:
    """The same with more and longer lives, on every release."""
    from tests.beds.offload_play import OffloadPlay

    play_class = OffloadPlay if played == "OffloadingConnector" else Play
    explore(300, 60, groups=groups, play_class=play_class)
