"""Evidence: what ran where. Written by `make test-all AREA=x`, checked by `make evidence-check`.

`docs/evidence/<area>.json` holds, per release and with or without the plugin, how many tests
passed, failed or were red as they must be; the same per part, with its verdict on each release; the
command that was run, and the hashes of the sources it speaks of.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from vllm_ext import features as package
from vllm_ext.core.plan import catalogue
from vllm_ext.core.release import record, recorded_releases

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "evidence"


# What only tells others what is in force, and so belongs to the evidence of one area.
REPORTING = ("effects.py", "metrics.py", "report.py", "status.py")


def sources(area: str) -> dict[str, str]:
    """Hashes of what the evidence of an area depends on: its features, the core, its tests."""
    patterns = (
        f"src/vllm_ext/features/{area}/**/*.py",
        "src/vllm_ext/core/**/*",
        "src/vllm_ext/*.py",
        f"tests/{area}/**/*.py",
        "tests/contract/*.py",
        "tests/conftest.py",
    )
    files = {path for pattern in patterns for path in ROOT.glob(pattern)}
    return {
        str(path.relative_to(ROOT)): hashlib.sha256(_spoken_of(path, area)).hexdigest()[:16]
        for path in sorted(files)
        if path.is_file()
        and path.suffix in (".py", ".json")
        and (area == "observability" or path.name not in REPORTING)
    }


def _spoken_of(path: Path, area: str) -> bytes:
    """What of a file the evidence of an area depends on: of a release's record, its own parts."""
    if path.suffix != ".json":
        return path.read_bytes()
    known = json.loads(path.read_text())
    own = [(f, part) for f in catalogue(package) if f.area == area for part in f.parts]
    targets = {target for _, part in own for target in part.fingerprinted}
    kept = {
        "parts": {f.part_id(part): known["parts"].get(f.part_id(part)) for f, part in own},
        "targets": {target: known["targets"].get(target) for target in sorted(targets)},
    }
    return json.dumps(kept, sort_keys=True).encode()


class Evidence:
    """pytest plugin that counts outcomes and writes them when the run ends."""

    def __init__(self, area: str) -> None:
        self._area = area
        self._counts: dict[tuple[str, str], Counter[str]] = {}
        self._failed: list[str] = []
        self._part_of: dict[str, str] = {}
        self._parts: dict[str, dict[str, Counter[str]]] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note which part each test speaks of: by its mark, or by its parameter."""
        for item in session.items:
            mark = item.get_closest_marker("behaviour")
            spec = getattr(item, "callspec", None)
            part = mark.args[0] if mark else spec.params.get("part") if spec else None
            if part:
                self._part_of[item.nodeid] = part

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count one outcome under its release and plugin setting, read from the test's id."""
        if report.when != "call" and not report.failed:
            return
        inside = report.nodeid.partition("[")[2].rstrip("]").split("-")
        release = next(
            (word for word in inside if word.count(".") == 2 and word[0].isdigit()), "any"
        )
        plugin = next((word for word in inside if word in ("with", "without")), "any")
        red = hasattr(report, "wasxfail")
        outcome = "red" if red and report.skipped else report.outcome
        self._counts.setdefault((release, plugin), Counter())[outcome] += 1
        if report.failed:
            self._failed.append(report.nodeid)
        if part := self._part_of.get(report.nodeid):
            self._parts.setdefault(part, {}).setdefault(release, Counter())[outcome] += 1

    def _tested(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Verdict and outcomes of each part of the area on each release."""
        tested: dict[str, dict[str, dict[str, Any]]] = {}
        for feature in catalogue(package):
            for part in feature.parts if feature.area == self._area else ():
                counted = self._parts.get(feature.part_id(part), {})
                tested[feature.part_id(part)] = {
                    release: {"verdict": known.judgement(feature, part).verdict, **counted[release]}
                    for release in recorded_releases()
                    if (known := record(release)) and release in counted
                }
        return tested

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write the evidence of the area; a run without an area, or without a test, writes none."""
        if not (self._area and self._counts) or exitstatus == pytest.ExitCode.INTERRUPTED:
            return
        FOLDER.mkdir(parents=True, exist_ok=True)
        data: dict[str, Any] = {
            "area": self._area,
            "date": datetime.date.today().isoformat(),
            "python": sys.version.split()[0],
            "command": f"make test-all AREA={self._area}",
            "exit_status": int(exitstatus),
            "outcomes": [
                {"release": release, "plugin": plugin, **counts}
                for (release, plugin), counts in sorted(self._counts.items())
            ],
            "parts": self._tested(),
            "failed": self._failed,
            "sources": sources(self._area),
        }
        (FOLDER / f"{self._area}.json").write_text(json.dumps(data, indent=1) + "\n")


def areas() -> dict[str, list[str]]:
    """The parts of each area of features."""
    found: dict[str, list[str]] = {}
    for feature in catalogue(package):
        found.setdefault(feature.area, []).extend(map(feature.part_id, feature.parts))
    return found


def stale(folder: Path = FOLDER) -> dict[str, list[str]]:
    """Why the evidence of each area says nothing of what is here now; empty where it does."""
    found = {}
    parts = areas()
    written = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    for area in sorted(parts.keys() | written.keys()):
        if area not in written:
            found[area] = ["there is none"]
        elif area not in parts:
            found[area] = ["there are no features of this area any more; remove its file"]
        else:
            found[area] = _reasons(area, written[area], parts[area])
    return found


def _reasons(area: str, data: dict[str, Any], parts: list[str]) -> list[str]:
    reasons = []
    if data["exit_status"] != 0:
        reasons.append(f"the run itself failed (status {data['exit_status']})")
    now, then = sources(area), data["sources"]
    reasons += [f"{file} is new" for file in now.keys() - then.keys()]
    reasons += [f"{file} is gone" for file in then if not (ROOT / file).is_file()]
    reasons += [f"{file} changed" for file in now.keys() & then.keys() if now[file] != then[file]]
    tested = data.get("parts", {})
    for part in parts:
        lacking = [r for r in recorded_releases() if r not in tested.get(part, {})]
        if lacking:
            reasons.append(f"no test of {part} on {', '.join(lacking)}")
    return sorted(reasons)


def main(folder: Path = FOLDER) -> int:
    """Print each area and why its evidence is stale; status 1 if that of any area is."""
    outdated = stale(folder)
    table = Table(title="Evidence")
    table.add_column("Area")
    table.add_column("State", overflow="fold")
    for area, reasons in outdated.items():
        told = f"stale, run make test-all AREA={area}:\n" + "\n".join(reasons)
        table.add_row(area, told if reasons else "fresh", style="red" if reasons else "green")
    Console().print(table)
    return 1 if any(outdated.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
