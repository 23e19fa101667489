"""How verdicts look in the terminal."""

from __future__ import annotations

from rich.text import Text

from vllm_ext.core.feature import Verdict

_COLOURS = {
    Verdict.FAILED: "bold red",
    Verdict.CONFLICT: "bold red",
    Verdict.DRIFTED: "red",
    Verdict.UNSUPPORTED: "yellow",
    Verdict.ARMED: "green",
    Verdict.ACTIVE: "green",
    Verdict.NATIVE: "cyan",
    Verdict.IDLE: "dim",
    Verdict.OFF: "dim",
}


def coloured(verdict: Verdict) -> Text:
    """A verdict in its colour."""
    return Text(verdict.value, style=_COLOURS[verdict])
