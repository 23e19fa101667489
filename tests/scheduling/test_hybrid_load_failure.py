"""HYBRID_LOAD_FAILURE without an engine: a real scheduler, real block tables, a played worker."""

from __future__ import annotations

import itertools

import pytest

from tests.beds.kv_contents import answer_to
from tests.beds.load_failures import (
    Bed,
    Fault,
    last_block_of,
    prompt,
)
from tests.beds.registered import registered

HYBRIDS = (("full", "window"), ("full", "mamba"), ("full", "window", "mamba"))
DIED = r"died of (ValueError: too many values|RuntimeError: A KV connector reported)"
GARBAGE = r"got wrong tokens \[999999"


def _with_null(fault: Fault) -> Fault:
    """The fault, and the null block reported along with it."""
    return lambda load: fault(load) | {0}


def _small(groups: tuple[str, ...], by_request: bool = False) -> Bed:
    """15 usable blocks of 16 tokens, 17 with three groups: enough for 140 tokens."""
    blocks = 15 if len(groups) < 3 else 17
    return Bed(groups, blocks, asynchronous=True, by_request=by_request, batched_tokens=32)


def _by_request() -> bool:
    """Whether this release takes failures by request; 0.29.0 does not."""
    from vllm.v1.outputs import KVConnectorOutput

    return "failed_recving" in KVConnectorOutput.__dataclass_fields__


@pytest.mark.behaviour("HYBRID_LOAD_FAILURE.block_reports", wrong=f"{DIED}|{GARBAGE}")
@pytest.mark.parametrize("overlapped", [False, True], ids=["one-batch", "two-batches"])
def test_a_failed_synchronous_load_is_recomputed(patched: None, overlapped: bool) -> None:
    """Two loads fail, a third request shares their blocks, the others notice nothing."""
    asked = {
        # 16 of the tokens computed from what failed fill a block, which must not be found again.
        "failing": (prompt(1, 150), 6),
        "failing-too": (prompt(4, 150), 6),
        "sharing": (prompt(1, 150), 6),
        "loading": (prompt(3, 100), 6),
        "computing": (prompt(2, 100), 9),
    }
    stored = {"failing": 128, "failing-too": 128, "sharing": 128, "loading": 96}
    found = []
    for groups in HYBRIDS:
        bed = Bed(groups, 90, asynchronous=False, overlapped=overlapped)
        fault = last_block_of(len(groups) - 1)
        bed.faults = [_with_null(fault), fault]
        requests = {
            name: bed.add(name, tokens, answer, stored.get(name, 0))
            for name, (tokens, answer) in asked.items()
        }
        found += bed.problems(asked, bed.run())
        disturbed = {name for name, request in requests.items() if request.num_preemptions}
        found += [f"{name} was preempted" for name in disturbed & {"loading", "computing"}]
    assert not found, "; ".join(found)


@pytest.mark.behaviour("HYBRID_LOAD_FAILURE.one_group", wrong=GARBAGE)
def test_one_group_with_a_batch_planned_on_the_failed_load(patched: None) -> None:
    """As above, with one group: who was planned further, and who shares what failed."""
    asked = {
        "failing": (prompt(1, 150), 6),
        "sharing": (prompt(1, 150), 6),
        "computing": (prompt(2, 100), 9),
    }
    found = []
    for at, caching in itertools.product((0, 3, -1), (True, False)):
        bed = Bed(("full",), 60, asynchronous=False, overlapped=True, caching=caching)
        bed.faults = [_with_null(last_block_of(0, at))]
        requests = {
            name: bed.add(name, *how, 0 if name == "computing" else 128)
            for name, how in asked.items()
        }
        found += bed.problems(asked, bed.run())
        found += ["computing was preempted"] * requests["computing"].num_preemptions
    assert not found, "; ".join(found)


