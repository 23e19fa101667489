"""Prefill and decode instances made of real Mooncake workers, one process per worker.

``with Imported(release) as vllm, vllm.instance(...) as p:`` starts workers in milliseconds, since
a process that has imported a release forks them. See ``tests.beds.mooncake_worker`` for what is
real in them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from tests.beds.children import environment
from tests.beds.layout import extra_path
from tests.beds.mooncake import ENVIRONMENT
from vllm_ext.checks.server import free_port

HEADS = 2
# Blocks of the producer that a request has, and the consumer's that they go to.
SOURCE, TARGET = [3, 4, 6], [7, 9, 8]


class OrderFailed(RuntimeError):
    """A worker's own error."""


class Worker:
    """One worker of an instance, by what it has: ``pp_rank``, ``tp_rank``."""

    def __init__(self, pp_rank: int, tp_rank: int, connection: socket.socket, log: Path) -> None:
        self.pp_rank, self.tp_rank = pp_rank, tp_rank
        self._log = log
        self._socket = connection
        self._pipe = connection.makefile("rw")
        self.pid = 0

    def ask(self, order: str, *arguments: Any) -> Any:
        """Have it carry out an order of ``mooncake_worker.Worker``; returns its answer.

        Raises OrderFailed with the worker's error, or if it has died.
        """
        self.tell(order, *arguments)
        return self.answer()

    def tell(self, order: str, *arguments: Any) -> None:
        """Send an order; ``answer`` takes what it says."""
        self._pipe.write(json.dumps([order, *arguments]) + "\n")
        self._pipe.flush()

    def answer(self) -> Any:
        """The answer to the oldest order that has none."""
        line = self._pipe.readline()
        if not line:
            raise OrderFailed(f"the worker has died:\n{self.log()[-3000:]}")
        verdict, value = json.loads(line)
        if verdict != "ok":
            raise OrderFailed(f"{value}\n{self.log()[-3000:]}")
        return value

    def load(
        self, producer: Instance, number: int, *, name: str = "d", blocks: Sequence[int] = TARGET
    ) -> None:
        """Start to pull ``d<number>`` from a producer."""
        self.ask(
            "load", f"{name}{number}", f"t{number}", list(blocks), producer.engine, producer.port
        )

    def settle(self) -> None:
        """Wait until no pull of this worker is under way."""
        self.ask("settle")

    def log(self) -> str:
        """What it has logged."""
        return self._log.read_text("utf-8", "replace")

    def kill(self) -> None:
        """SIGKILL, as the kernel does to a process that needs too much memory."""
        os.kill(self.pid, signal.SIGKILL)
        # The end of the stream is the end of the process.
        assert self._pipe.readline() == ""

    def close(self) -> None:
        """Let it end."""
        self._pipe.close()
        self._socket.close()


class Instance:
    """All workers of a prefill (``kv_producer``) or decode (``kv_consumer``) instance."""

    def __init__(self, engine: str, port: int, workers: list[Worker]) -> None:
        self.engine, self.port, self.workers = engine, port, workers

    def __getitem__(self, pp_rank: int) -> Worker:
        return next(worker for worker in self.workers if worker.pp_rank == pp_rank)

    def everyone(self, order: str, *arguments: Any) -> list[Any]:
        """The answers of all workers to one order."""
        for worker in self.workers:
            worker.tell(order, *arguments)
        return [worker.answer() for worker in self.workers]

    def prefill(self, number: int) -> None:
        """Request ``p<number>`` is computed by all workers: ``SOURCE`` blocks of it are ready."""
        self.everyone("prefilled", f"p{number}", f"t{number}", SOURCE)

    def load(
        self, producer: Instance, number: int, *, name: str = "d", blocks: Sequence[int] = TARGET
    ) -> None:
        """All workers pull ``d<number>`` from a producer; returns when no pull is under way."""
        for worker in self.workers:
            worker.load(producer, number, name=name, blocks=blocks)
        self.settle()

    def settle(self) -> None:
        """Wait until no pull is under way."""
        for worker in self.workers:
            worker.settle()

    def finished(self, number: int, name: str = "d") -> list[bool]:
        """By worker: whether the load is reported as over, with no block invalid."""
        told = self.everyone("step")
        return [
            f"{name}{number}" in one["received"]
            and not one["failed_blocks"]
            and f"{name}{number}" not in one["failed"]
            for one in told
        ]

    def failed(self, number: int, name: str = "d") -> list[bool]:
        """By worker: whether the load is reported as over and failed."""
        told = self.everyone("step")
        return [
            f"{name}{number}" in one["received"] and bool(one["failed_blocks"] or one["failed"])
            for one in told
        ]

    def filled(self, blocks: Sequence[int] = TARGET) -> list[bool]:
        """By worker: whether each byte of these blocks is the producer's, and all others are 0."""
        pairs = dict(zip(map(str, blocks), SOURCE, strict=True))
        found = self.everyone("contents", pairs)
        return [bool(one["right"]) and not one["untouched"] + one["wrong"] for one in found]

    def freed(self, number: int) -> list[bool]:
        """By worker: whether the engine may free the blocks of ``p<number>`` now."""
        return [f"p{number}" in one["sent"] for one in self.everyone("step")]

    def total(self, count: str) -> int:
        """The sum of a count of ``step`` over all workers: ``expired``, ``pulls``, ``bytes``."""
        return sum(one[count] for one in self.everyone("step"))

    def log(self) -> str:
        """What all workers have logged."""
        return "".join(worker.log() for worker in self.workers)


