"""``vllm-ext wire``: the messages between a vLLM frontend and its engine.

Exit status: 0 fine, 1 differs, breaks or is damaged, 2 cannot look.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_ext.cli.wheel import holder, is_wheel, unpacked
from vllm_ext.core.release import Installation, installation
from vllm_ext.wire.capture import CaptureError, read_capture
from vllm_ext.wire.compare import EXPLAINED, Comparison, compare
from vllm_ext.wire.derive import derive
from vllm_ext.wire.schema import Form, Schema, parse, stored, stored_releases
from vllm_ext.wire.source import UnderivableError

_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
_FOLDER = click.option(
    "--vllm",
    "folder",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder of an unpacked wheel (default: the installed vLLM).",
)


class CannotLookError(Exception):
    """A sentence on what is missing to answer at all."""


def _told(command: Callable[..., None]) -> Callable[..., None]:
    """Errors of these commands are sentences and exit statuses."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except (CannotLookError, UnderivableError, CaptureError) as error:
            console = Console(stderr=True, soft_wrap=True, highlight=False)
            console.print(f"{str(error).rstrip('.')}.", style="red", markup=False)
            raise SystemExit(1 if isinstance(error, CaptureError) else 2) from None

    return run


@click.group()
def wire() -> None:
    """Look at the messages between a vLLM frontend and its engine."""


def _installed(folder: Path | None) -> Installation:
    try:
        found = installation(holder(folder) if folder else None)
    except ValueError as error:
        raise CannotLookError(str(error)) from error
    if found is None:
        where = f"in {folder}" if folder else "installed here"
        raise CannotLookError(
            f"there is no vLLM {where}; name the folder of an unpacked wheel with --vllm DIR"
        )
    return found


def _known(release: str, folder: Path | None = None) -> Schema:
    found = stored(release)
    if found is None:
        newest = stored_releases()[-1]
        instead = f"vllm-ext wire diff {newest} {folder or 'DIR'}"
        raise CannotLookError(
            f"vLLM {release or repr(release)} has no stored wire table; there are "
            f"{', '.join(stored_releases())}; compare a vLLM on disk with one: `{instead}`"
        )
    return found


@wire.command()
@_FOLDER
@click.option("--release", help="Show the stored table of a release instead.")
@_JSON
@_told
def schema(folder: Path | None, release: str | None, as_json: bool) -> None:
    """Print the layout of every message, from the source files of a vLLM."""
    if folder and release is not None:
        raise click.UsageError("--vllm and --release can't be given together")
    found = _known(release) if release is not None else derive(_installed(folder))
    if as_json:
        click.echo(found.as_text(), nl=False)
        return
    console = Console()
    directions = {root.message: root.direction.value for root in found.roots}
    console.print(Text(f"Wire of vLLM {found.release}", style="bold"))
    for name, message in sorted(found.messages.items()):
        sent = f", {directions[name]}" if name in directions else ""
        table = Table(title=f"{name}: {message.form.value}{sent}", title_justify="left")
        table.add_column("Pos" if message.form is not Form.MAP else "", justify="right")
        for heading in ("Field", "Type", "Default"):
            table.add_column(heading, overflow="fold")
        for at, entry in enumerate(message.fields):
            position = "" if message.form is Form.MAP else str(at)
            default = Text("required", "dim") if entry.default is None else Text(entry.default)
            table.add_row(position, Text(entry.name), Text(entry.type), default)
        console.print(table)
    for name, enum in sorted(found.enums.items()):
        members = ", ".join(f"{member} = {value}" for member, value in enum.members.items())
        console.print(Text.assemble((name, "bold"), f": {members}"))
    codes = ", ".join(f"{name} = {code}" for name, code in found.extensions.items())
    console.print(Text.assemble(("extension types", "bold"), f": {codes}"))


def _side(name: str, scratch: Path) -> Schema:
    """A release, a folder with a vLLM in it, a wheel, or a file with a schema."""
    path = Path(name)
    if path.is_dir():
        return derive(_installed(path))
    if is_wheel(path):
        try:
            found = installation(unpacked(path, scratch))
        except ValueError as error:
            raise CannotLookError(str(error).replace(str(scratch), name)) from error
        if found is None:
            raise CannotLookError(f"there is no vLLM in {name}: no file vllm/__init__.py")
        return derive(found)
    if path.is_file():
        try:
            return parse(path.read_text(encoding="utf-8"))
        except (ValueError, OSError) as error:
            raise CannotLookError(f"{path} holds no wire schema: {error}") from error
    if name not in stored_releases():
        raise CannotLookError(
            f"{name} is neither a folder with an unpacked vLLM, nor a wheel, nor a file with a "
            f"schema, nor a release with a stored wire table ({', '.join(stored_releases())})"
        )
    return _known(name)


