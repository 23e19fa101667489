"""NAN_CONTAINMENT in the places that need more than a CPU or an engine: their real functions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from tests.beds.registered import registered
from vllm_ext.features.serving.nan_containment import _answer
from vllm_ext.features.serving.nan_worker import BLOCKS_TO_WIPE

DIRTY = r"blocks that hold NaN: \[0, 1, 2, 3, 4, 5\]"


@pytest.fixture
def patched(installed_release: str, plugin: str) -> Iterator[None]:
    """The process with the plugin registered, or as it came; both runners are loaded."""
    import vllm.entrypoints.generate.base.serving
    import vllm.v1.engine.output_processor
    import vllm.v1.worker.gpu.model_runner
    import vllm.v1.worker.gpu_model_runner  # noqa: F401

    with registered(plugin == "with"):
        yield


def _blocks_with_nan(runner_class: Any, method: str) -> str:
    """Blocks that hold NaN once a step begins that hands blocks 1 and 4 on."""
    import torch
    from vllm.v1.core.sched.output import SchedulerOutput

    class Runner(runner_class):  # type: ignore[misc]  # Any
        def __init__(self) -> None:
            cache = torch.full((6, 2, 4), torch.nan)
            self.cache = cache
            self.device = cache.device
            self.kv_cache_config = SimpleNamespace(num_blocks=6)
            layers = {"layer": SimpleNamespace(kv_cache=cache)}
            self.compilation_config = SimpleNamespace(static_forward_context=layers)
            self.requests, self.num_prompt_logprobs = {}, {}

    runner, planned = Runner(), SchedulerOutput.make_empty()
    setattr(planned.scheduled_cached_reqs, BLOCKS_TO_WIPE, [1, 4])
    # What comes after the blocks needs a whole runner.
    with suppress(AttributeError):
        getattr(runner, method)(planned)
    held = runner.cache.isnan().all(-1).all(-1).nonzero().flatten().tolist()
    return f"blocks that hold NaN: {held}"


@pytest.mark.behaviour("NAN_CONTAINMENT.wipe", wrong=DIRTY)
def test_a_step_wipes_what_it_hands_on(patched: None) -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    assert (
        _blocks_with_nan(GPUModelRunner, "_update_states") == "blocks that hold NaN: [0, 2, 3, 5]"
    )


@pytest.mark.behaviour("NAN_CONTAINMENT.wipe_v2", wrong=DIRTY)
def test_a_step_of_the_second_runner_wipes_what_it_hands_on(patched: None) -> None:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    found = _blocks_with_nan(GPUModelRunner, "update_requests")
    assert found == "blocks that hold NaN: [0, 2, 3, 5]"


@pytest.mark.behaviour("NAN_CONTAINMENT.notice_v2", wrong="told: None")
def test_the_second_runner_tells_when_its_output_is_read(
    patched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pooling step, whose output is made without the streams that only a GPU has."""
    import torch
    from vllm.v1.worker.gpu import model_runner

    class Output(model_runner.AsyncPoolingOutput):  # type: ignore[misc]  # Any
        def __init__(self, model_runner_output: Any, pooler_output: Any, **how: Any) -> None:
            self.model_runner_output = model_runner_output
            self.pooler_output_cpu = pooler_output
            self.copy_event = SimpleNamespace(synchronize=lambda: None)

    class Runner(model_runner.GPUModelRunner):  # type: ignore[misc]  # Any
        def __init__(self, state: Any) -> None:
            self.execute_model_state = state
            self.kv_connector = SimpleNamespace(post_forward=lambda *args: None)
            self.is_last_pp_rank = True
            self.pcp_manager = self.req_states = self.main_stream = self.output_copy_stream = None
            self.eplb = SimpleNamespace(step=lambda *args, **how: None)
            pooled = torch.ones(2, 4), [True, True]
            self.pooling_runner = SimpleNamespace(pool=lambda *args: pooled)

        def postprocess_num_computed_tokens(self, *args: Any) -> None: ...

    monkeypatch.setattr(model_runner, "AsyncPoolingOutput", Output)
    hidden = torch.ones(8, 4)
    hidden[[1, 6], 2] = torch.nan
    starts = torch.tensor([0, 3, 5, 5], dtype=torch.int32)
    batch = SimpleNamespace(
        req_ids=["bad", "good"], num_reqs=2, num_tokens=5, query_start_loc=starts
    )
    fields = dict.fromkeys(model_runner.ExecuteModelState._fields)
    fields |= {"input_batch": batch, "hidden_states": hidden, "finished_req_ids": set()}
    told = Runner(model_runner.ExecuteModelState(**fields)).pool().get_output().num_nans_in_logits
    assert told == {"bad": 2}, f"told: {told}"


@pytest.mark.behaviour("NAN_CONTAINMENT.error_message", wrong="the client reads 'Internal server")
def test_the_client_reads_why_its_request_was_ended(patched: None) -> None:
    """From the engine's output through the output processor to what the server raises."""
    from vllm import SamplingParams
    from vllm.entrypoints.generate.base.serving import GenerateBaseServing
    from vllm.exceptions import GenerationError
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine import EngineCoreRequest, FinishReason
    from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

    processor = OutputProcessor(None, log_stats=False)
    queue = RequestOutputCollector(RequestOutputKind.FINAL_ONLY, "cmpl-1-0-abcd")
    how = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY)
    asked = EngineCoreRequest("cmpl-1-0-abcd", [1, 2], None, how, None, 0.0, None, None, None)
    asked.external_req_id = "cmpl-1-0"
    processor.add_request(asked, None, queue=queue)
    ended = SimpleNamespace(
        request_id="cmpl-1-0-abcd",
        client_index=0,
        trace_headers=None,
        take_events=lambda: None,
        get_finished_reason=lambda: FinishReason.ERROR,
    )
    outputs: dict[int, Any] = {}
    _answer(outputs, ended)
    processor.process_outputs(outputs[0].outputs)
    try:
        output = queue.get_nowait()
        serving = object.__new__(GenerateBaseServing)
        serving._raise_if_error(output.outputs[0].finish_reason, "cmpl-1")
        read = ""
    except GenerationError as error:
        read = str(error)
    told = f"the client reads {read!r}"
    assert "Request cmpl-1-0-abcd " in read and "logits are NaN" in read, told
