"""One real MooncakeConnectorWorker on CPU tensors, in a process that was forked for it.

The transfer engine (TCP), the bootstrap server, the side channel, the wire format and the sender
and receiver loops are real. Shims, since there is no device, no model and no process group:
``torch.accelerator.current_device_index``, ``current_platform.set_device``, the ranks of the
connector's module, its attention backends and its block size of the kernel.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from types import SimpleNamespace
from typing import Any

from tests.beds.mooncake import EXTRA_CONFIG

CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector"
TOKENS, HEAD = 16, 8
BLOCKS = 16
# Far beyond what any of this takes: what ends here is a hang.
PATIENCE = 120.0


def layer_name(index: int) -> str:
    """What a layer of the model is called."""
    return f"model.layers.{index}.self_attn.attn"


class Worker:
    """A worker of one side; every public method is an order that comes over the pipe."""

    def __init__(self, how: dict[str, Any]) -> None:
        import torch

        for name, value in how["env"].items():
            os.environ[name] = value
        os.environ["VLLM_MOONCAKE_BOOTSTRAP_PORT"] = str(how["port"])
        self._layers: list[int] = how["layers"]
        self._heads = how["heads"] // how["tp_size"]
        self._first_head = self._heads * how["tp_rank"]
        self._changed = threading.Condition()
        self._ended = self._asked = self._bytes = 0
        self._failed_blocks: set[int] = set()
        self._failed: set[str] = set()
        self._received: set[str] = set()
        self._sent: dict[str, float] = {}
        self._expired = 0
        self._module = _shimmed(how)
        config, kv_cache = _configs(how, self._heads)
        self._connector = self._module.MooncakeConnector.__new__(self._module.MooncakeConnector)
        self.worker = self._module.MooncakeConnectorWorker(config, how["engine"], kv_cache)
        self._connector.connector_worker = self.worker
        self._watch()
        shape = (BLOCKS, self._heads, TOKENS, 2 * HEAD)
        self.caches = {layer: torch.zeros(shape) for layer in self._layers}
        if how["role"] == "kv_producer":
            for layer, cache in self.caches.items():
                for block in range(BLOCKS):
                    cache[block] = self._source(layer, block)
        self.worker.register_kv_caches({layer_name(k): v for k, v in self.caches.items()})

    def _source(self, layer: int, block: int) -> Any:
        """What the producer has in a block of a layer: each value once in the whole model."""
        import torch

        size = TOKENS * 2 * HEAD
        heads = [
            torch.arange(size) + 1 + size * (block + BLOCKS * (self._first_head + head + 8 * layer))
            for head in range(self._heads)
        ]
        return torch.stack(heads).reshape(self._heads, TOKENS, 2 * HEAD).float()

    def _watch(self) -> None:
        """Count the pulls that end here, on either side, and what the producer is asked."""
        name = (
            "send_kv_to_decode" if self.worker.is_kv_producer else "receive_kv_from_single_worker"
        )
        original = getattr(self.worker, name)

        async def watched(*args: Any, **kwargs: Any) -> Any:
            try:
                return await original(*args, **kwargs)
            finally:
                with self._changed:
                    self._ended += 1
                    self._changed.notify_all()

        setattr(self.worker, name, watched)
        decoder = self.worker._xfer_meta_decoder

        def decode(data: bytes) -> Any:
            with self._changed:
                self._asked += 1
                self._bytes += len(data)
                self._changed.notify_all()
            return decoder.decode(data)

        self.worker._xfer_meta_decoder = SimpleNamespace(decode=decode, type=decoder.type)

    def _until(self, reached: Any) -> bool:
        with self._changed:
            return self._changed.wait_for(reached, PATIENCE)

    def ended(self, count: int) -> int:
        """Wait until so many pulls have ended here since the start; returns how many have."""
        self._until(lambda: self._ended >= count)
        return self._ended

    def settle(self) -> None:
        """Consumer: wait until everything its receiver has begun is over."""
        import asyncio

        async def rest() -> None:
            while others := asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.wait(others)

        asyncio.run_coroutine_threadsafe(rest(), self.worker.receiver_loop).result(PATIENCE)

    def asked(self, count: int) -> int:
        """Producer: wait until so many pulls have come in; returns how many have."""
        self._until(lambda: self._asked >= count)
        return self._asked

    def load(self, request: str, transfer: str, blocks: list[int], source: str, port: int) -> None:
        """Consumer: start a load, as the scheduler has planned it."""
        meta = self._module.MooncakeConnectorMetadata()
        params = {
            "transfer_id": transfer,
            "remote_engine_id": source,
            "remote_bootstrap_addr": f"http://127.0.0.1:{port}",
        }
        meta.add_new_req(request, [blocks], params)
        self.worker.start_load_kv(meta)

    def prefilled(self, request: str, transfer: str, blocks: list[int]) -> None:
        """Producer: a request is scheduled and, if it has blocks, computed and ready to be sent."""
        for known in ([], [blocks]) if blocks else ([],):
            meta = self._module.MooncakeConnectorMetadata()
            params = {"transfer_id": transfer}
            meta.add_new_req(request, known, params, load_remote_cache=False)
            self.worker.start_load_kv(meta)

    def expire(self, transfer: str) -> None:
        """Producer: a request expires between the end of its prefill and the pulls that wait."""
        import asyncio

        async def expire() -> None:
            self.worker.reqs_need_send.pop(transfer).ready.set()

        asyncio.run_coroutine_threadsafe(expire(), self.worker.sender_loop).result(PATIENCE)

    def forget_introduction(self) -> None:
        """Consumer: send what a stock worker of the release sends."""
        import msgspec

        self.worker._encoder = msgspec.msgpack.Encoder()

    def waiting(self, transfer: str) -> bool:
        """Producer: wait until a pull waits for the end of the prefill; whether one does."""
        end = time.monotonic() + PATIENCE
        while transfer not in self.worker.reqs_need_send and time.monotonic() < end:
            # The side channel tells nobody else when it has taken a pull.
            threading.Event().wait(0.005)
        return transfer in self.worker.reqs_need_send

    def step(self) -> dict[str, Any]:
        """What an engine step collects, all steps together: finished, failed, expired."""
        sent, received = self.worker.get_finished()
        now = time.time()
        self._sent |= dict.fromkeys(sent or (), now)
        self._received |= received or set()
        self._failed_blocks |= self._connector.get_block_ids_with_load_errors()
        failed = getattr(self.worker, "_failed_recv_reqs", None)
        while failed is not None and not failed.empty():
            self._failed.add(failed.get_nowait())
        stats = self.worker.get_kv_connector_stats()
        self._expired += len(stats.data["num_kv_expired_reqs"]) if stats else 0
        return {
            "sent": sorted(self._sent),
            "sent_at": self._sent,
            "received": sorted(self._received),
            "failed_blocks": sorted(self._failed_blocks),
            "failed": sorted(self._failed),
            "expired": self._expired,
            "pulls": self._asked,
            "bytes": self._bytes,
            "held": sorted(self.worker.reqs_need_send),
        }

    def sent(self, request: str) -> dict[str, Any]:
        """Producer: step as an engine does until it may free a request's blocks."""
        end = time.monotonic() + PATIENCE
        while request not in (told := self.step())["sent"] and time.monotonic() < end:
            # An engine's step; there is nothing to wait for but the connector's own clock.
            threading.Event().wait(0.01)
        return told

    def contents(self, pairs: dict[str, int]) -> dict[str, list[str]]:
        """Compare every value: ``pairs`` are destination blocks and the source blocks they show."""
        found: dict[str, list[str]] = {"right": [], "untouched": [], "wrong": []}
        for layer, cache in self.caches.items():
            for block in range(BLOCKS):
                origin = pairs.get(str(block))
                zero = not bool(cache[block].any())
                if origin is None:
                    if not zero:
                        found["wrong"].append(f"{layer}:{block}")
                    continue
                right = bool((cache[block] == self._source(layer, origin)).all())
                verdict = "right" if right else "untouched" if zero else "wrong"
                found[verdict].append(f"{layer}:{block}")
        return found


