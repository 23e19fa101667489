"""record: the shipped records can be made again, and a build that differs is refused."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.beds.layout import IN_VENV
from vllm_ext.checks.recording import changes
from vllm_ext.core.release import RECORDS, Record, installation, record

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
    environ = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_EXT_")}
    return subprocess.run(
        [COMMAND, "record", *arguments],
        env={**environ, "PYTHONPATH": ""},
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
