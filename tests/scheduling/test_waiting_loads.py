"""HYBRID_LOAD_FAILURE: loaded requests and others that wait, and who may load beside whom."""

from __future__ import annotations

import pytest

from tests.beds.load_failures import Bed, prompt
from tests.beds.registered import counted, registered


@pytest.mark.behaviour("HYBRID_LOAD_FAILURE.loaded_first", wrong="never finished: first, loaded")
@pytest.mark.parametrize("order", ["fcfs", "priority"])
def test_loaded_requests_go_past_one_that_finds_no_room(patched: None, order: str) -> None:
    """The first one isn't known for a while, and then lacks what the others hold."""
    asked = {"first": (prompt(1, 60), 6), "loaded": (prompt(2, 90), 6), "next": (prompt(3, 20), 6)}
    bed = Bed(("full",), 8, asynchronous=True, order=order)
    requests = {
        name: bed.add(name, *how, stored=80 if name == "loaded" else 0)
        for name, how in asked.items()
    }
    requests["loaded"].priority = 1
    bed.connector.hits["first"] = None
    bed.meanwhile = lambda: bed.connector.hits.update(first=0)
    found = bed.problems(asked, bed.run())
    assert not found, "; ".join(found)


@pytest.mark.area("scheduling")
def test_nothing_is_hidden_where_nothing_is_stuck(installed_release: str) -> None:
    """An idle session with streamed input holds blocks, too; and a paused scheduler waits."""
    from vllm.v1.core.sched.interface import PauseState

    stuck = "HYBRID_LOAD_FAILURE.loaded_first"
    with registered(True):
        before = counted(stuck)
        bed = Bed(("full",), 60, asynchronous=True)
        session = bed.add("session", prompt(1, 40), 3)
        session.resumable, session.streaming_queue = True, None
        for _ in range(6):
            bed.step()
        assert session.status.name == "WAITING_FOR_STREAMING_REQ"
        bed.add("undecided", prompt(2), 4)
        bed.connector.hits["undecided"] = None
        for _ in range(10):
            bed.step()
        paused = Bed(("full",), 60, asynchronous=True)
        asked = {"loaded": (prompt(3, 100), 6), "next": (prompt(4, 60), 6)}
        paused.add("loaded", *asked["loaded"], stored=96)
        paused.step()
        paused.add("next", *asked["next"])
        paused.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        for _ in range(10):
            paused.step()
        paused.scheduler.set_pause_state(PauseState.UNPAUSED)
        assert not paused.problems(asked, paused.run())
        assert counted(stuck) == before


@pytest.mark.behaviour("HYBRID_LOAD_FAILURE.reserved_drafts", wrong="never finished: ")
@pytest.mark.parametrize("lengths", [(142, 130), (142, 142)])
def test_loads_leave_room_for_drafts(patched: None, lengths: tuple[int, int]) -> None:
    """Neither of two loaded requests could be given its blocks while both hold theirs."""
    bed = Bed(("full",), 17, asynchronous=True, batched_tokens=256)
    bed.scheduler.num_spec_tokens, bed.scheduler.num_lookahead_tokens = 3, 4
    asked = {f"r{at}": (prompt(at, length), 2) for at, length in enumerate(lengths, 1)}
    for name, how in asked.items():
        bed.add(name, *how, stored=128)
    found = bed.problems(asked, bed.run())
    assert not found, "; ".join(found)