def _shimmed(how: dict[str, Any]) -> Any:
    """The connector's module with what needs a device, a model or a process group replaced."""
    import importlib

    import torch

    module: Any = importlib.import_module(CONNECTOR)
    torch.accelerator.current_device_index = lambda: 0
    module.current_platform.set_device = lambda *args: None
    module.get_tensor_model_parallel_rank = lambda: how["tp_rank"]
    module.get_tensor_model_parallel_world_size = lambda: how["tp_size"]
    module.get_pp_group = lambda: SimpleNamespace(rank_in_group=how["pp_rank"])
    module.get_current_attn_backends = lambda config: []
    module.MooncakeConnectorWorker._sync_block_size_with_kernel = lambda self: None
    return module


def _configs(how: dict[str, Any], heads: int) -> tuple[Any, Any]:
    import torch
    from vllm.config import KVTransferConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(
        block_size=TOKENS, num_kv_heads=heads, head_size=HEAD, dtype=torch.float32
    )
    group = KVCacheGroupSpec([layer_name(index) for index in how["layers"]], spec)
    kv_cache = KVCacheConfig(BLOCKS, kv_cache_tensors=[], kv_cache_groups=[group])
    config = SimpleNamespace(
        kv_transfer_config=KVTransferConfig(
            kv_connector="MooncakeConnector",
            kv_role=how["role"],
            engine_id=how["engine"],
            kv_connector_extra_config=EXTRA_CONFIG,
        ),
        parallel_config=SimpleNamespace(
            data_parallel_index=0,
            data_parallel_rank_local=0,
            local_engines_only=False,
            nnodes_within_dp=1,
            data_parallel_master_ip="127.0.0.1",
            tensor_parallel_size=how["tp_size"],
            pipeline_parallel_size=how["pp_size"],
        ),
        cache_config=SimpleNamespace(block_size=TOKENS),
        model_config=SimpleNamespace(
            use_mla=False,
            get_total_num_kv_heads=lambda: how["heads"],
            get_total_num_hidden_layers=lambda: how["model_layers"],
        ),
        speculative_config=SimpleNamespace(method="mtp") if how["draft"] else None,
    )
    return config, kv_cache


def _serve(path: str, log: str) -> None:
    """The forked process: orders and answers as JSON lines over the socket at ``path``."""
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    worker: Any = None
    with connection, connection.makefile("rw") as pipe:
        for line in pipe:
            order, *arguments = json.loads(line)
            try:
                if order == "start":
                    worker, told = Worker(*arguments), os.getpid()
                else:
                    told = getattr(worker, order)(*arguments)
                answer = ["ok", told]
            except Exception as error:
                traceback.print_exc()
                answer = ["error", f"{type(error).__name__}: {error}"]
            pipe.write(json.dumps(answer) + "\n")
            pipe.flush()
    os._exit(0)


def main() -> None:
    """Import a release once; fork a worker for each line (socket and log) that comes in."""
    import importlib
    import signal

    from vllm.plugins import load_general_plugins

    load_general_plugins()
    importlib.import_module(CONNECTOR)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("imported", flush=True)
    for line in sys.stdin:
        if os.fork() == 0:
            sys.stdin.close()
            _serve(*json.loads(line))


if __name__ == "__main__":
    main()
