"""The host copy engine beside one memcpy of the same bytes, and what other threads do meanwhile.

Each round times every case in turn, the order turning from round to round; the ratio is taken
inside a round, so a busy machine moves both sides. A case is one job of 256 MiB: KV blocks of one
layer of a given size, at random places of a KV cache and of host memory, or in a row. Beside the
compiled copy: memcpy of all bytes at once, memcpy of the same pieces, one after another, and what
takes over where nothing was compiled. Besides: how far a loop in Python comes in the main thread
while copies run in their own, as a share of how far it comes alone.

    python -m benchmarks.host_copy [--rounds 15] [--json FILE]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.measure import Spread, describe, machine, save
from vllm_ext import native
from vllm_ext.connectors.host_copy import HostCopy, Lane, Move

BYTES = 256 * 1024**2
# Bytes of one block of one layer: 32 tokens of a small model, of Llama-3-8B in bfloat16 (128 KiB).
PAGES = (4096, 32768, 131072)
MEMCPY, PIECES = "memcpy", "memcpy, scattered"
Run = Callable[[], Any]


def cases(page: int) -> dict[str, Run]:
    """What is timed for one size of a block: name and a call that copies ``BYTES`` bytes."""
    count = BYTES // page
    cache, host = (torch.ones((count, page), dtype=torch.int8) for _ in range(2))
    mixed = [np.random.default_rng(seed).permutation(count) for seed in (1, 2)]
    rows = np.arange(count)
    copies = HostCopy([cache], [host])
    target, source = host.view(-1).numpy(), cache.view(-1).numpy()

    def job(cache_rows: Any, host_rows: Any) -> Run:
        move = Move(0, cache_rows, host_rows, page)
        return lambda: copies.submit([move], Lane.STORE).result()

    return {
        MEMCPY: lambda: np.copyto(target, source),
        PIECES: _piece_by_piece(job(*mixed)),
        "scattered": job(*mixed),
        "in a row": job(rows, rows),
        "scattered, not compiled": _not_compiled(job(*mixed)),
    }


def _piece_by_piece(run: Run) -> Run:
    """The same job with nothing fetched ahead and no store past the caches."""

    def without() -> None:
        defaults = native.copy_spans.__defaults__
        native.copy_spans.__defaults__ = (2**62,)
        try:
            run()
        finally:
            native.copy_spans.__defaults__ = defaults

    return without


def _not_compiled(run: Run) -> Run:
    def without() -> None:
        compiled = native._buffers
        native._buffers = lambda: None
        try:
            run()
        finally:
            native._buffers = compiled

    return without


def seconds(run: Run) -> float:
    """CPU time of a call, over all threads: waiting for a core does not count."""
    start = time.process_time()
    run()
    return time.process_time() - start


def measure(rounds: int, page: int, console: Console) -> dict[str, list[float]]:
    """Seconds by case, one figure per round."""
    made = cases(page)
    names = list(made)
    figures: dict[str, list[float]] = {name: [] for name in names}
    label = f"blocks of {page // 1024} KiB"
    for number in track(range(-1, rounds), description=label, console=console):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            spent = seconds(made[name])
            # The first round touches all memory.
            if number >= 0:
                figures[name].append(spent)
    return figures


def progress(rounds: int, page: int) -> list[float]:
    """Share of its speed that a Python loop keeps while jobs of 256 MiB run, one per round."""
    count = BYTES // page
    cache, host = (torch.ones((count, page), dtype=torch.int8) for _ in range(2))
    copies = HostCopy([cache], [host])
    move = Move(0, np.random.default_rng(1).permutation(count), np.arange(count), page)
    shares = []
    for _ in range(rounds):
        job = copies.submit([move], Lane.STORE)
        start, beside = time.perf_counter(), 0
        while not job.done():
            beside += 1
        spent = time.perf_counter() - start
        end, alone = time.perf_counter() + spent, 0
        while time.perf_counter() < end and job.done():
            alone += 1
        shares.append(beside / max(alone, 1))
    copies.shutdown()
    return shares


def _ratio(base: list[float], spent: list[float]) -> Spread:
    """Speed of a case by that of another one, taken round by round."""
    return Spread.of([bare / mine for bare, mine in zip(base, spent, strict=True)])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15, help="default 15")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds takes a number of at least 1")
    console = Console()
    where = machine()
    console.print(describe(where))
    figures = {page: measure(options.rounds, page, console) for page in PAGES}
    table = Table(title="256 MiB a job", caption="medians with 95 % interval")
    for heading in ("block", "copy"):
        table.add_column(heading, no_wrap=True)
    for heading in ("GB/s", "of memcpy's speed", "of that of memcpy, scattered"):
        table.add_column(heading, justify="right")
    for page, by_case in figures.items():
        for name, spent in by_case.items():
            speed = Spread.of([BYTES / value / 1e9 for value in spent])
            ratios = [
                "" if name == base else _ratio(by_case[base], spent).text(2)
                for base in (MEMCPY, PIECES)
            ]
            first = f"{page // 1024} KiB" if name == MEMCPY else ""
            table.add_row(first, name, speed.text(1), *ratios)
    console.print(table)
    kept = Spread.of(progress(options.rounds, PAGES[-1]))
    console.print(f"a Python loop beside a job keeps {kept.text(2)} of its turns")
    if options.json:
        save(options.json, {"machine": where, "seconds": figures, "kept": vars(kept)})


if __name__ == "__main__":
    main()
