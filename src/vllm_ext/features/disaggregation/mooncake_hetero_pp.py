"""MOONCAKE_HETERO_PP: P and D with different pipeline sizes (upstream PR 56033).

A decode (D) worker pulls the KV of a request from prefill (P) workers; P writes it into D's blocks
and frees its own when all D workers it expects have been served.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from vllm_ext.core.feature import Feature, Part, effect
from vllm_ext.core.seams import Add, Wrap
from vllm_ext.features.disaggregation import mooncake_peers as peers
from vllm_ext.features.disaggregation import mooncake_probes as probes
from vllm_ext.features.disaggregation import mooncake_pulls as pulls
from vllm_ext.features.disaggregation import mooncake_stages as stages
from vllm_ext.features.disaggregation.mooncake_wire import extend

_MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector"
_WORKER = f"{_MODULE}:MooncakeConnectorWorker"
_INIT = f"{_WORKER}.__init__"
_SERVE = f"{_WORKER}.send_kv_to_decode"
_COUNT = f"{_WORKER}.resolve_need_send"
_READY = f"{_WORKER}.record_send_reqs"
_PULL = f"{_WORKER}.receive_kv_from_single_worker"
_RESULT = f"{_WORKER}.process_pulling_result"
_START = f"{_WORKER}.receive_kv"
_ENGINE = f"{_WORKER}.handle_new_engine_id"
_EXPIRE = f"{_WORKER}.fetch_finished_sending_reqs"
_ALIGN = f"{_MODULE}:_align_transfer_regions"

# Pipeline size of the consumer whose pull is being served.
_REMOTE_SIZE: ContextVar[int] = ContextVar("remote_size", default=1)
_NAMED = "_vllm_ext_named_peers"


def exchange_pp_size(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    """Have the worker send its pipeline size and understand the peer's, as 0.30.0 does."""
    original(self, *args, **kwargs)
    field = ("remote_pp_size", int, 1)
    extend(self, "_xfer_meta_decoder", field, lambda message: self.pp_size)


