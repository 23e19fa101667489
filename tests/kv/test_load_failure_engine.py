"""HYBRID_LOAD_FAILURE on real engines: a load that fails costs a recomputation, bit for bit.

1, 3 and 20 loads fail one after another. With the plugin one engine meets them all. What comes
of a stock engine is named per release: dead, hanging, or wrong answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.beds.kv_store import Fault
from tests.beds.registered import registered

pytestmark = pytest.mark.engine

RETRIES = "VLLM_EXT_HYBRID_LOAD_FAILURE_RETRIES"
# Releases 0.29.0 and 0.31.0 to 0.33.0 end the engine with the first fault of several groups.
DEAD = (
    r"0\.29\.0 .*1 fault\(s\): the engine died of ValueError: too many values|"
    r"0\.3[123]\.0 .*1 fault\(s\): the engine died of RuntimeError: A KV connector reported"
)
HANGS = r"1 fault\(s\): never finished"
WRONG = r"1 fault\(s\): logprobs differ by \d+\.\d+"
# Where blocks are plenty, 0.30.0 loads again until no load fails.
AGAIN = r"a request met (3|20) faults"
# The step that was planned on the failed load has no token to begin with.
PLANNED = r"1 fault\(s\): the engine died of IndexError: index out of range"
POISONED = r"1 fault\(s\): asked again, logprobs differ by"


@pytest.fixture
def patched(installed_release: str, plugin: str) -> Iterator[None]:
    """The process with the plugin registered, or as it came."""
    with registered(plugin == "with"):
        yield


def _check(release: str, folder: Path, **setup: object) -> None:
    from tests.beds.failing_loads import Setup, table

    found = table(folder, Setup(**setup))  # type: ignore[arg-type]
    assert not found, f"{release} " + "; ".join(found)


@pytest.mark.area("scheduling")
def test_a_hybrid_model_survives_failed_loads(installed_release: str, tmp_path: Path) -> None:
    with registered(True):
        _check(installed_release, tmp_path, model="gemma3")


@pytest.mark.full
@pytest.mark.behaviour(
    "HYBRID_LOAD_FAILURE.block_reports", wrong=rf"{DEAD}|0\.30\.0 .*async.*({HANGS}|{AGAIN})"
)
@pytest.mark.parametrize(
    ("model", "caching"), [("gemma3", True), ("gemma3", False), ("lfm2", True)]
)
def test_asynchronous_loads_that_fail_are_recomputed(
    patched: None, installed_release: str, tmp_path: Path, model: str, caching: bool
) -> None:
    _check(installed_release, tmp_path, model=model, asynchronous=True, caching=caching)


@pytest.mark.full
@pytest.mark.behaviour(
    "HYBRID_LOAD_FAILURE.block_reports", wrong=rf"{DEAD}|0\.30\.0 .*{WRONG}.*{POISONED}"
)
def test_synchronous_loads_that_fail_are_recomputed(
    patched: None, installed_release: str, tmp_path: Path
) -> None:
    _check(installed_release, tmp_path, model="gemma3")


@pytest.mark.full
@pytest.mark.area("scheduling")
def test_synchronous_loads_of_states_that_fail(installed_release: str, tmp_path: Path) -> None:
    """Right on stock 0.30.0, too: the state of a request that starts over has a block."""
    with registered(True):
        _check(installed_release, tmp_path, model="lfm2")


@pytest.mark.full
@pytest.mark.behaviour("HYBRID_LOAD_FAILURE.block_reports", wrong=rf"{DEAD}|0\.30\.0 .*{WRONG}")
def test_synchronous_loads_without_a_prefix_cache(
    patched: None, installed_release: str, tmp_path: Path
) -> None:
    _check(installed_release, tmp_path, model="gemma3", caching=False)


@pytest.mark.full
@pytest.mark.behaviour(
    "HYBRID_LOAD_FAILURE.block_reports",
    wrong=rf"{DEAD}|0\.30\.0 .*({PLANNED}|{WRONG}|{HANGS}|{AGAIN})",
)
@pytest.mark.parametrize(
    ("model", "asynchronous"), [("gemma3", False), ("gemma3", True), ("lfm2", True)]
)
def test_loads_that_fail_while_two_batches_are_in_flight(
    patched: None, installed_release: str, tmp_path: Path, model: str, asynchronous: bool
) -> None:
    _check(installed_release, tmp_path, model=model, asynchronous=asynchronous, overlapped=True)


@pytest.mark.full
@pytest.mark.behaviour("HYBRID_LOAD_FAILURE.fail_policy", wrong=DEAD)
@pytest.mark.parametrize(
    ("model", "caching"), [("gemma3", True), ("gemma3", False), ("lfm2", True)]
)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_policy_fail_ends_the_failing_request_alone(
    patched: None,
    installed_release: str,
    tmp_path: Path,
    model: str,
    asynchronous: bool,
    caching: bool,
) -> None:
    setup = {"model": model, "asynchronous": asynchronous, "caching": caching}
    _check(installed_release, tmp_path, policy="fail", **setup)


@pytest.mark.full
@pytest.mark.behaviour("HYBRID_LOAD_FAILURE.inflight_reservation", wrong=rf"llama async.*{HANGS}")
@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
def test_asynchronous_loads_of_one_group_that_fail(
    patched: None, installed_release: str, tmp_path: Path, caching: bool
) -> None:
    _check(installed_release, tmp_path, model="llama", asynchronous=True, caching=caching)


@pytest.mark.full
@pytest.mark.behaviour(
    "HYBRID_LOAD_FAILURE.one_group", wrong=rf"llama sync.*two.*({PLANNED}|{WRONG})"
)
def test_synchronous_loads_of_one_group_while_two_batches_are_in_flight(
    patched: None, installed_release: str, tmp_path: Path
) -> None:
    _check(installed_release, tmp_path, model="llama", overlapped=True)


@pytest.mark.full
@pytest.mark.area("scheduling")
@pytest.mark.parametrize("active", [False, True], ids=["stock", "plugin"])
@pytest.mark.parametrize(
    ("asynchronous", "policy", "caching"),
    [
        (False, "recompute", True),
        (False, "recompute", False),
        (False, "fail", True),
        (True, "fail", True),
    ],
)
def test_what_vllm_does_right_with_one_group_stays(
    installed_release: str,
    tmp_path: Path,
    active: bool,
    asynchronous: bool,
    policy: str,
    caching: bool,
) -> None:
    setup = {"asynchronous": asynchronous, "policy": policy, "caching": caching}
    with registered(active):
        _check(installed_release, tmp_path, model="llama", **setup)


@pytest.mark.full
@pytest.mark.behaviour(
    "HYBRID_LOAD_FAILURE.bounded_retries", wrong=rf"{DEAD}|met 20 faults|0\.30\.0 .*{HANGS}"
)
@pytest.mark.parametrize("model", ["llama", "gemma3", "lfm2"])
def test_a_request_whose_loads_keep_failing_is_computed(
    patched: None,
    installed_release: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
) -> None:
    """Even where blocks are plenty; after 1 failure by default, or as many as the option says."""
    from tests.beds.failing_loads import Lost, Setup, failing_engine

    setup = Setup(model, asynchronous=True)
    found = []
    with failing_engine(tmp_path, setup, num_gpu_blocks_override=40) as bed:
        for retries in (1, 3):
            if retries != 1:
                monkeypatch.setenv(RETRIES, str(retries))
            bed.forget()
            bed.arm(*[Fault("fail", 0, 0)] * 20)
            try:
                found += bed.wrong(bed.ask(bed.prompts[0]), 0)
            except Lost as error:
                found.append(f"1 fault(s): {error}")
                break
            if (met := 20 - bed.armed) != retries:
                found.append(f"a request met {met} faults, not {retries}")
    assert not found, f"{installed_release} {setup}, " + "; ".join(found)
