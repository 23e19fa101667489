"""diff: real releases against the catalogue, whole copies with one change, and what it refuses."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.beds.children import environment
from tests.beds.copies import altered, root_of, skeleton
from tests.beds.layout import IN_VENV, RELEASES
from tests.conftest import FEATURES
from vllm_ext.core.feature import Verdict
from vllm_ext.core.release import Record, record

COMMAND = Path(sys.executable).with_name("vllm-ext")
SCORING = "vllm/entrypoints/pooling/scoring/serving.py"
BUILD = "vllm.entrypoints.pooling.scoring.serving:ServingScores._build_response"
PAIRS = list(itertools.pairwise(RELEASES))


def _run(*arguments: str | Path, width: int = 80) -> subprocess.CompletedProcess[str]:
    environ = {**environment(IN_VENV), "COLUMNS": str(width)}
    return subprocess.run(
        [COMMAND, "diff", *arguments], env=environ, capture_output=True, text=True
    )


def _ask(*arguments: str | Path, status: int = 0) -> dict[str, Any]:
    done = _run("--json", *arguments)
    assert done.returncode == status, done.stdout + done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _record(release: str) -> Record:
    known = record(release)
    assert known is not None
    return known


def _as_recorded(old: Record, new: Record) -> dict[str, tuple[str, str, bool, bool]]:
    """By the records alone: verdicts, whether it became native, whether all targets are equal."""
    expected = {}
    for feature in FEATURES.values():
        for part in feature.parts:
            before, after = (r.judgement(feature, part).verdict for r in (old, new))
            digests = [
                [(known := r.targets[target]) and known.digest for target in part.fingerprinted]
                for r in (old, new)
            ]
            native = after is Verdict.NATIVE and before is not Verdict.NATIVE
            expected[feature.part_id(part)] = (before, after, native, digests[0] == digests[1])
    return expected


@pytest.mark.parametrize(("old", "new"), [*PAIRS, (RELEASES[0], RELEASES[-1])])
@pytest.mark.parametrize("on_disk", [True, False], ids=["on disk", "recorded"])
def test_two_releases_differ_as_the_catalogue_says(old: str, new: str, on_disk: bool) -> None:
    given = [root_of(old), root_of(new)] if on_disk else [old, new]
    answer = _ask(*given)
    assert [answer[side]["recorded"] for side in ("old", "new")] == [True, True]
    told = {
        part["part"]: (part["old"], part["new"], part["state"] == "native", part["changes"] == [])
        for part in answer["parts"]
    }
    assert told == _as_recorded(_record(old), _record(new))
    for part in answer["parts"]:
        assert part["state"] != "same" or part["changes"] == []
        for change in part["changes"]:
            assert change["state"] != "same" and change["what"]
            assert change["line"] > 0 or change["state"] == "disappeared"
    assert answer["lost"] == []


def test_a_line_is_where_it_differs() -> None:
    """The lines that diff names, looked up in the sources."""
    answer = _ask(root_of("0.29.0"), root_of("0.30.0"))
    (part,) = [part for part in answer["parts"] if part["part"] == "SCORE_USAGE.missing_inputs"]
    (change,) = [change for change in part["changes"] if change["target"] == BUILD]
    lines = (root_of("0.30.0") / SCORING).read_text().splitlines()
    became = change["what"].rpartition(" became `")[2].partition("`")[0]
    assert lines[change["line"] - 1].strip() == became


def test_a_changed_body_in_a_whole_copy(tmp_path: Path) -> None:
    old, new = (
        "final_res_batch = ctx.final_res_batch",
        "final_res_batch = list(ctx.final_res_batch)",
    )
    copy = altered(IN_VENV, tmp_path / "copy", SCORING, f"        {old}\n", f"        {new}\n")
    answer = _ask(IN_VENV, copy, status=1)
    lost = {part["part"]: part for part in answer["parts"] if part["lost"]}
    assert list(lost) == answer["lost"]
    touched = [p for p in FEATURES["SCORE_USAGE"].parts if BUILD in p.fingerprinted]
    active = {
        FEATURES["SCORE_USAGE"].part_id(part)
        for part in touched
        if _record(IN_VENV).judgement(FEATURES["SCORE_USAGE"], part).verdict is Verdict.ACTIVE
    }
    assert lost.keys() == active
    for part in lost.values():
        assert part["state"] == part["new"] == "drifted"
        (change,) = part["changes"]
        assert change["file"] == SCORING
        assert f"`{old}` became `{new}`" in change["what"]
        lines = (copy / SCORING).read_text().splitlines()
        assert lines[change["line"] - 1].strip() == new


def test_a_module_that_moved_in_a_whole_copy(tmp_path: Path) -> None:
    copy = altered(
        IN_VENV, tmp_path / "copy", SCORING, "class ServingScores(", "class ServingScores("
    )
    (copy / SCORING).rename(copy / "vllm" / "entrypoints" / "moved.py")
    shown = _run(IN_VENV, copy)
    assert shown.returncode == 1
    assert "is vllm.entrypoints.moved:ServingScores._build_response now" in shown.stdout
    assert "SCORE_USAGE.prompt_tokens" in shown.stdout.splitlines()[-1]
    assert "would be lost" in shown.stdout.splitlines()[-1]
    states = {part["part"]: part["state"] for part in _ask(IN_VENV, copy, status=1)["parts"]}
    assert states["SCORE_USAGE.prompt_tokens"] == "moved"
    assert states["CACHE_KEYS.compile_key"] == "same"


def test_an_added_parameter_in_a_wheel(tmp_path: Path) -> None:
    """A wheel is read as it is, without unpacking it by hand."""
    tree = skeleton(tmp_path / "tree", IN_VENV, IN_VENV)
    text = (tree / SCORING).read_text()
    place = "    def _build_response(\n        self,\n"
    assert text.count(place) == 1
    (tree / SCORING).write_text(text.replace(place, place + "        flavour,\n"))
    wheel = tmp_path / "vllm-0.29.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in tree.rglob("*.py"):
            archive.write(file, file.relative_to(tree))
    answer = _ask(IN_VENV, wheel, status=1)
    (part,) = [part for part in answer["parts"] if part["part"] == "SCORE_USAGE.prompt_tokens"]
    assert part["state"] == "drifted" and part["lost"]
    what = next(change["what"] for change in part["changes"] if change["target"] == BUILD)
    assert what == "ServingScores._build_response: parameter `flavour` added"


def test_a_release_that_is_not_recorded_loses_everything_active(tmp_path: Path) -> None:
    tree = skeleton(tmp_path, "0.33.0", "0.34.0")
    answer = _ask(root_of("0.33.0"), tree, status=1)
    assert answer["new"]["recorded"] is False
    active = [part["part"] for part in answer["parts"] if part["old"] == "active"]
    assert answer["lost"] == active and active
    assert {part["new"] for part in answer["parts"]} == {"unsupported"}
    assert {part["state"] for part in answer["parts"]} == {"same"}
    shown = _run(root_of("0.33.0"), tree, width=100)
    assert "vLLM 0.34.0 is not a recorded release" in shown.stdout
    back = _ask(tree, root_of("0.33.0"))
    assert back["lost"] == [] and {part["old"] for part in back["parts"]} == {"unsupported"}


def test_probes_tell_what_an_unknown_release_brings_itself(tmp_path: Path) -> None:
    """Its sources are those of 0.33.0, so what is native there is native here."""
    stamp = "__version__ = version = '0.33.0'"
    copy = altered("0.33.0", tmp_path, "vllm/_version.py", stamp, stamp.replace("33", "34"))
    answer = _ask("0.29.0", copy, "--probe", status=1)
    for part in answer["parts"]:
        name, _, short = part["part"].partition(".")
        declared = next(p for p in FEATURES[name].parts if p.name == short)
        recorded = _record("0.33.0").judgement(FEATURES[name], declared).verdict
        assert part["probe"] == recorded
        assert (part["state"] == "native") == (recorded is Verdict.NATIVE)
        gone = part["old"] == "active" and recorded not in (Verdict.NATIVE, Verdict.IDLE)
        assert part["lost"] == gone


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            "0.28.0",
            "is neither a folder with an unpacked vLLM, nor a wheel, nor a recorded release",
        ),
        ("EMPTY", "There is no vLLM in"),
    ],
)
def test_what_is_no_vllm_is_refused(given: str, told: str, tmp_path: Path) -> None:
    done = _run(IN_VENV, tmp_path if given == "EMPTY" else given)
    assert done.returncode == 2 and told in done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""


def test_probes_of_a_release_without_sources_are_refused() -> None:
    done = _run("0.29.0", "0.33.0", "--probe")
    assert done.returncode == 2 and "must be installed or unpacked" in done.stderr


def _packed(tree: Path, wheel: Path) -> Path:
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in tree.rglob("*.py"):
            archive.write(file, file.relative_to(tree))
    return wheel


def test_a_wheel_is_named_as_it_was_given(tmp_path: Path) -> None:
    tree = skeleton(tmp_path / "tree", IN_VENV, IN_VENV)
    wheel = _packed(tree, tmp_path / "vllm.whl")
    assert _ask(IN_VENV, wheel)["new"]["path"] == str(wheel)
    assert f"NEW  vLLM {IN_VENV} in {wheel}\n" in _run(IN_VENV, wheel).stdout
    (tree / "vllm" / "_version.py").write_text("")
    done = _run(IN_VENV, _packed(tree, tmp_path / "none.whl"))
    assert done.returncode == 2 and f"vLLM in {tmp_path / 'none.whl'} tells no" in done.stderr


def _damage(content: bytes, how: str) -> bytes:
    header = content.index(b"PK\x01\x02")
    if how == "cut":
        return content[: len(content) // 2]
    if how == "spoiled":
        return content[:200] + b"\xff" * 300 + content[500:]
    # The flag of an encrypted file, or a method that no one knows, in each place that tells it.
    offset, value = (8, b"\x01") if how == "encrypted" else (10, b"\x63")
    first = content[: offset - 2] + value + content[offset - 1 : header + offset]
    return first + value + content[header + offset + 1 :]


@pytest.mark.parametrize("how", ["cut", "spoiled", "encrypted", "unknown method"])
def test_a_damaged_wheel_is_a_sentence(how: str, tmp_path: Path) -> None:
    wheel = _packed(skeleton(tmp_path / "tree", IN_VENV, IN_VENV), tmp_path / "vllm.whl")
    wheel.write_bytes(_damage(wheel.read_bytes(), how))
    done = _run(IN_VENV, wheel)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith(f"{wheel} can't be unpacked: ")
    assert done.stderr.endswith("(download it again).\n") and done.stdout == ""


def test_a_source_that_is_no_text_is_told(tmp_path: Path) -> None:
    tree = skeleton(tmp_path / "tree", IN_VENV, IN_VENV)
    with (tree / SCORING).open("ab") as file:
        file.write(b"# \xff\n")
    # The search for what is gone reads other files, too.
    other = next(file for file in record_files() if file != SCORING)
    (tree / other).unlink()
    (tree / "vllm" / "latin.py").write_bytes(b"def _build_response(): pass  # \xff\n")
    answer = _ask(IN_VENV, tree, status=1)
    (part,) = [part for part in answer["parts"] if part["part"] == "SCORE_USAGE.prompt_tokens"]
    assert part["state"] == "drifted"
    assert "this Python can't parse it" in part["changes"][0]["what"]
    said = [line for line in _run(IN_VENV, tree).stdout.splitlines() if "can't parse it" in line]
    assert len(said) == 1 and said[0].startswith(f"{SCORING}, line ")


def record_files() -> list[str]:
    return sorted(_record(IN_VENV).files)
