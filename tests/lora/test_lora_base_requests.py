"""LORA_BASE_REQUESTS: who gets which adapter, in the CPU's own classes and in real engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.beds.engines import CallFailed, call
from tests.beds.registered import registered

# Float32, against another implementation of the model. Of a prompt the least likely tokens are
# compared, too, whose log-probabilities are greater, and so is their rounding.
ALLOWED, ALLOWED_OF_PROMPTS = 2e-5, 1e-4


@pytest.fixture
def patched(installed_release: str, plugin: str) -> Iterator[None]:
    """The process with the plugin registered, or as it came."""
    import vllm.lora.punica_wrapper.punica_cpu
    import vllm.v1.worker.gpu_model_runner  # noqa: F401

    with registered(plugin == "with"):
        yield


@pytest.mark.behaviour("LORA_BASE_REQUESTS.base_rows", wrong=r"row \d is \[")
@pytest.mark.parametrize("slots", [[-1, 1, 0, -1, 1], [-1, 0]], ids=["five", "two"])
@pytest.mark.parametrize("prefill", [False, True], ids=["decode", "prefill"])
@pytest.mark.parametrize("added", [True, False], ids=["added", "written"])
def test_rows_without_an_adapter_are_left_alone(
    patched: None, slots: list[int], prefill: bool, added: bool
) -> None:
    _check_rows(slots, prefill, added)


@pytest.mark.area("lora")
@pytest.mark.parametrize("slots", [[-1, -1, -1], [0, 1, 1]], ids=["none", "all"])
@pytest.mark.parametrize("prefill", [False, True], ids=["decode", "prefill"])
def test_rows_that_all_have_an_adapter_or_none(
    installed_release: str, slots: list[int], prefill: bool
) -> None:
    import vllm.lora.punica_wrapper.punica_cpu  # noqa: F401

    with registered(True):
        _check_rows(slots, prefill, True)


def _check_rows(slots: list[int], prefill: bool, added: bool) -> None:
    """Shrink and expand of a linear layer with two slices; slots 0 and 1 double and treble."""
    import torch

    wrapper = _wrapper(slots, prefill)
    rows = torch.arange(1.0, len(slots) * 2 + 1).view(-1, 2)
    down = torch.eye(2).expand(2, 1, 2, 2).clone()
    up = [torch.stack([(s + slice_) * torch.eye(2) for s in (2, 3)])[:, None] for slice_ in (0, 10)]
    y = torch.full((len(slots), 4), 100.0)
    buffer = tuple(torch.zeros(len(slots), 2) for _ in range(2))
    wrapper.add_shrink(buffer, rows, (down, down), 1.0)
    wrapper.add_expand(y, buffer, tuple(up), (2, 2), add_inputs=added)
    for at, slot in enumerate(slots):
        want = torch.full((4,), 100.0)
        if slot >= 0:
            product = torch.cat([rows[at] * (slot + 2), rows[at] * (slot + 12)])
            want = want + product if added else product
        assert torch.equal(y[at], want), f"row {at} is {y[at].tolist()} and not {want.tolist()}"


def _wrapper(slots: list[int], prefill: bool) -> Any:
    """The CPU's wrapper for a batch whose rows have these LoRA slots, one request each."""
    import torch
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    wrapper = PunicaWrapperCPU(16, 8, "cpu")
    numbers = tuple(slot + 1 for slot in slots)
    mapping = LoRAMapping(index_mapping=numbers, prompt_mapping=numbers, is_prefill=prefill)
    wrapper.update_metadata(mapping, lora_index_to_id=[1, 2], max_loras=2, vocab_size=8)
    assert torch.equal(wrapper.token_lora_indices, torch.tensor(slots))
    return wrapper


@pytest.mark.engine
@pytest.mark.behaviour("LORA_BASE_REQUESTS.base_rows", wrong=r"base is off by \d")
def test_every_order_of_a_batch(release: str, plugin: str, tmp_path: Path) -> None:
    """The base model and three adapters, of which one has rsLoRA and one patterns."""
    # What patterns are worth is another feature's; without the plugin they are not compared.
    _judge(call(release, "tests.beds.lora_oracle:mixed", tmp_path, False, plugin=plugin), plugin)


@pytest.mark.full
@pytest.mark.engine
@pytest.mark.behaviour("LORA_BASE_REQUESTS.prompt_rows", wrong=r"prompt is off by \d|ended with")
def test_prompt_logprobs_of_every_request(release: str, plugin: str, tmp_path: Path) -> None:
    try:
        found = call(release, "tests.beds.lora_oracle:mixed", tmp_path, True, plugin=plugin)
    except CallFailed as error:
        raise AssertionError(str(error)) from error
    _judge({name: off for name, off in found.items() if name.endswith("prompt")}, plugin)


def _judge(found: dict[str, float], plugin: str) -> None:
    assert found, "nothing was compared"
    compared = {n: off for n, off in found.items() if plugin == "with" or "patterns" not in n}
    wrong = [
        f"{name} is off by {off:.6f}"
        for name, off in compared.items()
        if off > (ALLOWED_OF_PROMPTS if name.endswith("prompt") else ALLOWED)
    ]
    assert not wrong, "; ".join(wrong)
