"""What the features add to an engine step: schedule() and the update from its output.

One process, vLLM's own scheduler over a pool with room, 16 requests that decode, two batches in
flight. Blocks of steps alternate between the bare classes and the patched ones, so that a busy
machine moves both sides. ``plain`` is a server that frees blocks at once, ``deferred`` one with a
connector that loads, ``full`` the same with so few free blocks that PREEMPTION_FENCE watches each
allocation. *KV* are the wrappers of KV offloading and scheduling, *all* those of every feature
round scheduler, block manager and connectors that are there by default.

A step here calls schedule() and update_from_output() once and allocate_slots() once a request, so
what a step takes longer is told per call as well.

    python -m benchmarks.schedule [--release 0.29.0] [--rounds 40] [--json FILE]
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from statistics import median

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.measure import Spread, describe, machine, measured, save
from benchmarks.patches import active_wraps, patched
from vllm_ext import features as package
from vllm_ext.core.plan import catalogue
from vllm_ext.core.seams import Wrap, module_of
from vllm_ext.features.scheduling.fence_probe import Pipeline

REQUESTS, PROMPT, STEPS = 16, 32, 40
# Blocks a request, and whether frees wait for batches in flight.
KINDS = {"plain": (64, False), "deferred": (64, True), "full": (6, True)}
WITHIN = ("vllm.v1.core.", "vllm.distributed.kv_transfer.", "vllm.v1.request")
TARGET = 2.0


def chosen(release: str) -> dict[str, list[Wrap]]:
    """The wrappers by name of what is measured; those of options are left out."""
    features = catalogue(package)
    of_kv = [feature for feature in features if feature.area in ("kv", "scheduling")]
    return {
        name: [
            wrap
            for part, wrap in active_wraps(release, *of_these)
            if not part.option and wrap.target.startswith(WITHIN)
        ]
        for name, of_these in (("KV", of_kv), ("all", features))
    }


def microseconds(pipeline: Pipeline) -> float:
    """Median CPU time of a step over a block of steps."""
    spent = []
    for _ in range(STEPS):
        start = time.process_time_ns()
        pipeline.schedule()
        pipeline.process()
        spent.append((time.process_time_ns() - start) / 1000)
    return median(spent)


def steps(
    wraps: dict[str, list[Wrap]], kind: str, rounds: int, console: Console
) -> dict[str, list[float]]:
    """Microseconds a step, bare and with each choice of wrappers, one figure each a round."""
    cases = {"bare": [], **wraps}
    figures: dict[str, list[float]] = {name: [] for name in cases}
    names = list(cases)
    blocks, deferred = KINDS[kind]
    for number in track(range(-1, rounds), description=f"steps, {kind}", console=console):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            with Pipeline(1 + REQUESTS * blocks, deferred=deferred) as pipeline:
                for at in range(REQUESTS):
                    pipeline.add(f"r{at}", PROMPT, 4 * STEPS)
                pipeline.step()
                with patched(cases[name]):
                    spent = microseconds(pipeline)
            if number >= 0:
                figures[name].append(spent)
    return figures


def main() -> None:
    """Measure and print; ends with status 1 if *KV* adds more than the target with room."""
    description = __doc__.partition("\n")[0]
    options = measured(description, __spec__.name, "rounds", 40)
    sys.exit(_measure(options))


def _measure(options: argparse.Namespace) -> int:
    import vllm.v1.core.sched.scheduler  # noqa: F401

    console = Console()
    where = machine()
    console.print(describe(where))
    wraps = chosen(options.release)
    for wrap in wraps["all"]:
        importlib.import_module(module_of(wrap.target))
    rows = {kind: steps(wraps, kind, options.rounds, console) for kind in KINDS}
    table = Table(
        title=f"Steps of vLLM {options.release}: {REQUESTS} requests decoding",
        caption="µs of CPU time, median and interval over the rounds; target: KV adds at most "
        f"{TARGET:.0f} µs a step where there is room",
    )
    for heading in ("frees", "features"):
        table.add_column(heading)
    for heading in ("a step", "with them", "ratio", "more", "more a call"):
        table.add_column(heading, justify="right")
    worst = 0.0
    for kind, figures in rows.items():
        for name in wraps:
            pairs = list(zip(figures[name], figures["bare"], strict=True))
            a_call = Spread.of([(a - b) / (2 + REQUESTS) for a, b in pairs])
            added = Spread.of([a - b for a, b in pairs])
            if name == "KV" and kind != "full":
                worst = max(worst, added.median)
            table.add_row(
                kind,
                name,
                Spread.of(figures["bare"]).text(0),
                Spread.of(figures[name]).text(0),
                Spread.of([a / b for a, b in pairs]).text(3),
                added.text(1),
                a_call.text(2),
            )
    console.print(table)
    if options.json:
        save(options.json, {"machine": where, "release": options.release, "rows": rows})
    return int(worst > TARGET)


if __name__ == "__main__":
    main()
