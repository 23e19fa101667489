"""The plugin's wrappers on and off in one process, so that both sides of a ratio share it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vllm_ext.core.feature import Feature, Part, Verdict
from vllm_ext.core.release import record
from vllm_ext.core.seams import Place, Wrap, locate


def active_wraps(release: str, *features: Feature) -> list[tuple[Part, Wrap]]:
    """The wrappers of the parts of these features that are active on a release."""
    known = record(release)
    assert known is not None
    return [
        (part, seam)
        for feature in features
        for part in feature.parts
        if known.judgement(feature, part).verdict is Verdict.ACTIVE
        for seam in part.seams
        if isinstance(seam, Wrap)
    ]


@contextmanager
def patched(wraps: Sequence[Wrap]) -> Iterator[None]:
    """vLLM's functions with the wrappers on, as the ledger puts them there."""
    undo: list[tuple[Place, Any]] = []
    for wrap in wraps:
        place = locate(wrap.target)
        undo.append((place, place.read()))
        place.write(wrap.layer(place, place.read()))
    try:
        yield
    finally:
        for place, value in reversed(undo):
            place.write(value)
