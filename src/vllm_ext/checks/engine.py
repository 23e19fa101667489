"""A tiny real engine with the plugin in it: does it answer, and do its processes agree?"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from vllm_ext.checks.server import Server, ServerDied
from vllm_ext.checks.tiny_model import ARGUMENTS, WORDS, write_tiny_model
from vllm_ext.core.feature import Verdict
from vllm_ext.core.status import ProcessStatus, ServerStatus, servers, verdict
from vllm_ext.names import SERVER_ID

_TOKENS = 8
_PROMPT = " ".join(WORDS[:20])


class EngineError(RuntimeError):
    """The engine did not start or did not answer; the message says why, in one line.

    ``tail``: the last lines of its log, if it died.
    """

    def __init__(self, reason: str, tail: str = "") -> None:
        super().__init__(reason)
        self.tail = tail


@dataclass(frozen=True)
class Engine:
    """What the engine did. ``ready``: seconds until it could answer; ``text``: its answer."""

    ready: float
    text: str
    processes: list[ProcessStatus]
    problems: list[str]

    @property
    def effects(self) -> Counter[str]:
        """How often each part changed something, over all processes."""
        total: Counter[str] = Counter()
        for process in self.processes:
            total.update({part: count for part, count in process.effects.items() if count})
        return total

    def roles(self, part_id: str, *verdicts: Verdict) -> list[str]:
        """The processes in which a part has one of these verdicts."""
        return [
            process.role
            for process in self.processes
            if verdict(process.parts.get(part_id, ("", ""))[0]) in verdicts
        ]


def arguments(device: str) -> tuple[str, ...]:
    """What ``vllm serve`` needs to be small on a device (``cpu``, ``cuda``, ...)."""
    if device == "cpu":
        return (*ARGUMENTS, "--dtype", "float32")
    # Beside other servers: 64 MiB of KV cache, whatever the size of the device.
    small = ("--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", str(64 << 20))
    return (*ARGUMENTS, *small)


def try_engine(device: str, folder: Path | None = None) -> Engine:
    """Start ``vllm serve`` of a tiny model on this machine, have it answer, and end it.

    The operator's settings hold in it. The vLLM below ``folder`` comes first on the path. Takes
    about half a minute on a CPU. Raises EngineError; either way no process is left.
    """
    with tempfile.TemporaryDirectory(prefix="vllm-ext-verify-") as scratch:
        server = Server(
            write_tiny_model(Path(scratch) / "tiny"),
            log=Path(scratch) / "log",
            args=("--served-model-name", "tiny", *arguments(device)),
            env={SERVER_ID: None},
            pythonpath=[folder.resolve()] if folder else [],
        )
        begun = time.monotonic()
        try:
            with server:
                ready = time.monotonic() - begun
                text = _answer(server)
                return _judged(server, ready, text)
        except ServerDied as death:
            told = f"vllm serve ended with code {death.code}: {death.reason}"
            raise EngineError(told, death.tail) from None
        except EngineError:
            raise
        except (OSError, RuntimeError, LookupError, ValueError) as error:
            raise EngineError(f"{type(error).__name__}: {error}") from None


def _answer(server: Server) -> str:
    """The same greedy request twice; raises EngineError if the answers aren't what was asked."""
    body = {
        "model": "tiny",
        "prompt": _PROMPT,
        "max_tokens": _TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    replies = [server.post("/v1/completions", body).raise_for_status().json() for _ in range(2)]
    texts = [str(reply["choices"][0]["text"]) for reply in replies]
    counted = [reply["usage"]["completion_tokens"] for reply in replies]
    if counted != [_TOKENS] * 2:
        raise EngineError(f"{_TOKENS} tokens were asked for, usage says {counted[0]}")
    if texts[0] != texts[1]:
        raise EngineError(f"one greedy request gave two answers: {texts[0]!r} and {texts[1]!r}")
    server.get("/metrics").raise_for_status()
    return texts[0]


def _judged(server: Server, ready: float, text: str) -> Engine:
    pid = server.process.pid
    mine = [s for s in servers() if any(process.pid == pid for process in s.processes)]
    if not mine:
        sentence = (
            "no process of the engine gave a report: the plugin does not run in it, or its runtime "
            "directory can't be written"
        )
        return Engine(ready, text, [], [sentence])
    return Engine(ready, text, mine[0].processes, [*mine[0].problems, *_not_honoured(mine[0])])


def _not_honoured(server: ServerStatus) -> list[str]:
    return [
        f"pid {process.pid} ({process.role}): {part_id} is {word}: {why}."
        for process in server.processes
        for part_id, (word, why) in process.parts.items()
        if not verdict(word).honoured
    ]
