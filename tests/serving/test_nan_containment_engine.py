"""NAN_CONTAINMENT with a real engine and a real NaN: who else pays?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.beds import contagion
from tests.beds.contagion import CORRUPT, INNOCENT, Engine, damage
from tests.beds.registered import registered
from vllm_ext.features.scheduling.fence_probe import log_lines

pytestmark = pytest.mark.engine
CONTAIN = "NAN_CONTAINMENT.contain"
POLICY = "VLLM_EXT_NAN_CONTAINMENT_POLICY"
NONE = f"0 of {INNOCENT} innocent requests differ, 0 in their text"
DAMAGED = r"after policy clamp: [1-9]\d* of 20 innocent requests differ, [1-9]"


@pytest.fixture
def running(installed_release: str, plugin: str, caching: bool, tmp_path: Path) -> Iterator[Engine]:
    """An engine in this process, with the plugin or without."""
    with registered(plugin == "with"), contagion.engine(tmp_path, caching=caching) as engine:
        yield engine


@pytest.mark.behaviour(CONTAIN, wrong=DAMAGED)
@pytest.mark.parametrize("caching", [True])
def test_nobody_else_pays(running: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """5 requests with NaN and no logprobs, then 20 innocent ones, bit by bit; both policies."""
    _nobody_pays(running, monkeypatch)


@pytest.mark.full
@pytest.mark.behaviour(CONTAIN, wrong=DAMAGED)
@pytest.mark.parametrize("caching", [False])
def test_nobody_else_pays_without_prefix_caching(
    running: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    _nobody_pays(running, monkeypatch)


def _nobody_pays(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = engine.innocent()
    engine.llm.reset_prefix_cache()
    assert damage(fresh, engine.innocent()) == NONE, "the bed is not deterministic"
    for policy, finish in (("clamp", "length"), ("error", "error")):
        engine.llm.reset_prefix_cache()
        monkeypatch.setenv(POLICY, policy)
        with log_lines() as lines:
            answers = engine.corrupt()
        found = damage(fresh, engine.innocent())
        assert found == NONE, f"after policy {policy}: {found}"
        assert [answer.finish for answer in answers] == [finish] * CORRUPT
        told = [line for line in lines if "has NaN" in line]
        assert len(told) == CORRUPT
        # NaN is in token 41; the CPU kernel spreads it over its block of 32.
        assert all(32 <= int(line.split(" from token ")[1].split()[0]) <= 41 for line in told)
        named = [
            f"Request {line.split()[1]} " in answer.reason
            for line, answer in zip(sorted(told), answers, strict=True)
        ]
        assert all(named) == (policy == "error")
