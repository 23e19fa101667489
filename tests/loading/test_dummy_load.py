"""DUMMY_LOAD: what is drawn and written, beside what the running release does by itself.

Values are compared with those of the stock loader in the same process, over whole storages, each
time from the same garbage. Numbers are counted in torch's ``uniform_``; nothing is timed.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

from tests.beds.llama import llama, load_dummy
from tests.beds.registered import registered
from vllm_ext.core.effects import PAGE
from vllm_ext.features.loading import dummy_load

pytestmark = pytest.mark.area("loading")

TENSOR = "DUMMY_LOAD.stream"
KINDS = ("bfloat16", "float16", "float32", "float8_e4m3fn")

Count = list[tuple[int, Any, int]]


@pytest.fixture
def chosen(installed_release: str, plugin: str) -> Callable[[], AbstractContextManager[None]]:
    """Registers the plugin for the length of a block, or leaves the process as it came."""
    return lambda: registered(plugin == "with")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Count:
    """Every ``uniform_`` call: elements, type and address of the tensor."""
    import torch

    calls: Count = []
    original = torch.Tensor.uniform_

    inside: list[Any] = []

    # The name is what torch shows to those who watch; they call it again, which isn't counted.
    @functools.wraps(original)
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not inside:
            calls.append((self.numel(), self.dtype, self.data_ptr()))
        inside.append(self)
        try:
            return original(self, *args, **kwargs)
        finally:
            inside.pop()

    monkeypatch.setattr(torch.Tensor, "uniform_", counted)
    return calls


@pytest.fixture(scope="session")
def deep(
    installed_release: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """A Llama of 64 layers, and its parameters' own data."""
    with llama(tmp_path_factory.mktemp("llama"), layers=64, hidden=64) as model:
        yield model, {name: value.data for name, value in model.named_parameters()}


def _tensors(model: Any) -> dict[str, Any]:
    """All tensors that are not on meta, non-persistent buffers included."""
    pairs = [*model.named_parameters(), *model.named_buffers()]
    return {name: value.data for name, value in pairs if not value.is_meta}


def _bytes(tensor: Any) -> Any:
    """The whole storage of a tensor, gaps included, as uint8 [n]."""
    import torch

    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _load(model: Any) -> str:
    """Load over garbage; SHA-256 over every storage, names included."""
    import torch

    for tensor in _tensors(model).values():
        _bytes(tensor).fill_(0x5A)
    load_dummy(model)
    digest = hashlib.sha256()
    for name, tensor in sorted(_tensors(model).items()):
        assert isinstance(tensor, torch.Tensor)
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(_bytes(tensor).numpy())
    return digest.hexdigest()


def _effect(part: str) -> int:
    return PAGE.read().get(f"DUMMY_LOAD.{part}", 0)


def _longest(model: Any) -> int:
    """Sum over the types of their longest drawn tensor."""
    longest: dict[Any, int] = {}
    for tensor in model.state_dict(keep_vars=True).values():
        if tensor.is_floating_point() and getattr(tensor, "dummy_weight_value", None) is None:
            longest[tensor.dtype] = max(longest.get(tensor.dtype, 0), tensor.numel())
    return sum(longest.values())


def _module(**tensors: Any) -> Any:
    """A module with parameters, none of which wants a gradient."""
    import torch

    module = torch.nn.Module()
    for name, tensor in tensors.items():
        module.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    return module


def _same_as_stock(make: Callable[[], Any]) -> Any:
    """Loads with the plugin and without give the same bytes; the patched model."""
    expected = _load(make())
    model = make()
    with registered(True):
        assert _load(model) == expected
    return model


