"""``vllm-ext list`` and ``vllm-ext explain``: the features, as they are declared."""

from __future__ import annotations

import json
from typing import Any

import click
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from vllm_ext import features as package
from vllm_ext.cli.style import coloured
from vllm_ext.core.feature import Feature, Judgement, Part, worst
from vllm_ext.core.plan import catalogue
from vllm_ext.core.release import record, recorded_releases


def recorded(feature: Feature, part: Part) -> dict[str, Judgement]:
    """What was recorded of a part, per release."""
    records = ((release, record(release)) for release in recorded_releases())
    return {release: known.judgement(feature, part) for release, known in records if known}


def as_data(feature: Feature) -> dict[str, Any]:
    """One element of ``vllm-ext list --json``."""
    parts = [
        {
            "name": part.name,
            "summary": part.summary,
            "seam": ", ".join(dict.fromkeys(type(seam).__name__ for seam in part.seams)),
            "targets": list(part.targets),
            "option": feature.variable(part.option) if part.option else None,
            "releases": {r: j.verdict.value for r, j in recorded(feature, part).items()},
        }
        for part in feature.parts
    ]
    options = [
        {
            "name": feature.variable(option),
            "type": option.type.__name__,
            "default": option.default,
            "summary": option.summary,
        }
        for option in feature.options
    ]
    return {
        "name": feature.name,
        "toggle": feature.toggle,
        "options": options,
        "area": feature.area,
        "upstream_pr": list(feature.upstream_pr),
        "summary": feature.summary,
        "parts": parts,
        "releases": {
            release: worst(recorded(feature, part)[release] for part in feature.parts).verdict.value
            for release in recorded_releases()
        },
    }


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def list_features(as_json: bool) -> None:
    """Show every feature and what it does on each release."""
    features = catalogue(package)
    if as_json:
        click.echo(json.dumps([as_data(feature) for feature in features], indent=2))
        return
    table = Table(title="Features by vLLM release", title_style="bold")
    for heading in ("Feature", "Part", "Area", "PR", *recorded_releases()):
        table.add_column(heading, no_wrap=heading != "Part")
    for feature in features:
        for at, part in enumerate(feature.parts):
            name = Text(part.name)
            if part.option:
                name.append(" (option)", style="dim")
            table.add_row(
                Text(feature.name, style="bold") if at == 0 else "",
                name,
                feature.area if at == 0 else "",
                ", ".join(map(str, feature.upstream_pr)) if at == 0 else "",
                *(coloured(judgement.verdict) for judgement in recorded(feature, part).values()),
            )
        table.add_section()
    console = Console()
    console.print(table)
    console.print(
        "active: vLLM lacks it, we bring it · native: vLLM has it, we stand aside", style="dim"
    )
    console.print(
        "vllm-ext explain FEATURE tells more; vllm-ext doctor looks at this machine.", style="dim"
    )


@click.command()
@click.argument("feature")
def explain(feature: str) -> None:
    """Tell what FEATURE changes, where, why, and how to switch it."""
    known = {entry.name: entry for entry in catalogue(package)}
    found = known.get(feature.upper().removeprefix("VLLM_EXT_"))
    if found is None:
        raise click.UsageError(f"there is no feature {feature!r}; there are {', '.join(known)}")
    console = Console()
    console.print(Panel(Text(found.why), title=Text(found.name, "bold"), subtitle=found.summary))
    pull = ", ".join(f"vllm-project/vllm #{number}" for number in found.upstream_pr)
    console.print(f"Upstream: {pull or 'no pull request'}", highlight=False)
    console.print(f"Toggle:   {found.toggle} = auto (default) | 1 | 0", highlight=False)
    for option in found.options:
        console.print(
            f"Option:   {found.variable(option)} ({option.type.__name__}, default "
            f"{option.default}): {option.summary}",
            highlight=False,
        )
    for part in found.parts:
        table = Table(title=f"{part.name}: {part.summary}", title_justify="left", show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for seam in part.seams:
            table.add_row(type(seam).__name__, seam.target)
        for target in part.relies_on:
            table.add_row("relies on", target)
        for release, judgement in recorded(found, part).items():
            table.add_row(
                release, Text.assemble(coloured(judgement.verdict), f": {judgement.reason}")
            )
        console.print()
        console.print(table)
