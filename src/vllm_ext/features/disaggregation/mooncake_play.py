"""Mooncake's real workers without its transfer engine, network and bootstrap server, for probes.

Played are the engine (transfers succeed, or fail where told), the side channel (messages go from
one worker's loop to the other's) and what asks for a device or process groups. Needs no package
beyond vLLM's own.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

_MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector"
_TOKENS, _HEADS, _HEAD, _BLOCKS = 16, 2, 4, 8
_PATIENCE = 20.0
_PORTS = itertools.count(1)


class _Engine:
    """A transfer engine that moves nothing."""

    def __init__(self) -> None:
        self.status = 0
        self._port = next(_PORTS)

    def initialize(self, *args: Any) -> int:
        return 0

    def get_rpc_port(self) -> int:
        return self._port

    def batch_register_memory(self, *args: Any) -> int:
        return 0

    def batch_transfer_sync_write(self, *args: Any) -> int:
        return self.status


class Play:
    """Workers of a producer (``serve``) and of a consumer (``pull``), made one after another."""

    def __init__(self, module: Any) -> None:
        self._module = module
        # Without vLLM's __del__: it would ask for process groups after the play.
        own = {"__del__": lambda worker: None, "__module__": module.__name__}
        self._kind = type("Played", (module.MooncakeConnectorWorker,), own)
        self._servers: dict[str, tuple[Any, Any]] = {}
        self._made: list[Any] = []
        self.pulls = 0

    def worker(
        self,
        role: str,
        layers: Sequence[int],
        *,
        pp: tuple[int, int] = (0, 1),
        tp: tuple[int, int] = (0, 1),
    ) -> Any:
        """A worker of a role, with these layers; ``pp`` and ``tp`` are rank and size."""
        import torch

        module = self._module
        names = [f"model.layers.{layer}.attn" for layer in layers]
        heads = _HEADS // tp[1]
        # Only the producer's first stage has a bootstrap server.
        group = SimpleNamespace(rank_in_group=pp[0] + (role == "kv_producer"))
        with _replaced(
            module,
            get_pp_group=lambda: group,
            get_tensor_model_parallel_rank=lambda: tp[0],
            get_tensor_model_parallel_world_size=lambda: tp[1],
        ):
            made = self._kind(*_configs(role, names, heads, pp, tp))
        made.pp_rank = pp[0]
        self._made.append(made)
        shape = (_BLOCKS, heads, _TOKENS, 2 * _HEAD)
        consumer, made.is_kv_consumer = made.is_kv_consumer, True
        made.register_kv_caches({name: torch.zeros(shape) for name in names})
        made.is_kv_consumer = consumer
        if role == "kv_producer":
            self._serve(made)
        return made

    def _serve(self, producer: Any) -> None:
        answers: dict[bytes, Callable[[bytes], None]] = {}

        async def send_multipart(parts: Any) -> None:
            answers[parts[0]](parts[1])

        socket = SimpleNamespace(send_multipart=send_multipart)

        async def start() -> None:
            for _ in range(4):
                asyncio.get_running_loop().create_task(producer._sender_worker(socket))

        asyncio.run_coroutine_threadsafe(start(), producer.sender_loop).result(_PATIENCE)
        self._servers[f"played:{len(self._servers)}"] = producer, answers

    @contextmanager
    def socket(self, context: Any, path: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """In the place of vLLM's ``make_zmq_socket``: the consumer's end of the side channel."""
        producer, answers = self._servers[path]
        loop = asyncio.get_running_loop()
        waiting: asyncio.Queue[bytes] = asyncio.Queue()
        identity = str(next(_PORTS)).encode()
        answers[identity] = lambda data: (
            loop.call_soon_threadsafe(waiting.put_nowait, data) and None
        )

        async def send(data: bytes) -> None:
            self.pulls += 1
            put = producer.sender_worker_queue.put((identity, data))
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(put, producer.sender_loop))

        yield SimpleNamespace(send=send, recv=waiting.get, setsockopt=lambda *args: None)

    def load(self, consumer: Any, request: str, transfer: str, blocks: list[int]) -> Any:
        """Have a consumer worker pull from all producer workers made so far; returns the pull."""
        consumer._remote_agents["p"] = {0: dict(enumerate(self._servers))}
        consumer._tp_size["p"] = 1
        meta = self._module.MooncakeConnectorMetadata()
        params = {"transfer_id": transfer, "remote_engine_id": "p", "remote_bootstrap_addr": ""}
        meta.add_new_req(request, [blocks], params)
        consumer.start_load_kv(meta)
        return meta.reqs_to_recv["p"][request]

    def prefilled(self, producer: Any, request: str, transfer: str, blocks: list[int]) -> None:
        """A request of the producer is scheduled and computed."""
        for known in ([], [blocks]):
            meta = self._module.MooncakeConnectorMetadata()
            params = {"transfer_id": transfer}
            meta.add_new_req(request, known, params, load_remote_cache=False)
            producer.start_load_kv(meta)

    def settle(self, consumer: Any) -> None:
        """Wait until all that a consumer worker has begun is over; raises TimeoutError."""

        async def rest() -> None:
            while others := asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.wait(others)

        asyncio.run_coroutine_threadsafe(rest(), consumer.receiver_loop).result(_PATIENCE)

    def on_loop(self, producer: Any, change: Callable[[], Any]) -> Any:
        """Call something on a producer's own loop."""

        async def call() -> Any:
            return change()

        return asyncio.run_coroutine_threadsafe(call(), producer.sender_loop).result(_PATIENCE)

    def sent(self, producer: Any) -> set[str]:
        """Requests whose blocks the producer frees now."""
        return set(producer.get_finished()[0] or ())

    def received(self, consumer: Any) -> tuple[set[str], set[int]]:
        """Requests that a consumer worker reports as over, and its invalid blocks."""
        connector = self._module.MooncakeConnector.__new__(self._module.MooncakeConnector)
        connector.connector_worker = consumer
        over = set(consumer.get_finished()[1] or ())
        return over, set(connector.get_block_ids_with_load_errors())

    def close(self) -> None:
        """End all workers' threads."""

        async def cancel() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        for worker in self._made:
            loops = [getattr(worker, name, None) for name in ("sender_loop", "receiver_loop")]
            for loop in filter(None, loops):
                asyncio.run_coroutine_threadsafe(cancel(), loop).result(_PATIENCE)
            worker.shutdown()


