"""pytest plugin: prints the behaviour mark of every collected test, for the catalogue's test."""

from __future__ import annotations

import pytest


def pytest_collection_finish(session: pytest.Session) -> None:
    """One line per behaviour test: part, release, with or without the plugin."""
    for item in session.items:
        mark = item.get_closest_marker("behaviour")
        spec = getattr(item, "callspec", None)
        if mark and spec:
            release = spec.params.get("installed_release") or spec.params.get("release")
            print("behaviour", mark.args[0], release, spec.params.get("plugin"))
