"""Fixtures of the scheduler's tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def retries(patched: None, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    """The option set to the test's parameter, as in a process that was started with it."""
    monkeypatch.setenv("VLLM_EXT_HYBRID_LOAD_FAILURE_RETRIES", str(request.param))
    return int(request.param)