@pytest.mark.behaviour(
    "DUMMY_LOAD.stream", wrong=r"drew \d+ random numbers, the longest tensors hold \d+"
)
@pytest.mark.parametrize("kind", KINDS)
def test_64_layers_take_one_stream_per_type_and_keep_every_value(
    chosen: Callable[[], AbstractContextManager[None]], deep: Any, drawn: Count, kind: str
) -> None:
    import torch

    model, data = deep
    wanted = getattr(torch, kind)
    for name, parameter in model.named_parameters():
        # As in a real checkpoint: norms stay as they are where the matrices are FP8.
        narrow = wanted.itemsize == 1 and parameter.dim() != 2
        parameter.data = data[name] if narrow else data[name].to(wanted)
    expected = _load(model)
    drawn.clear()
    with chosen():
        assert _load(model) == expected
    total, longest = sum(length for length, _, _ in drawn), _longest(model)
    # A few hundred numbers per type and name are drawn to learn what vLLM draws.
    assert total <= 1.5 * longest, (
        f"drew {total} random numbers, the longest tensors hold {longest}"
    )


@pytest.mark.behaviour("DUMMY_LOAD.once", wrong=r"initialised [2-9] times")
def test_a_tensor_is_initialised_once_however_deep_it_lies(
    chosen: Callable[[], AbstractContextManager[None]], drawn: Count
) -> None:
    import torch

    # One with gaps is left to vLLM's function, so each initialisation shows as a call.
    gaps = torch.zeros(8, 6)[:, :3]
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Sequential(_module(weight=gaps))))
    with chosen():
        load_dummy(model)
    times = sum(address == gaps.data_ptr() for _, _, address in drawn)
    assert times == 1, f"initialised {times} times"


@pytest.mark.behaviour("DUMMY_LOAD.constant_fill", wrong=r"weight: not 1\.0 throughout")
def test_a_tensor_with_a_dummy_value_gets_it(
    chosen: Callable[[], AbstractContextManager[None]],
) -> None:
    import torch

    values = {
        "weight": (torch.float8_e4m3fn, 1.0),
        "e5m2": (torch.float8_e5m2, -2.0),
        "scale": (torch.uint8, 127),
        "count": (torch.int32, 0),
        "norm": (torch.bfloat16, 0.0),
        "drawn": (torch.bfloat16, None),
    }
    layer = _module(**{name: torch.ones(40, 3).to(dtype) for name, (dtype, _) in values.items()})
    layer.register_buffer("buffer", torch.zeros(5))
    layer.buffer.dummy_weight_value = 3.5
    for name, (_, value) in values.items():
        getattr(layer, name).dummy_weight_value = value
    with chosen():
        _load(torch.nn.Sequential(layer))
    for name, value in [*((name, value) for name, (_, value) in values.items()), ("buffer", 3.5)]:
        found = getattr(layer, name).data.float()
        if value is not None:
            assert bool((found == value).all()), f"{name}: not {value} throughout"
    assert layer.drawn.unique().numel() > 10


@pytest.mark.behaviour("DUMMY_LOAD.fp8_scratch", wrong=r"scratch of \d+ bytes for 3145729 values")
@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
def test_the_scratch_of_a_long_fp8_tensor_is_bounded(
    chosen: Callable[[], AbstractContextManager[None]], kind: str
) -> None:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from vllm.model_executor.model_loader import weight_utils

    made: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = function(*args, **kwargs or {})
            if isinstance(result, torch.Tensor) and result.data_ptr() not in own:
                made.append(result.untyped_storage().nbytes())
            return result

    length = 3 * dummy_load.PIECE + 1
    first, second = (torch.empty(length, dtype=getattr(torch, kind)) for _ in range(2))
    own = range(second.data_ptr(), second.data_ptr() + length)
    weight_utils.initialize_single_dummy_weight(first)
    with chosen(), Watch():
        weight_utils.initialize_single_dummy_weight(second)
    assert torch.equal(_bytes(first), _bytes(second))
    assert max(made) <= 2 * dummy_load.PIECE, f"scratch of {max(made)} bytes for {length} values"


def test_a_load_of_long_fp8_tensors_draws_them_in_pieces(
    installed_release: str, monkeypatch: pytest.MonkeyPatch, drawn: Count
) -> None:
    import torch

    monkeypatch.setattr(dummy_load.Drawing.draw, "__defaults__", (100,))
    monkeypatch.setattr(dummy_load, "STREAM", 250)
    expected = _load(model := _module(weight=torch.empty(1001).to(torch.float8_e4m3fn)))
    drawn.clear()
    with registered(True):
        assert _load(model) == expected
    lengths = [length for length, dtype, _ in drawn if dtype is torch.float16]
    assert max(lengths) <= dummy_load.SAMPLE and sum(lengths) <= 1001 + 3 * dummy_load.SAMPLE


