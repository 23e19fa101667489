"""The plugin registered in this process for the length of a ``with`` block."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

from vllm_ext import plugin
from vllm_ext.core.effects import PAGE


@contextmanager
def registered(active: bool, environ: Mapping[str, str] | None = None) -> Iterator[None]:
    """register() as vLLM calls it in a child process of a server; all undone at the end."""
    if not active:
        yield
        return
    from vllm import envs

    with pytest.MonkeyPatch.context() as patch:
        # Reports of another run, or of one that was killed, are not this process's server's.
        patch.setenv("VLLM_EXT_SERVER_ID", f"test-{os.getpid()}")
        for name, value in (environ or {}).items():
            patch.setenv(name, value)
        patch.setattr(plugin, "_process", None)
        patch.setattr(envs, "environment_variables", dict(envs.environment_variables))
        plugin.register()
        try:
            yield
        finally:
            plugin._process.stop()


def counted(part_id: str) -> int:
    """What was counted of a part so far in this process."""
    return PAGE.read().get(part_id, 0)
