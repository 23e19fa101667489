"""An engine in a process of its own, for one function that a test calls in it.

``call("0.33.0", "tests.beds.controls:generation", "llama", folder)`` imports that release in a
fresh process, runs the function there and returns what it returned. Engine and worker live in that
process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``), so the function reaches into both.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.beds.children import environment
from tests.beds.layout import extra_path
from vllm_ext.checks.family import Family

if TYPE_CHECKING:
    from tests.beds.checkpoints.checkpoint import Checkpoint

_TAIL = 40


class CallFailed(RuntimeError):
    """The process ended without an answer; the message is the end of what it wrote."""


def call(
    release: str,
    target: str,
    *arguments: Any,
    plugin: str = "with",
    env: Mapping[str, str] | None = None,
    needs: Sequence[str] = (),
    pythonpath: Sequence[Path] = (),
    timeout: float = 600.0,
) -> Any:
    """Run ``module:function`` in a process of ``release``; arguments and result go as JSON.

    ``plugin``: "with" or "without". ``needs`` are names of ``layout.EXTRAS``. Raises
    ``CallFailed`` if the function raises or the process dies, ``TimeoutError`` after ``timeout``
    seconds. No process is left either way.
    """
    environ = environment(release)
    environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_EXT_DISABLE": "1" if plugin == "without" else "0",
        "VLLM_EXT_SERVER_ID": "test",
        **(env or {}),
    }
    first = [*map(str, pythonpath), *(str(extra_path(name)) for name in needs)]
    environ["PYTHONPATH"] = os.pathsep.join([*first, environ["PYTHONPATH"]])
    with tempfile.TemporaryDirectory(prefix="engine-") as folder:
        result, log = Path(folder, "result"), Path(folder, "log")
        words = json.dumps([str(a) if isinstance(a, Path) else a for a in arguments])
        command = [sys.executable, "-m", "tests.beds.engines", target, words, str(result)]
        code = run_to_end(command, environ, log, timeout, what=target)
        if code != 0 or not result.exists():
            tail = "\n".join(log.read_text("utf-8", "replace").splitlines()[-_TAIL:])
            raise CallFailed(f"{target} on {release} ended with status {code}:\n{tail}")
        return json.loads(result.read_text())


def run_to_end(
    command: Sequence[str],
    environ: Mapping[str, str],
    log: Path,
    timeout: float,
    *,
    what: str,
    grace: float = 0.0,
    cwd: Path | None = None,
) -> int:
    """Status of a process that ends by itself; nothing of its family is left.

    ``log`` receives what it prints. Raises ``TimeoutError``, with ``what`` in it, after ``timeout``
    seconds; what still runs then has ``grace`` seconds to end.
    """
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    family = Family(process.pid)
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{what} still ran after {timeout:.0f} s; log: {log}") from None
    finally:
        family.end(grace)
        process.wait()


@contextmanager
def engine(checkpoint: Checkpoint, *, cured: bool = True, **more: Any) -> Iterator[Any]:
    """``vllm.LLM`` on a checkpoint, in this process; ``more`` are further arguments of it.

    ``cured``: without the faults of the CPU build that ``cpu_faults`` knows.
    """
    from tests.beds import cpu_faults

    if cured:
        cpu_faults.cure()
    import vllm

    llm = vllm.LLM(**{**checkpoint.arguments, "max_logprobs": -1, **more})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def _main(target: str, arguments: str, result: str) -> None:
    module, _, name = target.partition(":")
    told = getattr(importlib.import_module(module), name)(*json.loads(arguments))
    Path(result).write_text(json.dumps(told))
    # Interpreters with engines in them take seconds to tidy up what the kernel removes anyway.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    _main(*sys.argv[1:])
