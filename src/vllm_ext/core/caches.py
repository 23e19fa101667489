"""Cache keys of vLLM: they carry the active parts that change traced code, and nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from vllm_ext import __version__
from vllm_ext.core.feature import PREFIX

FINGERPRINT = PREFIX + "FINGERPRINT"
_traced: set[str] = set()


def note(part_id: str) -> None:
    """A part that changes traced code became active in this process."""
    _traced.add(part_id)


def forget(part_id: str) -> None:
    """The part was taken away again."""
    _traced.discard(part_id)


def fingerprint() -> str | None:
    """Digest of the active parts that change traced code, None if there is none."""
    if not _traced:
        return None
    text = "\n".join([__version__, *sorted(_traced)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def compile_factors(original: Callable[..., dict[str, Any]], *args: Any, **kwargs: Any) -> Any:
    """vLLM's environment factors of the compile key, less our variables, plus the fingerprint."""
    factors = original(*args, **kwargs)
    factors = {name: value for name, value in factors.items() if not name.startswith(PREFIX)}
    if (active := fingerprint()) is not None:
        factors[FINGERPRINT] = active
    return factors
