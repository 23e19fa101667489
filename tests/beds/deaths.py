"""A process that dies at a named point: SIGKILL when a function is called for the n-th time.

``make_mortal`` gives a folder for PYTHONPATH and the variables that say where. The plugin in it
runs in every process of vLLM; where a function is only called in one of them, that one dies.
"""

from __future__ import annotations

import functools
import importlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

from tests.beds.foreign import metadata
from vllm_ext.core.imports import PostImportFinder

_WHERE = "VLLMEXT_TEST_DIE_AT"
_NOTE = "VLLMEXT_TEST_DIED"
ROOT = Path(__file__).parents[2]


def make_mortal(
    folder: Path, module: str, function: str, call: int = 1
) -> tuple[list[Path], dict[str, str]]:
    """Folders for PYTHONPATH and variables of a server of which one process dies.

    It is the first whose ``call``-th call of ``module:function`` comes; ``died_in`` tells its pid.
    """
    folder.mkdir(parents=True)
    metadata(folder, "mortal", f"mortal = {__name__}:register")
    where = f"{module}:{function}:{call}"
    return [folder, ROOT, ROOT / "src"], {_WHERE: where, _NOTE: str(folder / "died")}


def died_in(folder: Path) -> int | None:
    """The pid of the process that died, or None as long as none has."""
    note = folder / "died"
    return int(note.read_text()) if note.exists() else None


def register() -> None:
    """Entry point: wrap the function once its module is there."""
    where = os.environ.get(_WHERE)
    if not where:
        return
    module, function, call = where.split(":")
    if module in sys.modules:
        _arm(module, function, int(call))
        return
    PostImportFinder([module], lambda name: _arm(name, function, int(call))).install()


def _arm(module: str, function: str, call: int) -> None:
    owner: Any = importlib.import_module(module)
    *path, name = function.split(".")
    for step in path:
        owner = getattr(owner, step)
    original = getattr(owner, name)
    if getattr(original, "deadly", False):
        return
    calls = 0

    @functools.wraps(original)
    def deadly(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and _first_to_die():
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    deadly.deadly = True  # type: ignore[attr-defined]
    setattr(owner, name, deadly)


def _first_to_die() -> bool:
    try:
        note = os.open(os.environ[_NOTE], os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return False
    os.write(note, str(os.getpid()).encode())
    return True
