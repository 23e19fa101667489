"""verify: the behaviour checks in a process that vLLM loaded the plugin into; no engine runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.beds.children import environment
from tests.beds.copies import altered
from tests.beds.foreign import make_first, make_plugin
from tests.beds.layout import IN_VENV
from tests.conftest import FEATURES, recorded
from vllm_ext.checks.behaviour import Checked, Checks
from vllm_ext.checks.engine import Engine, EngineError
from vllm_ext.cli.verify import Outcome, _block
from vllm_ext.core.feature import Judgement, Verdict
from vllm_ext.core.status import ProcessStatus

COMMAND = Path(sys.executable).with_name("vllm-ext")
PARTS = [feature.part_id(part) for feature in FEATURES.values() for part in feature.parts]
BILLED = "SCORE_USAGE.prompt_tokens"
SPOILER = """
import functools


def register():
    from vllm.entrypoints.pooling.scoring.serving import ServingScores

    ours = ServingScores._build_response

    @functools.wraps(ours)
    def spoiled(self, ctx):
        response = ours(self, ctx)
        response.body = response.body.replace(b'"prompt_tokens":12', b'"prompt_tokens":13')
        return response

    ServingScores._build_response = spoiled
"""


def run(
    release: str, *arguments: str, env: Mapping[str, str] = {}, first: tuple[Path, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """``vllm-ext verify`` as somebody with that release would call it."""
    environ = environment(release)
    environ["PYTHONPATH"] = ":".join([*map(str, first), environ["PYTHONPATH"]])
    return subprocess.run(
        [COMMAND, "verify", *arguments], env={**environ, **env}, capture_output=True, text=True
    )


def _ask(release: str, *arguments: str, status: int = 0, **how: Any) -> dict[str, Any]:
    done = run(release, "--no-engine", "--json", *arguments, **how)
    assert done.returncode == status, done.stdout + done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.mark.parametrize("version", [IN_VENV, "0.33.0"])
def test_every_active_part_is_checked_and_right(version: str) -> None:
    answer = _ask(version)
    assert answer["facts"]["vLLM"].startswith(version)
    assert sorted(answer["parts"]) == sorted(PARTS)
    for part_id, part in answer["parts"].items():
        verdict = recorded(version, part_id)
        assert part["verdict"] == verdict
        assert part["right"] is (True if verdict is Verdict.ACTIVE else None), part
        assert part["wrong"] is None and (part["check"] is None) == (part["right"] is None)
    assert answer["problems"] == [] and answer["engine"] is None


def test_the_block_tells_all_that_a_bug_report_needs() -> None:
    done = run(IN_VENV, "--no-engine", "--feature", "cache_keys", env={"VLLM_EXT_SCORE_USAGE": "0"})
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == lines[-1] == "```"
    assert any(line.startswith(f"vLLM:      {IN_VENV}") for line in lines)
    for name in ("vllm-ext:", "Python:", "torch:", "device:    cpu", "VLLM_EXT_SCORE_USAGE: 0"):
        assert any(line.startswith(name) for line in lines), name
    checked = [line.split()[:3] for line in lines if "CACHE_KEYS." in line]
    assert checked == [
        ["right", f"CACHE_KEYS.{part.name}", "active"] for part in FEATURES["CACHE_KEYS"].parts
    ]
    assert "SCORE_USAGE." not in done.stdout
    assert "engine: not started (--no-engine)" in lines
    assert lines[-2] == f"{len(checked)} parts checked and right, 0 problems"


def test_a_part_that_is_active_and_spoiled_by_another_plugin_is_wrong(tmp_path: Path) -> None:
    """Its verdict can't tell: the other plugin keeps ours and changes what it gives."""
    ours, theirs = make_first(tmp_path / "ours"), make_plugin(tmp_path / "theirs", "spoiler")
    (theirs / "spoiler.py").write_text(SPOILER)
    answer = _ask(IN_VENV, "--feature", "SCORE_USAGE", status=1, first=(ours, theirs))
    part = answer["parts"][BILLED]
    assert part["verdict"] == "active" and "spoiler.register" in part["reason"]
    assert part["right"] is False and "is billed as 13" in part["wrong"]
    assert [problem.partition(":")[0] for problem in answer["problems"]] == [BILLED]


def test_a_part_that_another_plugin_keeps_out_is_wrong(tmp_path: Path) -> None:
    theirs = make_plugin(tmp_path / "theirs", "early_bird")
    answer = _ask(IN_VENV, "--feature", "SCORE_USAGE", status=1, first=(theirs,))
    part = answer["parts"][BILLED]
    assert part["verdict"] == "conflict" and part["wrong"].startswith("conflict: ")
    assert "early_bird" in part["wrong"]