async def serve_other_size(
    original: Callable[..., Any],
    self: Any,
    identity: bytes,
    sock: Any,
    meta: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Serve a pull with the consumer's pipeline size at hand, if it is another one."""
    size = getattr(meta, "remote_pp_size", 1)
    token = _REMOTE_SIZE.set(size if size != self.pp_size else 1)
    try:
        return await original(self, identity, sock, meta, *args, **kwargs)
    finally:
        _REMOTE_SIZE.reset(token)


def align_by_name(
    original: Callable[..., Any],
    local_regions: list[Any],
    remote_regions: list[Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Leave out layers of other stages of the consumer; all of vLLM's checks stay."""
    if _REMOTE_SIZE.get() > 1:
        effect("MOONCAKE_HETERO_PP.hetero_pp")
        local_regions = peers.of_both(local_regions, remote_regions)
    return original(local_regions, remote_regions, *args, **kwargs)


def expect_all_stages(
    original: Callable[..., Any], self: Any, send_meta: Any, *args: Any, **kwargs: Any
) -> Any:
    """Every stage of the consumer pulls, also those that share no layer with this one."""
    result = original(self, send_meta, *args, **kwargs)
    send_meta.need_send *= _REMOTE_SIZE.get()
    return result


async def name_old_peer(
    original: Callable[..., Any],
    self: Any,
    identity: bytes,
    sock: Any,
    meta: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Say once who doesn't send its pipeline size, though it holds a part of the layers only."""
    own = set(self.registered_layer_names)
    # 0.33.0 leaves out the layers after the first pull; a peer that old sends them always.
    told = getattr(meta, "vllm_ext", None) or not meta.registered_layer_names
    lacking = set() if told else own - set(meta.registered_layer_names)
    named = vars(self).setdefault(_NAMED, set())
    peer = (meta.remote_hostname, meta.remote_port)
    if lacking and getattr(meta, "remote_pp_size", 1) == 1 and peer not in named:
        named.add(peer)
        pulls.log(self).warning(
            "Decode worker %s:%d pulls without telling its pipeline size, and holds %d of the %d "
            "layers of this prefill stage. If it has more than one pipeline stage, its vLLM is "
            "too old for that: upgrade the decoder to 0.30.0 or install vllm-ext there.",
            *peer,
            len(own) - len(lacking),
            len(own),
        )
        effect("MOONCAKE_HETERO_PP.old_peer")
    return await original(self, identity, sock, meta, *args, **kwargs)


FEATURE = Feature(
    name="MOONCAKE_HETERO_PP",
    area="disaggregation",
    summary="Mooncake P/D transfer works with any pipeline sizes, and no peer holds up the others.",
    why=(
        "On vLLM 0.29.0 a decoder with more pipeline stages than the prefiller, other than one, "
        "gets an error for every request and waits for it for ever, and so it does after any "
        "other failed pull. On every release a prefiller counts pulls and not peers: one decode "
        "stage that pulls twice frees the blocks that another still needs, and one whose "
        "transfer failed keeps them until they expire (480 s). Nobody checks that all layers "
        "of a decoder were filled, so different partitions of the same number of stages give "
        "wrong answers, and stages that share no layer pull from each other for every request."
    ),
    upstream_pr=(56033,),
    parts=(
        Part(
            name="hetero_pp",
            summary="P serves the stages of a D with another pipeline size.",
            seams=(
                Wrap(_INIT, exchange_pp_size),
                Wrap(_SERVE, serve_other_size),
                Wrap(_ALIGN, align_by_name),
                Wrap(_COUNT, expect_all_stages),
            ),
            relies_on=(_START, _PULL),
            probe=probes.hetero_pp,
        ),
        Part(
            name="peers",
            summary="P frees blocks when each D worker has got a result, good or bad.",
            seams=(
                Wrap(_SERVE, peers.serve_pull),
                Wrap(_COUNT, peers.count_peers),
                Wrap(_READY, peers.record_ready),
                Wrap(_EXPIRE, peers.forget_expired),
            ),
            relies_on=(_START, f"{_WORKER}._sender_worker"),
            probe=probes.peers,
        ),
        Part(
            name="failed_pulls",
            summary="D reports a failed pull, so that its request is recomputed or ended.",
            seams=(
                Wrap(_PULL, pulls.end_pull),
                Wrap(_RESULT, pulls.note_results),
                Wrap(_START, pulls.start_pulls),
                Wrap(_ENGINE, pulls.meet_engine),
                Add(
                    f"{_MODULE}:MooncakeConnector.get_block_ids_with_load_errors",
                    pulls.block_ids_with_load_errors,
                ),
            ),
            probe=probes.failed_pulls,
        ),
        Part(
            name="unreported",
            summary="A pull that P ends without a result for a request is a failed one.",
            seams=(Wrap(_PULL, pulls.end_unreported), Wrap(_RESULT, pulls.note_results)),
            relies_on=(f"{_WORKER}._handle_failed_recv", _SERVE),
            probe=probes.unreported,
        ),
        Part(
            name="stages",
            summary="D checks that all its layers came, and pulls only from stages that have some.",
            seams=(
                Wrap(_INIT, stages.exchange_stages),
                Wrap(_SERVE, stages.serve_stage),
                Wrap(_ALIGN, stages.align_shared),
                Wrap(_PULL, stages.pull_stage),
                Wrap(_RESULT, stages.take_result),
            ),
            relies_on=(_START, _COUNT, _READY),
            probe=probes.stages,
            check=probes.coverage,
        ),
        Part(
            name="old_peer",
            summary="A D that doesn't tell its pipeline size is named in one log line.",
            seams=(Wrap(_SERVE, name_old_peer),),
            probe=probes.old_peer,
        ),
    ),
)
