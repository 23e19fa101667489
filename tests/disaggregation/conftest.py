"""Fixtures of disaggregated serving."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

import pytest

from tests.beds.mooncake_workers import Imported

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
