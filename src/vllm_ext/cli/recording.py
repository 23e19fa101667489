"""``vllm-ext record``: what a vLLM release needs, and its record (for developers of the plugin)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn
from zipfile import is_zipfile

import click
from packaging.version import InvalidVersion
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_ext import features as package
from vllm_ext.checks.probe import ProbeError, probe
from vllm_ext.checks.recording import RecordingError, changes, make_record
from vllm_ext.checks.work import Item, nearest, work
from vllm_ext.cli.ending import cannot_look
from vllm_ext.cli.style import coloured
from vllm_ext.cli.wheel import holder
from vllm_ext.core.feature import Judgement
from vllm_ext.core.plan import catalogue
from vllm_ext.core.release import Installation, installation
from vllm_ext.core.release import record as old_record


@click.command()
@click.option(
    "--vllm",
    "folder",
    type=click.Path(path_type=Path, exists=True),
    help="Folder of the unpacked wheel (default: the installed vLLM).",
)
@click.option(
    "--reference",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="The release's CUDA wheel, to prove that its Python files are the same.",
)
@click.option(
    "--to",
    "records",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write the record into this folder; needs --reference.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON; writes nothing.")
def record(
    folder: Path | None, reference: Path | None, records: Path | None, as_json: bool
) -> None:
    """Run the probes of any vLLM, tell what each part needs there, and record it if asked to.

    Without --to nothing is written, and nothing is in force on a release until its record is part
    of the plugin. Exit status: 0 nothing to do, 1 something needs work or can't be recorded, 2 it
    can't be looked at.
    """
    if reference and not is_zipfile(reference):
        raise click.BadParameter(f"{reference} is not a wheel", param_hint="--reference")
    if records and (as_json or not reference):
        raise click.UsageError("--to needs --reference, and doesn't go with --json")
    installed = _find(folder)
    try:
        with Console(stderr=True).status(f"probing vLLM {installed.version}"):
            shown = probe(installed.root if folder else None)
    except ProbeError as error:
        _refuse(installed, error)
    if records and reference:
        _write(installed, shown, reference, records)
    else:
        _report(installed, shown, as_json)


def _find(folder: Path | None) -> Installation:
    installed = None
    try:
        installed = installation(holder(folder) if folder else None)
        if installed is not None:
            nearest(installed.version)
            return installed
    except InvalidVersion as error:
        where = f"vLLM in {installed.root}" if installed else "vLLM"
        cannot_look(f"{where}: {error}, so it can't be told which release it is close to.")
    except ValueError as error:
        cannot_look(f"{error}.")
    where = f"no vLLM to record in {folder}" if folder else "no vLLM to record"
    cannot_look(f"There is {where}; name the folder of an unpacked wheel with --vllm DIR.")


def _refuse(installed: Installation, error: Exception) -> NoReturn:
    told = f"vLLM {installed.version} in {installed.root} can't be recorded: {error}"
    Console(stderr=True).print(Text(told, style="red"), soft_wrap=True)
    raise SystemExit(1)


def _write(
    installed: Installation, shown: Mapping[str, Judgement], reference: Path, records: Path
) -> None:
    console = Console()
    try:
        new = make_record(catalogue(package), installed, shown, reference)
    except RecordingError as error:
        _refuse(installed, error)
    rows = changes(old_record(new.release), new)
    records.mkdir(parents=True, exist_ok=True)
    path = new.save(records)
    table = Table(title=f"vLLM {new.release}: {len(new.files)} files equal {reference.name}")
    table.add_column("Target or part", overflow="fold")
    table.add_column("Change since the last record")
    for row in rows or [("everything", "as recorded before")]:
        table.add_row(*row)
    console.print(table)
    console.print(Text(f"written to {path}"), soft_wrap=True)


def _report(installed: Installation, shown: Mapping[str, Judgement], as_json: bool) -> None:
    items = work(catalogue(package), installed, shown)
    todo = [item for item in items if item.todo]
    if as_json:
        click.echo(json.dumps(_as_data(installed, items), indent=2))
    else:
        _print(installed, items, todo)
    raise SystemExit(1 if todo else 0)


def _as_data(installed: Installation, items: Sequence[Item]) -> dict[str, Any]:
    return {
        "vllm": installed.version,
        "recorded": old_record(installed.release) is not None,
        "nearest": nearest(installed.version),
        "parts": {
            item.part_id: {
                "probe": item.shown.verdict.value,
                "reason": item.shown.reason,
                "todo": item.todo,
                "changes": [{**vars(c), "state": c.state.value} for c in item.changes],
            }
            for item in items
        },
    }


def _print(installed: Installation, items: Sequence[Item], todo: Sequence[Item]) -> None:
    console = Console()
    base = nearest(installed.version)
    console.print(Text(_standing(installed, base)), soft_wrap=True)
    table = Table()
    for heading in ("Part", "Probe", "Targets"):
        table.add_column(heading, overflow="fold")
    for item in items:
        told = f"{len(item.changes)} not as in {base}" if item.changes else f"as in {base}"
        table.add_row(item.part_id, coloured(item.shown.verdict), told)
    console.print(table)
    for item in todo:
        console.print(Text.assemble((item.part_id, "bold"), f": {item.todo}"), soft_wrap=True)
        console.print(Text(f"    shown: {item.shown.reason}", "dim"), soft_wrap=True)
        for change in item.changes:
            if str(change) not in item.todo:
                console.print(Text(f"    {change}", "dim"), soft_wrap=True)
    if todo:
        console.print(f"{len(todo)} of {len(items)} parts need work.", highlight=False)
    else:
        console.print("No part needs work.")
    console.print("Nothing was written; --reference WHEEL --to DIR writes the record.", style="dim")


def _standing(installed: Installation, base: str) -> str:
    """What this vLLM is to the plugin today."""
    version, release = installed.version, installed.release
    if old_record(release) is None:
        return (
            f"vLLM {version} is not recorded, so nothing of it is touched (every part is "
            f"unsupported). The nearest recorded release is {base}."
        )
    if version == release:
        return f"vLLM {version} is recorded."
    return (
        f"vLLM {version} is a build of the recorded release {release}: where its sources are the "
        "same, parts are in force; where they differ, they are drifted and stand aside."
    )