@pytest.mark.parametrize("kind", [*KINDS, "float64", "float8_e5m2"])
def test_beyond_the_limit_a_stream_is_drawn_in_place(
    installed_release: str, monkeypatch: pytest.MonkeyPatch, drawn: Count, kind: str
) -> None:
    import torch

    monkeypatch.setattr(dummy_load, "STREAM", 1000)
    monkeypatch.setattr(dummy_load, "SHARE", 1 << 40)
    lengths = [300, 5000, 700, 1000, 1001, 999, 5000, 1]
    dtype = getattr(torch, kind)
    model = _module(**{f"w{at}": torch.zeros(n).to(dtype) for at, n in enumerate(lengths)})
    expected = _load(model)
    drawn.clear()
    with registered(True):
        assert _load(model) == expected
    beyond = sum(max(0, length - 1000) for length in lengths)
    watched = 2 * dummy_load.SAMPLE * len(lengths)
    assert 0 <= sum(length for length, _, _ in drawn) - 1000 - beyond <= watched


def test_the_limit_grows_with_the_model(
    installed_release: str, monkeypatch: pytest.MonkeyPatch, drawn: Count
) -> None:
    import torch

    monkeypatch.setattr(dummy_load, "STREAM", 100)
    model = _module(**{f"w{at}": torch.zeros(2000) for at in range(32)})
    expected = _load(model)
    drawn.clear()
    with registered(True):
        assert _load(model) == expected
    assert sum(length for length, _, _ in drawn) <= 2000 + 2 * dummy_load.SAMPLE * 32


