"""Asynchronous scheduling on a CPU: real engines with two batches in flight."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def asynchronous_scheduling(on: bool = True) -> Iterator[None]:
    """Engines made meanwhile plan a step before the last one's result is in.

    vLLM's CPU platform switches that off while it checks a configuration; scheduler, engine core
    and model runner have it all the same.
    """
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        original(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = on

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", classmethod(check_and_update_config))
        yield
