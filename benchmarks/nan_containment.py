"""What the NaN features cost while no request has NaN: tokens a second, with and without them.

One engine in one process; the wrappers are put on and taken off between rounds, so that a busy
machine moves both sides.

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
from rich.progress import Progress
from rich.table import Table

from benchmarks.measure import Spread, describe, machine, measured, save
from benchmarks.patches import active_wraps, patched
from tests.beds.contagion import Engine, engine
from vllm_ext.core.seams import Wrap, module_of
from vllm_ext.features.serving import nan_containment, nan_logprobs

TARGET = 0.99
REQUESTS = 8
# Prefill only, decoding only: one number each would hide the other.
PROMPTS = {"prefill": (300, 1), "decode": (8, 96)}
# As small as a model can be, which shows what is added, and as small as anybody serves.
MODELS = {
    "tiny": ("bfloat16", {"hidden": 128, "layers": 2}),
    "small": ("float32", {"hidden": 512, "layers": 12}),
}
# Of these the ratio must reach the target.
SERVED = "small"
SECONDS = 0.25


def _wraps(release: str) -> list[Wrap]:
    active = active_wraps(release, nan_containment.FEATURE, nan_logprobs.FEATURE)
    return [wrap for _, wrap in active if module_of(wrap.target) in sys.modules]


def seconds_per_batch(running: Engine, length: int, answer: int, batches: int) -> float:
    """Seconds of one of ``batches`` batches of ``REQUESTS`` prompts of ``length`` words."""
    words = running.model.clean_words
    asked = [
        running.model.ids(*(words[(at * 31 + step) % len(words)] for step in range(length)))
        for at in range(REQUESTS)
    ]
    start = time.perf_counter()
    for _ in range(batches):
        running.ask(asked, answer, None)
    return (time.perf_counter() - start) / batches


def pairs(running: Engine, wraps: list[Wrap], count: int, progress: Progress) -> dict[str, Any]:
    """Seconds a batch, bare and with the plugin, one figure each a pair."""
    figures: dict[str, dict[str, list[float]]] = {}
    for kind, (length, answer) in PROMPTS.items():
        seconds_per_batch(running, length, answer, 3)
        batches = max(1, round(SECONDS / seconds_per_batch(running, length, answer, 3)))
        rows = figures[kind] = {"bare": [], "with": []}
        for number in progress.track(range(count), description=kind):
            for name in ("bare", "with") if number % 2 else ("with", "bare"):
                with patched(wraps if name == "with" else []):
                    rows[name].append(seconds_per_batch(running, length, answer, batches))
    return figures


def main() -> None:
    """Measure and print; ends with status 1 if a ratio's median is below the target."""
    description = __doc__.partition("\n")[0]
    options = measured(description, __spec__.name, "pairs", 41)
    sys.exit(_measure(options))


def _measure(options: argparse.Namespace) -> int:
    console = Console()
    where = machine()
    console.print(describe(where))
    figures = {}
    for model, (dtype, shape) in MODELS.items():
        with (
            tempfile.TemporaryDirectory() as folder,
            engine(Path(folder), caching=False, dtype=dtype, shape=shape) as running,
            Progress(console=console) as progress,
        ):
            figures[model] = pairs(running, _wraps(options.release), options.pairs, progress)
    table = Table(
        title=f"NAN_* on vLLM {options.release}, {REQUESTS} requests at once, no NaN",
        caption=f"median and interval over pairs; target for {SERVED}: ratio >= {TARGET}",
    )
    for heading in ("model", "work", "step, ms", "added, µs a step", "ratio of tokens/s"):
        table.add_column(heading, justify="left" if heading in ("model", "work") else "right")
    worst = 1.0
    for model, kinds in figures.items():
        for kind, rows in kinds.items():
            steps = PROMPTS[kind][1]
            ratio = Spread.of([b / a for a, b in zip(rows["with"], rows["bare"], strict=True)])
            added = Spread.of(
                [1e6 * (a - b) / steps for a, b in zip(rows["with"], rows["bare"], strict=True)]
            )
            step = Spread.of([1e3 * value / steps for value in rows["bare"]])
            table.add_row(model, kind, step.text(2), added.text(0), ratio.text(4))
            if model == SERVED:
                worst = min(worst, ratio.median)
    console.print(table)
    if options.json:
        save(options.json, {"machine": where, "release": options.release, "seconds": figures})
    return int(worst < TARGET)


if __name__ == "__main__":
    main()
