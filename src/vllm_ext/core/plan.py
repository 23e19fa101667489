"""What is to be done to one installed vLLM: a judgement per part, from source files alone."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

from vllm_ext.core.feature import Feature, Judgement, Part, Verdict, worst
from vllm_ext.core.fingerprint import source_file
from vllm_ext.core.release import Installation, Record, record, recorded_releases
from vllm_ext.core.seams import module_of
from vllm_ext.names import DISABLE, STRICT
from vllm_ext.settings import OFF, ON, Settings


@dataclass(frozen=True)
class Planned:
    """One part with what the source files say about it; ``armed`` parts can be applied."""

    feature: Feature
    part: Part
    judgement: Judgement

    @property
    def id(self) -> str:
        """``FEATURE.part``."""
        return self.feature.part_id(self.part)

    @property
    def modules(self) -> set[str]:
        """The modules that must be loaded before the part can be applied."""
        return {module_of(target) for target in self.part.targets}

    def files(self, root: Path) -> set[Path]:
        """The source files of these modules below ``root``."""
        return {root / file for m in self.modules if (file := source_file(root, m))}


def catalogue(package: ModuleType) -> list[Feature]:
    """Every feature declared (as ``FEATURE``) in a module below ``package``, by name.

    Raises ValueError if two features have the same name.
    """
    found: dict[str, Feature] = {}
    for info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        feature = getattr(importlib.import_module(info.name), "FEATURE", None)
        if isinstance(feature, Feature):
            if feature.name in found:
                raise ValueError(f"two features are called {feature.name}")
            found[feature.name] = feature
    return [found[name] for name in sorted(found)]


def plan(
    features: Sequence[Feature], settings: Settings, installed: Installation
) -> tuple[Planned, ...]:
    """Judge every part of every feature against an installation; imports nothing of it."""
    known = record(installed.release)
    return tuple(
        Planned(feature, part, _judge(feature, part, settings, installed, known))
        for feature in features
        for part in feature.parts
    )


def _judge(
    feature: Feature,
    part: Part,
    settings: Settings,
    installed: Installation,
    known: Record | None,
) -> Judgement:
    if settings.disable:
        return Judgement(Verdict.OFF, f"{DISABLE}=1 switches everything off")
    if settings.toggle(feature) == OFF:
        return Judgement(Verdict.OFF, f"{feature.toggle}=0")
    # 0 is a value: only unset and false are off.
    if part.option and any(settings.option(feature, part.option) is off for off in (None, False)):
        return Judgement(Verdict.OFF, f"set {feature.how_to_switch_on(part)} to switch it on")
    if known is None:
        supported = ", ".join(recorded_releases())
        return Judgement(
            Verdict.UNSUPPORTED,
            f"vLLM {installed.version} is not a recorded release ({supported}), "
            "so nothing of it is touched",
        )
    recorded = known.judgement(feature, part)
    drift = known.drift(installed.root, part.fingerprinted)
    if drift and recorded.verdict is not Verdict.UNSUPPORTED:
        return Judgement(
            Verdict.DRIFTED, f"the source is not that of vLLM {known.release}: {drift}"
        )
    if recorded.verdict is Verdict.ACTIVE:
        return Judgement(Verdict.ARMED, lacks(known.release) + recorded.reason)
    return recorded


def lacks(release: str) -> str:
    """How the reason of a part begins that a release lacks."""
    return f"vLLM {release} lacks it: "


def expected(planned: Iterable[Planned]) -> tuple[Planned, ...]:
    """The plan as it will turn out: before a process runs, an armed part is one to be active."""
    return tuple(
        replace(entry, judgement=replace(entry.judgement, verdict=Verdict.ACTIVE))
        if entry.judgement.verdict is Verdict.ARMED
        else entry
        for entry in planned
    )


def by_feature(planned: Iterable[Planned]) -> dict[str, list[Planned]]:
    """The plan grouped by feature, in its order."""
    groups: dict[str, list[Planned]] = {}
    for entry in planned:
        groups.setdefault(entry.feature.name, []).append(entry)
    return groups


def refusals(planned: Iterable[Planned], settings: Settings) -> list[str]:
    """One sentence per feature that was asked for (``=1`` or STRICT) and can't be honoured."""
    sentences = []
    for entries in by_feature(planned).values():
        feature = entries[0].feature
        judgement = worst(entry.judgement for entry in entries)
        if judgement.verdict.honoured or not (settings.strict or settings.toggle(feature) == ON):
            continue
        asked = f"{feature.toggle}=1" if settings.toggle(feature) == ON else f"{STRICT}=1"
        sentences.append(
            f"{asked} can't be honoured, {feature.name} is {judgement.verdict}: "
            f"{judgement.reason} (set {feature.toggle}=0 to start without it)"
        )
    return sentences
