"""``vllm-ext diff OLD NEW``: what an upgrade of vLLM would do to the plugin, before it is made."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_ext import features as package
from vllm_ext.checks.change import Side, State, count
from vllm_ext.checks.difference import NATIVE, Difference, differences
from vllm_ext.checks.probe import ProbeError, probe
from vllm_ext.cli.ending import cannot_look
from vllm_ext.cli.style import coloured
from vllm_ext.cli.wheel import holder, is_wheel, unpacked
from vllm_ext.core.plan import catalogue
from vllm_ext.core.release import installation, record, recorded_releases

_COLOURS = {
    NATIVE: "cyan",
    State.SAME: "dim",
    State.DRIFTED: "yellow",
    State.MOVED: "yellow",
    State.DISAPPEARED: "red",
}


@click.command()
@click.argument("old")
@click.argument("new")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--probe", "with_probes", is_flag=True, help="Also run NEW's probes (imports it).")
def diff(old: str, new: str, as_json: bool, with_probes: bool) -> None:
    """Tell, part by part, what would change if vLLM OLD became vLLM NEW.

    Each is the folder of an unpacked wheel, a wheel, or a release: the installed one, or another
    as it was recorded. Neither is imported. Exit status: 0 nothing is lost, 1 something that is
    active with OLD would be lost, 2 it can't be looked at.
    """
    with tempfile.TemporaryDirectory(prefix="vllm-ext-diff-") as scratch:
        before, after = _side(old, Path(scratch) / "old"), _side(new, Path(scratch) / "new")
        if with_probes and (after.root is None or Path(scratch) in after.root.parents):
            cannot_look(f"--probe imports NEW, so {new} must be installed or unpacked in a folder.")
        with _looking(f"comparing vLLM {before.version} with {after.version}"):
            try:
                shown = probe(after.root) if with_probes else None
            except ProbeError as error:
                cannot_look(str(error))
            found = differences(catalogue(package), before, after, shown)
    places = {
        name: _place(given, side)
        for name, given, side in zip(("old", "new"), (old, new), (before, after), strict=True)
    }
    if as_json:
        click.echo(json.dumps(_as_data(before, after, found, places), indent=2))
    else:
        _print(before, after, found, places)
    raise SystemExit(1 if any(difference.lost for difference in found) else 0)


def _side(given: str, scratch: Path) -> Side:
    """The vLLM that an argument names; ends with status 2 if it names none."""
    path = Path(given)
    try:
        if is_wheel(path):
            path = unpacked(path, scratch)
        elif not path.is_dir():
            return _release(given)
        found = installation(holder(path))
    except ValueError as error:
        cannot_look(f"{str(error).replace(str(scratch), given)}.")
    if found is None:
        cannot_look(f"There is no vLLM in {given}: no file vllm/__init__.py.")
    return Side.on_disk(found, record(found.release))


def _release(given: str) -> Side:
    installed = None
    with contextlib.suppress(ValueError):  # then it isn't the one that was asked for
        installed = installation()
    if installed is not None and given in (installed.version, installed.release):
        return Side.on_disk(installed, record(installed.release))
    known = record(given)
    if known is None:
        cannot_look(
            f"{given} is neither a folder with an unpacked vLLM, nor a wheel, nor a recorded "
            f"release ({', '.join(recorded_releases())})."
        )
    return Side(known.release, None, known)


@contextlib.contextmanager
def _looking(text: str) -> Iterator[None]:
    with Console(stderr=True).status(text):
        yield


def _place(given: str, side: Side) -> str | None:
    """Where a vLLM is that was read from disk: the wheel, if it came out of one."""
    if side.root is None:
        return None
    return given if is_wheel(Path(given)) else str(side.root / "vllm")


def _described(side: Side, place: str | None) -> dict[str, Any]:
    return {
        "version": side.version,
        "path": place,
        "recorded": side.record is not None,
    }


def _as_data(
    old: Side, new: Side, found: Sequence[Difference], places: Mapping[str, str | None]
) -> dict[str, Any]:
    return {
        "old": _described(old, places["old"]),
        "new": _described(new, places["new"]),
        "parts": [
            {
                "part": difference.part_id,
                "state": difference.state,
                "old": difference.old.verdict.value,
                "new": difference.new.verdict.value,
                "why": difference.new.reason,
                "probe": difference.probe and difference.probe.verdict.value,
                "lost": difference.lost,
                "changes": [
                    {**vars(change), "state": change.state.value} for change in difference.changes
                ],
            }
            for difference in found
        ],
        "lost": [difference.part_id for difference in found if difference.lost],
    }


def _print(
    old: Side, new: Side, found: Sequence[Difference], places: Mapping[str, str | None]
) -> None:
    console = Console()
    for which, side in (("old", old), ("new", new)):
        place = places[which]
        where = f"in {place}" if place else "as it was recorded (no sources)"
        console.print(Text(f"{which.upper()}  vLLM {side.version} {where}"), soft_wrap=True)
    table = Table()
    table.add_column("Part", overflow="fold")
    for heading in (old.version, new.version, "Sources"):
        table.add_column(heading)
    for difference in found:
        verdict = coloured(difference.new.verdict)
        if difference.probe:
            verdict.append(f"\nprobe: {difference.probe.verdict}", "dim")
        if difference.lost:
            verdict.append(" LOST", "bold red")
        name = Text(difference.part_id, "bold red" if difference.lost else "")
        state = Text(str(difference.state), _COLOURS[difference.state])
        table.add_row(name, coloured(difference.old.verdict), verdict, state)
    console.print(table)
    for change, parts in _by_change(found).items():
        console.print(Text(change), soft_wrap=True)
        console.print(Text(f"    {', '.join(parts)}", "dim"), soft_wrap=True)
    console.print(*_summary(old, new, found), sep="\n", soft_wrap=True)


def _by_change(found: Sequence[Difference]) -> dict[str, list[str]]:
    """The parts that each change is about; a file that can't be parsed is told once."""
    about: dict[str, dict[str, None]] = {}
    for difference in found:
        for change in difference.changes:
            about.setdefault(str(change), {})[difference.part_id] = None
    return {told: list(parts) for told, parts in about.items()}


def _summary(old: Side, new: Side, found: Sequence[Difference]) -> list[Text]:
    lost = [difference for difference in found if difference.lost]
    native = [difference.part_id for difference in found if difference.state == NATIVE]
    told = [Text(f"vLLM {new.version} brings {', '.join(native)} itself.")] if native else []
    if not lost:
        return [*told, Text(f"Nothing that is active with vLLM {old.version} would be lost.")]
    same = sum(difference.state == State.SAME for difference in lost)
    if new.record is None:
        told.append(
            Text(
                f"vLLM {new.version} is not a recorded release, so nothing of it would be touched; "
                f"the targets of {same} of these parts are the same. vllm-ext record tells what "
                "it takes."
            )
        )
    names = ", ".join(difference.part_id for difference in lost)
    return [*told, Text(f"{count(len(lost), 'active part')} would be lost: {names}.", "bold red")]
