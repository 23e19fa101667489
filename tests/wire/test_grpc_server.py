"""Our stubs against the real vllm-rs of 0.32.0 before a CPU engine (`make test-rust-frontend`)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import grpc
import pytest

from tests.beds.corrupt import BLOCK_SIZE, MAX_MODEL_LEN, CorruptLlama, corrupt_llama
from tests.beds.rust_frontend import rust_server
from vllm_ext.checks.server import free_port
from vllm_ext.wire.proto import control_pb2 as control
from vllm_ext.wire.proto import inference_pb2 as inference
from vllm_ext.wire.proto.control_pb2_grpc import ControlStub
from vllm_ext.wire.proto.inference_pb2_grpc import InferenceStub

pytestmark = [pytest.mark.rust_frontend, pytest.mark.engine, pytest.mark.area("serving")]

RELEASE = "0.32.0"
PATIENCE = 120.0


class Surface(NamedTuple):
    """The gRPC port of a running server, and its model."""

    channel: grpc.Channel
    model: CorruptLlama

    def request(self, *words: str, **how: object) -> inference.GenerateRequest:
        ids = inference.TokenIds(ids=self.model.ids(*words))
        return inference.GenerateRequest(token_ids=ids, model=str(self.model.path), **how)


@pytest.fixture(scope="module")
def surface(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Surface]:
    folder = tmp_path_factory.mktemp("grpc")
    model = corrupt_llama(folder / "model", dtype="bfloat16")
    port = free_port()
    args = (*model.serve_args, "--grpc-port", str(port))
    with (
        rust_server(model.path, RELEASE, folder / "log", args=args),
        grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.enable_http_proxy", 0)]) as channel,
    ):
        grpc.channel_ready_future(channel).result(PATIENCE)
        yield Surface(channel, model)


def asked(**more: object) -> inference.ResponseOptions:
    return inference.ResponseOptions(output_token_ids=True, output_logprobs=True, **more)


def test_the_server_tells_about_itself(surface: Surface) -> None:
    info = ControlStub(surface.channel).GetServerInfo(
        control.GetServerInfoRequest(), timeout=PATIENCE
    )
    assert info.engine_version == RELEASE
    assert info.max_model_len == MAX_MODEL_LEN
    assert info.kv_block_size == BLOCK_SIZE
    assert info.total_kv_blocks > 0 and info.max_batched_tokens > 0
    assert info.parallelism.world_size == info.parallelism.tensor_parallel_size == 1
    assert info.effective_attention_block_size == BLOCK_SIZE
    # Since 0.33.0.
    assert info.proto_version == ""


def test_the_model_is_told(surface: Surface) -> None:
    info = ControlStub(surface.channel).GetModelInfo(
        control.GetModelInfoRequest(), timeout=PATIENCE
    )
    assert info.served_model_name == str(surface.model.path)
    assert info.supports_text_input and info.supports_token_ids_input
    assert not info.supports_lora


def test_generate_and_its_stream_agree(surface: Surface) -> None:
    stub = InferenceStub(surface.channel)
    request = surface.request(
        "w1",
        "w2",
        temperature=0.0,
        stopping=inference.StoppingCriteria(max_new_tokens=5),
        response=asked(prompt_token_ids=True, output_candidates=inference.CandidateTokens(top_n=2)),
    )
    whole = stub.Generate(request, timeout=PATIENCE)
    assert list(whole.prompt_info.token_ids) == surface.model.ids("w1", "w2")
    assert whole.outputs.num_tokens == len(whole.outputs.token_ids) == 5
    assert list(whole.outputs.ranks) == [1] * 5
    assert [len(position.tokens) for position in whole.outputs.candidate_tokens] == [2] * 5
    assert all(-20 < logprob <= 0 for logprob in whole.outputs.logprobs)
    finish = whole.outputs.finish_info
    assert finish.finish_reason == inference.FinishInfo.LENGTH
    assert finish.num_output_tokens == 5

    parts = list(stub.GenerateStream(request, timeout=PATIENCE))
    assert parts[0].HasField("prompt_info")
    assert not any(part.HasField("prompt_info") for part in parts[1:])
    assert [t for part in parts for t in part.outputs.token_ids] == list(whole.outputs.token_ids)
    assert "".join(part.outputs.text for part in parts) == whole.outputs.text
    assert parts[-1].outputs.finish_info.finish_reason == inference.FinishInfo.LENGTH


def test_stop_tokens_and_bans_reach_the_engine(surface: Surface) -> None:
    """Nested messages, maps, repeated fields and oneofs, each with an effect that shows."""
    stub = InferenceStub(surface.channel)
    chosen = surface.model.ids("w7")[-1]
    forced = surface.request(
        "w1",
        temperature=0.0,
        decoding=inference.DecodingParameters(allowed_token_ids=[chosen]),
        stopping=inference.StoppingCriteria(max_new_tokens=4, stop_token_ids=[chosen]),
        response=asked(),
    )
    done = stub.Generate(forced, timeout=PATIENCE).outputs
    assert list(done.token_ids) == [chosen]
    assert done.finish_info.finish_reason == inference.FinishInfo.STOP
    assert done.finish_info.stop_token_id == chosen
    biased = surface.request(
        "w1",
        temperature=0.0,
        decoding=inference.DecodingParameters(logit_bias={chosen: 100.0}),
        stopping=inference.StoppingCriteria(max_new_tokens=3),
        response=asked(),
    )
    assert list(stub.Generate(biased, timeout=PATIENCE).outputs.token_ids) == [chosen] * 3


def test_abort_ends_a_request(surface: Surface) -> None:
    request = surface.request(
        "w3",
        request_id="endless",
        stopping=inference.StoppingCriteria(max_new_tokens=MAX_MODEL_LEN - 10),
        response=asked(),
    )
    stream = InferenceStub(surface.channel).GenerateStream(request, timeout=PATIENCE)
    first = next(stream)
    ControlStub(surface.channel).Abort(
        control.AbortRequest(request_ids=["endless"]), timeout=PATIENCE
    )
    parts = [first, *stream]
    assert parts[-1].outputs.finish_info.finish_reason == inference.FinishInfo.ABORTED
    assert sum(part.outputs.num_tokens for part in parts) < MAX_MODEL_LEN - 10


def test_pause_and_resume_are_seen(surface: Surface) -> None:
    stub = ControlStub(surface.channel)
    stub.PauseGeneration(
        control.PauseGenerationRequest(mode=control.PAUSE_MODE_ABORT), timeout=PATIENCE
    )
    assert stub.IsPaused(control.IsPausedRequest(), timeout=PATIENCE).paused
    stub.ResumeGeneration(control.ResumeGenerationRequest(), timeout=PATIENCE)
    assert not stub.IsPaused(control.IsPausedRequest(), timeout=PATIENCE).paused


def test_errors_have_the_codes_that_are_written_down(surface: Surface) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        ControlStub(surface.channel).Shutdown(control.ShutdownRequest(), timeout=PATIENCE)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    with pytest.raises(grpc.RpcError) as refused:
        InferenceStub(surface.channel).Generate(
            inference.GenerateRequest(model=str(surface.model.path)), timeout=PATIENCE
        )
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_nan_and_rank_0_come_as_they_are(surface: Surface) -> None:
    """Last: a request of NaN can leave its traces in the blocks of the cache."""
    request = surface.request(
        surface.model.nan_word,
        temperature=0.0,
        stopping=inference.StoppingCriteria(max_new_tokens=2),
        response=asked(),
    )
    found = InferenceStub(surface.channel).Generate(request, timeout=PATIENCE).outputs
    assert all(map(math.isnan, found.logprobs)) and len(found.logprobs) == 2
    assert list(found.ranks) == [0, 0]
