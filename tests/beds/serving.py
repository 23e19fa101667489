"""A server of one release with or without the plugin, for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from tests.beds.layout import release_path
from vllm_ext.checks.server import Server


class Servable(Protocol):
    """A checkpoint on disk and what ``vllm serve`` is told about it."""

    @property
    def path(self) -> Path: ...

    @property
    def serve_args(self) -> tuple[str, ...]: ...


def serve(
    model: Servable,
    release: str,
    log: Path,
    *,
    plugin: str = "with",
    env: Mapping[str, str] | None = None,
    args: Sequence[str] = (),
    pythonpath: Sequence[Path] = (),
) -> Server:
    """``vllm serve`` of that release on the model; not started yet."""
    folder = release_path(release)
    return Server(
        model.path,
        log=log,
        args=[*model.serve_args, *args],
        env={"VLLM_EXT_DISABLE": "1" if plugin == "without" else "0", **(env or {})},
        pythonpath=[*pythonpath, *([folder] if folder else [])],
    )


def settled_metric(server: Server, name: str, expected: float) -> float:
    """A counter once it shows ``expected``, or what it shows in the end: it trails the answers."""
    value = server.metric(name)
    for _ in range(100):
        if value == expected:
            break
        value = server.metric(name)
    return value