class Imported:
    """A process that has imported a release, with or without the plugin, for a ``with`` block."""

    def __init__(self, release: str, plugin: str = "with") -> None:
        self.release, self.plugin = release, plugin

    def __enter__(self) -> Self:
        self._kept = contextlib.ExitStack()
        self._folder = Path(self._kept.enter_context(tempfile.TemporaryDirectory(prefix="kv-")))
        environ = environment(self.release) | ENVIRONMENT
        environ["PYTHONPATH"] = os.pathsep.join(
            [str(extra_path("mooncake")), environ["PYTHONPATH"]]
        )
        environ["VLLM_EXT_DISABLE"] = "1" if self.plugin == "without" else "0"
        environ["VLLM_EXT_SERVER_ID"] = "mooncake"
        environ["OMP_NUM_THREADS"] = "1"
        log = self._kept.enter_context((self._folder / "import").open("w"))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.beds.mooncake_worker"],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout
        if not any(line == "imported\n" for line in self._process.stdout):
            raise OrderFailed((self._folder / "import").read_text()[-3000:])
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin and self._process.stdout
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
        self._kept.close()

    @contextlib.contextmanager
    def instance(
        self,
        role: str,
        partition: Sequence[Sequence[int]],
        *,
        tp: int = 1,
        timeout: int = 480,
        engine: str = "",
        model_layers: int = 0,
        draft: bool = False,
    ) -> Iterator[Instance]:
        """Workers for the layers of each pipeline stage, ``tp`` per stage, for a ``with`` block.

        ``timeout``: seconds until the producer frees what nobody has pulled. ``model_layers``: what
        the model's config says (default: all), beyond which layers belong to the draft model.
        """
        engine = engine or f"{role}-{uuid.uuid4().hex[:8]}"
        port = free_port()
        listener = socket.socket(socket.AF_UNIX)
        unique = uuid.uuid4().hex[:8]
        path = str(self._folder / unique)
        listener.bind(path)
        listener.listen()
        workers: list[Worker] = []
        try:
            for pp_rank, layers in enumerate(partition):
                for tp_rank in range(tp):
                    log = self._folder / f"{unique}-{pp_rank}-{tp_rank}.log"
                    assert self._process.stdin
                    self._process.stdin.write(json.dumps([path, str(log)]) + "\n")
                    self._process.stdin.flush()
                    worker = Worker(pp_rank, tp_rank, listener.accept()[0], log)
                    workers.append(worker)
                    how = {
                        "role": role,
                        "engine": engine,
                        "port": port,
                        "layers": list(layers),
                        "heads": HEADS,
                        "tp_rank": tp_rank,
                        "tp_size": tp,
                        "pp_rank": pp_rank,
                        "pp_size": len(partition),
                        "model_layers": model_layers or 1 + max(map(max, partition)),
                        "draft": draft,
                        "env": {"VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": str(timeout)},
                    }
                    worker.tell("start", how)
                    if len(workers) == 1:
                        # It has the bootstrap server; the others would retry after a second.
                        worker.pid = worker.answer()
            for worker in workers[1:]:
                worker.pid = worker.answer()
            yield Instance(engine, port, workers)
        finally:
            for worker in workers:
                with contextlib.suppress(OSError):
                    os.kill(worker.pid, signal.SIGKILL) if worker.pid else None
                worker.close()
            listener.close()
