"""Evidence: stale evidence is named with its reasons, and what a run writes is what it did."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.beds import evidence
from tests.beds.evidence import Evidence, areas, main, sources, stale
from tests.beds.layout import RELEASES

AREA = "serving"


def _fresh(area: str) -> dict[str, Any]:
    told = {"verdict": "active", "passed": 1}
    return {
        "area": area,
        "date": "2026-01-02",
        "python": "3.11.9",
        "exit_status": 0,
        "outcomes": [],
        "parts": {part: dict.fromkeys(RELEASES, told) for part in areas()[area]},
        "failed": [],
        "sources": sources(area),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Evidence of all areas that is as fresh as can be."""
    for area in areas():
        (tmp_path / f"{area}.json").write_text(json.dumps(_fresh(area)))
    return tmp_path


def _alter(folder: Path, change: dict[str, Any]) -> None:
    path = folder / f"{AREA}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def test_fresh_evidence_is_fresh(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stale(folder) == {area: [] for area in sorted(areas())}
    assert main(folder) == 0
    assert "stale" not in capsys.readouterr().out


def test_what_changed_since_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    then = sources(AREA)
    changed, new, *_ = then
    then[changed] = "0" * 16
    del then[new]
    then["src/vllm_ext/features/serving/given_up.py"] = "0" * 16
    _alter(folder, {"sources": then})
    found = stale(folder)
    assert found.pop(AREA) == sorted(
        [
            f"{changed} changed",
            f"{new} is new",
            "src/vllm_ext/features/serving/given_up.py is gone",
        ]
    )
    assert not any(found.values()), "evidence of other areas is named"
    assert main(folder) == 1
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert f"stale, run make test-all AREA={AREA}:" in shown
    assert "given_up.py is gone" in shown


def test_a_failed_run_and_a_part_nobody_tested_are_named(folder: Path) -> None:
    first, *others = areas()[AREA]
    tested = _fresh(AREA)["parts"]
    del tested[first]["0.31.0"], tested[others[0]]
    _alter(folder, {"parts": tested, "exit_status": 1})
    assert stale(folder)[AREA] == sorted(
        [
            "the run itself failed (status 1)",
            f"no test of {first} on 0.31.0",
            f"no test of {others[0]} on {', '.join(RELEASES)}",
        ]
    )


def test_an_area_without_evidence_and_evidence_without_an_area_are_named(folder: Path) -> None:
    (folder / f"{AREA}.json").rename(folder / "given_up.json")
    found = stale(folder)
    assert found[AREA] == ["there is none"]
    assert found["given_up"] == ["there are no features of this area any more; remove its file"]


def test_a_run_writes_what_each_part_showed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A collection and its reports as pytest hands them over."""
    monkeypatch.setattr(evidence, "FOLDER", tmp_path)
    written = Evidence(AREA)
    part, other = areas()[AREA][:2]
    place = ("test_made_up.py", 1, "test")
    nodes = {
        f"a.py::one[0.29.0-with-{part}]": (part, "passed", False),
        f"a.py::two[0.29.0-without-{part}]": (part, "skipped", True),
        f"a.py::three[0.30.0-with-{part}]": (part, "failed", False),
        "a.py::four[0.30.0]": (None, "passed", False),
    }
    for node, (about, outcome, red) in nodes.items():
        if about:
            written._part_of[node] = about
        report = pytest.TestReport(node, place, {}, outcome, None, "call")  # type: ignore[arg-type]
        if red:
            report.wasxfail = "red"  # type: ignore[attr-defined]
        written.pytest_runtest_logreport(report)
    written.pytest_sessionfinish(1)
    data = json.loads((tmp_path / f"{AREA}.json").read_text())
    assert data["command"] == f"make test-all AREA={AREA}"
    assert data["parts"][part]["0.29.0"].items() >= {"passed": 1, "red": 1}.items()
    assert data["parts"][part]["0.30.0"].items() >= {"failed": 1}.items()
    assert {told["verdict"] for told in data["parts"][part].values()} <= {"active", "native"}
    assert data["parts"][other] == {}
    assert data["failed"] == [f"a.py::three[0.30.0-with-{part}]"]


def test_each_test_is_put_down_to_its_part(request: pytest.FixtureRequest) -> None:
    """Of this very session: marks and parameters of the tests that were collected."""
    noted = Evidence(AREA)
    noted.pytest_collection_finish(request.session)
    for item in request.session.items:
        mark = item.get_closest_marker("behaviour")
        if mark:
            assert noted._part_of[item.nodeid] == mark.args[0]
    assert request.node.nodeid not in noted._part_of


def test_a_record_counts_with_the_parts_of_the_area_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    path = evidence.ROOT / "src/vllm_ext/core/releases/0.29.0.json"
    known = json.loads(path.read_text())
    others = [part for part in known["parts"] if part not in evidence.areas()[AREA]]
    before = evidence._spoken_of(path, AREA)

    def after(part: str) -> bytes:
        changed = json.loads(path.read_text())
        changed["parts"][part]["reason"] += " now"
        copy = json.dumps(changed)
        with monkeypatch.context() as patch:
            patch.setattr(type(path), "read_text", lambda self: copy)
            return evidence._spoken_of(path, AREA)

    assert all(after(part) == before for part in others)
    assert all(after(part) != before for part in evidence.areas()[AREA])
