"""Evidence: what ran where. Written by `make test-all AREA=x`, checked by `make evidence-check`.

`docs/evidence/<area>.json` holds, per release and with or without the plugin, how many tests
passed, failed or were red as they must be, and the hashes of the sources it speaks of.
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

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "evidence"


# What only tells others what is in force, and so belongs to the evidence of one area.
REPORTING = ("effects.py", "metrics.py", "report.py", "status.py")


def sources(area: str) -> dict[str, str]:
    """Hashes of the files the evidence of an area depends on: its features, the core, its tests."""
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
        str(path.relative_to(ROOT)): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for path in sorted(files)
        if path.is_file()
        and path.suffix in (".py", ".json")
        and (area == "observability" or path.name not in REPORTING)
    }


class Evidence:
    """pytest plugin that counts outcomes and writes them when the run ends."""

    def __init__(self, area: str) -> None:
        self._area = area
        self._counts: dict[tuple[str, str], Counter[str]] = {}
        self._failed: list[str] = []

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

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write the evidence of the area; a run without an area writes none."""
        if not self._area or exitstatus == pytest.ExitCode.INTERRUPTED:
            return
        FOLDER.mkdir(parents=True, exist_ok=True)
        data: dict[str, Any] = {
            "area": self._area,
            "date": datetime.date.today().isoformat(),
            "python": sys.version.split()[0],
            "exit_status": int(exitstatus),
            "outcomes": [
                {"release": release, "plugin": plugin, **counts}
                for (release, plugin), counts in sorted(self._counts.items())
            ],
            "failed": self._failed,
            "sources": sources(self._area),
        }
        (FOLDER / f"{self._area}.json").write_text(json.dumps(data, indent=1) + "\n")


def stale() -> dict[str, list[str]]:
    """Per area, the sources that changed since its evidence was written."""
    found = {}
    for path in sorted(FOLDER.glob("*.json")):
        data = json.loads(path.read_text())
        now = sources(data["area"])
        then = data["sources"]
        changed = [file for file, digest in now.items() if then.get(file) != digest]
        changed += [file for file in then if not (ROOT / file).is_file()]
        if data["exit_status"] != 0:
            changed.insert(0, f"the run itself failed (status {data['exit_status']})")
        if changed:
            found[data["area"]] = changed
    return found


def main() -> int:
    """Print the areas whose evidence is older than their sources; status 1 if there are any."""
    console = Console()
    areas = {path.name for path in (ROOT / "src/vllm_ext/features").iterdir() if path.is_dir()}
    areas = {area for area in areas if not area.startswith("_")}
    missing = sorted(area for area in areas if not (FOLDER / f"{area}.json").is_file())
    outdated = stale()
    table = Table(title="Evidence")
    table.add_column("Area")
    table.add_column("State", overflow="fold")
    for area in sorted(areas):
        if area in missing:
            table.add_row(area, f"none: run make test-all AREA={area}", style="red")
        elif area in outdated:
            table.add_row(area, f"older than {', '.join(outdated[area])}", style="red")
        else:
            table.add_row(area, "fresh", style="green")
    console.print(table)
    return 1 if missing or outdated else 0


if __name__ == "__main__":
    raise SystemExit(main())
