"""How a played engine or a real one has ended, in the words that tests look for."""

from __future__ import annotations


def died_of(error: Exception) -> str:
    """``the engine died of ValueError: too many values``; long messages are cut."""
    return f"the engine died of {type(error).__name__}: {str(error)[:100]}"
