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
        path = str(self._folder / engine)
        listener.bind(path)
        listener.listen()
        workers: list[Worker] = []
        try:
            for pp_rank, layers in enumerate(partition):
                for tp_rank in range(tp):
                    log = self._folder / f"{engine}-{pp_rank}-{tp_rank}.log"
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
