"""Tiers, releases, and the rule that decides which behaviour tests must be red.

``installed_release``: the test runs inside a child process that imports that release.
``release``: the test starts processes of that release itself (servers), from this run.
``plugin`` ("with"/"without") comes with a ``behaviour`` mark that names the part and the wrong
value. With the plugin such a test passes on every release. Without it, it must fail in that very
way where the record says ``active``, and pass where it says ``native``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import pytest

from tests.beds.children import REPORTS, Child, Reporter
from tests.beds.evidence import Evidence
from tests.beds.layout import RELEASES
from vllm_ext import features as package
from vllm_ext.core.feature import Feature, Part, Verdict
from vllm_ext.core.plan import catalogue
from vllm_ext.core.release import record

FEATURES = {feature.name: feature for feature in catalogue(package)}
CI_RELEASE = "0.29.0"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("vllm-ext")
    group.addoption("--all", action="store_true", help="engine tests on all releases")
    group.addoption("--area", default="", help="with --all: only this area, and write its evidence")
    group.addoption("--soak", action="store_true", help="only the soak tests")
    group.addoption(
        "--rust-frontend",
        action="store_true",
        help="only the tests with a real vllm-rs; fetches CUDA wheels that are not cached",
    )
    group.addoption("--release", default="", help="internal: the child run of that release")


def find_part(name: str) -> tuple[Feature, Part]:
    """Feature and part of an id like SCORE_USAGE.prompt_tokens."""
    feature_name, _, part_name = name.partition(".")
    feature = FEATURES[feature_name]
    return feature, next(part for part in feature.parts if part.name == part_name)


def recorded(release: str, part: str) -> Verdict:
    """What the record of a release says of a part."""
    known = record(release)
    assert known is not None
    return known.judgement(*find_part(part)).verdict


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "behaviour(part, wrong): what users must see of a part")
    config.addinivalue_line("markers", "full: too long for CI, runs in test-all only")
    config.addinivalue_line(
        "markers", "ci(releases): where CI runs a test, if not (an engine test) on 0.29.0"
    )
    config.addinivalue_line("markers", "rust_frontend: runs only with --rust-frontend")
    config.addinivalue_line("markers", "area(name): the area of features a test belongs to")
    if path := os.environ.get(REPORTS):
        config.pluginmanager.register(Reporter(config, path))
    elif config.getoption("--all"):
        config.pluginmanager.register(Evidence(config.getoption("--area")), "evidence")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    config = metafunc.config
    name = next((n for n in ("installed_release", "release") if n in metafunc.fixturenames), None)
    if name is None:
        return
    child = config.getoption("--release")
    releases = (child,) if child else RELEASES
    if "part" in metafunc.fixturenames:
        metafunc.parametrize(f"{name},part", _active_parts(releases), scope="session")
        return
    mark = metafunc.definition.get_closest_marker("behaviour")
    if mark is None:
        metafunc.parametrize(name, releases, scope="session")
        return
    part = mark.args[0]
    cases = [(r, p) for r in releases for p in ("with", "without")]
    cases = [c for c in cases if c[1] == "with" or recorded(c[0], part) in _told_without(metafunc)]
    metafunc.parametrize(f"{name},plugin", cases, scope="session")


def _told_without(metafunc: pytest.Metafunc) -> tuple[Verdict, ...]:
    """Verdicts with a case without the plugin: red where active, green where native.

    Engines are dear, and that a native part is right without us was shown when it was recorded.
    """
    engine = any(mark.name == "engine" for mark in metafunc.definition.iter_markers())
    return (Verdict.ACTIVE,) if engine else (Verdict.ACTIVE, Verdict.NATIVE)


def _active_parts(releases: Iterable[str]) -> list[tuple[str, str]]:
    ids = [f.part_id(part) for f in FEATURES.values() for part in f.parts]
    return [(r, part) for r in releases for part in ids if recorded(r, part) is Verdict.ACTIVE]


def _fixed(item: pytest.Item, name: str) -> Any:
    spec = getattr(item, "callspec", None)
    return spec.params.get(name) if spec else None


def _area(item: pytest.Item) -> str:
    mark = item.get_closest_marker("behaviour")
    if mark:
        return find_part(mark.args[0])[0].area
    mark = item.get_closest_marker("area")
    return mark.args[0] if mark else ""


def _selected(item: pytest.Item, config: pytest.Config) -> bool:
    soak = item.get_closest_marker("soak") is not None
    if config.getoption("--release"):
        return True
    rust = item.get_closest_marker("rust_frontend") is not None
    if config.getoption("--soak") or soak:
        return bool(config.getoption("--soak")) and soak
    if config.getoption("--rust-frontend") or rust:
        return bool(config.getoption("--rust-frontend")) and rust
    if config.getoption("--all"):
        area = config.getoption("--area")
        part = _fixed(item, "part")
        area_of = find_part(part)[0].area if part else _area(item)
        return not area or area_of == area
    if item.get_closest_marker("full"):
        return False
    named = item.get_closest_marker("ci")
    if named is None and item.get_closest_marker("engine") is None:
        return True
    # In CI an engine test runs where most parts are active, on the first model of its list.
    model = _fixed(item, "model")
    release = _fixed(item, "release") or _fixed(item, "installed_release")
    releases = named.args if named else (CI_RELEASE,)
    return release in (None, *releases) and model in (None, _first_model(item))


def _first_model(item: pytest.Item) -> str | None:
    mark = next((m for m in item.iter_markers("parametrize") if m.args[0] == "model"), None)
    return mark.args[1][0] if mark else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        for mark in item.iter_markers():
            if mark.name in ("xfail", "skip", "skipif"):
                raise pytest.UsageError(
                    f"{item.nodeid} is marked {mark.name} by hand; what must be red is derived "
                    "from the catalogue"
                )
    kept = [item for item in items if _selected(item, config)]
    if rest := set(items) - set(kept):
        config.hook.pytest_deselected(items=list(rest))
    # Children last, one release after another: each is started once.
    kept.sort(key=_child)
    items[:] = kept
    children = {}
    if not config.getoption("--release"):
        for child, group in groupby(kept, key=_child):
            if child:
                children[child] = list(group)
    config.stash[_CHILDREN] = children


def _child(item: pytest.Item) -> str:
    """Which child runs a test; engines change their process, so they have one of their own."""
    release = _fixed(item, "installed_release") or ""
    return f"{release} engines" if release and item.get_closest_marker("engine") else release


_CHILDREN = pytest.StashKey[dict[str, list[pytest.Item]]]()
_RUNNING = pytest.StashKey[dict[str, Child]]()


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Items of a release run in its child; here their reports are replayed."""
    config = item.config
    name = _child(item)
    if name not in config.stash[_CHILDREN]:
        return None
    running = config.stash.setdefault(_RUNNING, {})
    if name not in running:
        for child in running.values():
            child.close()
        release = name.partition(" ")[0]
        running[name] = Child(release, config.stash[_CHILDREN][name], config)
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in running[name].replay(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_sessionfinish(session: pytest.Session) -> None:
    for child in session.config.stash.get(_RUNNING, {}).values():
        child.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Iterator[pytest.TestReport]:
    """Without the plugin, a behaviour test of an active part must fail, in the way it names."""
    report: pytest.TestReport = yield
    if report.skipped:
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} skipped itself; a test that can't run is a failure"
    mark = item.get_closest_marker("behaviour")
    if mark is None or _fixed(item, "plugin") != "without" or call.when != "call":
        return report
    release = _fixed(item, "installed_release") or _fixed(item, "release")
    if recorded(release, mark.args[0]) is not Verdict.ACTIVE:
        return report
    wrong = mark.kwargs["wrong"]
    if call.excinfo is None:
        report.outcome = "failed"
        report.longrepr = f"green without the plugin, though {mark.args[0]} is active on {release}"
    elif call.excinfo.errisinstance(AssertionError) and re.search(wrong, str(call.excinfo.value)):
        report.outcome = "skipped"
        report.wasxfail = f"red without {mark.args[0]}: {wrong}"
    else:
        report.longrepr = f"red, but not as expected ({wrong}):\n{report.longreprtext}"
    return report
