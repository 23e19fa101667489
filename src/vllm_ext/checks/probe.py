"""Run the probes of all parts against an unpatched vLLM, in a process of their own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from vllm_ext.checks.fresh import FreshError, answer_of, give
from vllm_ext.core.feature import Feature, Judgement, Verdict


class ProbeError(RuntimeError):
    """The probing process failed; the message holds the end of what it printed."""


def probe(folder: Path | None = None) -> dict[str, Judgement]:
    """What the probes show for the vLLM below ``folder`` (default: the installed one).

    Starts a fresh interpreter without plugins, since probes need vLLM as it is. Takes about 10 s.
    """
    try:
        told = answer_of("vllm_ext.checks.probe", {"VLLM_PLUGINS": ""}, folder)
    except FreshError as error:
        raise ProbeError(f"the probes failed: {error}") from None
    return {part: Judgement(Verdict(verdict), reason) for part, (verdict, reason) in told.items()}


def run(features: Iterable[Feature]) -> dict[str, Judgement]:
    """Run every probe in this process; one that raises counts as ``failed``."""
    return {
        feature.part_id(part): shown(part.probe) for feature in features for part in feature.parts
    }


def shown(behaviour: Callable[[], Judgement]) -> Judgement:
    """What one probe or check shows; ``failed`` if it raises."""
    try:
        return behaviour()
    except Exception as error:
        return Judgement(Verdict.FAILED, f"the probe raised {type(error).__name__}: {error}")


if __name__ == "__main__":
    from vllm_ext import features as package
    from vllm_ext.core.plan import catalogue

    give({part: [j.verdict, j.reason] for part, j in run(catalogue(package)).items()}, sys.argv)
