"""``vllm-ext record``: record a vLLM release (for developers of the plugin)."""

from __future__ import annotations

from pathlib import Path
from zipfile import is_zipfile

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_ext import features as package
from vllm_ext.checks.probe import ProbeError, probe
from vllm_ext.checks.recording import RecordingError, changes, make_record
from vllm_ext.core.plan import catalogue
from vllm_ext.core.release import RECORDS, installation
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
    required=True,
    help="The release's CUDA wheel, to prove that its Python files are the same.",
)
@click.option("--to", "records", type=click.Path(path_type=Path), default=RECORDS, hidden=True)
def record(folder: Path | None, reference: Path, records: Path) -> None:
    """Run the probes of a release, fingerprint its targets, show what changed."""
    console = Console()
    if not is_zipfile(reference):
        raise click.BadParameter(f"{reference} is not a wheel", param_hint="--reference")
    try:
        installed = installation(folder)
    except ValueError as error:
        console.print(f"{error}.", style="red", markup=False, soft_wrap=True)
        raise SystemExit(2) from None
    if installed is None:
        console.print("There is no vLLM to record; name an unpacked wheel with --vllm DIR.")
        raise SystemExit(2)
    try:
        with console.status(f"probing vLLM {installed.version}"):
            shown = probe(folder)
        new = make_record(catalogue(package), installed, shown, reference)
    except (ProbeError, RecordingError) as error:
        told = Text(f"vLLM {installed.version} can't be recorded: {error}", style="red")
        console.print(told, soft_wrap=True)
        raise SystemExit(1) from None
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