@pytest.mark.behaviour("HYBRID_LOAD_FAILURE.one_group", wrong=f"sharing {GARBAGE}")
def test_one_group_whose_failed_block_is_shared(patched: None) -> None:
    """Who was to compute it again leaves, before the one that shares it reads it."""
    from vllm.v1.request import RequestStatus

    bed = Bed(("full",), 60, asynchronous=False)
    for name in ("failing", "sharing"):
        bed.add(name, prompt(1, 150), stored=128)
    bed.faults = [last_block_of(0)]
    bed.step()
    bed.scheduler.finish_requests("failing", RequestStatus.FINISHED_ABORTED)
    del bed.results["failing"]
    found = bed.problems({"sharing": (prompt(1, 150), 6)}, bed.run())
    assert not found, "; ".join(found)


@pytest.mark.behaviour("HYBRID_LOAD_FAILURE.one_group", wrong=f"next {GARBAGE}")
@pytest.mark.parametrize("when", ["before", "after"])
def test_one_group_leaves_no_bad_prefix(patched: None, when: str) -> None:
    """The client leaves before or after the failure is known; the next one asks the same."""
    from vllm.v1.request import RequestStatus

    bed = Bed(("full",), 60, asynchronous=False)
    bed.add("failing", prompt(1, 150), stored=128)
    bed.faults = [last_block_of(0)]

    def leave() -> None:
        bed.connector.hits.clear()
        bed.scheduler.finish_requests("failing", RequestStatus.FINISHED_ABORTED)
        del bed.results["failing"]
        bed.add("next", prompt(1, 150))

    if when == "before":
        bed.meanwhile = leave
    bed.step()
    if when == "after":
        leave()
    found = bed.problems({"next": (prompt(1, 150), 6)}, bed.run())
    assert not found, "; ".join(found)


