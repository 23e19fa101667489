"""A real ``vllm serve`` process for the length of a ``with`` block, and nothing left after it.

It reports facts only (HTTP replies, Prometheus counters, the log, exit codes).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from prometheus_client.parser import text_string_to_metric_families

from vllm_ext.checks.family import Family

if TYPE_CHECKING:
    import psutil

# -P keeps a folder called "vllm" in the working directory from shadowing the installed one.
SERVE = ("-P", "-m", "vllm.entrypoints.cli.main", "serve")

DEFAULT_ENV = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}

_TAIL_LINES = 12
_ERROR = re.compile(
    r"((?:\b(?:\w+\.)*\w*(?:Error|Exception|NotFound): |Value error, ).+?)(?: \[type=.*)?$"
)
# Parents of a process that died say "See ... root cause"; the cause stands further up.
_ECHO = "root cause"


class ServerDied(RuntimeError):
    """The server process ended by itself.

    Attributes: ``code`` (exit status, negative for a signal), ``reason`` (one line), ``tail``
    (the log's last lines up to that one) and ``log`` (the whole log's path).
    """

    def __init__(self, code: int, text: str, log: Path) -> None:
        self.code = code
        self.log = log
        lines = [line for line in text.splitlines() if line.strip()]
        self.reason, last = _cause(code, lines)
        self.tail = "\n".join(lines[: last + 1][-_TAIL_LINES:])
        super().__init__(f"vllm serve ended with code {code}: {self.reason}\n{self.tail}")


class RequestFailed(RuntimeError):
    """A reply had a status of 400 or more; the message carries its body."""


@dataclass(frozen=True)
class Reply:
    """One HTTP answer; ``json()`` raises ``ValueError`` if the body is no JSON."""

    status_code: int
    text: str

    def json(self) -> Any:
        return json.loads(self.text)

    def raise_for_status(self) -> Reply:
        """Return self, or raise ``RequestFailed`` for a status of 400 or more."""
        if self.status_code >= 400:
            raise RequestFailed(f"HTTP {self.status_code}: {self.text[:500]}")
        return self


class Server:
    """``vllm serve MODEL`` on a free port of 127.0.0.1, in a session of its own.

    ``args`` follow the model on the command line. ``env`` is laid over this process's environment
    (``None`` removes a name); ``DEFAULT_ENV`` fills what neither sets. ``pythonpath`` comes first
    on the server's PYTHONPATH, so that an unpacked release there is the one that runs. ``log``
    receives stdout and stderr and is overwritten. ``command`` follows ``python``; the model comes
    after it. ``ready_timeout`` is in seconds.

    Entering the block raises ``ServerDied`` if the process ends before it is healthy and
    ``TimeoutError`` if it is not healthy in time; either way no process is left.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        log: Path,
        args: Sequence[str] = (),
        env: Mapping[str, str | None] | None = None,
        pythonpath: Sequence[str | Path] = (),
        python: str | Path = sys.executable,
        command: Sequence[str] = SERVE,
        ready_timeout: float = 600.0,
    ) -> None:
        self.log = Path(log)
        self.ready_timeout = ready_timeout
        self._start = (str(python), *command, str(model))
        self._args = tuple(args)
        self._env = _environment(env or {}, pythonpath)
        self._process: subprocess.Popen[bytes] | None = None
        self._family: Family | None = None
        self._port = 0
        self._ready = False

    def __enter__(self) -> Self:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """``http://127.0.0.1:PORT``, known once started."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The API server process; raises ``RuntimeError`` before ``start()``."""
        if self._process is None:
            raise RuntimeError("the server has not been started")
        return self._process

    def start(self) -> None:
        """Start the process and return at once; raises ``RuntimeError`` if it was started."""
        if self._process is not None:
            raise RuntimeError("the server has already been started")
        self._port = free_port()
        where = ("--host", "127.0.0.1", "--port", str(self._port))
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as sink:
            self._process = subprocess.Popen(
                (*self._start, *where, *self._args),
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._family = Family(self._process.pid)

    def wait_ready(self) -> None:
        """Return once /health answers 200; errors as in the class description."""
        deadline = time.monotonic() + self.ready_timeout
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self._send("GET", "/health", None, timeout=5.0).status_code == 200:
                    self._ready = True
                    return
            self._raise_if_dead(patience=0.2)
        raise TimeoutError(
            f"vllm serve was not healthy after {self.ready_timeout:.0f} s; log: {self.log}"
        )

    def wait_exit(self, timeout: float) -> tuple[int, str]:
        """Wait for a process that is expected to end; return its exit code and whole log.

        Raises ``TimeoutError`` if it still runs after ``timeout`` seconds. Leaves no process.
        """
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"still running after {timeout:.0f} s; log: {self.log}") from None
        finally:
            self.stop()
        return code, self.log_text()

    def get(self, path: str, *, timeout: float = 60.0) -> Reply:
        """GET; raises ``ServerDied`` if the process ended, ``OSError`` if it doesn't answer."""
        return self._request("GET", path, None, timeout)

    def post(self, path: str, body: object, *, timeout: float = 300.0) -> Reply:
        """POST ``body`` as JSON; raises as ``get`` does. The status is not judged."""
        return self._request("POST", path, body, timeout)

    def metric(self, name: str) -> float:
        """Sum over all labels of one Prometheus sample, such as ``vllm:prompt_tokens_total``.

        Raises ``KeyError`` if /metrics has no sample of that name.
        """
        families = text_string_to_metric_families(self.get("/metrics").raise_for_status().text)
        samples = [sample for family in families for sample in family.samples]
        values = [sample.value for sample in samples if sample.name == name]
        if not values:
            raise KeyError(name)
        return sum(values)

    def log_text(self) -> str:
        """Everything the processes have written so far."""
        return self.log.read_text("utf-8", "replace") if self.log.exists() else ""

    def processes(self) -> list[psutil.Process]:
        """The live processes of this server, engine and worker processes included."""
        return self._family.live() if self._family else []

    def stop(self, grace: float = 20.0) -> None:
        """End the server as Ctrl-C would, then by force whatever is left; may be called again.

        A server that was ready has ``grace`` seconds for the clean way. An interrupt meanwhile goes
        straight to force. Raises ``RuntimeError`` if a process survives even that.
        """
        if self._process is None or self._family is None:
            return
        patience = 0.0
        try:
            self._family.live()
            # A server that still starts obeys SIGTERM at once and SIGINT only seconds later.
            if self._ready and self._process.poll() is None:
                self._process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(grace)
            patience = 5.0
        finally:
            self._family.end(patience)
            self._process.poll()

    def _request(self, method: str, path: str, body: object, timeout: float) -> Reply:
        try:
            return self._send(method, path, body, timeout)
        except (OSError, http.client.HTTPException):
            self._raise_if_dead(patience=2.0)
            raise

    def _send(self, method: str, path: str, body: object, timeout: float) -> Reply:
        # http.client, because it never takes a proxy from the environment.
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=timeout)
        with contextlib.closing(connection):
            payload = None if body is None else json.dumps(body)
            connection.request(method, path, payload, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return Reply(answer.status, answer.read().decode("utf-8", "replace"))

    def _raise_if_dead(self, patience: float) -> None:
        """Wait ``patience`` seconds for the process to end; raise ``ServerDied`` if it does."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.process.wait(patience)
            raise ServerDied(code, self.log_text(), self.log)


@contextlib.contextmanager
def signals_interrupt() -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and a closed terminal all end the block by KeyboardInterrupt."""
    # SIGINT too: a shell starts background jobs with it ignored.
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _environment(
    changes: Mapping[str, str | None], pythonpath: Sequence[str | Path]
) -> dict[str, str]:
    merged: dict[str, str | None] = {**DEFAULT_ENV, **os.environ, **changes}
    env = {name: value for name, value in merged.items() if value is not None}
    paths = [*map(str, pythonpath), *filter(None, [env.get("PYTHONPATH")])]
    return env | ({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})


def free_port() -> int:
    """A port below those the kernel hands out, which vLLM's own sockets could take meanwhile."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _cause(code: int, lines: list[str]) -> tuple[str, int]:
    """The last error of a log that is no parent's echo of a child's, and its line's index."""
    last = len(lines) - 1
    if code == -signal.SIGKILL:
        return "it was killed, most likely because memory ran out", last
    found = [(hit.group(1), at) for at, line in enumerate(lines) if (hit := _ERROR.search(line))]
    causes = [(error, at) for error, at in found if _ECHO not in error]
    return (causes or found or [(lines[-1].strip() if lines else "its log is empty", last)])[-1]
