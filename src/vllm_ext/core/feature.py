"""What a feature is: data, declared once, from which CLI, status, docs and tests are derived."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, get_args

from vllm_ext.core.effects import PAGE
from vllm_ext.core.seams import Seam
from vllm_ext.names import PREFIX


class Verdict(StrEnum):
    """State of a part in one process, the one that needs most attention first."""

    FAILED = "failed"
    CONFLICT = "conflict"
    DRIFTED = "drifted"
    UNSUPPORTED = "unsupported"
    ARMED = "armed"
    ACTIVE = "active"
    NATIVE = "native"
    IDLE = "idle"
    OFF = "off"

    @property
    def honoured(self) -> bool:
        """True unless something that was asked for is not in force."""
        return self not in _NOT_HONOURED

    @property
    def in_force(self) -> bool:
        """True where users have the part: through us, about to be, or vLLM's own."""
        return self.honoured and self is not Verdict.OFF


_NOT_HONOURED = (Verdict.FAILED, Verdict.CONFLICT, Verdict.DRIFTED, Verdict.UNSUPPORTED)


@dataclass(frozen=True)
class Judgement:
    """A verdict and, in one sentence, why."""

    verdict: Verdict
    reason: str


def worst(judgements: Iterable[Judgement]) -> Judgement:
    """The judgement that needs most attention; a feature's verdict is its worst part's."""
    order = list(Verdict)
    return min(judgements, key=lambda judgement: order.index(judgement.verdict))


def effect(part_id: str, amount: int = 1) -> None:
    """Count what a part (``FEATURE.part``) changed: once per changed answer, step or tensor.

    Operators read it with ``vllm-ext status`` and on /metrics; costs about a microsecond.
    """
    PAGE.add(part_id, amount)


@dataclass(frozen=True)
class Option:
    """A setting of a feature besides its toggle: ``VLLM_EXT_<FEATURE>_<NAME>``.

    ``type`` is anything pydantic can validate a string against, such as ``int`` or a ``Literal``;
    ``at_least`` is the smallest number it takes.
    """

    name: str
    type: Any
    default: Any
    summary: str
    at_least: int | None = None

    @property
    def takes(self) -> str:
        """The values it takes, in words: a type's name, or the choices of a ``Literal``."""
        choices = get_args(self.type)
        name = " or ".join(map(str, choices)) if choices else str(self.type.__name__)
        return name if self.at_least is None else f"{name} of at least {self.at_least}"


@dataclass(frozen=True)
class Part:
    """The smallest thing that is applied as a whole: all its seams or none.

    ``relies_on`` are targets that are read, not changed; they are fingerprinted like the
    patched ones. ``option`` names the option that switches this part on: a boolean one that is
    true, or another one that is set (its default is None). ``traced`` parts change model code
    that torch.compile traces, so they enter the compile cache key; ``inspected`` parts change
    what vLLM inspects of a model class and caches (capability flags). ``probe`` tells, from the
    behaviour of the unpatched vLLM in the current process, whether the release lacks this part
    (``active``), has it (``native``) or has no use for it (``idle``).
    ``check`` tells the same in a process in which the part is in force, together with all others,
    and must then show ``native``; it is left out where the probe itself does.
    """

    name: str
    summary: str
    seams: tuple[Seam, ...]
    probe: Callable[[], Judgement]
    relies_on: tuple[str, ...] = ()
    option: str | None = None
    traced: bool = False
    inspected: bool = False
    check: Callable[[], Judgement] | None = None

    @property
    def behaviour(self) -> Callable[[], Judgement]:
        """What shows, on a patched vLLM, whether users have the part."""
        return self.check or self.probe

    @property
    def targets(self) -> tuple[str, ...]:
        """The vLLM objects that are patched, as ``module:qualname``."""
        return tuple(seam.target for seam in self.seams)

    @property
    def fingerprinted(self) -> tuple[str, ...]:
        """Everything whose source must be the recorded one before the part is applied."""
        evidence = [target for seam in self.seams for target in seam.evidence]
        return tuple(dict.fromkeys([*evidence, *self.relies_on]))


# The text of a variable and what it was read as.
_SETTINGS: dict[str, tuple[str | None, Any]] = {}


@dataclass(frozen=True)
class Feature:
    """One fix or capability with one toggle."""

    name: str
    area: str
    summary: str
    why: str
    upstream_pr: tuple[int, ...]
    parts: tuple[Part, ...]
    options: tuple[Option, ...] = ()

    @property
    def toggle(self) -> str:
        """Name of the environment variable: ``auto`` (default), ``1`` or ``0``."""
        return PREFIX + self.name

    def variable(self, option: Option | str) -> str:
        """Name of the environment variable of one of the feature's options."""
        return f"{self.toggle}_{option if isinstance(option, str) else option.name}"

    def how_to_switch_on(self, part: Part) -> str:
        """What to set for a part with an option: the variable, with ``=1`` if it is boolean."""
        option = next(option for option in self.options if option.name == part.option)
        return self.variable(option) + ("=1" if option.type is bool else "")

    def setting(self, name: str) -> Any:
        """Value of one of the feature's options in this process; cheap enough for every step.

        Raises SettingsError if the variable holds a value it can't have, KeyError if there is no
        such option.
        """
        variable = self.variable(name)
        raw = os.environ.get(variable)
        held = _SETTINGS.get(variable)
        if held is None or held[0] != raw:
            from vllm_ext.settings import read

            held = _SETTINGS[variable] = raw, read(os.environ, [self]).option(self, name)
        return held[1]

    def part_id(self, part: Part) -> str:
        """The part's name in verdicts, counters and release records."""
        return f"{self.name}.{part.name}"