def _views() -> dict[str, Any]:
    """Tensors whose order of elements isn't that of their storage, or that have gaps."""
    import torch

    return {
        "transposed": torch.zeros(30, 50).t(),
        "permuted": torch.zeros(4, 5, 6, 7).permute(2, 0, 3, 1),
        "channels_last": torch.zeros(2, 8, 5, 5).to(memory_format=torch.channels_last),
        "offset": torch.zeros(100)[13:77].view(8, 8).t(),
        "ones": torch.zeros(6, 1, 7).as_strided((6, 1, 7), (1, 999, 6)),
        "gaps": torch.zeros(9, 10)[:, 2:7],
        "transposed_gaps": torch.zeros(9, 10)[:, 2:7].t(),
        "steps": torch.zeros(60)[::3],
        "scalar": torch.zeros(()),
        "empty": torch.zeros(0, 4),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_any_layout_is_filled_as_vllm_fills_it(installed_release: str, kind: str) -> None:
    import torch

    dtype = getattr(torch, kind)

    def make() -> Any:
        return _module(
            **{
                name: torch.empty(0, dtype=dtype).set_(
                    torch.zeros(view.untyped_storage().nbytes() // 4, dtype=dtype),
                    view.storage_offset(),
                    view.shape,
                    view.stride(),
                )
                for name, view in _views().items()
            }
        )

    before = _effect("stream")
    model = _same_as_stock(make)
    assert [p.stride() for p in model.parameters()] == [v.stride() for v in _views().values()]
    assert _effect("stream") - before == 6, "all dense layouts, no other"


def test_what_vllm_does_not_draw_stays_with_vllm(installed_release: str) -> None:
    import torch

    types = ("uint8", "int8", "int32", "int64", "bool", "float8_e8m0fnu", "complex64", "float64")

    def make() -> Any:
        empties = {name: torch.zeros(64).to(getattr(torch, name)) for name in types}
        scales = {f"{name}_scale": value.clone() for name, value in empties.items()}
        return torch.nn.Sequential(_module(**empties, **scales))

    _same_as_stock(make)


def test_shared_and_tied_modules_and_buffers(installed_release: str) -> None:
    import torch

    def make() -> Any:
        shared, tied = torch.nn.Linear(6, 5), torch.nn.Linear(6, 5)
        tied.weight = shared.weight
        tied.register_buffer("persistent", torch.zeros(7))
        tied.register_buffer("passing", torch.zeros(7), persistent=False)
        tied.register_buffer("absent", None)
        tied.register_parameter("on_meta", torch.nn.Parameter(torch.zeros(3, device="meta")))
        return torch.nn.ModuleDict({"a": torch.nn.Sequential(shared, tied), "b": shared})

    model = _same_as_stock(make)
    last = model["a"][1]
    assert model["b"].weight is last.weight and last.on_meta.is_meta
    assert bool((_bytes(last.passing) == 0x5A).all()), "a non-persistent buffer was written"
    assert 0 < last.persistent.abs().max() <= 1e-3


def test_a_module_that_hides_a_tensor_from_its_state(installed_release: str) -> None:
    import torch

    class Hides(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = torch.nn.Parameter(torch.zeros(9))
            self.hidden = torch.nn.Parameter(torch.zeros(9))

        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            del destination[f"{prefix}hidden"]
            destination[f"{prefix}note"] = torch.zeros(2)

    _same_as_stock(lambda: torch.nn.Sequential(torch.nn.Sequential(Hides())))


def test_parameters_of_vllms_own_classes_are_copied_too(installed_release: str, deep: Any) -> None:
    import torch
    from vllm.model_executor.parameter import ModelWeightParameter

    def make() -> Any:
        module = torch.nn.Module()
        module.weight = ModelWeightParameter(
            data=torch.zeros(8, 4), input_dim=1, output_dim=0, weight_loader=lambda *_: None
        )
        return module

    before = _effect("stream")
    _same_as_stock(make)
    assert _effect("stream") - before == 1


def test_layers_quantised_while_loading_are_processed_by_vllm(installed_release: str) -> None:
    import torch
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.model_loader.reload.layerwise import (
        get_layerwise_info,
        initialize_online_processing,
    )

    class Halve(QuantizeMethodBase):
        def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
            """Nothing: the test makes them."""

        def apply(self, layer: Any, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError

        def process_weights_after_loading(self, layer: Any) -> None:
            layer.weight.data.mul_(0.5)
            layer.processed = layer.weight.shape

    def make() -> Any:
        layer = _module(weight=torch.empty(40, 3, device="meta"))
        layer.weight.weight_loader = lambda *_: None
        layer.quant_method = Halve()
        initialize_online_processing(layer)
        return torch.nn.Sequential(layer, torch.nn.Linear(40, 3))

    model = _same_as_stock(make)
    assert model[0].processed == (40, 3) and not get_layerwise_info(model[0]).can_load()
    assert torch.equal(model[0].weight.view(-1), model[1].weight.view(-1) * 0.5)


def test_arguments_are_honoured(installed_release: str) -> None:
    import torch
    from vllm.model_executor.model_loader import weight_utils

    long = dummy_load.PIECE + 5
    for dtype, length in ((torch.float8_e4m3fn, long), (torch.bfloat16, 50)):
        for args, kwargs in (
            ((), {"seed": 7}),
            ((-0.5, 0.25), {}),
            ((), {"low": 0.0, "high": 1.0}),
        ):
            first, second = (torch.zeros(length).to(dtype) for _ in range(2))
            weight_utils.initialize_single_dummy_weight(first, *args, **kwargs)
            with registered(True):
                weight_utils.initialize_single_dummy_weight(second, *args, **kwargs)
            assert torch.equal(_bytes(first), _bytes(second))


def test_a_stream_ends_with_its_load(installed_release: str) -> None:
    import torch

    with registered(True):
        load_dummy(_module(weight=torch.zeros(4)))
        assert dummy_load._streams.get() is None and not dummy_load._loading.get()
        broken = _module(weight=torch.zeros(4))
        broken.weight.data = torch.zeros(1).expand(4)
        with pytest.raises(RuntimeError, match="single memory location"):
            load_dummy(torch.nn.Sequential(broken))
        assert dummy_load._streams.get() is None and not dummy_load._loading.get()


def test_the_generator_of_the_process_is_not_touched(installed_release: str) -> None:
    import torch

    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    with registered(True):
        load_dummy(_module(weight=torch.zeros(400)))
    assert torch.equal(torch.rand(4), expected)
