"""Mooncake's real transfer engine over TCP on loopback: a process whose memory others write.

vLLM's Mooncake connector runs on CPU tensors with ``ENVIRONMENT`` and ``EXTRA_CONFIG``; the engine
itself is importable with ``extra_path("mooncake")`` on PYTHONPATH.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from tests.beds.layout import extra_path

ENVIRONMENT = {"VLLM_HOST_IP": "127.0.0.1", "MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "2"}
EXTRA_CONFIG = {"mooncake_protocol": "tcp", "num_workers": 2}
ROOT = Path(__file__).parents[2]


class Peer:
    """A process with a registered buffer of ``size`` bytes, all zero, for the length of a block.

    ``where`` is what another engine writes to: session and address. One line in, one line out;
    raises ``RuntimeError`` with the process's own words if it ends.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.where: tuple[str, int] = ("", 0)

    def __enter__(self) -> Self:
        paths = [extra_path("mooncake"), ROOT]
        environ = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(map(str, paths))}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.beds.mooncake", str(self._size)],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        session, address = self._heard()
        self.where = (session, address)
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()

    def fill(self, seed: int) -> str:
        """Fill the buffer with the bytes of a seed; returns their SHA-256."""
        return str(self._ask(["fill", seed]))

    def digest(self) -> str:
        """SHA-256 of what is in the buffer now."""
        return str(self._ask(["digest"]))

    def write_to(self, peer: Peer, parts: int = 1) -> int:
        """Write the buffer into the other's in ``parts`` transfers; returns the engine's status."""
        return int(self._ask(["write", *peer.where, parts]))

    def _ask(self, words: Sequence[object]) -> Any:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(words) + "\n")
        return self._heard()

    def _heard(self) -> Any:
        assert self._process.stdout
        # Libraries of the engine print to stdout as well; answers are marked.
        for line in self._process.stdout:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        raise RuntimeError(f"the peer ended with status {self._process.wait()}")


def _serve(size: int) -> None:
    import numpy as np
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    buffer = np.zeros(size, dtype=np.uint8)
    address = int(buffer.ctypes.data)
    assert engine.register_memory(address, size) == 0

    def answer(words: object) -> None:
        print("answer", json.dumps(words), flush=True)

    answer([f"127.0.0.1:{engine.get_rpc_port()}", address])
    for line in sys.stdin:
        order, *rest = json.loads(line)
        if order == "write":
            session, target, parts = rest
            step = size // parts
            starts = range(0, size, step)
            answer(
                engine.batch_transfer_sync_write(
                    session,
                    [address + at for at in starts],
                    [target + at for at in starts],
                    [step for _ in starts],
                )
            )
            continue
        if order == "fill":
            buffer[:] = np.random.default_rng(rest[0]).integers(0, 256, size, dtype=np.uint8)
        answer(hashlib.sha256(buffer.tobytes()).hexdigest())


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
