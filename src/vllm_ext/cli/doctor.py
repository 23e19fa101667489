"""``vllm-ext doctor``: what would happen to the vLLM on this machine, without importing it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_ext import __version__, native
from vllm_ext import features as package
from vllm_ext.checks.probe import ProbeError, probe
from vllm_ext.cli.style import coloured
from vllm_ext.cli.wheel import holder
from vllm_ext.core.feature import Feature, Judgement, worst
from vllm_ext.core.plan import Planned, by_feature, catalogue, expected, lacks, plan, refusals
from vllm_ext.core.release import Installation, installation, record
from vllm_ext.core.seams import split
from vllm_ext.settings import SettingsError, read

GROUP = "vllm.general_plugins"
OURS = "vllm_ext"
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Foreign:
    """Another general plugin, and which of our targets its code speaks of (None: no sources)."""

    name: str
    value: str
    distribution: str
    touches: tuple[str, ...] | None


def foreign_plugins(features: list[Feature]) -> list[Foreign]:
    """The other general plugins; their sources are read, nothing of them is imported."""
    parts = [part for feature in features for part in feature.parts]
    targets = sorted({t for part in parts for t in (*part.targets, *part.relies_on)})
    return [
        Foreign(
            entry.name,
            entry.value,
            entry.dist.name if entry.dist else "unknown",
            _touches(entry, targets),
        )
        for entry in metadata.entry_points(group=GROUP)
        if entry.module.partition(".")[0] not in ("vllm", OURS)  # vLLM ships plugins itself
    ]


def _touches(entry: metadata.EntryPoint, targets: list[str]) -> tuple[str, ...] | None:
    """Targets whose last two names both stand in the plugin's sources; None without sources."""
    files = _sources(entry.module.partition(".")[0])
    if not files:
        return None
    words = {
        word
        for file in files
        for word in _WORD.findall(file.read_text(encoding="utf-8", errors="replace"))
    }
    return tuple(t for t in targets if words.issuperset(split(t)[1][-2:]))


def _sources(top: str) -> list[Path]:
    """The Python files of a top-level module or package, wherever it is installed."""
    spec = importlib.util.find_spec(top)
    folders = (spec.submodule_search_locations if spec else None) or []
    files = [file for folder in folders for file in sorted(Path(folder).rglob("*.py"))]
    if not folders and spec and spec.origin and spec.origin.endswith(".py"):
        files = [Path(spec.origin)]
    return files


def _stop(status: int, sentence: str, as_json: bool, installed: Installation | None) -> NoReturn:
    """End with one sentence; as JSON, in the shape a complete answer has."""
    if as_json:
        click.echo(json.dumps(_as_data(installed, (), {}, [], [sentence], ()), indent=2))
    else:
        click.echo(sentence, err=True)
    raise SystemExit(status)


def _plugin() -> dict[str, Any]:
    registered = any(entry.name == OURS for entry in metadata.entry_points(group=GROUP))
    return {"version": __version__, "registered": registered, "native": native.status()}


def _shown(entry: Planned, probes: dict[str, Judgement]) -> dict[str, Any]:
    shown = {
        "name": entry.part.name,
        "verdict": entry.judgement.verdict.value,
        "reason": entry.judgement.reason,
    }
    if entry.id in probes:
        shown["probe"] = f"{probes[entry.id].verdict}: {probes[entry.id].reason}"
    return shown


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option("--probe", "with_probes", is_flag=True, help="Also run the probes (imports vLLM).")
@click.option(
    "--vllm",
    "folder",
    type=click.Path(path_type=Path),
    help="Look at the unpacked wheel in this folder instead of the installed vLLM.",
)
def doctor(as_json: bool, with_probes: bool, folder: Path | None) -> None:
    """Tell what the plugin would do to the vLLM found here, and why."""
    features = catalogue(package)
    folder = holder(folder) if folder else None
    installed = _find(folder, as_json)
    try:
        settings = read(os.environ, features)
    except SettingsError as error:
        _stop(1, str(error), as_json, installed)
    planned = expected(plan(features, settings, installed))
    try:
        probes = probe(folder) if with_probes else {}
    except ProbeError as error:
        _stop(2, str(error), as_json, installed)
    problems = [
        *refusals(planned, settings),
        *_not_loaded(),
        *_contradictions(installed, planned, probes),
    ]
    foreign = foreign_plugins(features)
    if as_json:
        data = _as_data(installed, planned, probes, foreign, problems, settings.unknown)
        click.echo(json.dumps(data, indent=2))
    else:
        _print(installed, planned, probes, foreign, [*settings.unknown, *problems])
    raise SystemExit(1 if problems else 0)


