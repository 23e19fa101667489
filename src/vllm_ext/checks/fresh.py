"""A module of ours in an interpreter of its own, whose answer is read back as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_SAID = 2000
_TRACEBACK = "Traceback (most recent call last)"


class FreshError(RuntimeError):
    """The process failed; the message holds the end of what it printed."""


def answer_of(
    module: str, environ: Mapping[str, str | None], folder: Path | None = None, *arguments: str
) -> Any:
    """What ``python -m module FILE ...`` wrote to its file.

    ``environ`` is laid over this process's environment (``None`` removes a name). The vLLM below
    ``folder`` comes first on the path. Raises FreshError if there is no answer.
    """
    merged = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", **environ}
    if folder:
        merged["PYTHONPATH"] = os.pathsep.join(
            [str(folder.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
    with tempfile.TemporaryDirectory() as scratch:
        answer = Path(scratch) / "answer.json"
        done = subprocess.run(
            [sys.executable, "-m", module, str(answer), *arguments],
            env={name: value for name, value in merged.items() if value is not None},
            capture_output=True,
            text=True,
        )
        if done.returncode or not answer.is_file():
            said = (done.stderr or done.stdout)[-_SAID:]
            if done.returncode == 1 and done.stderr.strip() and _TRACEBACK not in done.stderr:
                # It ended of its own accord, with a sentence; what stands before are warnings.
                raise FreshError(done.stderr.strip().splitlines()[-1])
            raise FreshError(f"python -m {module} failed (status {done.returncode}): {said}")
        return json.loads(answer.read_text())


def give(answer: Any, arguments: Sequence[str]) -> None:
    """In that process: the answer to the file that it was started with."""
    Path(arguments[1]).write_text(json.dumps(answer))
