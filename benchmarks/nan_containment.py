"""What the NaN features cost while no request has NaN: tokens a second, with and without them.

One engine in one process; the wrappers are put on and taken off between rounds, so that a busy
machine moves both sides. The model is tiny, so a step is short and what is added to it shows most.

    python -m benchmarks.nan_containment [--release 0.29.0] [--pairs 10] [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.measure import Spread, describe, machine, measured, save
from benchmarks.patches import active_wraps, patched
from tests.beds.contagion import Engine, engine
from vllm_ext.core.seams import Wrap, module_of
from vllm_ext.features.serving import nan_containment, nan_logprobs

TARGET = 0.99
REQUESTS, TOKENS = 8, 96
# Prefill only, decoding only: one number each would hide the other.
PROMPTS = {"prefill": (300, 1), "decode": (8, TOKENS)}


def _wraps(release: str) -> list[Wrap]:
    active = active_wraps(release, nan_containment.FEATURE, nan_logprobs.FEATURE)
    return [wrap for _, wrap in active if module_of(wrap.target) in sys.modules]


def tokens_per_second(running: Engine, length: int, answer: int, rounds: int = 2) -> float:
    """Tokens a second of ``rounds`` batches of ``REQUESTS`` prompts of ``length`` words."""
    words = running.model.clean_words
    asked = [
        running.model.ids(*(words[(at * 31 + step) % len(words)] for step in range(length)))
        for at in range(REQUESTS)
    ]
    start = time.perf_counter()
    for _ in range(rounds):
        running.ask(asked, answer, None)
    return rounds * REQUESTS * (length + answer) / (time.perf_counter() - start)


def pairs(running: Engine, wraps: list[Wrap], count: int, console: Console) -> dict[str, Any]:
    """Tokens a second, bare and with the plugin, one figure each a pair; the first is dropped."""
    figures: dict[str, dict[str, list[float]]] = {
        kind: {"bare": [], "with": []} for kind in PROMPTS
    }
    for number in track(range(-1, count), description="pairs", console=console):
        for kind, (length, answer) in PROMPTS.items():
            for name in ("bare", "with") if number % 2 else ("with", "bare"):
                with patched(wraps if name == "with" else []):
                    speed = tokens_per_second(running, length, answer)
                if number >= 0:
                    figures[kind][name].append(speed)
    return figures


def main() -> None:
    """Measure and print; ends with status 1 if a ratio's median is below the target."""
    description = __doc__.partition("\n")[0]
    options = measured(description, __spec__.name, "pairs", 10)
    sys.exit(_measure(options))


def _measure(options: argparse.Namespace) -> int:
    console = Console()
    where = machine()
    console.print(describe(where))
    with tempfile.TemporaryDirectory() as folder, engine(Path(folder), caching=False) as running:
        figures = pairs(running, _wraps(options.release), options.pairs, console)
    table = Table(
        title=f"NAN_* on vLLM {options.release}, {REQUESTS} requests, no NaN",
        caption=f"tokens a second, median and interval over pairs; target: ratio >= {TARGET}",
    )
    table.add_column("work")
    for heading in ("bare", "with plugin", "ratio"):
        table.add_column(heading, justify="right")
    worst = 1.0
    for kind, rows in figures.items():
        ratio = Spread.of([a / b for a, b in zip(rows["with"], rows["bare"], strict=True)])
        worst = min(worst, ratio.median)
        speeds = [Spread.of(rows[name]).text(0) for name in ("bare", "with")]
        table.add_row(kind, *speeds, ratio.text(4))
    console.print(table)
    if options.json:
        save(options.json, {"machine": where, "release": options.release, "rows": figures})
    return int(worst < TARGET)


if __name__ == "__main__":
    main()