def _find(folder: Path | None, as_json: bool) -> Installation:
    try:
        installed = installation(folder)
    except ValueError as error:
        _stop(2, f"{error}.", as_json, None)
    if installed is None:
        where = f"in {folder}" if folder else "in this Python environment"
        _stop(
            2,
            f"There is no vLLM {where}: vllm-ext needs one to have something to do "
            "(pip install vllm, or name an unpacked wheel with --vllm DIR).",
            as_json,
            None,
        )
    return installed


def _not_loaded() -> list[str]:
    """Why vLLM would not even call the plugin here."""
    if not _plugin()["registered"]:
        return ["vllm-ext is not installed as a vLLM plugin here, so vLLM does not load it."]
    names = os.environ.get("VLLM_PLUGINS")
    if names is None or OURS in names.split(","):
        return []
    return [f"VLLM_PLUGINS={names} keeps vLLM from loading this plugin; add {OURS} to it."]


def _contradictions(
    installed: Installation, planned: tuple[Planned, ...], probes: dict[str, Judgement]
) -> list[str]:
    """Probes that show something else than the record says: the record can't be trusted then."""
    known = record(installed.release)
    return [
        f"{entry.id} is {recorded.verdict} by the record, but the probe shows "
        f"{probes[entry.id].verdict}: {probes[entry.id].reason}."
        for entry in planned
        if known is not None
        and entry.id in probes
        and entry.judgement.verdict.honoured
        and (recorded := known.judgement(entry.feature, entry.part)).verdict
        is not probes[entry.id].verdict
    ]


def _as_data(
    installed: Installation | None,
    planned: tuple[Planned, ...],
    probes: dict[str, Judgement],
    foreign: list[Foreign],
    problems: list[str],
    unknown: tuple[str, ...],
) -> dict[str, Any]:
    groups = by_feature(planned)
    judged = {name: worst(entry.judgement for entry in entries) for name, entries in groups.items()}
    return {
        "vllm": installed
        and {
            "version": installed.version,
            "path": str(installed.root / "vllm"),
            "supported": record(installed.release) is not None,
        },
        "plugin": _plugin(),
        "features": [
            {
                "name": name,
                "verdict": judged[name].verdict.value,
                "reason": judged[name].reason,
                "parts": [_shown(entry, probes) for entry in entries],
            }
            for name, entries in groups.items()
        ],
        "foreign_plugins": [vars(plugin) for plugin in foreign],
        "problems": problems,
        "warnings": list(unknown),
    }


def _print(
    installed: Installation,
    planned: tuple[Planned, ...],
    probes: dict[str, Judgement],
    foreign: list[Foreign],
    sentences: list[str],
) -> None:
    console = Console()
    where = Text(f"vLLM {installed.version} in {installed.root / 'vllm'}")
    console.print(where, soft_wrap=True)
    console.print(f"vllm-ext {__version__}", highlight=False)
    for name, state in native.status().items():
        console.print(f"  {name}: {state}", style="dim", highlight=False)
    table = Table()
    for heading in ("Feature", "Part", "Verdict", "Why", *(["Probe"] if probes else [])):
        table.add_column(heading, overflow="fold")
    for name, entries in by_feature(planned).items():
        for at, entry in enumerate(entries):
            shown = (
                [Text(f"{probes[entry.id].verdict}: {probes[entry.id].reason}")] if probes else []
            )
            table.add_row(
                Text(name, style="bold") if at == 0 else "",
                entry.part.name,
                coloured(entry.judgement.verdict),
                # The table is about one release: no need to name it in every row.
                Text(entry.judgement.reason.removeprefix(lacks(installed.release))),
                *shown,
            )
        table.add_section()
    console.print(table)
    for plugin in foreign:
        touches = (
            "its sources were not found"
            if plugin.touches is None
            else f"speaks of {', '.join(plugin.touches)}"
            if plugin.touches
            else "speaks of nothing that we patch"
        )
        told = Text(f"Other plugin: {plugin.name} ({plugin.distribution}) {touches}")
        console.print(told, soft_wrap=True)
    for sentence in sentences:
        console.print(Text(sentence, style="bold red"), soft_wrap=True)
    if not sentences:
        judged = [worst(e.judgement for e in entries) for entries in by_feature(planned).values()]
        on = sum(judgement.verdict.in_force for judgement in judged)
        console.print(f"{on} of {len(judged)} features will be in force.", highlight=False)
