"""Fixtures of the scheduler's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.beds.registered import registered


@pytest.fixture
def patched(installed_release: str, plugin: str) -> Iterator[None]:
    """The process with the plugin registered, or as it came."""
    import vllm.v1.core.sched.scheduler  # noqa: F401

    with registered(plugin == "with"):
        yield


@pytest.fixture
def retries(patched: None, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    """The option set to the test's parameter, as in a process that was started with it."""
    monkeypatch.setenv("VLLM_EXT_HYBRID_LOAD_FAILURE_RETRIES", str(request.param))
    return int(request.param)
