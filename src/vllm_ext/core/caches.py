"""Cache keys of vLLM: they carry the active parts that change traced code, and nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from vllm_ext import __version__
from vllm_ext.names import PREFIX

FINGERPRINT = PREFIX + "FINGERPRINT"
_traced: set[str] = set()
_inspected: dict[str, frozenset[Path]] = {}


def note(part_id: str) -> None:
    """A part that changes traced code became active in this process."""
    _traced.add(part_id)


def note_inspected(part_id: str, files: Iterable[Path]) -> None:
    """A part that changes what vLLM inspects of the model classes in ``files`` is armed."""
    _inspected[part_id] = frozenset(files)


def forget(part_id: str) -> None:
    """The part isn't in force (any more)."""
    _traced.discard(part_id)
    _inspected.pop(part_id, None)


def fingerprint(part_ids: Iterable[str]) -> str:
    """Digest of parts and of the plugin's version, 16 hexadecimal digits."""
    text = "\n".join([__version__, *sorted(part_ids)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def compile_factors(original: Callable[..., dict[str, Any]], *args: Any, **kwargs: Any) -> Any:
    """vLLM's environment factors of the compile key, less our variables, plus the fingerprint."""
    factors = original(*args, **kwargs)
    factors = {name: value for name, value in factors.items() if not name.startswith(PREFIX)}
    if _traced:
        factors[FINGERPRINT] = fingerprint(_traced)
    return factors


def modelinfo_hash(original: Callable[..., str], model_path: Path, *args: Any, **kw: Any) -> str:
    """vLLM's key of a model's cached inspection; ours too where a part changes that model.

    A package's key covers its whole folder, so a part that changes any file in it counts.
    """
    key = original(model_path, *args, **kw)
    whole = model_path.parent if model_path.name == "__init__.py" else None
    touching = [
        part_id
        for part_id, files in _inspected.items()
        if any(file == model_path or (whole and whole in file.parents) for file in files)
    ]
    return (
        hashlib.sha256(f"{key} {fingerprint(touching)}".encode()).hexdigest() if touching else key
    )
