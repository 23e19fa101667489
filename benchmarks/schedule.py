"""What PREEMPTION_FENCE adds to a step: schedule() and allocate_slots(), with and without it.

One process, vLLM's own scheduler over a pool with room, 16 requests that decode, two batches in
flight. Blocks of steps alternate between the bare classes and the patched ones, so that a busy
machine moves both sides. ``deferred`` is the case that the feature is for (a connector that
loads); ``plain`` is every other server, where schedule() leaves early.

A step here calls schedule() once and allocate_slots() once a request, so what a step takes longer
is told per call as well.

    python -m benchmarks.schedule [--release 0.29.0] [--rounds 40] [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
import time
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.measure import Spread, describe, machine, measured, save
from benchmarks.patches import active_wraps, patched
from vllm_ext.core.seams import Wrap
from vllm_ext.features.scheduling.fence_probe import Pipeline
from vllm_ext.features.scheduling.preemption_fence import FEATURE

REQUESTS, PROMPT, STEPS = 16, 32, 40
KINDS = {"deferred": True, "plain": False}
TARGET = 2.0


def microseconds(pipeline: Pipeline) -> float:
    """Median CPU time of schedule() over a block of steps."""
    spent = []
    for _ in range(STEPS):
        start = time.process_time_ns()
        pipeline.schedule()
        spent.append((time.process_time_ns() - start) / 1000)
        pipeline.process()
    return median(spent)


def steps(wraps: list[Wrap], deferred: bool, rounds: int, console: Console) -> dict[str, Any]:
    """Microseconds a step, bare and with the plugin, one figure each a round."""
    figures: dict[str, list[float]] = {"bare": [], "with": []}
    kind = "deferred" if deferred else "plain"
    for number in track(range(-1, rounds), description=f"steps, {kind}", console=console):
        for name in ("bare", "with") if number % 2 else ("with", "bare"):
            with Pipeline(REQUESTS * 16, deferred=deferred) as pipeline:
                for at in range(REQUESTS):
                    pipeline.add(f"r{at}", PROMPT, 4 * STEPS)
                pipeline.step()
                with patched(wraps if name == "with" else []):
                    spent = microseconds(pipeline)
            if number >= 0:
                figures[name].append(spent)
    return figures


def main() -> None:
    """Measure and print; ends with status 1 if a call costs more than the target."""
    description = __doc__.partition("\n")[0]
    options = measured(description, __spec__.name, "rounds", 40)
    sys.exit(_measure(options))


def _measure(options: argparse.Namespace) -> int:
    import vllm.v1.core.sched.scheduler  # noqa: F401

    console = Console()
    where = machine()
    console.print(describe(where))
    wraps = [wrap for _, wrap in active_wraps(options.release, FEATURE)]
    rows = {
        kind: steps(wraps, deferred, options.rounds, console) for kind, deferred in KINDS.items()
    }
    table = Table(
        title=f"PREEMPTION_FENCE on vLLM {options.release}: {REQUESTS} requests decoding",
        caption="µs of CPU time, median and interval over the rounds; target: at most "
        f"{TARGET:.0f} µs more a call",
    )
    table.add_column("frees")
    for heading in ("schedule()", "with plugin", "ratio", "more", "more a call"):
        table.add_column(heading, justify="right")
    worst = 0.0
    for kind, figures in rows.items():
        pairs = list(zip(figures["with"], figures["bare"], strict=True))
        a_call = Spread.of([(a - b) / (1 + REQUESTS) for a, b in pairs])
        worst = max(worst, a_call.median)
        table.add_row(
            kind,
            Spread.of(figures["bare"]).text(0),
            Spread.of(figures["with"]).text(0),
            Spread.of([a / b for a, b in pairs]).text(3),
            Spread.of([a - b for a, b in pairs]).text(1),
            a_call.text(2),
        )
    console.print(table)
    if options.json:
        save(options.json, {"machine": where, "release": options.release, "rows": rows})
    return int(worst > TARGET)


if __name__ == "__main__":
    main()
