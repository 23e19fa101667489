"""Fixtures of the KV tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """What vLLM and the plugin log."""
    sentences: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: sentences.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("vllm").addHandler(listener)
    yield sentences
    logging.getLogger("vllm").removeHandler(listener)
