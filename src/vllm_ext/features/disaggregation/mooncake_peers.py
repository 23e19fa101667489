"""The producer's account of who has pulled a request: by peer, with those that failed.

A peer is one worker of the consumer, known by its tensor-parallel rank and the layers it holds,
which every release has on the wire: the same stage of another instance is the same peer, so a
retry there settles nothing twice. A peer is settled when it has been told a result, good or bad,
since it never pulls again then.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm_ext.core.feature import effect

PART = "MOONCAKE_HETERO_PP.peers"
Peer = tuple[int, tuple[str, ...]]

_LEDGER = "_vllm_ext_ledger"
# Requests and peers that nobody asks for any more are forgotten, the oldest first.
_REMEMBERED = 8192


@dataclass
class Transfer:
    """One request: its settled peers, and how many pulls of it are being served."""

    settled: set[Peer] = field(default_factory=set)
    ranks: list[int] = field(default_factory=list)
    stages: int = 1
    by_layers: bool = False
    limit: int = 0
    engine: int | None = None
    under_way: int = 0


@dataclass
class Engine:
    """A consumer that tells who it is: where its workers are, and who needn't pull any more."""

    places: dict[tuple[int, int], tuple[str, int]] = field(default_factory=dict)
    sharing: set[Peer] = field(default_factory=set)
    excused: set[Peer] = field(default_factory=set)


class Ledger:
    """All transfers of one producer worker; lives on its sender loop alone."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._transfers: OrderedDict[str, Transfer] = OrderedDict()
        self._layers: OrderedDict[tuple[str, int], tuple[str, ...]] = OrderedDict()
        self._engines: OrderedDict[int, Engine] = OrderedDict()

    def layers(self, meta: Any) -> tuple[str, ...] | None:
        """The layers of the peer that pulls, if known: 0.33.0 sends them once per peer only."""
        place = (meta.remote_hostname, meta.remote_port)
        if meta.registered_layer_names:
            self._layers[place] = tuple(meta.registered_layer_names)
            _forget_oldest(self._layers)
        return self._layers.get(place)

    def peer(self, meta: Any) -> Peer:
        """Who pulls."""
        place = f"{meta.remote_hostname}:{meta.remote_port}"
        return meta.remote_tp_rank, self.layers(meta) or (place,)

    def shared(self, meta: Any) -> list[str] | None:
        """The layers that this worker and the peer both hold; None if the peer's aren't known."""
        theirs = self.layers(meta)
        if theirs is None:
            return None
        own = dict.fromkeys(self._worker.registered_layer_names)
        return [name for name in own if name in theirs]

    def begin(self, meta: Any, ranks: list[int]) -> None:
        """A pull comes in; ``ranks`` are the consumer's that this worker serves."""
        size, own = getattr(meta, "remote_pp_size", 1), self._worker.pp_size
        identity = getattr(meta, "vllm_ext", None)
        for transfer_id in _transfers(meta):
            transfer = self._transfers.setdefault(transfer_id, Transfer())
            transfer.under_way += 1
            transfer.ranks = ranks
            transfer.stages = size if size != own else 1
            # Stages of other partitions come for the rest, as far as they need it.
            transfer.by_layers = bool(identity) and size == own > 1
            transfer.engine, transfer.limit = (identity[0], identity[3]) if identity else (None, 0)
        _forget_oldest(self._transfers, self._worker.reqs_need_send)

    def settle(self, meta: Any, transfer_ids: Iterable[str], failed: bool) -> None:
        """The peer is told the result of these transfers."""
        peer = self.peer(meta)
        for transfer_id in transfer_ids:
            transfer = self._transfers.get(transfer_id)
            if transfer is not None:
                if failed or peer in transfer.settled:
                    effect(PART)
                transfer.settled.add(peer)
                transfer.under_way -= 1
                self.release(transfer_id)

    def end(self, transfer_ids: Iterable[str]) -> None:
        """The pull is over for transfers that it had no result for."""
        for transfer_id in transfer_ids:
            if transfer_id in self._transfers:
                self._transfers[transfer_id].under_way -= 1
                self.release(transfer_id)

    def forget(self, transfer_ids: Iterable[str]) -> None:
        """Transfers that will not take place."""
        for transfer_id in transfer_ids:
            self._transfers.pop(transfer_id, None)

    def release(self, transfer_id: str) -> None:
        """Give the blocks back, if the request is ready and all its peers are settled."""
        transfer = self._transfers.get(transfer_id)
        waiting = self._worker.reqs_need_send.get(transfer_id)
        if transfer is None or waiting is None or not waiting.ready.is_set():
            return
        if not transfer.under_way and self._complete(transfer):
            del self._transfers[transfer_id], self._worker.reqs_need_send[transfer_id]
            self._worker.finished_sending_reqs.add(waiting.p_req_id)

    def _complete(self, transfer: Transfer) -> bool:
        if transfer.by_layers:
            own = self._own(transfer.limit)
            pulled: dict[int, set[str]] = {rank: set() for rank in transfer.ranks}
            for rank, layers in transfer.settled:
                pulled.setdefault(rank, set()).update(layers)
            if all(own <= pulled[rank] for rank in transfer.ranks):
                return True
            return len(transfer.settled) >= len(transfer.ranks) * self._worker.pp_size
        known = self._engines.get(transfer.engine) if transfer.engine is not None else None
        excused = known.excused if known else set()
        return len(transfer.settled | excused) >= len(transfer.ranks) * transfer.stages

    def _own(self, limit: int) -> set[str]:
        """This worker's layers, but those of a draft model that the consumer hasn't."""
        layers = zip(
            self._worker.registered_layer_names, self._worker.registered_layer_indices, strict=True
        )
        return {name for name, index in layers if not limit or index < limit}

    def meet(self, meta: Any) -> Engine:
        """The consumer that pulls. One that has been started anew is another one."""
        number, stage, *_ = meta.vllm_ext
        engine = self._engines.setdefault(number, Engine())
        place = (meta.remote_hostname, meta.remote_port)
        if engine.places.get((meta.remote_tp_rank, stage), place) != place:
            engine = self._engines[number] = Engine()
        engine.places[meta.remote_tp_rank, stage] = place
        _forget_oldest(self._engines)
        if self.shared(meta):
            engine.sharing.add(self.peer(meta))
        return engine

    def excuse(self, meta: Any) -> bool:
        """Whether the peer needn't pull here any more: no layer in common, and others have some."""
        size = getattr(meta, "remote_pp_size", 1)
        engine = self.meet(meta)
        if self.shared(meta) != [] or not engine.sharing or size in (1, self._worker.pp_size):
            return False
        if self.peer(meta) not in engine.excused:
            engine.excused.add(self.peer(meta))
            for transfer_id in [t for t, one in self._transfers.items() if one.engine is not None]:
                self.release(transfer_id)
        return True