@contextmanager
def mooncake() -> Iterator[Play]:
    """A play for the length of a block."""
    import torch

    module = importlib.import_module(_MODULE)
    play = Play(module)
    nothing = SimpleNamespace(set_device=lambda *args: None)
    with ExitStack() as stack:
        stack.enter_context(
            _replaced(
                module,
                TransferEngine=_Engine,
                current_platform=nothing,
                get_current_attn_backends=lambda config: [],
                should_launch_bootstrap_server=lambda config: False,
                make_zmq_socket=play.socket,
            )
        )
        worker = module.MooncakeConnectorWorker
        stack.enter_context(_replaced(worker, _sync_block_size_with_kernel=lambda self: None))
        stack.enter_context(_replaced(torch.accelerator, current_device_index=lambda: 0))
        stack.callback(play.close)
        yield play


@contextmanager
def _replaced(owner: Any, **values: Any) -> Iterator[None]:
    before = {name: vars(owner)[name] for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def _configs(
    role: str, names: list[str], heads: int, pp: tuple[int, int], tp: tuple[int, int]
) -> tuple[Any, str, Any]:
    import torch
    from vllm.config import KVTransferConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(
        block_size=_TOKENS, num_kv_heads=heads, head_size=_HEAD, dtype=torch.float32
    )
    kv_cache = KVCacheConfig(
        _BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(names, spec)]
    )
    engine = "p" if role == "kv_producer" else "d"
    config = SimpleNamespace(
        kv_transfer_config=KVTransferConfig(
            kv_connector="MooncakeConnector",
            kv_role=role,
            engine_id=engine,
            kv_connector_extra_config={"num_workers": 2, "mooncake_protocol": "tcp"},
        ),
        parallel_config=SimpleNamespace(
            data_parallel_index=0,
            data_parallel_rank_local=0,
            local_engines_only=False,
            nnodes_within_dp=1,
            data_parallel_master_ip="127.0.0.1",
            tensor_parallel_size=tp[1],
            pipeline_parallel_size=pp[1],
        ),
        cache_config=SimpleNamespace(block_size=_TOKENS),
        model_config=SimpleNamespace(
            use_mla=False,
            get_total_num_kv_heads=lambda: _HEADS,
            get_total_num_hidden_layers=lambda: 99,
        ),
        speculative_config=None,
    )
    return config, engine, kv_cache
