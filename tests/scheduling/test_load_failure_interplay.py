"""Failed KV loads together with what else happens: caps, preemptions, deferred frees, no cache.

Real schedulers and block managers, a played worker; tokens are checked as in ``load_failures``.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import pytest

from tests.beds.ending import died_of
from tests.beds.failing_offload import FailingOffload
from tests.beds.kv_contents import answer_to
from tests.beds.load_failures import Bed, last_block_of, prompt
from tests.beds.registered import registered

HYBRIDS = (("full", "window"), ("full", "mamba"))
# Groups, whether loads are asynchronous, and whether prefixes are cached. vLLM keeps states at the
# ends of blocks for its prefix cache alone, and synchronous loads of states end it where blocks are
# scarce ("Cannot get 1 free blocks from the pool"), whether they fail or not.
WAYS = (
    (("full", "window"), True, True),
    (("full", "window"), True, False),
    (("full", "window"), False, True),
    (("full", "window"), False, False),
    (("full", "mamba"), True, True),
)
DIED = r"died of (ValueError: too many values|RuntimeError: A KV connector reported)"
GARBAGE = r"got wrong tokens \["
NEVER = "never finished"
TOKENS = list(range(1, 201))
# Enough for the longest request of a mixture, by the last of its groups.
BLOCKS = {"full": 20, "window": 32, "mamba": 18}


@pytest.fixture
def patched(installed_release: str, plugin: str) -> Iterator[None]:
    """The process with the plugin registered, or as it came."""
    import vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler
    import vllm.v1.core.sched.async_scheduler  # noqa: F401

    with registered(plugin == "with"):
        yield


@pytest.mark.behaviour("HYBRID_LOAD_FAILURE.block_reports", wrong=DIED + "|loaded")
@pytest.mark.parametrize("retries", [1, 3], indirect=True)
@pytest.mark.parametrize("groups", HYBRIDS, ids="+".join)
def test_a_capped_load_fails(retries: int, groups: Sequence[str]) -> None:
    """Each further load is capped as well, and the cap outlives the last one."""
    bed = FailingOffload(groups)
    usable = bed.pool.get_num_free_blocks()
    bed.store(TOKENS)
    bed.forget_local()
    for name, tokens, cap in (("capped", TOKENS, 32), ("none", list(range(500, 600)), 0)):
        request = bed.request(name, tokens, 4, max_load_tokens=cap)
        bed.scheduler.add_request(request)
    bed.failing = 20
    died = bed.run_to_end()
    assert not died, died
    expected = [("capped", 32)] * retries
    assert bed.loads == expected, f"loaded {bed.loads}"
    assert bed.failing == 20 - retries
    assert bed.pool.get_num_free_blocks() == usable


@pytest.mark.behaviour("HYBRID_LOAD_FAILURE.fail_policy", wrong=DIED)
@pytest.mark.parametrize("groups", HYBRIDS, ids="+".join)
def test_a_capped_load_ends_its_request(patched: None, groups: Sequence[str]) -> None:
    """The next one with that cap loads as much, and is answered."""
    bed = FailingOffload(groups, policy="fail")
    bed.store(TOKENS)
    bed.forget_local()
    bed.failing = 1
    for name in ("failing", "loading"):
        request = bed.request(name, TOKENS, 4, max_load_tokens=40)
        bed.scheduler.add_request(request)
        died = bed.run_to_end()
        assert not died, died
        expected = "FINISHED_ERROR" if name == "failing" else "FINISHED_LENGTH_CAPPED"
        assert request.status.name == expected
    assert [name for name, _ in bed.loads] == ["failing", "loading"]


def _outgrow(bed: Bed, failing: int) -> list[str]:
    """Four requests outgrow the pool, the loads of some fail: what goes wrong.

    Those that were preempted are looked up and loaded again.
    """
    asked = {f"r{seed}": (prompt(seed, 100), 60) for seed in range(1, 5)}
    bed.faults = [last_block_of(at % len(bed.groups)) for at in range(failing)]
    for name, how in asked.items():
        bed.add(name, *how, 96)
    found = bed.problems(asked, bed.run(800))
    found += [f"{name} was preempted in vain" for name, free in bed.preempted if not free]
    return found


@pytest.mark.behaviour("HYBRID_LOAD_FAILURE.block_reports", wrong=f"{DIED}|{GARBAGE}|{NEVER}")
@pytest.mark.parametrize("overlapped", [False, True], ids=["one-batch", "two-batches"])
@pytest.mark.parametrize("retries", [1, 2], indirect=True)
def test_requests_are_preempted_whose_loads_failed(retries: int, overlapped: bool) -> None:
    """Two batches in flight: their frees are deferred, and no preemption is in vain."""
    found, preemptions = [], 0
    for (groups, asynchronous, caching), blocks in itertools.product(WAYS, (22, 24, 32, 36)):
        bed = Bed(
            groups,
            blocks,
            asynchronous=asynchronous,
            overlapped=overlapped,
            caching=caching,
            batched_tokens=256,
        )
        assert bed.scheduler.defer_block_free is overlapped
        wrong = _outgrow(bed, 6)
        preemptions += len(bed.preempted)
        where = f"{'+'.join(groups)} {asynchronous=} {caching=} {blocks} blocks"
        found += [f"{where}: {one}" for one in wrong]
    assert not found, "; ".join(found)
    assert preemptions > len(WAYS)


@pytest.mark.behaviour("PREEMPTION_FENCE.fence", wrong=f"preempted in vain|{NEVER}")
@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
def test_loads_that_succeed_while_frees_are_deferred(patched: None, asynchronous: bool) -> None:
    found, preemptions = [], 0
    ways = [way for way in ((("full",), asynchronous, True), *WAYS) if way[1] is asynchronous]
    for (groups, _, caching), blocks in itertools.product(ways, (22, 32)):
        bed = Bed(
            groups,
            blocks,
            asynchronous=asynchronous,
            overlapped=True,
            caching=caching,
            batched_tokens=256,
        )
        found += [f"{'+'.join(groups)} {blocks} blocks: {one}" for one in _outgrow(bed, 0)]
        preemptions += len(bed.preempted)
    assert not found, "; ".join(found)
    assert preemptions > len(ways)


def _mixture(bed: Bed, seed: int) -> list[str]:
    """Eight requests that come one by one, some sharing a prefix; a third of the loads fail."""
    choose = random.Random(seed)
    asked = {}
    for number in range(8):
        tokens = prompt(choose.randint(1, 4), choose.randint(30, 150))
        asked[f"r{number}"] = tokens, choose.randint(2, 30)
    bed.faults = [
        last_block_of(choose.randrange(len(bed.groups)), choose.choice((0, -1)))
        if choose.random() < 0.33
        else lambda load: set()
        for _ in range(100)
    ]
    for name, how in asked.items():
        bed.add(name, *how, choose.choice((0, len(how[0]) - 10)))
        for _ in range(choose.randint(0, 4)):
            bed.step()
    died = bed.run(800)
    if died:
        return [died]
    found = [f"{name} was preempted in vain" for name, free in bed.preempted if not free]
    ended = {name for name, result in bed.results.items() if result.reason == "error"}
    if ended and bed.scheduler.recompute_kv_load_failures:
        found.append(f"{sorted(ended)} ended with an error")
    for name, (tokens, length) in asked.items():
        # What was said before an error was right as well.
        said = bed.results[name].tokens
        right = answer_to(tokens, length)
        if said != (right[: len(said)] if name in ended else right):
            found.append(f"{name} got wrong tokens {said[:4]}")
    free, usable = bed.free_blocks
    return found + [f"{usable - free} blocks leaked"] * (free != usable)


def _mixtures(policy: str, groups: Sequence[str]) -> str:
    found = []
    ways = itertools.product((True, False), (True, False), (True, False), range(4))
    for asynchronous, overlapped, caching, seed in ways:
        if "mamba" in groups and not (caching and asynchronous):
            continue
        bed = Bed(
            groups,
            BLOCKS[groups[-1]],
            asynchronous=asynchronous,
            overlapped=overlapped,
            caching=caching,
            policy=policy,
        )
        try:
            wrong = _mixture(bed, seed)
        except Exception as error:
            wrong = [died_of(error)]
        where = f"{'async' if asynchronous else 'sync'} {overlapped=} {caching=} {seed=}"
        found += [f"{where}: {one}" for one in wrong]
    return "; ".join(found)


@pytest.mark.behaviour("HYBRID_LOAD_FAILURE.block_reports", wrong=f"{DIED}|{GARBAGE}|{NEVER}")
@pytest.mark.parametrize("groups", HYBRIDS, ids="+".join)
def test_requests_come_while_loads_are_recomputed(patched: None, groups: Sequence[str]) -> None:
    """Loads sync and async, one batch and two, with and without a prefix cache."""
    found = _mixtures("recompute", groups)
    assert not found, found


@pytest.mark.behaviour("HYBRID_LOAD_FAILURE.fail_policy", wrong=DIED)
@pytest.mark.parametrize("groups", HYBRIDS, ids="+".join)
def test_requests_come_while_others_end_with_their_loads(
    patched: None, groups: Sequence[str]
) -> None:
    """The same under policy ``fail``."""
    found = _mixtures("fail", groups)
    assert not found, found


@pytest.mark.behaviour("HYBRID_LOAD_FAILURE.one_group", wrong=f"{GARBAGE}|{NEVER}")
def test_requests_come_while_loads_of_one_group_are_recomputed(patched: None) -> None:
    found = _mixtures("recompute", ("full",))
    assert not found, found