def of_both(local_regions: list[Any], remote_regions: list[Any]) -> list[Any]:
    """The producer's transfer regions of layers that the consumer has, too."""
    theirs = {region.layer_name for region in remote_regions}
    return [region for region in local_regions if region.layer_name in theirs]


def _transfers(meta: Any) -> set[str]:
    return {transfer_id for transfer_id, _ in meta.req_blocks.values()}


def _forget_oldest(remembered: OrderedDict[Any, Any], but: Any = ()) -> None:
    if len(remembered) > _REMEMBERED:
        for key in [key for key in remembered if key not in but][: len(remembered) - _REMEMBERED]:
            del remembered[key]


def ledger_of(worker: Any) -> Ledger:
    """The worker's ledger."""
    held = vars(worker).get(_LEDGER)
    if held is None:
        held = vars(worker)[_LEDGER] = Ledger(worker)
    ledger: Ledger = held
    return ledger


class _Told:
    """The side channel's socket while one pull is served: what is sent there settles the peer."""

    def __init__(self, worker: Any, socket: Any, meta: Any) -> None:
        self._ledger, self._decoder = ledger_of(worker), worker._xfer_resp_decoder
        self._socket, self._meta = socket, meta
        self.open = _transfers(meta)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    async def send_multipart(self, parts: Any, *args: Any, **kwargs: Any) -> Any:
        """Send vLLM's response, and note what it says."""
        self.settle(self._decoder.decode(parts[1]))
        return await self._socket.send_multipart(parts, *args, **kwargs)

    def settle(self, response: Any) -> None:
        """Note a response: FINISH and CONTINUE name requests, ERROR means all."""
        name = response.status.name
        if name == "ERROR":
            self.failed()
        elif name in ("FINISH", "CONTINUE"):
            for requests, failed in ((response.err_reqs, True), (response.ok_reqs, False)):
                named = {self._meta.req_blocks[r][0] for r in requests or () if r in self._known}
                self._ledger.settle(self._meta, named & self.open, failed)
                self.open -= named

    @property
    def _known(self) -> Any:
        return self._meta.req_blocks

    def failed(self) -> None:
        """All requests of the pull without a result so far have failed."""
        self._ledger.settle(self._meta, self.open, True)
        self.open = set()


async def serve_pull(
    original: Callable[..., Any],
    self: Any,
    identity: bytes,
    sock: Any,
    meta: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Serve a pull, and settle the peer with what it is told."""
    ranks = list(self.transfer_topo.handshake_target_ranks(meta.remote_tp_size))
    if meta.remote_tp_rank not in ranks:
        # Not one of ours: vLLM tells it so, and nobody waits for it.
        return await original(self, identity, sock, meta, *args, **kwargs)
    ledger = ledger_of(self)
    ledger.begin(meta, ranks)
    told = _Told(self, sock, meta)
    try:
        return await original(self, identity, told, meta, *args, **kwargs)
    except Exception:
        # vLLM answers with ERROR when this gets there.
        told.failed()
        raise
    finally:
        ledger.end(told.open)


def count_peers(
    original: Callable[..., Any], self: Any, send_meta: Any, *args: Any, **kwargs: Any
) -> Any:
    """Have vLLM's own count of pulls never reach the number of peers."""
    result = original(self, send_meta, *args, **kwargs)
    send_meta.need_send = -abs(send_meta.need_send)
    return result


async def forget_expired(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Forget the peers of requests that vLLM gives up, since their ids may come again."""
    before = set(self.reqs_need_send)
    result = await original(self, *args, **kwargs)
    ledger_of(self).forget(before - self.reqs_need_send.keys())
    return result


async def record_ready(
    original: Callable[..., Any], self: Any, metadata: Any, *args: Any, **kwargs: Any
) -> Any:
    """Release requests at once whose peers were all settled before the request was ready."""
    result = await original(self, metadata, *args, **kwargs)
    ledger = ledger_of(self)
    ledger.forget(metadata.reqs_not_processed)
    for transfer_id, _ in metadata.reqs_to_send.values():
        ledger.release(transfer_id)
    return result
