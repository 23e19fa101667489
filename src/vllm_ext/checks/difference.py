"""Two vLLMs compared part by part: what would become of the plugin in the new one?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_ext.checks.change import Change, Side, State, compare
from vllm_ext.core.feature import Feature, Judgement, Verdict
from vllm_ext.core.plan import expected, plan
from vllm_ext.core.release import Installation
from vllm_ext.settings import Settings

NATIVE = "native"


@dataclass(frozen=True)
class Difference:
    """One part in two vLLMs: its verdict in each, and the targets that aren't the same.

    ``probe`` is what its probe shows on the new one, where the probes were run.
    """

    part_id: str
    old: Judgement
    new: Judgement
    changes: tuple[Change, ...]
    probe: Judgement | None = None

    @property
    def state(self) -> str:
        """``native`` if the new vLLM brings what the old one lacked, else the gravest change."""
        shown = (self.new.verdict, self.probe.verdict if self.probe else None)
        if Verdict.NATIVE in shown and self.old.verdict is not Verdict.NATIVE:
            return NATIVE
        return self.change.state if self.change else State.SAME

    @property
    def lost(self) -> bool:
        """Whether users have it today through us and would have it no more."""
        has = (Verdict.NATIVE, Verdict.IDLE)
        shown = self.probe is not None and self.probe.verdict in has
        return self.old.verdict is Verdict.ACTIVE and not self.new.verdict.in_force and not shown

    @property
    def change(self) -> Change | None:
        """The change that ``state`` speaks of, None if all targets are the same."""
        order = list(State)
        return min(self.changes, key=lambda change: order.index(change.state), default=None)


def differences(
    features: Sequence[Feature],
    old: Side,
    new: Side,
    probes: Mapping[str, Judgement] | None = None,
) -> list[Difference]:
    """Compare every part; imports nothing of either vLLM."""
    before, after = _judgements(features, old), _judgements(features, new)
    compared: dict[str, Change] = {}
    found = []
    for feature in features:
        for part in feature.parts:
            for target in part.fingerprinted:
                if target not in compared:
                    compared[target] = compare(old, new, target)
            changes = tuple(
                compared[target]
                for target in part.fingerprinted
                if compared[target].state is not State.SAME
            )
            part_id = feature.part_id(part)
            shown = (probes or {}).get(part_id)
            found.append(Difference(part_id, before[part_id], after[part_id], changes, shown))
    return found


def _judgements(features: Sequence[Feature], side: Side) -> dict[str, Judgement]:
    """What each part is in a vLLM, with all options on."""
    if side.root is None:
        assert side.record is not None
        return {
            f.part_id(part): side.record.judgement(f, part) for f in features for part in f.parts
        }
    options = {f.variable(p.option): True for f in features for p in f.parts if p.option}
    planned = plan(features, Settings(options=options), Installation(side.root, side.version))
    return {entry.id: entry.judgement for entry in expected(planned)}
