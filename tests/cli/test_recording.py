"""record: the shipped records can be made again, and a build that differs is refused."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.beds.children import environment
from tests.beds.copies import altered, rewrite
from tests.beds.layout import IN_VENV
from tests.conftest import FEATURES
from vllm_ext.checks.recording import changes
from vllm_ext.checks.work import nearest, work
from vllm_ext.core.feature import Verdict
from vllm_ext.core.plan import plan
from vllm_ext.core.release import RECORDS, Record, installation, record
from vllm_ext.settings import Settings

COMMAND = Path(sys.executable).with_name("vllm-ext")


def _record(release: str) -> Record:
    known = record(release)
    assert known is not None
    return known


def _contents() -> dict[str, bytes]:
    """The target files of the installed release, by their names in a wheel."""
    stock = installation()
    assert stock is not None
    return {file: (stock.root / file).read_bytes() for file in _record(IN_VENV).files}


def _wheel(folder: Path, contents: Mapping[str, bytes]) -> Path:
    path = folder / _record(IN_VENV).reference
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("vllm/__init__.py", "")
        for name, content in contents.items():
            archive.writestr(name, content)
    return path


def _run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, "record", *arguments],
        env={**environment(IN_VENV), "COLUMNS": "80"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_recording_again_gives_the_shipped_record(tmp_path: Path) -> None:
    to = tmp_path / "new" / "records"
    done = _run("--reference", _wheel(tmp_path, _contents()), "--to", to)
    assert done.returncode == 0, done.stdout
    assert [path.name for path in to.iterdir()] == [f"{IN_VENV}.json"]
    assert (to / f"{IN_VENV}.json").read_bytes() == (RECORDS / f"{IN_VENV}.json").read_bytes()
    assert "as recorded before" in done.stdout
    assert f"written to {to / f'{IN_VENV}.json'}" in done.stdout


def test_a_build_that_differs_from_the_reference_is_refused(tmp_path: Path) -> None:
    contents = _contents()
    missing, different, *same = contents
    del contents[missing]
    contents[different] += b"\n"
    to = tmp_path / "records"
    done = _run("--reference", _wheel(tmp_path, contents), "--to", to)
    assert done.returncode == 1
    assert "can't be recorded: these files differ from vllm-0.29.0" in done.stdout
    assert missing in done.stdout and different in done.stdout
    assert same and not any(name in done.stdout for name in same)
    assert not to.exists()


@pytest.mark.parametrize("version", ["0.29.0", None], ids=["no probe works", "no version"])
def test_a_folder_that_is_no_vllm_is_refused(version: str | None, tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    if version:
        (tmp_path / "vllm" / "_version.py").write_text(f"__version__ = version = '{version}'\n")
    reference = _wheel(tmp_path, {})
    done = _run("--vllm", tmp_path, "--reference", reference, "--to", tmp_path / "records")
    if version:
        assert done.returncode == 1 and "can't be recorded: probes failed: " in done.stdout
        assert "CACHE_KEYS.compile_key: " in done.stdout
    else:
        assert done.returncode == 2 and "tells no version" in done.stdout
    assert "Traceback" not in done.stdout
    assert not (tmp_path / "records").exists()


def test_where_there_is_no_vllm_nothing_is_recorded(tmp_path: Path) -> None:
    reference = _wheel(tmp_path, {})
    done = _run("--vllm", tmp_path, "--reference", reference, "--to", tmp_path / "records")
    assert done.returncode == 2 and "There is no vLLM to record" in done.stdout


def test_a_reference_that_is_no_wheel_is_refused_at_once(tmp_path: Path) -> None:
    reference = tmp_path / "vllm.whl"
    reference.write_text("an error page")
    done = _run("--reference", reference, "--to", tmp_path / "records")
    assert done.returncode == 2 and "is not a wheel" in done.stdout
    assert not (tmp_path / "records").exists()


def test_what_changed_between_two_records_is_told() -> None:
    old, new = _record("0.29.0"), _record("0.30.0")
    assert changes(old, old) == []
    rows = dict(changes(old, new))
    assert rows["SCORE_USAGE.prompt_tokens"] == "active -> native"
    assert rows["SCORE_USAGE.missing_inputs"] == "idle -> active"
    digests = [
        {(target, found and found.digest) for target, found in known.targets.items()}
        for known in (old, new)
    ]
    changed = {target for target, _ in digests[0] ^ digests[1]}
    assert changed and {row for row in rows if ":" in row} == changed
    assert changes(None, new) == [("0.30.0", "first record of this release")]


STAMP = "__version__ = version = '{}'"
SCORING = "vllm/entrypoints/pooling/scoring/serving.py"


def _copy(folder: Path, release: str, version: str) -> Path:
    """A release that says it is another version."""
    return altered(
        release, folder, "vllm/_version.py", STAMP.format(release), STAMP.format(version)
    )


def _report(*arguments: str | Path, status: int) -> dict[str, Any]:
    done = _run(*arguments, "--json")
    assert done.returncode == status, done.stdout
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def _files(folder: Path) -> set[str]:
    files = (str(path.relative_to(folder)) for path in folder.rglob("*"))
    return {file for file in files if "__pycache__" not in file}


def _verdicts(folder: Path) -> set[Verdict]:
    """What the plugin would do to it today."""
    installed = installation(folder)
    assert installed is not None
    options = {f.variable(p.option): True for f in FEATURES.values() for p in f.parts if p.option}
    planned = plan(list(FEATURES.values()), Settings(options=options), installed)
    return {entry.judgement.verdict for entry in planned}


def test_a_release_nobody_has_seen_is_reported_and_stays_untouched(tmp_path: Path) -> None:
    """0.34.0 with the sources of 0.33.0: nothing to do, and yet nothing is in force."""
    copy = _copy(tmp_path / "copy", "0.33.0", "0.34.0")
    before = _files(copy), _files(RECORDS)
    report = _report("--vllm", copy, status=0)
    assert (report["vllm"], report["recorded"], report["nearest"]) == ("0.34.0", False, "0.33.0")
    known = _record("0.33.0").parts
    assert {name: part["probe"] for name, part in report["parts"].items()} == {
        name: judgement.verdict for name, judgement in known.items()
    }
    assert {(part["todo"], *part["changes"]) for part in report["parts"].values()} == {("",)}
    assert _verdicts(copy) == {Verdict.UNSUPPORTED}
    assert (_files(copy), _files(RECORDS)) == before


def test_a_release_nobody_has_seen_is_recorded_on_request(tmp_path: Path) -> None:
    copy = _copy(tmp_path / "copy", "0.33.0", "0.34.0")
    known = _record("0.33.0")
    wheel = _wheel(tmp_path, {file: (copy / file).read_bytes() for file in known.files})
    to = tmp_path / "records"
    done = _run("--vllm", copy, "--reference", wheel, "--to", to)
    assert done.returncode == 0, done.stdout
    assert "first record of this release" in done.stdout
    made = json.loads((to / "0.34.0.json").read_text())
    stock = json.loads((RECORDS / "0.33.0.json").read_text())
    assert made.pop("release") == "0.34.0" and stock.pop("release") == "0.33.0"
    assert made.pop("reference") == wheel.name and stock.pop("reference")
    assert made == stock


def test_a_vendor_build_is_told_what_differs(tmp_path: Path) -> None:
    copy = _copy(tmp_path / "copy", "0.29.0", "0.29.0+vendor.1")
    old, new = (
        "final_res_batch = ctx.final_res_batch",
        "final_res_batch = list(ctx.final_res_batch)",
    )
    rewrite(copy, SCORING, f"        {old}\n", f"        {new}\n")
    vendored = installation(copy)
    assert vendored is not None
    items = work(list(FEATURES.values()), vendored, _record("0.29.0").parts)
    todo = {item.part_id: item.todo for item in items if item.todo}
    line = (copy / SCORING).read_text().splitlines().index(f"        {new}") + 1
    assert "SCORE_USAGE.prompt_tokens" in todo
    for name, sentence in todo.items():
        assert name.startswith("SCORE_USAGE.")
        assert sentence.startswith("read what changed since 0.29.0: ")
        assert f"{SCORING}, line " in sentence and "1 statement changed" in sentence
    # The record has no sources: the line is that of the changed statement all the same.
    assert f"line {line}:" in todo["SCORE_USAGE.prompt_tokens"]
    shown = _run("--vllm", copy)
    assert shown.returncode == 1
    assert "is a build of the recorded release 0.29.0" in shown.stdout
    assert all(f"{name}: {sentence}\n" in shown.stdout for name, sentence in todo.items())
    assert f"{len(todo)} of {len(items)} parts need work." in shown.stdout
    assert "Nothing was written" in shown.stdout


def test_a_probe_that_does_not_work_there_is_work_and_nothing_is_guessed(tmp_path: Path) -> None:
    copy = _copy(tmp_path / "copy", "0.29.0", "0.29.1")
    old = "    def _build_response(\n"
    rewrite(copy, SCORING, old, old.replace("_build_response", "_make_response"))
    report = _report("--vllm", copy, status=1)
    assert (report["recorded"], report["nearest"]) == (False, "0.29.0")
    part = report["parts"]["SCORE_USAGE.prompt_tokens"]
    assert part["probe"] == "failed" and part["todo"].startswith("repair the probe")
    moved = [c for c in part["changes"] if c["target"].endswith("._build_response")]
    assert [change["state"] for change in moved] == ["moved"]
    assert moved[0]["what"].endswith("ServingScores._make_response now")
    assert report["parts"]["CACHE_KEYS.compile_key"]["todo"] == ""
    assert _verdicts(copy) == {Verdict.UNSUPPORTED}


@pytest.mark.parametrize(
    ("version", "base"),
    [
        ("0.34.0", "0.33.0"),
        ("0.29.1", "0.29.0"),
        ("0.30.0rc1", "0.29.0"),
        ("0.31.0+vendor", "0.31.0"),
        ("0.28.2", "0.29.0"),
        ("1.0", "0.33.0"),
    ],
)
def test_the_nearest_release_is_the_last_one_before(version: str, base: str) -> None:
    assert nearest(version) == base


def test_a_version_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    (tmp_path / "vllm" / "_version.py").write_text("__version__ = version = 'nightly'\n")
    done = _run("--vllm", tmp_path)
    assert done.returncode == 2 and "Invalid version: 'nightly'" in done.stdout


def test_writing_needs_the_proof(tmp_path: Path) -> None:
    done = _run("--to", tmp_path / "records")
    assert done.returncode == 2 and "--to needs --reference" in done.stdout
    assert not (tmp_path / "records").exists()


@pytest.mark.parametrize("stamp", ["0.33.0", "nightly", "", None], ids=str)
def test_errors_leave_stdout_to_the_answer_and_name_the_folder(
    stamp: str | None, tmp_path: Path
) -> None:
    if stamp is not None:
        (tmp_path / "vllm").mkdir()
        (tmp_path / "vllm" / "__init__.py").write_text("raise SystemExit('broken')\n")
        (tmp_path / "vllm" / "_version.py").write_text(f"version = '{stamp}'\n")
    done = subprocess.run(
        [COMMAND, "record", "--json", "--vllm", tmp_path],
        env=environment(IN_VENV),
        capture_output=True,
        text=True,
    )
    assert done.returncode == (1 if stamp == "0.33.0" else 2)
    assert done.stdout == "" and str(tmp_path) in done.stderr
    if stamp is not None:
        inside = _run("--json", "--vllm", tmp_path / "vllm")
        assert inside.returncode == done.returncode and inside.stdout == done.stderr