def test_on_a_release_that_is_not_recorded_nothing_is_right(tmp_path: Path) -> None:
    stamp = "__version__ = version = '0.33.0'"
    copy = altered("0.33.0", tmp_path, "vllm/_version.py", stamp, stamp.replace("33", "34"))
    done = run(IN_VENV, "--no-engine", "--vllm", str(copy))
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert "vLLM:      0.34.0" in lines
    wrong = [line.split()[:3] for line in lines if line.startswith("WRONG")]
    assert wrong == [["WRONG", part_id, "unsupported"] for part_id in PARTS]
    (problem,) = [line for line in lines if line.startswith("PROBLEM")]
    assert problem.startswith(f"PROBLEM {', '.join(PARTS)}: unsupported: vLLM 0.34.0 is not")
    assert lines[-2] == "0 parts checked and right, 1 problem"


def test_what_is_switched_off_is_not_checked() -> None:
    answer = _ask(IN_VENV, "--feature", "SCORE_USAGE", env={"VLLM_EXT_SCORE_USAGE": "0"})
    assert {part["verdict"] for part in answer["parts"].values()} == {"off"}
    assert {part["right"] for part in answer["parts"].values()} == {None}


@pytest.mark.parametrize(
    ("arguments", "env", "told"),
    [
        ((), {"VLLM_EXT_DISABLE": "1"}, "VLLM_EXT_DISABLE=1 switches everything off"),
        (("--feature", "GONE"), {}, "there is no feature 'GONE'"),
        ((), {"VLLM_PLUGINS": "other"}, "vLLM did not load vllm-ext here"),
        ((), {"VLLM_EXT_STRICT": "2"}, "VLLM_EXT_STRICT is '2', but it takes 1 or 0."),
    ],
    ids=["disabled", "no feature", "not loaded", "impossible value"],
)
def test_where_nothing_can_be_looked_at_one_sentence_says_why(
    arguments: tuple[str, ...], env: dict[str, str], told: str
) -> None:
    done = run(IN_VENV, "--no-engine", *arguments, env=env)
    assert done.returncode == 2 and told in done.stderr
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 or done.stderr.startswith("Usage: ")


def _outcome(**how: Any) -> Outcome:
    """One part, checked and right, of a feature that was asked for alone."""
    right = Judgement(Verdict.NATIVE, "as it should be")
    part = Checked(Judgement(Verdict.ACTIVE, "lacking"), right)
    return Outcome(Checks({"vLLM": IN_VENV}, {BILLED: part}), **how)


def test_the_block_tells_what_the_engine_did() -> None:
    api = ProcessStatus(1, "APIServer", "live", {BILLED: ("active", "so")}, {BILLED: 3})
    core = ProcessStatus(2, "EngineCore", "live", {BILLED: ("armed", "so")})
    problems = [
        f"pid 2 (EngineCore) lacks {BILLED}, which its siblings have: armed, so.",
        "pid 2 (EngineCore) lacks CACHE_KEYS.modelinfos, which its siblings have: failed, so.",
        "pid 3 (Worker) gave no report: the plugin does not run in it.",
    ]
    engine = Engine(12.3, " lo ho", [api, core], problems)
    outcome = _outcome(engine=engine, others=frozenset({"CACHE_KEYS.modelinfos"}))
    assert outcome.problems == [problems[0], problems[2]]
    lines = _block(outcome)
    (row,) = [line for line in lines if line.startswith("right")]
    assert row.endswith("as it should be [active in APIServer; 3 effects]")
    assert "engine: ready after 12 s, answered 'lo ho'" in lines
    assert "  APIServer: 1 part active, 0 armed" in lines
    assert [line for line in lines if line.startswith("PROBLEM")] == [
        f"PROBLEM {problems[0]}",
        f"PROBLEM {problems[2]}",
    ]
    assert lines[-2] == "1 part checked and right, 2 problems"


def test_the_block_tells_why_the_engine_died() -> None:
    error = EngineError("vllm serve ended with code 1: no room", "its log\nits last line")
    outcome = _outcome(engine=None, failure=error)
    assert outcome.problems == [f"the tiny engine failed: {error}"]
    lines = _block(outcome)
    at = lines.index("engine: failed")
    assert lines[at + 1 : at + 3] == ["  its log", "  its last line"]


@pytest.mark.parametrize(
    ("verdict", "check", "told"),
    [
        (Verdict.ACTIVE, Verdict.NATIVE, None),
        (Verdict.ACTIVE, Verdict.ACTIVE, "shown"),
        (Verdict.ACTIVE, Verdict.IDLE, "shown"),
        (Verdict.ACTIVE, Verdict.FAILED, "shown"),
        (Verdict.ARMED, Verdict.NATIVE, "still armed, though all that it patches is imported"),
        (Verdict.DRIFTED, None, "drifted: because"),
        (Verdict.UNSUPPORTED, None, "unsupported: because"),
        (Verdict.FAILED, Verdict.ACTIVE, "failed: because"),
        (Verdict.NATIVE, None, None),
        (Verdict.OFF, None, None),
    ],
)
def test_a_part_is_right_only_if_it_is_in_force_and_shows_it(
    verdict: Verdict, check: Verdict | None, told: str | None
) -> None:
    shown = Judgement(check, "shown") if check else None
    assert Checked(Judgement(verdict, "because"), shown).wrong == told
