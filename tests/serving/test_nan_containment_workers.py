"""NAN_CONTAINMENT in the places that need more than a CPU or an engine: their real functions."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.beds.registered import registered
from vllm_ext.features.serving import nan_containment_checks as checks
from vllm_ext.features.serving.nan_containment import _answer

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


@pytest.mark.behaviour("NAN_CONTAINMENT.wipe", wrong=DIRTY)
def test_a_step_wipes_what_it_hands_on(patched: None) -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    held = checks.blocks_with_nan(GPUModelRunner, "_update_states")
    assert held == [0, 2, 3, 5], f"blocks that hold NaN: {held}"


@pytest.mark.behaviour("NAN_CONTAINMENT.wipe_v2", wrong=DIRTY)
def test_a_step_of_the_second_runner_wipes_what_it_hands_on(patched: None) -> None:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    held = checks.blocks_with_nan(GPUModelRunner, "update_requests")
    assert held == [0, 2, 3, 5], f"blocks that hold NaN: {held}"


@pytest.mark.behaviour("NAN_CONTAINMENT.notice_v2", wrong="told: None")
def test_the_second_runner_tells_when_its_output_is_read(patched: None) -> None:
    told = checks.told_by_second_runner()
    assert told == {"bad": 2}, f"told: {told}"


@pytest.mark.behaviour("NAN_CONTAINMENT.error_message", wrong="the client reads 'Internal server")
def test_the_client_reads_why_its_request_was_ended(patched: None) -> None:
    """From the engine's output through the output processor to what the server raises."""
    from vllm.v1.engine import FinishReason

    ended = SimpleNamespace(
        request_id="cmpl-1-0-abcd",
        client_index=0,
        trace_headers=None,
        take_events=lambda: None,
        get_finished_reason=lambda: FinishReason.ERROR,
    )
    outputs: dict[int, Any] = {}
    _answer(outputs, ended)
    (output,) = outputs[0].outputs
    read = checks.read_by_client(output)
    told = f"the client reads {read!r}"
    assert "Request cmpl-1-0-abcd " in read and "logits are NaN" in read, told