@wire.command()
@click.argument("old", metavar="A")
@click.argument("new", metavar="B")
@_JSON
@_told
def diff(old: str, new: str, as_json: bool) -> None:
    """Show what changed from A to B, and whether they can talk to each other.

    A and B are releases, folders of unpacked wheels, wheels, or files written by `schema --json`.
    Exit status 1: they can't, in at least one pairing.
    """
    with tempfile.TemporaryDirectory(prefix="vllm-ext-wire-") as folder:
        scratch = Path(folder)
        found = compare(_side(old, scratch / "old"), _side(new, scratch / "new"))
    if as_json:
        click.echo(json.dumps(_as_data(found), indent=1))
    else:
        _print(Console(), found)
    raise SystemExit(0 if found.compatible else 1)


def _as_data(found: Comparison) -> dict[str, Any]:
    pairings = {
        pairing.value: {
            "verdict": "breaking" if breaches else "compatible",
            "breaches": [asdict(breach) for breach in breaches],
        }
        for pairing, breaches in found.breaches.items()
    }
    rows = [asdict(change) for change in found.changes]
    return {"old": found.old, "new": found.new, "changes": rows, "pairings": pairings}


def _print(console: Console, found: Comparison) -> None:
    table = Table(title=f"Wire of vLLM {found.old} -> {found.new}")
    for heading in ("Message", "Field", "Change", "Pos", "Detail"):
        table.add_column(heading, overflow="fold")
    for change in found.changes:
        position = "" if change.position is None else str(change.position)
        row = (change.message, change.field, change.what, position, change.detail)
        table.add_row(*map(Text, row))
    console.print(table if found.changes else Text("No difference."))
    rules = set()
    for pairing, breaches in found.breaches.items():
        verdict = ("breaking", "bold red") if breaches else ("compatible", "green")
        console.print(Text.assemble(f"{pairing.value}: ", verdict), soft_wrap=True)
        for breach in breaches:
            rules.add(breach.rule)
            name = ".".join(filter(None, (breach.message, breach.field)))
            told = f"  {name} ({breach.direction.value}), {breach.rule.value}: {breach.found}"
            console.print(Text(told), soft_wrap=True)
    for rule in sorted(rules):
        console.print(Text(f"{rule.value}: {EXPLAINED[rule]}", "dim"), soft_wrap=True)


@wire.command()
@_FOLDER
@_JSON
@_told
def check(folder: Path | None, as_json: bool) -> None:
    """Tell whether a vLLM's messages are those stored for its release.

    It compares fields, enums and extension codes; not the array packing or the plain payloads.
    """
    installed = _installed(folder)
    known = _known(installed.release, folder)
    found = compare(known, derive(installed))
    if as_json:
        rows = [asdict(change) for change in found.changes]
        equal = not found.changes
        click.echo(
            json.dumps({"release": known.release, "equal": equal, "changes": rows}, indent=1)
        )
    elif found.changes:
        console = Console()
        told = f"vLLM {installed.version} in {installed.root} has another wire than is stored:"
        console.print(Text(told, "red"), soft_wrap=True)
        _print(console, found)
    else:
        count = len(known.messages)
        click.echo(f"vLLM {installed.version}: {count} messages as stored for {known.release}.")
    raise SystemExit(1 if found.changes else 0)


@wire.command()
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--release", help="Whose messages they are (default: the installed vLLM's).")
@_JSON
@_told
def decode(file: Path, release: str | None, as_json: bool) -> None:
    """Print captured messages; docs/wire.md tells how to capture them."""
    try:
        from vllm_ext.cli.wire_values import print_message
        from vllm_ext.wire import decode as decoder
    except ModuleNotFoundError as error:
        raise CannotLookError(
            f"decoding needs {error.name}, which vLLM brings along; without vLLM, "
            "pip install 'vllm-ext[wire]'"
        ) from error
    known = _known(release) if release is not None else _default()
    console = Console()
    rows: list[Any] = []
    empty, damage = True, None
    try:
        for count, (number, frames) in enumerate(read_capture(file), 1):
            try:
                message = decoder.decode(frames, known)
                with console.capture() as shown:
                    if as_json:
                        row = decoder.as_data(message)
                        json.dumps(row, indent=1)
                        rows.append(row)
                    else:
                        print_message(console, count, message)
            except RecursionError as error:
                raise CaptureError(f"line {number}: its values are nested too deeply") from error
            except CaptureError as error:
                raise CaptureError(f"line {number}: {error}") from error
            click.echo(shown.get(), nl=False)
            empty = False
        if empty:
            raise CaptureError(f"{file} holds no message")
    except CaptureError as error:
        damage = error
        rows.append({"error": str(error)})
    if as_json:
        click.echo(json.dumps(rows, indent=1))
    if damage:
        raise damage


def _default() -> Schema:
    """The installed release's table; the newest one where there is no vLLM."""
    try:
        found = installation()
    except ValueError as error:
        raise CannotLookError(f"{error}; name a release with --release") from error
    return _known(found.release if found else stored_releases()[-1])
