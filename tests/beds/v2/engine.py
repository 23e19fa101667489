"""An engine with Model Runner V2 in a process of its own, told what to do as JSON.

    answers = run("0.29.0", Job(model, batches=(Batch(prompts),), pcp=2), folder)

One engine serves all batches of a job, one after another; between them, functions of this bed can
be run in every worker (`Batch.before`), to watch what it does or to break it. The engine core lives
in the started process; with more than one rank each rank has a process. All have ended when `run`
returns.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.beds.children import environment
from tests.beds.engines import run_to_end
from tests.beds.layout import write_distribution

BACKEND = "tests.beds.v2.backend"
# Of a quiet machine an engine needs about a minute.
PATIENCE = 600.0


@dataclass(frozen=True)
class Batch:
    """Requests that are sent together: prompts as token ids, sampled greedily."""

    prompts: Sequence[Sequence[int]]
    tokens: int = 8
    # Logprobs per sampled token: of so many tokens, the likeliest first; -1 tells the vocabulary's.
    logprobs: int = -1
    # Also tell the logprobs of the prompts' own tokens.
    prompt_logprobs: bool = False
    # `module:function`, called with the worker in every worker before the batch, in this order.
    before: Sequence[str] = ()


@dataclass(frozen=True)
class Job:
    """What an engine is started with, and what it is asked."""

    model: Path
    batches: Sequence[Batch]
    pcp: int = 1
    # Draft tokens per step of the checkpoint's own MTP module.
    mtp: int = 0
    # Prompts are computed in steps of at most so many tokens; 0 computes each in one step.
    chunk: int = 0
    # A step is scheduled before the one before it has answered, as on a GPU.
    asynchronous: bool = False
    # Further arguments of vllm.LLM; they win over what the bed sets.
    args: Mapping[str, Any] = field(default_factory=dict)
    # vllm-ext: `with` as its users have it, `without` switched off as a whole.
    plugin: str = "without"
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Output:
    """What came of one prompt."""

    tokens: list[int]
    # Per sampled token: logprobs (natural) by token id.
    logprobs: list[dict[int, float]]
    # Per prompt token but the first: its own logprob. Empty if not asked for.
    prompt_logprobs: list[float]


@dataclass(frozen=True)
class Answer:
    """What came of one batch."""

    outputs: list[Output]
    # Speculative decoding during this batch.
    drafts: int
    drafted: int
    accepted: int
    # Accepted draft tokens by their position in the draft.
    accepted_at: list[int]
    # Per rank, what its worker says of itself after the batch: see `worker.facts`.
    workers: list[dict[str, Any]]
    seconds: float


class EngineFailed(Exception):
    """The engine's process ended before it had answered; the text ends with its log."""


def run(release: str, job: Job, folder: Path, *, timeout: float = PATIENCE) -> list[Answer]:
    """Start an engine of ``release``, have it answer all batches, end it; one answer per batch.

    ``folder`` gets the job, the log and the answers; it may exist already. Raises ``EngineFailed``
    if the engine fails, ``TimeoutError`` if it isn't done after ``timeout`` seconds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    asked, told, log = (folder / name for name in ("job.json", "answers.json", "log"))
    told.unlink(missing_ok=True)
    asked.write_text(json.dumps(dataclasses.asdict(job), default=str))
    status = run_to_end(
        [sys.executable, "-m", "tests.beds.v2.process", str(asked), str(told)],
        bed_environment(release, job, folder),
        log,
        timeout,
        what=f"vLLM {release} with pcp={job.pcp}",
        grace=5.0,
        cwd=folder,
    )
    if status or not told.exists():
        text = log.read_text("utf-8", "replace")[-6000:]
        raise EngineFailed(f"vLLM {release} ended with status {status}, log {log}:\n{text}")
    return [_answer(data) for data in json.loads(told.read_text())]


def bed_environment(release: str, job: Job, folder: Path) -> dict[str, str]:
    """Environment of every process of an engine: the release, the stub backend, the interpreter."""
    env = interpreter_environment(folder, environment(release))
    env.update(
        VLLM_USE_V2_MODEL_RUNNER="1",
        # The engine core runs in the process that asks it, and can be asked for what it counted.
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        # Workers share the cores: vLLM's own choice wants a NUMA node for each.
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        OMP_NUM_THREADS="1",
        VLLM_HOST_IP="127.0.0.1",
        # Functions of this bed are sent to the workers.
        VLLM_ALLOW_INSECURE_SERIALIZATION="1",
        VLLM_LOGGING_LEVEL="INFO",
        VLLM_EXT_DISABLE="1" if job.plugin == "without" else "0",
    )
    env.update(job.env)
    return env


def interpreter_environment(folder: Path, base: Mapping[str, str]) -> dict[str, str]:
    """``base`` plus what makes Triton kernels run on CPU tensors; metadata goes into ``folder``."""
    site = folder / "site"
    site.mkdir(parents=True, exist_ok=True)
    write_distribution(
        site,
        "vllm-ext-test-interpreter",
        "1",
        "Triton backend of the test bed: kernels run in the interpreter",
        f"[triton.backends]\ncpu = {BACKEND}\n",
    )
    path = os.pathsep.join([str(site), base["PYTHONPATH"]])
    return {**base, "PYTHONPATH": path, "TRITON_INTERPRET": "1"}


def _answer(data: dict[str, Any]) -> Answer:
    outputs = [
        Output(
            one["tokens"],
            [{int(token): value for token, value in at.items()} for at in one["logprobs"]],
            one["prompt_logprobs"],
        )
        for one in data.pop("outputs")
    ]
    return Answer(outputs, **data)


def distance(one: Answer, other: Answer) -> float:
    """Largest difference of a logprob (nats) that both tell, as long as both have said the same.

    Raises ``ValueError`` where prompts or lengths differ.
    """
    worst = 0.0
    for left, right in zip(one.outputs, other.outputs, strict=True):
        pairs = list(zip(left.prompt_logprobs, right.prompt_logprobs, strict=True))
        for at, (mine, theirs) in enumerate(zip(left.logprobs, right.logprobs, strict=True)):
            if left.tokens[:at] != right.tokens[:at]:
                break
            pairs += [(mine[token], theirs[token]) for token in mine.keys() & theirs.keys()]
        worst = max([worst, *(abs(a - b) for a, b in pairs)])
    return worst


def said(answer: Answer) -> list[list[int]]:
    """The tokens of every output."""
    return [output.tokens for output in answer.outputs]
