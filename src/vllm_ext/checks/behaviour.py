"""Run the behaviour checks of all parts in a process that vLLM has loaded the plugin into."""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_ext.checks.fresh import FreshError, answer_of, give
from vllm_ext.checks.probe import shown
from vllm_ext.core.feature import Feature, Judgement, Verdict
from vllm_ext.core.seams import module_of
from vllm_ext.names import SERVER_ID


class CheckError(RuntimeError):
    """The checking process gave no answer; the message holds the end of what it printed."""


@dataclass(frozen=True)
class Checked:
    """A part in the checking process: its verdict there, and what its check showed, if it ran."""

    judgement: Judgement
    check: Judgement | None

    @property
    def wrong(self) -> str | None:
        """Why users don't have what they should have, None if they do."""
        if not self.judgement.verdict.honoured:
            return f"{self.judgement.verdict}: {self.judgement.reason}"
        if self.check is not None and self.judgement.verdict is not Verdict.ACTIVE:
            return f"still {self.judgement.verdict}, though all that it patches is imported"
        if self.check is not None and self.check.verdict is not Verdict.NATIVE:
            return self.check.reason
        return None


@dataclass(frozen=True)
class Checks:
    """What one checking process told: facts of this machine by name, and its parts by id."""

    facts: Mapping[str, str]
    parts: Mapping[str, Checked]


def every_option(features: Sequence[Feature]) -> dict[str, str]:
    """The variables that switch on what is off by default, less those the operator set."""
    names = [f.variable(part.option) for f in features for part in f.parts if part.option]
    return {name: "1" for name in names if not os.environ.get(name, "").strip()}


def check(features: Sequence[Feature], folder: Path | None = None) -> Checks:
    """Check every active part of ``features`` on the vLLM below ``folder`` or the installed one.

    Starts a fresh interpreter in which vLLM loads its plugins as ever, with the options on that
    switch parts on; an option that the operator set stays. Takes about 15 s. Raises CheckError.
    """
    environ = {SERVER_ID: None, **every_option(features)}
    names = [feature.name for feature in features]
    try:
        told = answer_of("vllm_ext.checks.behaviour", environ, folder, *names)
    except FreshError as error:
        raise CheckError(f"the behaviour checks could not run: {error}") from None
    return Checks(
        told["facts"],
        {
            part: Checked(
                _judgement(entry["judgement"]), entry["check"] and _judgement(entry["check"])
            )
            for part, entry in told["parts"].items()
        },
    )


def _judgement(told: Sequence[str]) -> Judgement:
    return Judgement(Verdict(told[0]), told[1])


def run(names: Sequence[str]) -> dict[str, Any]:
    """In the checking process: load vLLM's plugins, check the parts of the named features."""
    from vllm.plugins import load_general_plugins

    from vllm_ext import plugin
    from vllm_ext.core.process import StartRefused

    try:
        load_general_plugins()
    except StartRefused as error:
        raise SystemExit(str(error)) from None
    process = plugin.running()
    if process is None:
        raise SystemExit("vLLM did not load vllm-ext here; vllm-ext doctor tells why")
    entries = {e.id: e for e in process.ledger.planned() if e.feature.name in names}
    checks = {
        part_id: shown(_imported(entry.part.targets, entry.part.behaviour))
        for part_id, entry in entries.items()
        if entry.judgement.verdict in (Verdict.ARMED, Verdict.ACTIVE)
    }
    process.reread()
    now = {e.id: e.judgement for e in process.ledger.planned()}
    return {
        "facts": _facts(process.installed.version),
        "parts": {
            part_id: {
                "judgement": _told(now[part_id]),
                "check": _told(checks[part_id]) if part_id in checks else None,
            }
            for part_id in entries
        },
    }


def _imported(targets: Sequence[str], behaviour: Any) -> Any:
    """The check, once all that its part patches is there."""

    def after_import() -> Judgement:
        for target in targets:
            importlib.import_module(module_of(target))
        judgement: Judgement = behaviour()
        return judgement

    return after_import


def _told(judgement: Judgement) -> list[str]:
    return [judgement.verdict.value, judgement.reason]


def _facts(version: str) -> dict[str, str]:
    import torch
    from vllm.platforms import current_platform

    kind, name = current_platform.device_type, platform.machine()
    if kind != "cpu":
        with contextlib.suppress(NotImplementedError):  # not every platform has names
            name = current_platform.get_device_name()
    return {
        "vLLM": version,
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "device": f"{kind} ({name})",
        "system": f"{platform.system()} {platform.release()}",
    }


if __name__ == "__main__":
    give(run(sys.argv[2:]), sys.argv)
