"""The catalogue as a whole: every part has a test that can be red, and nothing is left behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.beds.layout import RELEASES
from tests.conftest import FEATURES, recorded
from vllm_ext.checks.recording import targets_of
from vllm_ext.core.feature import Feature, Verdict
from vllm_ext.core.release import record, recorded_releases
from vllm_ext.core.seams import split
from vllm_ext.settings import variables

ROOT = Path(__file__).parents[1]
PARTS = [feature.part_id(part) for feature in FEATURES.values() for part in feature.parts]


def _collect(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "--all", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def test_every_active_part_has_a_red_case_on_every_release() -> None:
    """The behaviour marks of all collected tests, by a plugin that prints them."""
    listed = _collect("-p", "tests.beds.marks")
    assert listed.returncode == 0, listed.stdout[-2000:] + listed.stderr
    red = {
        (words[1], words[2])
        for line in listed.stdout.splitlines()
        if len(words := line.split()) == 4 and words[0] == "behaviour" and words[3] == "without"
    }
    missing = [
        f"{part} on {release}"
        for part in PARTS
        for release in RELEASES
        if recorded(release, part) is Verdict.ACTIVE and (part, release) not in red
    ]
    assert missing == [], f"no test can be red for {', '.join(missing)}"


@pytest.mark.parametrize("mark", ["xfail", "skip", 'skipif(True, reason="no")'])
def test_a_mark_made_by_hand_fails_the_collection(mark: str, tmp_path: Path) -> None:
    file = tmp_path / "test_marked.py"
    file.write_text(f"import pytest\n@pytest.mark.{mark}\ndef test_it(): assert False\n")
    done = _collect(str(file), f"--rootdir={ROOT}", "-p", "tests.conftest", "--noconftest")
    assert done.returncode != 0
    assert f"is marked {mark.partition('(')[0]} by hand" in done.stdout + done.stderr


def test_all_supported_releases_are_recorded_with_every_part_and_target() -> None:
    assert recorded_releases() == list(RELEASES)
    for release in RELEASES:
        known = record(release)
        assert known is not None
        assert sorted(known.parts) == sorted(PARTS)
        assert sorted(known.targets) == targets_of(list(FEATURES.values()))
        assert known.reference.startswith(f"vllm-{release}-")


def _told(feature: Feature) -> dict[str, set[Verdict]]:
    """What the records say of each part, over all supported releases."""
    return {
        feature.part_id(part): {recorded(release, feature.part_id(part)) for release in RELEASES}
        for part in feature.parts
    }


def _retired(verdicts: Mapping[str, set[Verdict]]) -> list[str]:
    """Parts of a feature that no supported release needs; the feature itself if it has no other."""
    done = [part for part, told in verdicts.items() if told <= {Verdict.NATIVE, Verdict.IDLE}]
    if len(done) == len(verdicts):
        return [next(iter(verdicts)).partition(".")[0]]
    return done


def _remove_me(verdicts: Mapping[str, set[Verdict]]) -> None:
    done = _retired(verdicts)
    assert not done, (
        f"remove me: {', '.join(done)} has nothing left to do, every supported release "
        f"({', '.join(RELEASES)}) has it or has no use for it"
    )


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_that_every_release_has_is_to_be_removed(name: str) -> None:
    _remove_me(_told(FEATURES[name]))


def test_a_feature_with_nothing_left_to_do_is_found() -> None:
    everywhere = {"MADE_UP.fix": {Verdict.NATIVE}, "MADE_UP.gap": {Verdict.NATIVE, Verdict.IDLE}}
    with pytest.raises(AssertionError, match=r"^remove me: MADE_UP has nothing left to do"):
        _remove_me(everywhere)
    with pytest.raises(AssertionError, match=r"^remove me: MADE_UP\.fix has nothing left to do"):
        _remove_me(everywhere | {"MADE_UP.gap": {Verdict.NATIVE, Verdict.ACTIVE}})
    _remove_me({"MADE_UP.fix": {Verdict.ACTIVE, Verdict.NATIVE}})
    # What isn't recorded may be needed.
    _remove_me({"MADE_UP.fix": {Verdict.UNSUPPORTED}})


def test_names_are_unique_and_well_formed() -> None:
    names = variables(FEATURES.values())
    assert len(names) == len(set(names))
    for feature in FEATURES.values():
        assert feature.name == feature.name.upper() and feature.name.replace("_", "").isalnum()
        assert feature.summary.endswith(".") and feature.why.endswith(".")
        options = {option.name for option in feature.options}
        for part in feature.parts:
            assert part.option is None or part.option in options
            assert part.seams and part.summary.endswith(".")
            for target in part.fingerprinted:
                module, path = split(target)
                assert module.startswith("vllm.") and all(name.isidentifier() for name in path)
                # The CPU builds differ from the CUDA wheel in these two files.
                assert module not in ("vllm._version", "vllm.platforms")
