"""What a vLLM that was never recorded needs before the plugin may touch it. Nothing is guessed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from packaging.version import Version

from vllm_ext.checks.change import Change, Side, State
from vllm_ext.checks.difference import Difference, differences
from vllm_ext.core.feature import Feature, Judgement, Verdict
from vllm_ext.core.release import Installation, record, recorded_releases


@dataclass(frozen=True)
class Item:
    """One part on a vLLM: what its probe shows there, and what is to be done (empty: nothing)."""

    part_id: str
    shown: Judgement
    todo: str
    changes: tuple[Change, ...]


def nearest(version: str) -> str:
    """The recorded release that a version is closest to: the last one before it, or the first."""
    wanted = Version(version)
    releases = recorded_releases()
    return next((r for r in reversed(releases) if Version(r) <= wanted), releases[0])


def work(
    features: Sequence[Feature], installed: Installation, probes: Mapping[str, Judgement]
) -> list[Item]:
    """What each part needs on ``installed``, by its probes and by its sources against the record.

    Raises packaging.version.InvalidVersion if its version is none.
    """
    known = record(nearest(installed.version))
    assert known is not None
    old, new = Side(known.release, None, known), Side.on_disk(installed, record(installed.release))
    return [
        Item(found.part_id, probes[found.part_id], _todo(found, known.release), found.changes)
        for found in differences(features, old, new, probes)
    ]


def _todo(found: Difference, base: str) -> str:
    """What has to be done for one part; each sentence begins with a verb."""
    shown, change = found.probe, found.change
    assert shown is not None
    if shown.verdict is Verdict.FAILED:
        return "repair the probe: it can't tell on this vLLM whether the part is needed"
    if shown.verdict is not Verdict.ACTIVE:
        applied = found.new.verdict is Verdict.ACTIVE
        return f"read why it is {shown.verdict} here: the plugin would apply it" if applied else ""
    before = f" ({found.old.verdict} on {base})" if found.old.verdict is not Verdict.ACTIVE else ""
    if found.state == State.DISAPPEARED:
        return f"find another place for the patch{before}: {change}"
    if found.state == State.MOVED:
        return f"follow the target{before}: {change}"
    if found.state == State.DRIFTED:
        return f"read what changed since {base}{before}: {change}"
    return f"read why it is needed here{before}" if before else ""
