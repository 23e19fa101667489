"""A snapshot of vLLM in this process: who stands where, in every module and class."""

from __future__ import annotations

import sys
from types import ModuleType


def snapshot() -> dict[str, int]:
    """``id()`` of everything in vars() of each loaded ``vllm`` module and of each class in it.

    Registries are dicts held by a class; their entries count as well.
    """
    taken: dict[str, int] = {}
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] != "vllm" or not isinstance(module, ModuleType):
            continue
        for key, value in list(vars(module).items()):
            taken[f"{name}:{key}"] = id(value)
            if isinstance(value, type) and value.__module__ == name:
                for attribute, raw in list(vars(value).items()):
                    taken[f"{name}:{key}.{attribute}"] = id(raw)
                    if isinstance(raw, dict) and "registry" in attribute:
                        for entry, registered in list(raw.items()):
                            taken[f"{name}:{key}.{attribute}[{entry}]"] = id(registered)
    return taken


def differences(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """Names whose object is another one, is new or is gone."""
    return sorted(n for n in before.keys() | after.keys() if before.get(n) != after.get(n))
