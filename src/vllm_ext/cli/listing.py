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
from vllm_ext.connectors import CONNECTORS, Connector
from vllm_ext.core.feature import Feature, Judgement, Part, Verdict, worst
from vllm_ext.core.plan import catalogue
from vllm_ext.core.release import record, recorded_releases
from vllm_ext.names import PREFIX


def recorded(feature: Feature, part: Part) -> dict[str, Judgement]:
    """What was recorded of a part, per release."""
    records = ((release, record(release)) for release in recorded_releases())
    return {release: known.judgement(feature, part) for release, known in records if known}


def overall(feature: Feature) -> dict[str, Verdict]:
    """The feature's verdict per release: its worst part's."""
    return {
        release: worst(recorded(feature, part)[release] for part in feature.parts).verdict
        for release in recorded_releases()
    }


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
            "type": option.takes,
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
        "releases": {release: verdict.value for release, verdict in overall(feature).items()},
    }


def find_feature(name: str) -> Feature:
    """The feature of that name, in any case, or of that toggle; raises click.UsageError."""
    known = {entry.name: entry for entry in catalogue(package)}
    found = known.get(name.upper().removeprefix(PREFIX))
    if found is None:
        raise click.UsageError(f"there is no feature {name!r}; there are {', '.join(known)}")
    return found


def connector_as_data(connector: Connector) -> dict[str, Any]:
    """One element of ``vllm-ext list --connectors --json``."""
    feature, part = _part(connector)
    return {
        "name": connector.name,
        "summary": connector.summary,
        "kv_transfer_config": connector.config,
        "feature": feature.name,
        "part": part.name,
        "releases": {r: j.verdict.value for r, j in recorded(feature, part).items()},
    }


def _part(connector: Connector) -> tuple[Feature, Part]:
    name, _, part_name = connector.part.partition(".")
    feature = next(feature for feature in catalogue(package) if feature.name == name)
    return feature, next(part for part in feature.parts if part.name == part_name)


def _show_connectors(as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps([connector_as_data(one) for one in CONNECTORS], indent=2))
        return
    table = Table(title="KV connectors by vLLM release", title_style="bold")
    for heading in ("Connector", *recorded_releases()):
        table.add_column(heading, no_wrap=True)
    for connector in CONNECTORS:
        feature, part = _part(connector)
        name = Text.assemble((connector.name, "bold"), (f"\n{connector.part}", "dim"))
        verdicts = (judgement.verdict for judgement in recorded(feature, part).values())
        table.add_row(name, *map(coloured, verdicts))
    console = Console()
    console.print(table)
    for connector in CONNECTORS:
        console.print(
            Text.assemble("\n", (connector.name, "bold"), f": {connector.summary}"), soft_wrap=True
        )
        # Plain, so that a line can be copied as it is.
        click.echo(f"--kv-transfer-config '{connector.config}'")
    console.print(
        "\ncpu_bytes_to_use is the host memory of all workers together, in bytes; "
        "docs/kv-offload.md tells more.",
        style="dim",
    )


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--connectors", is_flag=True, help="Show KV connectors and how to select them.")
def list_features(as_json: bool, connectors: bool) -> None:
    """Show every feature and what it does on each release."""
    if connectors:
        _show_connectors(as_json)
        return
    features = catalogue(package)
    if as_json:
        click.echo(json.dumps([as_data(feature) for feature in features], indent=2))
        return
    table = Table(title="Features by vLLM release", title_style="bold")
    for heading in ("Feature and its parts", *recorded_releases()):
        table.add_column(heading, no_wrap=True)
    for feature in features:
        pulls = "".join(f" #{number}" for number in feature.upstream_pr)
        name = Text.assemble((feature.name, "bold"), (f"\n{feature.area}{pulls}", "dim"))
        table.add_row(name, *map(coloured, overall(feature).values()))
        for part in feature.parts:
            name = Text.assemble(f"  {part.name}", (" (option)" if part.option else "", "dim"))
            verdicts = (judgement.verdict for judgement in recorded(feature, part).values())
            table.add_row(name, *map(coloured, verdicts))
        table.add_section()
    console = Console()
    console.print(table)
    console.print(
        "active: vLLM lacks it, we bring it; native: vLLM has it, we stand aside", style="dim"
    )
    console.print(
        "idle: nothing to do there; option: off until you set it; a feature's own row shows the "
        "part that needs most attention.",
        style="dim",
    )
    console.print(
        "vllm-ext explain FEATURE tells more; vllm-ext doctor looks at this machine.", style="dim"
    )


@click.command()
@click.argument("feature")
def explain(feature: str) -> None:
    """Tell what FEATURE changes, where, why, and how to switch it."""
    found = find_feature(feature)
    console = Console()
    told = Text.assemble((found.summary, "bold"), f"\n\n{found.why}")
    console.print(Panel(told, title=Text(found.name, "bold")))
    pull = ", ".join(f"vllm-project/vllm #{number}" for number in found.upstream_pr)
    console.print(f"Upstream: {pull or 'no pull request'}", highlight=False)
    console.print(f"Toggle:   {found.toggle} = auto (default) | 1 | 0", highlight=False)
    for option in found.options:
        console.print(
            f"Option:   {found.variable(option)} ({option.takes}, default "
            f"{option.default}): {option.summary}",
            highlight=False,
        )
    for part in found.parts:
        console.print(Text.assemble("\n", (part.name, "bold"), f": {part.summary}"))
        touched = [(type(seam).__name__, seam.target) for seam in part.seams]
        for how, target in touched + [("relies on", target) for target in part.relies_on]:
            console.print(Text(f"{how:>11}  {target}"), soft_wrap=True)
        table = Table(box=None, show_header=False, padding=(0, 0, 0, 2))
        table.add_column(min_width=9, justify="right")
        for release, judgement in recorded(found, part).items():
            table.add_row(release, coloured(judgement.verdict), Text(judgement.reason))
        console.print(table)
