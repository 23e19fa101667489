"""The store of ``kv_folder`` as a test sees it: how engines are told of it, and its faults.

Faults lie in the folder: ``arm(folder, Fault(...))`` works from any process, on any engine.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

_FAULTS = "faults.json"
_LOADS = "loads"


@dataclass(frozen=True)
class Fault:
    """What happens to the next load, to the ``at``-th block it fills in a KV group.

    ``fail``: garbage is loaded and the block reported as invalid. ``corrupt``: garbage, told to
    nobody, which is the negative control of every test of loads. ``lose``: an asynchronous load
    that is never reported as finished.
    """

    kind: Literal["fail", "corrupt", "lose"]
    group: int = 0
    at: int = -1


def transfer_config(
    folder: Path,
    *,
    asynchronous: bool = False,
    role: str = "kv_both",
    fails_every: int = 0,
    **more: Any,
) -> dict[str, Any]:
    """Arguments of ``KVTransferConfig``; ``more`` are further ones, such as the load policy.

    ``fails_every``: of so many loads one fails, in the KV groups by turns; ``carried_out`` counts.
    """
    return {
        "kv_connector": "KVFolder",
        "kv_connector_module_path": "tests.beds.kv_folder",
        "kv_role": role,
        "kv_connector_extra_config": {
            "folder": str(folder),
            "asynchronous": asynchronous,
            "fails_every": fails_every,
        },
        **more,
    }


def arm(folder: Path, *faults: Fault) -> None:
    """Let each of the next loads of any engine on this folder meet one fault, in this order."""
    with armed_faults(folder) as armed:
        armed += [asdict(fault) for fault in faults]


@contextmanager
def armed_faults(folder: Path) -> Iterator[list[dict[str, Any]]]:
    """The armed faults, to be changed; nobody else sees them meanwhile."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _FAULTS).open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        armed = json.loads(file.read() or "[]")
        yield armed
        file.seek(0)
        file.truncate()
        file.write(json.dumps(armed))


def note_load(folder: Path, fault: Fault | None) -> None:
    """Tell ``carried_out`` of one more load."""
    with (folder / _LOADS).open("a") as file:
        file.write(f"{fault.kind if fault else 'done'}\n")


def carried_out(folder: Path) -> tuple[int, int]:
    """Loads with a rate of failures so far, and how many of them failed."""
    path = folder / _LOADS
    told = path.read_text().split() if path.exists() else []
    return len(told), told.count("fail")


def as_json(config: Mapping[str, Any]) -> str:
    """The argument of ``--kv-transfer-config``."""
    return json.dumps(config)
