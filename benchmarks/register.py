"""CPU time of register() per process, everything on and everything off.

Fresh processes, alternating on (the default) and off (VLLM_EXT_DISABLE=1), run vLLM's own code up
to the moment it loads our entry point: ``vllm serve`` while it builds its parser, and EngineCore as
a spawned process begins. What vLLM has imported by then is not counted; the clock
(time.process_time_ns) runs from the load of the entry point to the return of register().

    python -m benchmarks.register [--pairs 12] [--process server|engine] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks.measure import Spread, describe, machine, save

CHILD = Path(__file__).with_name("register_child.py")
PROCESSES = {"server": "API server", "engine": "EngineCore"}
TARGETS = {"on": 30.0, "off": 10.0}
PROFILES = 3


class ChildFailed(RuntimeError):
    """A measured process did not reach register(); the message holds the end of its output."""


def run_child(process: str, mode: str, phases: bool = False) -> dict[str, Any]:
    """Measure one fresh process."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_EXT_")}
    for name in ("VLLM_PLUGINS", "PYTHONDONTWRITEBYTECODE"):
        environ.pop(name, None)
    environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    if mode == "off":
        environ["VLLM_EXT_DISABLE"] = "1"
    with tempfile.TemporaryDirectory() as scratch:
        answer = Path(scratch) / "result.json"
        # -P: a console script has no source folder on sys.path either.
        command = [sys.executable, "-P", str(CHILD), process, str(answer)]
        done = subprocess.run(
            command + ["--phases"] * phases,
            env=environ,
            cwd=scratch,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode or not answer.is_file():
            raise ChildFailed((done.stderr or done.stdout)[-2000:])
        told: dict[str, Any] = json.loads(answer.read_text())
        return told


def measure(processes: list[str], pairs: int, console: Console) -> dict[str, Any]:
    """Warm up, then pairs of on and off, then a few processes with the phases told apart."""
    results: dict[str, Any] = {}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        total = len(processes) * (2 + 2 * pairs + 2 * PROFILES)
        task = progress.add_task("starting", total=total)
        for process in processes:
            runs: dict[str, list[dict[str, Any]]] = {"on": [], "off": []}
            profiles: dict[str, list[dict[str, Any]]] = {"on": [], "off": []}
            # The first of each fills the page cache and writes the .pyc files.
            for number in range(pairs + 1):
                for mode in runs:
                    what = f"pair {number} of {pairs}" if number else "warming up"
                    progress.update(task, description=f"{process}, {what}, {mode}")
                    told = run_child(process, mode)
                    if number:
                        runs[mode].append(told)
                    progress.advance(task)
            for _ in range(PROFILES):
                for mode in profiles:
                    progress.update(task, description=f"{process}, phases, {mode}")
                    profiles[mode].append(run_child(process, mode, phases=True))
                    progress.advance(task)
            results[process] = {
                mode: {"runs": runs[mode], **_merged(profiles[mode])} for mode in runs
            }
    return results


def _merged(profiles: list[dict[str, Any]]) -> dict[str, Any]:
    """Median over the profiled processes, in milliseconds, the largest first."""
    merged: dict[str, Any] = {"missing": profiles[0]["missing"]}
    for kind in ("phases", "modules"):
        names = {name for profile in profiles for name in profile[kind]}
        middle = {n: median(p[kind].get(n, 0) for p in profiles) / 1e6 for n in names}
        merged[kind] = dict(sorted(middle.items(), key=lambda item: -item[1]))
    return merged


def spreads(results: dict[str, Any]) -> dict[str, dict[str, Spread]]:
    """CPU milliseconds per process and mode."""
    return {
        process: {
            mode: Spread.of([run["cpu_ns"] / 1e6 for run in result["runs"]])
            for mode, result in modes.items()
        }
        for process, modes in results.items()
    }


def show(results: dict[str, Any], console: Console) -> None:
    """Print the figures, the verdict on the targets, and where the time goes."""
    figures = spreads(results)
    table = Table(title="register(), CPU milliseconds per process")
    for heading in ("process", "mode", "median, interval", "of it: load", "target", "met"):
        table.add_column(heading, justify="left" if heading in ("process", "mode") else "right")
    for process, modes in figures.items():
        for mode, spread in modes.items():
            loads = [run["load_ns"] / 1e6 for run in results[process][mode]["runs"]]
            table.add_row(
                PROCESSES[process] if mode == "on" else "",
                mode,
                spread.text(),
                f"{median(loads):.1f}",
                f"{TARGETS[mode]:.0f}",
                _met(spread, TARGETS[mode]),
            )
    console.print(table)
    spread = next(iter(figures.values()))["on"]
    console.print(
        f"{spread.count} alternating pairs; {spread.confidence:.1%} interval of the median, from "
        "order statistics. A target is met when the whole interval lies below it.",
        style="dim",
    )
    for process, modes in results.items():
        for mode, result in modes.items():
            _show_costs(f"{PROCESSES[process]}, {mode}", result, console)
    every = [result for modes in results.values() for result in modes.values()]
    runs = [run for result in every for run in result["runs"]]
    if not all(run["compiled"] for run in runs):
        console.print("no .pyc of vllm_ext.plugin was there: the figures hold a compilation")
    if collected := sum(bool(run["full_collections"]) for run in runs):
        console.print(f"{collected} of {len(runs)} measurements held a full garbage collection")


def _met(spread: Spread, target: float) -> str:
    if spread.high <= target:
        return "[green]yes[/]"
    return "[yellow]median only[/]" if spread.median <= target else "[bold red]no[/]"


def _show_costs(title: str, result: dict[str, Any], console: Console) -> None:
    total = sum(result["phases"].values())
    table = Table(title=f"{title}: where the time goes (instrumented)")
    for heading in ("phase", "import of"):
        table.add_column(heading, no_wrap=True)
        table.add_column("ms", justify="right")
        table.add_column("%", justify="right")
    phases = [item for item in result["phases"].items() if item[1] >= 0.005]
    modules = list(result["modules"].items())[:12]
    for at in range(max(len(phases), len(modules))):
        cells: list[str] = []
        for rows in (phases, modules):
            name, spent = rows[at] if at < len(rows) else ("", 0.0)
            shown = ".".join(name.split(".")[-2:])
            cells += [shown, f"{spent:.2f}", f"{spent / total:.0%}"] if name else ["", "", ""]
        table.add_row(*cells)
    table.caption = f"{total:.1f} ms in all, {len(result['modules'])} modules imported"
    console.print(table)
    if result["missing"] and title.endswith("on"):
        gone = ", ".join(result["missing"])
        console.print(f"not told apart, no longer in core: {gone}", style="dim")


def main() -> None:
    """Measure and print; exit status 0 whenever there are figures, 2 when there are none."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=12, help="alternating pairs (default 12)")
    parser.add_argument("--process", choices=PROCESSES, help="only this process")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    options = parser.parse_args()
    if options.pairs < 1:
        parser.error("--pairs takes a number of at least 1")
    console = Console()
    where = machine()
    console.print(describe(where))
    try:
        chosen = [options.process] if options.process else list(PROCESSES)
        results = measure(chosen, options.pairs, console)
    except ChildFailed as failure:
        console.print(f"nothing measured, a process failed:\n{failure}", markup=False)
        raise SystemExit(2) from None
    show(results, console)
    if options.json:
        summary = {
            process: {mode: vars(spread) for mode, spread in modes.items()}
            for process, modes in spreads(results).items()
        }
        where["load after"] = machine()["load"]
        save(
            options.json,
            {"machine": where, "targets": TARGETS, "summary": summary, "details": results},
        )


if __name__ == "__main__":
    main()
