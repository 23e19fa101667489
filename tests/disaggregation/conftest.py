"""Fixtures of disaggregated serving."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.beds.mooncake_workers import Imported


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """CI runs tests with worker processes on the releases that their ``ci`` mark names."""
    if config.getoption("--all"):
        return
    left_out = [item for item in items if item.path.parent == FOLDER and _left_out(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def _left_out(item: pytest.Item) -> bool:
    named = item.get_closest_marker("ci")
    if named is None or item.get_closest_marker("engine"):
        return False
    given = getattr(item, "callspec").params  # noqa: B009  # pytest's types don't know it
    return given.get("release", given.get("installed_release")) not in named.args


FOLDER = Path(__file__).parent
# Processes that have imported a release: a test needs two at most.
_KEPT = 2


@pytest.fixture(scope="session")
def imported() -> Iterator[Callable[[str, str], Imported]]:
    """``imported(release, plugin)``: workers of that release, with or without the plugin."""
    held: OrderedDict[tuple[str, str], Imported] = OrderedDict()

    def get(release: str, plugin: str) -> Imported:
        key = release, plugin
        if key not in held:
            held[key] = Imported(release, plugin).__enter__()
            while len(held) > _KEPT:
                held.popitem(last=False)[1].__exit__()
        held.move_to_end(key)
        return held[key]

    yield get
    for one in held.values():
        one.__exit__()
