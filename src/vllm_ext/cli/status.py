"""``vllm-ext status``: what is in force in every vLLM process of this user, now."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_ext.cli.style import coloured
from vllm_ext.core.feature import Judgement, Verdict, worst
from vllm_ext.core.report import directories, unreadable
from vllm_ext.core.status import ProcessStatus, ServerStatus, servers, verdict

_STATES = {"live": "green", "ended": "dim", "no report": "bold red"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option("--ended", is_flag=True, help="Also show servers all of whose processes are gone.")
def status(as_json: bool, ended: bool) -> None:
    """Show every vLLM process of this user on this host and what is in force in it."""
    found = servers()
    shown = [server for server in found if ended or as_json or server.live]
    if as_json:
        click.echo(json.dumps({"servers": [_as_data(server) for server in shown]}, indent=2))
    else:
        _print(shown, hidden=len(found) - len(shown))
    raise SystemExit(1 if any(server.problems for server in shown) else 0)


def _as_data(server: ServerStatus) -> dict[str, Any]:
    return {
        "id": server.id,
        "vllm": server.vllm,
        "plugin": server.plugin,
        "live": server.live,
        "ranks": server.ranks,
        "processes": [_process(process) for process in server.processes],
        "problems": server.problems,
    }


def _process(process: ProcessStatus) -> dict[str, Any]:
    parts = {name: {"verdict": v, "reason": why} for name, (v, why) in process.parts.items()}
    return {**asdict(process), "parts": parts}


def _features(process: ProcessStatus) -> dict[str, list[str]]:
    """Part names of a process by feature."""
    grouped: dict[str, list[str]] = {}
    for part in process.parts:
        grouped.setdefault(part.partition(".")[0], []).append(part)
    return grouped


def _print(shown: list[ServerStatus], hidden: int) -> None:
    console = Console()
    if not shown:
        looked = ", ".join(map(str, directories())) or "no runtime directory of this user"
        console.print("No vLLM process of this user and host has the plugin in it.")
        console.print(f"Looked in: {looked}", style="dim", highlight=False)
    for server in shown:
        console.print(
            f"Server {server.id}: vLLM {server.vllm}, vllm-ext {server.plugin}, {server.ranks}",
            style="bold",
            highlight=False,
        )
        table = Table()
        for heading in ("Pid", "Role", "State", "Features", "Effects"):
            table.add_column(heading, overflow="fold")
        for process in server.processes:
            table.add_row(*_row(process))
            table.add_section()
        console.print(table)
        for sentence in server.problems:
            console.print(Text(sentence, style="bold red"), soft_wrap=True)
    if others := unreadable():
        console.print(f"Reports of another vllm-ext version, not shown: {others}.", style="dim")
    if hidden:
        console.print(
            f"{hidden} ended: vllm-ext status --ended shows what they counted.", style="dim"
        )


def _row(process: ProcessStatus) -> list[Text]:
    by_verdict: dict[Verdict, list[str]] = {}
    for feature, parts in _features(process).items():
        judged = worst(Judgement(verdict(process.parts[p][0]), "") for p in parts).verdict
        by_verdict.setdefault(judged, []).append(feature)
    features = Text("\n").join(
        Text.assemble(coloured(word), f": {', '.join(by_verdict[word])}")
        for word in Verdict
        if word in by_verdict
    )
    effects = "\n".join(f"{count} {part}" for part, count in process.effects.items() if count)
    style = "bold red" if process.lacks or process.state == "no report" else ""
    return [
        Text(str(process.pid), style),
        Text(process.role, style),
        Text(process.state, _STATES[process.state]),
        features,
        Text(effects),
    ]
