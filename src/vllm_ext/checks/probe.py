"""Run the probes of all parts against an unpatched vLLM, in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from vllm_ext.core.feature import Feature, Judgement, Verdict


class ProbeError(RuntimeError):
    """The probing process failed; the message holds the end of what it printed."""


def probe(folder: Path | None = None) -> dict[str, Judgement]:
    """What the probes show for the vLLM below ``folder`` (default: the installed one).

    Starts a fresh interpreter without plugins, since probes need vLLM as it is. Takes about 10 s.
    """
    environ = dict(os.environ, VLLM_PLUGINS="", VLLM_LOGGING_LEVEL="ERROR")
    if folder:
        environ["PYTHONPATH"] = os.pathsep.join(
            [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
    with tempfile.TemporaryDirectory() as scratch:
        answer = Path(scratch) / "probes.json"
        done = subprocess.run(
            [sys.executable, "-m", "vllm_ext.checks.probe", str(answer)],
            env=environ,
            capture_output=True,
            text=True,
        )
        if done.returncode or not answer.is_file():
            raise ProbeError(f"the probes failed: {(done.stderr or done.stdout)[-2000:]}")
        told = json.loads(answer.read_text())
    return {part: Judgement(Verdict(verdict), reason) for part, (verdict, reason) in told.items()}


def run(features: list[Feature]) -> dict[str, Judgement]:
    """Run every probe in this process; one that raises counts as ``failed``."""
    shown = {}
    for feature in features:
        for part in feature.parts:
            try:
                shown[feature.part_id(part)] = part.probe()
            except Exception as error:
                shown[feature.part_id(part)] = Judgement(
                    Verdict.FAILED, f"the probe raised {type(error).__name__}: {error}"
                )
    return shown


if __name__ == "__main__":
    from vllm_ext import features as package
    from vllm_ext.core.plan import catalogue

    shown = run(catalogue(package))
    Path(sys.argv[1]).write_text(
        json.dumps({part: [j.verdict, j.reason] for part, j in shown.items()})
    )