@pytest.mark.behaviour("HYBRID_LOAD_FAILURE.one_group", wrong=GARBAGE)
@pytest.mark.parametrize("kind", ["window", "mamba"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_one_group_that_keeps_no_prefix(patched: None, asynchronous: bool, kind: str) -> None:
    """What comes before the failed block was never loaded, so the block can't be recomputed."""
    found = []
    for at, caching in itertools.product((0, -1), (True, False)):
        bed = Bed((kind,), 60, asynchronous=asynchronous, caching=caching)
        bed.faults = [last_block_of(0, at)]
        bed.add("failing", prompt(1), stored=128)
        found += bed.problems({"failing": (prompt(1), 6)}, bed.run())
    assert not found, "; ".join(found)


@pytest.mark.area("scheduling")
def test_one_group_whose_failed_block_another_load_continues(installed_release: str) -> None:
    """The second request is admitted in the same step and loads what follows the first one's."""
    from tests.beds.kv_play import Play, Shape

    with registered(True):
        play = Play(Shape(("full",), 30))
        text = list(range(1000, 1150))
        play.add(text[:70], 7, [1], stored=70)
        play.add(text, 5, stored=150, asynchronous=True)
        assert not play.finish()


@pytest.mark.parametrize("active", [False, True], ids=["stock", "plugin"])
@pytest.mark.parametrize("at", [0, 3, -1])
def test_what_one_group_recomputed_is_found_again(
    installed_release: str, active: bool, at: int
) -> None:
    """vLLM leaves the failed block in the prefix cache; taken out, it must come back."""
    with registered(active):
        bed = Bed(("full",), 60, asynchronous=False)
        bed.add("failing", prompt(1, 150), stored=128)
        bed.faults = [last_block_of(0, at)]
        found = bed.problems({"failing": (prompt(1, 150), 6)}, bed.run())
        bed.connector.hits.clear()
        bed.add("next", prompt(1, 150))
        found += bed.problems({"next": (prompt(1, 150), 6)}, bed.run())
    assert not found, "; ".join(found)
    assert bed.computed["next"] < 150 - 128 + 6


@pytest.mark.behaviour("HYBRID_LOAD_FAILURE.block_reports", wrong=f"{DIED}|never finished: loading")
@pytest.mark.parametrize("retries", [1, 2], indirect=True)
@pytest.mark.parametrize("groups", HYBRIDS, ids="+".join)
def test_a_failed_asynchronous_load_is_repaired_in_a_small_pool(
    retries: int, groups: tuple[str, ...]
) -> None:
    """A pool that holds the request of 140 tokens, but not twice; computed or loaded again."""
    bed = _small(groups)
    bed.add("loading", prompt(1), stored=128)
    bed.faults = [_with_null(last_block_of(1, 0))]
    found = bed.problems({"loading": (prompt(1), 6)}, bed.run())
    assert not found, "; ".join(found)
    assert len(bed.loads) == retries


@pytest.mark.behaviour("HYBRID_LOAD_FAILURE.block_reports", wrong=f"{DIED}|{GARBAGE}")
def test_any_block_of_any_group_may_fail(patched: None) -> None:
    """Every block of every group, loaded either way; a second request is never touched."""
    asked = {"failing": (prompt(1), 6), "other": (prompt(2, 90), 6)}
    found = []
    cases = [
        (groups, group, at, asynchronous)
        for groups, asynchronous in itertools.product(HYBRIDS, (False, True))
        for group, kind in enumerate(groups)
        for at in range({"full": 8, "window": 2, "mamba": 1}[kind])
    ]
    for groups, group, at, asynchronous in cases:
        bed = Bed(groups, 40, asynchronous=asynchronous)
        bed.add("failing", prompt(1), stored=128)
        other = bed.add("other", prompt(2, 90), stored=64)
        bed.faults = [last_block_of(group, at)]
        found += bed.problems(asked, bed.run())
        found += ["other was preempted"] * other.num_preemptions
    assert not found, "; ".join(sorted(set(found)))


@pytest.mark.behaviour("HYBRID_LOAD_FAILURE.block_reports", wrong=f"{DIED}|{GARBAGE}")
def test_what_was_right_before_the_failed_block_is_kept(patched: None) -> None:
    """The local prefix of 64 tokens isn't computed again, nor is any other request's."""
    first = prompt(1, 65)
    asked = {"failing": (prompt(1), 6), "failing-too": (prompt(4), 6)}
    failed_step, decoded = 140 - 128, 5
    expected = {
        "failing": failed_step + (140 - 64) + decoded,
        "failing-too": failed_step + 140 + decoded,
    }
    found = []
    for groups in HYBRIDS:
        bed = Bed(groups, 90, asynchronous=False)
        bed.add("before", first, 2)
        found += bed.problems({"before": (first, 2)}, bed.run())
        bed.faults = [last_block_of(len(groups) - 1)] * 2
        for name, (tokens, answer) in asked.items():
            bed.add(name, tokens, answer, 128)
        found += bed.problems(asked, bed.run())
        found += [
            f"{name} was computed {bed.computed[name]} times"
            for name, tokens in expected.items()
            if bed.computed[name] != tokens
        ]
    assert not found, "; ".join(found)


@pytest.mark.behaviour("HYBRID_LOAD_FAILURE.block_reports", wrong=f"{DIED}|{GARBAGE}")
@pytest.mark.parametrize("groups", HYBRIDS, ids="+".join)
@pytest.mark.parametrize("lost", ["aborted", "preempted"])
def test_a_request_that_is_gone_leaves_no_bad_prefix(
    patched: None, groups: tuple[str, ...], lost: str
) -> None:
    """Its client leaves, or it is preempted, while the step that loads is carried out."""
    from vllm.v1.request import RequestStatus

    bed = Bed(groups, 60, asynchronous=False)
    bed.add("failing", prompt(1, 150), stored=128)
    bed.faults = [last_block_of(len(groups) - 1)]
    scheduler = bed.scheduler

    def meanwhile() -> None:
        bed.connector.hits.clear()
        if lost == "aborted":
            scheduler.finish_requests("failing", RequestStatus.FINISHED_ABORTED)
            del bed.results["failing"]
        else:
            scheduler._preempt_request(scheduler.running.pop(), 0.0)
            # As if the next step had been planned, which is when vLLM preempts.
            scheduler.prev_step_scheduled_req_ids.clear()
        bed.add("next", prompt(1, 150))

    bed.meanwhile = meanwhile
    died = bed.run()
    found = bed.problems({name: (prompt(1, 150), 6) for name in bed.results}, died)
    assert not found, "; ".join(found)


@pytest.mark.behaviour("HYBRID_LOAD_FAILURE.block_reports", wrong=f"{DIED}|{GARBAGE}")
@pytest.mark.parametrize("retries", [2], indirect=True)
@pytest.mark.parametrize("groups", HYBRIDS, ids="+".join)
def test_a_failure_told_after_the_load_was_finished(retries: int, groups: tuple[str, ...]) -> None:
    """The request is loaded, and waits for blocks to be admitted, when its failure is told."""
    bed = _small(groups)
    bed.add("loading", prompt(1), stored=128)
    bed.step()
    load = bed.loads[0]
    blocks = last_block_of(len(groups) - 1)(load)
    bed.fill(load, blocks)
    bed.step()
    others = bed.pool.get_new_blocks(bed.pool.get_num_free_blocks())
    bed.invalid = blocks

    def meanwhile() -> None:
        assert bed.scheduler.requests["loading"].status.name == "WAITING"
        bed.pool.free_blocks(others)

    bed.meanwhile = meanwhile
    found = bed.problems({"loading": (prompt(1), 6)}, bed.run())
    assert not found, "; ".join(found)
    assert len(bed.loads) == retries


@pytest.mark.behaviour("HYBRID_LOAD_FAILURE.block_reports", wrong=f"{DIED}|{GARBAGE}")
@pytest.mark.parametrize("retries", [1, 2], indirect=True)
def test_synchronous_loads_that_keep_failing_are_given_up(retries: int) -> None:
    """Requests come back in the order in which they came."""
    asked = {f"failing-{seed}": (prompt(seed), 6) for seed in (1, 4)}
    found = []
    for groups in HYBRIDS:
        bed = Bed(groups, 60, asynchronous=False)
        for name, (tokens, answer) in asked.items():
            bed.add(name, tokens, answer, 128)
        bed.faults = [last_block_of(1)] * 20
        found += bed.problems(asked, bed.run())
        loads = [load.request for load in bed.loads]
        found += [f"loads of {loads}"] * (loads != [*asked] * retries)
    assert not found, "; ".join(found)


@pytest.mark.behaviour("HYBRID_LOAD_FAILURE.fail_policy", wrong=DIED)
@pytest.mark.parametrize("overlapped", [False, True], ids=["one-batch", "two-batches"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("groups", HYBRIDS, ids="+".join)
def test_policy_fail_ends_the_affected_only(
    patched: None, groups: tuple[str, ...], asynchronous: bool, overlapped: bool
) -> None:
    bed = Bed(groups, 60, asynchronous=asynchronous, overlapped=overlapped, policy="fail")
    asked = {
        "failing": (prompt(1), 6),
        "loading": (prompt(3, 100), 6),
        "computing": (prompt(2, 100), 6),
    }
    bed.faults = [_with_null(last_block_of(1))]
    stored = {"failing": 128, "loading": 96}
    for name, (tokens, answer) in asked.items():
        bed.add(name, tokens, answer, stored.get(name, 0))
    died = bed.run()
    assert not died, died
    assert (bed.results["failing"].reason, bed.results["failing"].tokens) == ("error", [])
    # The prompt again, computed here: what the failed load left behind must not be found.
    bed.add("again", prompt(1))
    asked = {**asked, "again": (prompt(1), 6)}
    del asked["failing"]
    found = bed.problems(asked, bed.run())
    assert not found, "; ".join(found)


@pytest.mark.behaviour(
    "HYBRID_LOAD_FAILURE.inflight_reservation", wrong=f"{DIED}|never finished: loading"
)
@pytest.mark.parametrize("groups", (("full",), *HYBRIDS), ids="+".join)
def test_a_request_is_admitted_again_after_its_load_failed(
    patched: None, groups: tuple[str, ...]
) -> None:
    """Reported by request where the release knows that, else by block."""
    bed = _small(groups, by_request=_by_request())
    bed.add("loading", prompt(1), stored=128)
    bed.faults = [last_block_of(0, 0)]
    found = bed.problems({"loading": (prompt(1), 6)}, bed.run())
    assert not found, "; ".join(found)


@pytest.mark.behaviour("HYBRID_LOAD_FAILURE.inflight_reservation", wrong="never finished: loading")
def test_one_group_with_failing_blocks_is_admitted_again(patched: None) -> None:
    bed = Bed(("full",), 15, asynchronous=True)
    bed.add("loading", prompt(1), stored=128)
    bed.faults = [last_block_of(0, 0)]
    found = bed.problems({"loading": (prompt(1), 6)}, bed.run())
    assert not found, "; ".join(found)


@pytest.mark.behaviour(
    "HYBRID_LOAD_FAILURE.inflight_reservation", wrong=f"{DIED}|never finished: behind, failing"
)
@pytest.mark.parametrize("groups", (("full",), ("full", "window")), ids="+".join)
def test_loads_behind_a_failed_one_are_admitted(patched: None, groups: tuple[str, ...]) -> None:
    """What was loaded behind it holds the blocks it lacks, and so does a load that failed, too."""
    asked = {name: (prompt(seed, 100), 6) for seed, name in ((1, "failing"), (2, "behind"))}
    found = []
    for blocks, faults in itertools.product((14, 16, 18, 20), (1, 2)):
        bed = Bed(groups, blocks, asynchronous=True, by_request=_by_request(), batched_tokens=256)
        for name, how in asked.items():
            bed.add(name, *how, 96)
        bed.faults = [last_block_of(0, 0)] * faults
        found += [f"{blocks} blocks: {wrong}" for wrong in bed.problems(asked, bed.run())]
    assert not found, "; ".join(found)


@pytest.mark.behaviour(
    "HYBRID_LOAD_FAILURE.bounded_retries", wrong=f"{DIED}|loaded 21 times, not 1"
)
@pytest.mark.parametrize("by_request", [False, True], ids=["by-block", "by-request"])
@pytest.mark.parametrize("groups", (("full",), *HYBRIDS), ids="+".join)
def test_loads_that_keep_failing_are_given_up(
    patched: None, groups: tuple[str, ...], by_request: bool
) -> None:
    """A second request of the same connector goes on loading."""
    bed = Bed(groups, 60, asynchronous=True, by_request=by_request and _by_request())
    bed.add("failing", prompt(1), stored=128)
    bed.faults = [last_block_of(0, 0)] * 20
    asked = {"failing": (prompt(1), 6), "loading": (prompt(3), 6)}
    died = bed.run(70)
    bed.faults.clear()
    bed.add("loading", prompt(3), stored=128)
    found = bed.problems(asked, died or bed.run())
    assert not found, "; ".join(found)
    loaded = [load.request for load in bed.loads]
    assert loaded.count("failing") == 1, f"loaded {loaded.count('failing')} times, not 1"
    assert loaded.count("loading") == 1
    assert "get_num_new_matched_tokens" not in vars(bed.connector)


@pytest.mark.behaviour("HYBRID_LOAD_FAILURE.bounded_retries", wrong=r"loaded 21 times, not \d+")
@pytest.mark.parametrize("retries", [3], indirect=True)
def test_the_number_of_failed_loads_is_an_option(retries: int) -> None:
    bed = Bed(("full",), 60, asynchronous=True)
    bed.add("failing", prompt(1), stored=128)
    bed.faults = [last_block_of(0, 0)] * 20
    found = bed.problems({"failing": (prompt(1), 6)}, bed.run())
    assert not found, "; ".join(found)
    assert len(bed.loads) == retries, f"loaded {len(bed.loads)} times, not {retries}"


@pytest.mark.behaviour("HYBRID_LOAD_FAILURE.late_reports", wrong="died of AssertionError")
def test_a_transfer_that_finishes_after_its_request_failed(patched: None) -> None:
    bed = Bed(("full",), 60, asynchronous=True, policy="fail")
    bed.add("other", prompt(2), 20)
    bed.add("failing", prompt(1), stored=128)
    bed.faults = [last_block_of(0, 0)]
    for _ in range(6):
        bed.step()
    assert bed.results.pop("failing").reason == "error"
    bed.late = {"failing", "never-heard-of"}
    found = bed.problems({"other": (prompt(2), 20)}, bed.run())
    assert not found, "; ".join(found)


def test_right_answers_are_not_trivial() -> None:
    """The bed's own arithmetic: every token depends on all before it."""
    answer = answer_to(prompt(1), 6)
    assert answer_to([0, *prompt(1)[1:]], 6) != answer
    assert len(set(answer)) > 1
