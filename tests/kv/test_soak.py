"""A server whose KV comes and goes for minutes: every answer is that of a server without any of it.

`VLLMEXT_SOAK_SECONDS` (default 300, per connector) and `VLLMEXT_SOAK_RELEASE` (default 0.29.0).
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tests.beds.checkpoints import write
from tests.beds.checkpoints.checkpoint import Checkpoint
from tests.beds.kv_store import Fault, arm, carried_out, transfer_config
from tests.beds.serving import serve
from tests.conftest import CI_RELEASE
from vllm_ext.checks.server import Server

pytestmark = [pytest.mark.soak, pytest.mark.engine, pytest.mark.area("kv")]

SECONDS = int(os.environ.get("VLLMEXT_SOAK_SECONDS", "300"))
RELEASE = os.environ.get("VLLMEXT_SOAK_RELEASE", CI_RELEASE)
CLIENTS = 8
FAMILIES, PER_FAMILY = 8, 6
FAILS_EVERY = 20
CAPS = (None, None, 0, 32, 64)
# One request of the longest takes ten blocks in two groups; eight at once outgrow forty.
BLOCKS = 40
# Answers of bfloat16 models don't depend on the batch on a CPU, if attention isn't split.
INVARIANT = {"VLLM_CPU_ATTN_SPLIT_KV": "0"}
PREEMPTIONS = "vllm:num_preemptions_total"
HITS = "vllm:external_prefix_cache_hits_total"


@dataclass(frozen=True)
class Question:
    """A prompt of one family (they share a prefix) and the length of its answer, in tokens."""

    prompt: tuple[int, ...]
    length: int

    def body(self, cap: int | None = None) -> dict[str, Any]:
        """The body of a completion request, greedy, with the log-probability of each token."""
        body = {"prompt": list(self.prompt), "max_tokens": self.length, "temperature": 0}
        body |= {"logprobs": 1, "ignore_eos": True}
        if cap is not None:
            body["kv_transfer_params"] = {"max_load_tokens": cap}
        return body


def questions(checkpoint: Checkpoint) -> list[Question]:
    """Prompts of 70 to 200 tokens, six of each family, and answers of 8 to 64."""
    drawn = random.Random(0)
    made = []
    for family in range(FAMILIES):
        common = checkpoint.prompt(160, seed=family)
        for at in range(PER_FAMILY):
            shared = drawn.randint(40, 160)
            own = checkpoint.prompt(drawn.randint(30, 40), seed=1000 + family * PER_FAMILY + at)
            made.append(Question((*common[:shared], *own), drawn.randint(8, 64)))
    return made


Answer = tuple[list[str], list[float]]


def ask(server: Server, question: Question, cap: int | None = None) -> Answer:
    """Tokens and their log-probabilities."""
    reply = server.post("/v1/completions", question.body(cap)).raise_for_status().json()
    logprobs = reply["choices"][0]["logprobs"]
    return logprobs["tokens"], logprobs["token_logprobs"]


@dataclass
class Figures:
    """What came of a soak; ``wrong`` names the first few questions with a wrong answer."""

    requests: int = 0
    tokens: int = 0
    wrong: list[int] = field(default_factory=list)
    difference: float = 0.0
    left: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, at: int, right: Answer, answer: Answer) -> None:
        """Count an answer and compare it."""
        with self.lock:
            self.requests += 1
            self.tokens += len(answer[0])
            if answer != right:
                self.wrong.append(at)
                if answer[0] == right[0]:
                    pairs = zip(answer[1], right[1], strict=True)
                    self.difference = max(self.difference, *(abs(a - b) for a, b in pairs))


def right_answers(checkpoint: Checkpoint, asked: list[Question], log: Path) -> list[Answer]:
    """Each question alone, on a server without plugin, connector and prefix cache."""
    args = ["--dtype", "bfloat16", "--no-enable-prefix-caching"]
    with serve(checkpoint, RELEASE, log, plugin="without", env=INVARIANT, args=args) as server:
        return [ask(server, question) for question in asked]


@contextmanager
def loaded_server(checkpoint: Checkpoint, config: Mapping[str, Any], log: Path) -> Iterator[Server]:
    """A server with few KV blocks and a connector."""
    args = ["--dtype", "bfloat16", "--max-num-seqs", str(CLIENTS)]
    args += ["--num-gpu-blocks-override", str(BLOCKS), "--enable-prefix-caching"]
    args += ["--kv-transfer-config", json.dumps(config)]
    with serve(checkpoint, RELEASE, log, env=INVARIANT, args=args) as server:
        yield server


def soak(
    server: Server, asked: list[Question], right: list[Answer], caps: bool, progress: Progress
) -> Figures:
    """Eight clients until the time is up; one request in fifty is given up by its client."""
    figures = Figures()
    end = time.monotonic() + SECONDS
    task = progress.add_task("soak", total=SECONDS)

    def client(number: int) -> None:
        drawn = random.Random(number)
        while time.monotonic() < end:
            at = drawn.randrange(len(asked))
            cap = drawn.choice(CAPS) if caps else None
            if drawn.random() < 0.02:
                try:
                    server.post("/v1/completions", asked[at].body(cap), timeout=0.05)
                except OSError:
                    figures.left += 1
                continue
            figures.note(at, right[at], ask(server, asked[at], cap))
            told = f"{figures.requests} requests, {len(figures.wrong)} wrong"
            passed = min(SECONDS, SECONDS - (end - time.monotonic()))
            progress.update(task, completed=passed, description=told)

    with ThreadPoolExecutor(CLIENTS) as pool:
        for done in [pool.submit(client, number) for number in range(CLIENTS)]:
            done.result()
    return figures


@pytest.mark.parametrize("connector", ["KVFolder", "OffloadingConnector"])
def test_answers_under_load_are_those_of_a_clean_server(
    connector: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """KVFolder: every 20th load fails. OffloadingConnector: host memory, capped by turns."""
    checkpoint = write("gemma3", tmp_path / "model")
    asked = questions(checkpoint)
    right = right_answers(checkpoint, asked, tmp_path / "clean.log")
    store = tmp_path / "store"
    config = (
        transfer_config(
            store,
            asynchronous=True,
            fails_every=FAILS_EVERY,
            kv_load_failure_policy="recompute",
        )
        if connector == "KVFolder"
        else {
            "kv_connector": connector,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "HostOffloadingSpec",
                "cpu_bytes_to_use": 1 << 24,
            },
        }
    )
    capped = connector == "OffloadingConnector"
    with loaded_server(checkpoint, config, tmp_path / "log") as server:
        before = {process.pid for process in server.processes()}
        with capsys.disabled(), Progress() as progress:
            figures = soak(server, asked, right, capped, progress)
        restarts = before ^ {process.pid for process in server.processes()}
        loads, failed = carried_out(store)
        rows = {
            "requests": figures.requests,
            "tokens of answers": figures.tokens,
            "given up by clients": figures.left,
            "tokens loaded": int(server.metric(HITS)),
            "loads": loads,
            "loads that failed": failed,
            "preemptions": int(server.metric(PREEMPTIONS)),
            "wrong answers": len(figures.wrong),
            "restarts": len(restarts),
        }
        with capsys.disabled():
            _print(f"{connector}, vLLM {RELEASE}, {SECONDS} s, {CLIENTS} clients", rows)
        if not capped:
            # The comparison can fail: garbage that nobody reports is noticed.
            arm(store, *[Fault("corrupt")] * len(asked))
            assert any(ask(server, one) != it for one, it in zip(asked, right, strict=True))
    assert not figures.wrong, f"{len(figures.wrong)} wrong answers, to {figures.wrong[:5]}; "
    assert not restarts
    assert rows["tokens loaded"] > 0
    assert rows["preemptions"] > 0
    assert capped or failed >= loads // FAILS_EVERY > 0


def _print(title: str, rows: Mapping[str, int]) -> None:
    table = Table(title=title, show_header=False)
    for name, value in rows.items():
        table.add_row(name, f"{value:,}")
    Console().print(table)
