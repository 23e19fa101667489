"""The compatibility page and its small version in the README: what the evidence says, no more."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_ext import features as package
from vllm_ext.cli.markdown import MARK, code, join, plain, table
from vllm_ext.core.feature import Feature, Judgement, Verdict, worst
from vllm_ext.core.plan import catalogue
from vllm_ext.core.release import recorded_releases

COMPATIBILITY = "compatibility.md"
README = "README.md"
UNTESTED = "no evidence"
_OUTCOMES = ("passed", "red", "failed")
_BEGIN, _END = "<!-- compatibility: from docs/evidence -->", "<!-- end of compatibility -->"

Evidence = Mapping[str, Mapping[str, Any]]
"""The content of docs/evidence/*.json, by area."""


def load(folder: Path) -> Evidence:
    """The evidence files in a folder that need not exist yet."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def compatibility(folder: Path) -> str:
    """The page, from the evidence in a folder."""
    found, features = load(folder), catalogue(package)
    areas = sorted(found.keys() | {feature.area for feature in features})
    sections = [
        _area(area, found.get(area), [f for f in features if f.area == area]) for area in areas
    ]
    return join(
        MARK,
        "# Compatibility",
        "What was run, on which vLLM release, with the plugin and without it. A part's verdict "
        "stands with the tests that speak of it: *passed* with the plugin or, where the release "
        "has the part itself, without; *red* without the plugin, with the wrong value they name: "
        "there the release lacks what the part brings. `make test-all AREA=x` writes these numbers "
        "to `docs/evidence/x.json`; `make evidence-check` names those older than the sources.",
        "Why a verdict is what it is: [feature pages](features/README.md).",
        *sections,
    )


def _area(area: str, data: Mapping[str, Any] | None, features: Sequence[Feature]) -> str:
    if data is None:
        return join(f"## {area}", f"No evidence yet: run `make test-all AREA={area}`.").rstrip()
    state = "" if data["exit_status"] == 0 else " **This run failed.**"
    releases = recorded_releases()
    parts = [
        (code(part_id), *(_tested(data, part_id, release) for release in releases))
        for feature in features
        for part_id in map(feature.part_id, feature.parts)
    ]
    rows = [
        (code(o["release"]), code(o["plugin"]), *(str(o.get(n, 0)) for n in _OUTCOMES))
        for o in sorted(data["outcomes"], key=lambda o: _order(o["release"], o["plugin"]))
    ]
    failed = "\n".join(f"- {code(name)}" for name in data["failed"])
    return join(
        f"## {area}",
        f"{data['date']}, Python {data['python']}, {code(_command(area, data))}.{state}",
        table(("Part", *releases), parts),
        "All tests of the area, also those that speak of no part:",
        table(("vLLM", "Plugin", "Passed", "Red", "Failed"), rows),
        *([f"Failed:\n\n{failed}"] if failed else []),
    ).rstrip()


def _command(area: str, data: Mapping[str, Any]) -> str:
    return str(data.get("command", f"make test-all AREA={area}"))


def _tested(data: Mapping[str, Any], part_id: str, release: str) -> str:
    """A part's verdict on a release and the outcomes it stands on."""
    told = data.get("parts", {}).get(part_id, {}).get(release)
    if not told:
        return UNTESTED
    counted = [f"{told[name]} {name}" for name in _OUTCOMES if told.get(name)]
    return ": ".join([told["verdict"], ", ".join(counted) or UNTESTED])


def _order(release: str, plugin: str) -> tuple[list[int], str]:
    """Oldest release first, tests that name no release ("any") before them."""
    numbers = [int(number) for number in release.split(".")] if release != "any" else []
    return numbers, plugin


def small_table(folder: Path) -> str:
    """Feature by release: the verdict of its part that needs most attention, as tested."""
    found = load(folder)
    rows = [
        (
            f"[{feature.name}](docs/features/{feature.name.lower()}.md)",
            plain(feature.summary),
            *(_overall(found, feature, release) for release in recorded_releases()),
        )
        for feature in catalogue(package)
    ]
    return table(("Feature", "What it does", *recorded_releases()), rows)


def _overall(found: Evidence, feature: Feature, release: str) -> str:
    parts = found.get(feature.area, {}).get("parts", {})
    told = [parts.get(feature.part_id(part), {}).get(release) for part in feature.parts]
    if any(entry is None for entry in told):
        return UNTESTED
    verdict = worst(Judgement(Verdict(entry["verdict"]), "") for entry in told).verdict.value
    return f"{verdict}, **tests failed**" if any(entry.get("failed") for entry in told) else verdict


def with_table(readme: str, folder: Path) -> str:
    """The README with the small table between its markers; as it is if it has none."""
    block = f"{_BEGIN}\n{small_table(folder)}\n{_END}"
    pattern = re.compile(f"{re.escape(_BEGIN)}.*?{re.escape(_END)}", re.DOTALL)
    return pattern.sub(lambda _: block, readme)
