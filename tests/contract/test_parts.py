"""What every part promises, on every release where it is active. New features inherit this."""

from __future__ import annotations

import importlib
import inspect
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.beds.snapshot import differences, snapshot
from tests.conftest import FEATURES, find_part
from vllm_ext import plugin
from vllm_ext.core.feature import Part, Verdict
from vllm_ext.core.ledger import Ledger
from vllm_ext.core.plan import plan
from vllm_ext.core.release import installation
from vllm_ext.core.report import Reporter
from vllm_ext.core.seams import Wrap, function_of, locate, module_of
from vllm_ext.settings import Settings


class Injected(RuntimeError):
    """The failure a test injects."""


@pytest.fixture
def ledger(installed_release: str, part: str) -> Iterator[Ledger]:
    """A ledger for the imported release with the part's option on; its modules are loaded."""
    installed = installation()
    assert installed is not None and installed.release == installed_release
    feature, declared = find_part(part)
    options = {feature.variable(declared.option): True} if declared.option else {}
    planned = plan(list(FEATURES.values()), Settings(options=options), installed)
    for target in declared.targets:
        importlib.import_module(module_of(target))
    made = Ledger(planned, installed.root)
    yield made
    if made.entries[part].judgement.verdict is Verdict.ACTIVE:
        made.undo(part)


def _objects(part: Part) -> list[object]:
    return [locate(target).read() for target in part.targets]


def test_apply_undo_apply_leaves_every_object_identical(ledger: Ledger, part: str) -> None:
    before = snapshot()
    assert ledger.apply(part).verdict is Verdict.ACTIVE, ledger.entries[part].judgement.reason
    changed = differences(before, snapshot())
    assert changed, "applying the part changed nothing"
    ledger.undo(part)
    assert differences(before, snapshot()) == []
    assert ledger.apply(part).verdict is Verdict.ACTIVE
    assert differences(before, snapshot()) == changed
    ledger.undo(part)
    assert differences(before, snapshot()) == []


def test_a_failure_at_any_step_leaves_nothing_changed(ledger: Ledger, part: str) -> None:
    declared = find_part(part)[1]
    before = snapshot()
    for failing in ledger.steps(declared):
        reached: list[str] = []

        def fail(name: str, reached: list[str] = reached, failing: str = failing) -> None:
            reached.append(name)
            if name == failing:
                raise Injected(name)

        ledger.entries[part].judgement = ledger.entries[part].planned.judgement
        judgement = ledger.apply(part, fail)
        assert failing in reached, f"the step {failing!r} was never taken"
        assert judgement.verdict is Verdict.FAILED
        assert "Injected" in judgement.reason
        assert differences(before, snapshot()) == [], failing
    taken: list[str] = []
    ledger.entries[part].judgement = ledger.entries[part].planned.judgement
    ledger.apply(part, taken.append)
    assert taken == ledger.steps(declared), "apply takes steps that are not enumerated"


def test_wrappers_are_transparent(ledger: Ledger, part: str) -> None:
    declared = find_part(part)[1]
    originals = _objects(declared)
    assert ledger.apply(part).verdict is Verdict.ACTIVE
    for seam, original, current in zip(declared.seams, originals, _objects(declared), strict=True):
        if not isinstance(seam, Wrap):
            continue
        old, new = function_of(original), function_of(current)
        assert type(original) is type(current)
        assert inspect.signature(old) == inspect.signature(new)
        assert inspect.iscoroutinefunction(old) == inspect.iscoroutinefunction(new)
        assert (old.__name__, old.__qualname__, old.__module__, old.__doc__) == (
            new.__name__,
            new.__qualname__,
            new.__module__,
            new.__doc__,
        )
        assert new.__wrapped__ is old
        # Functions are equal only to themselves; a class method is made anew from its class.
        place = locate(seam.target)
        found = getattr(place.owner, place.name)
        assert pickle.loads(pickle.dumps(found)) == found


def test_registering_ten_times_gives_one_wrapper(
    installed_release: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    feature, declared = find_part(part)
    monkeypatch.setenv("VLLM_EXT_SERVER_ID", "contract")
    if declared.option:
        monkeypatch.setenv(feature.variable(declared.option), "1")
    for target in declared.targets:
        importlib.import_module(module_of(target))
    before = snapshot()
    originals = _objects(declared)
    monkeypatch.setattr(plugin, "_process", None)
    for _ in range(10):
        plugin.register()
    process = plugin._process
    assert process.ledger.entries[part].judgement.verdict is Verdict.ACTIVE
    for seam, original in zip(declared.seams, originals, strict=True):
        current = function_of(locate(seam.target).read())
        if isinstance(seam, Wrap):
            others = [
                planned
                for planned in process.ledger.planned()
                if planned.judgement.verdict is Verdict.ACTIVE
                and seam.target in planned.part.targets
            ]
            depth = 0
            while current is not function_of(original):
                current = current.__wrapped__
                depth += 1
            assert depth == len(others)
    process.stop()
    assert differences(before, snapshot()) == []


@pytest.mark.full
def test_its_check_shows_that_it_is_in_force(
    ledger: Ledger,
    installed_release: str,
    part: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What `vllm-ext verify` runs; a probe that can't show it needs a ``check`` beside it."""
    declared = find_part(part)[1]
    if declared.check:
        assert declared.check().verdict is Verdict.ACTIVE
    assert ledger.apply(part).verdict is Verdict.ACTIVE
    # As in every process of vLLM: some parts show what the process reports.
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("VLLM_EXT_SERVER_ID", "contract")
    report = Reporter("contract", installed_release)
    report.publish(ledger.planned())
    shown = declared.behaviour()
    report.remove()
    assert shown.verdict is Verdict.NATIVE, shown.reason
