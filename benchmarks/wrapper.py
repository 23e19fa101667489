"""Cost of a call through our Wrap, beside the bare function and beside wrapt, in one run.

Each round times every variant in turn, the order turning from round to round; the ratios are taken
inside a round, so a busy machine moves both sides. wrapt takes part if it can be imported. Besides:
whether the wrapped object pickles by reference, and whether torch.compile traces through it.

    python -m benchmarks.wrapper [--rounds 30] [--calls 100000] [--json FILE]
"""

from __future__ import annotations

import argparse
import importlib
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.measure import Spread, describe, machine, save
from vllm_ext.core.seams import Wrap, locate

BARE, OURS, WRAPT = "bare", "Wrap", "wrapt"
Call = Callable[..., Any]


def scale(value: Any, factor: int, *, offset: int = 0) -> Any:
    """The function that is wrapped."""
    return value * factor + offset


class Scaler:
    """A class whose method is wrapped."""

    def scale(self, value: Any, factor: int, *, offset: int = 0) -> Any:
        """The method that is wrapped."""
        return value * factor + offset


def pass_through(original: Call, *args: Any, **kwargs: Any) -> Any:
    """The least a behaviour does: call what it stands for."""
    return original(*args, **kwargs)


def pass_through_wrapt(original: Call, instance: Any, args: Any, kwargs: Any) -> Any:
    """The same in the form that wrapt asks for."""
    return original(*args, **kwargs)


TARGETS = {"function": f"{__name__}:scale", "method": f"{__name__}:Scaler.scale"}


def variants() -> dict[str, Call | None]:
    """What makes the object to put at a target's place, by name; None leaves it bare."""
    made: dict[str, Call | None] = {BARE: None}
    made[OURS] = lambda place, below, target: Wrap(target, pass_through).layer(place, below)
    try:
        wrapt = importlib.import_module("wrapt")
    except ImportError:
        return made
    made[WRAPT] = lambda place, below, target: wrapt.FunctionWrapper(below, pass_through_wrapt)
    return made


class Put:
    """Puts a variant at a target's place and takes it away again."""

    def __init__(self, target: str, make: Call | None) -> None:
        self._place = locate(target)
        self._target, self._make = target, make
        self._original = self._place.read()

    def __enter__(self) -> Any:
        """What a user of the target calls ``scale`` on: an instance, or the module."""
        owner = self._place.owner
        if self._make is not None:
            self._place.write(self._make(self._place, self._original, self._target))
        return owner() if isinstance(owner, type) else owner

    def __exit__(self, *exception: object) -> None:
        self._place.write(self._original)


def nanoseconds(owner: Any, calls: int) -> float:
    """CPU time of one call, with the look-up of its name and the loop."""
    numbers = range(calls)
    start = time.process_time_ns()
    for _ in numbers:
        owner.scale(3, 2, offset=1)
    return (time.process_time_ns() - start) / calls


def empty_loop(calls: int) -> float:
    """CPU time of one turn of the loop alone."""
    numbers = range(calls)
    start = time.process_time_ns()
    for _ in numbers:
        pass
    return (time.process_time_ns() - start) / calls


def measure(rounds: int, calls: int, console: Console) -> dict[str, dict[str, list[float]]]:
    """Nanoseconds per call: kind of target, variant, one figure per round."""
    made = variants()
    figures: dict[str, dict[str, list[float]]] = {k: {v: [] for v in made} for k in TARGETS}
    names = list(made)
    for number in track(range(-1, rounds), description="rounds", console=console):
        turn = number % len(names)
        for kind, target in TARGETS.items():
            for name in names[turn:] + names[:turn]:
                with Put(target, made[name]) as owner:
                    spent = nanoseconds(owner, calls) - empty_loop(calls)
                # The first round warms up the interpreter's specialised instructions.
                if number >= 0:
                    figures[kind][name].append(spent)
    return figures


def pickles(target: str, make: Call | None) -> str:
    """Whether what stands at the target comes back from pickle as the same object."""
    with Put(target, make):
        value = locate(target).read()
        try:
            same = pickle.loads(pickle.dumps(value)) is value
        except Exception as error:
            return f"no: {type(error).__name__}"
        return "yes" if same else "no: a copy"


def traces(target: str, make: Call | None) -> str:
    """Whether torch.compile takes the target into one graph with the right result."""
    import torch

    torch._dynamo.reset()
    with Put(target, make) as owner:
        compiled = torch.compile(
            lambda value: owner.scale(value, 2, offset=1), fullgraph=True, backend="eager"
        )
        try:
            right = torch.equal(compiled(torch.arange(4)), torch.arange(4) * 2 + 1)
        except Exception as error:
            return f"no: {type(error).__name__}"
        return "yes" if right else "no: wrong result"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=30, help="default 30")
    parser.add_argument("--calls", type=int, default=100_000, help="per round and variant")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    options = parser.parse_args()
    if options.rounds < 1 or options.calls < 1:
        parser.error("--rounds and --calls take numbers of at least 1")
    console = Console()
    where = machine()
    console.print(describe(where))
    figures = measure(options.rounds, options.calls, console)
    rows = {
        kind: {
            name: _row(figures[kind], name)
            | {"pickles": pickles(target, make), "traced": traces(target, make)}
            for name, make in variants().items()
        }
        for kind, target in TARGETS.items()
    }
    show(rows, console)
    if WRAPT not in variants():
        console.print("wrapt is not installed here, so it is not compared", style="dim")
    if options.json:
        save(options.json, {"machine": where, "rows": _plain(rows), "rounds": figures})


def show(rows: dict[str, dict[str, dict[str, Any]]], console: Console) -> None:
    """Print the cost of a call, and what the wrapped objects can still do."""
    costs = Table(title="A call that passes through", caption="medians with 95 % interval")
    able = Table(title="What still works")
    for table, headings in (
        (costs, ("ns a call", "times bare", "times wrapt")),
        (able, ("pickles by reference", "torch.compile(fullgraph=True)")),
    ):
        for heading in ("target", "through"):
            table.add_column(heading, no_wrap=True)
        for heading in headings:
            table.add_column(heading, justify="right" if table is costs else "left")
    for kind, variants_of in rows.items():
        for name, row in variants_of.items():
            first = kind if name == BARE else ""
            bare = "" if name == BARE else row["times bare"].text(1)
            wrapt = row["times wrapt"].text(2) if name == OURS and "times wrapt" in row else ""
            costs.add_row(first, name, row["ns"].text(0), bare, wrapt)
            able.add_row(first, name, row["pickles"], row["traced"])
    console.print(costs)
    console.print(able)


def _row(rounds: dict[str, list[float]], name: str) -> dict[str, Any]:
    mine = rounds[name]
    row = {
        "ns": Spread.of(mine),
        "times bare": Spread.of([a / b for a, b in zip(mine, rounds[BARE], strict=True)]),
    }
    if WRAPT in rounds:
        row["times wrapt"] = Spread.of([a / b for a, b in zip(mine, rounds[WRAPT], strict=True)])
    return row


def _plain(rows: dict[str, Any]) -> dict[str, Any]:
    return {
        key: vars(value)
        if isinstance(value, Spread)
        else _plain(value)
        if isinstance(value, dict)
        else value
        for key, value in rows.items()
    }


if __name__ == "__main__":
    main()
