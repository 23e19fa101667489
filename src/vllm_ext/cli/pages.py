"""``vllm-ext pages``: the feature pages and the compatibility page (for developers of the plugin).

Everything on them comes from the declarations, the release records and docs/evidence, so the same
sources give the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from vllm_ext import features as package
from vllm_ext.cli.compatibility import COMPATIBILITY, README, compatibility, with_table
from vllm_ext.cli.listing import overall, recorded
from vllm_ext.cli.markdown import MARK, code, join, plain, table
from vllm_ext.core.feature import Feature, Part
from vllm_ext.core.plan import catalogue
from vllm_ext.core.release import recorded_releases

INDEX = "README.md"
_PULL = "https://github.com/vllm-project/vllm/pull"


def feature_pages() -> dict[str, str]:
    """The files of docs/features: name and content, one page per feature and the index."""
    features = catalogue(package)
    pages = {page_name(feature): _page(feature) for feature in features}
    return {**pages, INDEX: _index(features)}


def page_name(feature: Feature) -> str:
    """File name of a feature's page."""
    return f"{feature.name.lower()}.md"


def _index(features: Sequence[Feature]) -> str:
    rows = [
        (
            f"[{feature.name}]({page_name(feature)})",
            feature.area,
            plain(feature.summary),
            *overall(feature).values(),
        )
        for feature in features
    ]
    return join(
        MARK,
        "# Features",
        "*active*: the release lacks it and the plugin brings it; *native*: the release has it and "
        "the plugin stands aside; *idle*: nothing to do in this release. A feature's verdict is "
        "that of its part that needs most attention. `vllm-ext doctor` tells what holds on your "
        "machine, the [compatibility page](../compatibility.md) what was tested.",
        table(("Feature", "Area", "What it does", *recorded_releases()), rows),
    )


def _page(feature: Feature) -> str:
    pulls = [f"[vllm-project/vllm#{n}]({_PULL}/{n})" for n in feature.upstream_pr]
    facts = (
        ("Toggle", f"{code(feature.toggle)} = `auto` (default), `1` or `0`"),
        ("Area", feature.area),
        ("Upstream", ", ".join(pulls) or "no pull request"),
    )
    verdicts = [
        (
            f"[{part.name}](#{part.name})",
            *(judgement.verdict for judgement in recorded(feature, part).values()),
        )
        for part in feature.parts
    ]
    return join(
        MARK,
        f"# {feature.name}",
        plain(feature.summary),
        "\n".join(f"- {name}: {value}" for name, value in facts),
        table(("Part", *recorded_releases()), verdicts),
        "## Why",
        plain(feature.why),
        "## Options",
        _options(feature),
        "## Parts",
        *(_part(feature, part) for part in feature.parts),
    )


def _options(feature: Feature) -> str:
    if not feature.options:
        return "None besides the toggle."
    rows = [
        (
            code(feature.variable(option)),
            option.takes,
            code(str(int(option.default) if option.type is bool else option.default)),
            plain(option.summary),
        )
        for option in feature.options
    ]
    return table(("Variable", "Type", "Default", "What it does"), rows)


def _part(feature: Feature, part: Part) -> str:
    touched = [(type(seam).__name__, code(seam.target)) for seam in part.seams]
    touched += [("relies on", code(target)) for target in part.relies_on]
    verdicts = [
        (release, judgement.verdict, plain(judgement.reason))
        for release, judgement in recorded(feature, part).items()
    ]
    on = []
    if part.option:
        variable = feature.how_to_switch_on(part)
        on = [f"Off until {code(variable)}{'' if variable.endswith('=1') else ' is set'}."]
    return join(
        f"### {part.name}",
        " ".join([plain(part.summary), *on]),
        table(("Seam", "Target"), touched),
        table(("vLLM", "Verdict", "What was found when the release was recorded"), verdicts),
    ).rstrip()


@click.command(hidden=True)
@click.option(
    "--to",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("docs/features"),
    show_default=True,
    help="Where the feature pages go; compatibility.md and evidence/ lie beside, README.md above.",
)
def pages(folder: Path) -> None:
    """Write the feature pages, the compatibility page and the README's table."""
    folder.mkdir(parents=True, exist_ok=True)
    made = feature_pages()
    for path in sorted(folder.glob("*.md")):
        if path.name not in made and path.read_text().startswith(MARK):
            path.unlink()
            click.echo(f"removed {path}: there is no such feature")
    for name, content in made.items():
        (folder / name).write_text(content)
    beside = folder.parent
    (beside / COMPATIBILITY).write_text(compatibility(beside / "evidence"))
    readme = beside.parent / README
    if readme.is_file():
        readme.write_text(with_table(readme.read_text(), beside / "evidence"))
    click.echo(f"{len(made)} pages in {folder}, {beside / COMPATIBILITY}")
