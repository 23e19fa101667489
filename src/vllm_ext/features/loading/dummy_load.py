"""DUMMY_LOAD: load_format=dummy draws each random number once (upstream PRs 56682, 56688).

What vLLM draws for a tensor (range, seed, type) is not known here: its own function is watched on a
few elements, per type and arguments, and what can't be repeated bit for bit is left to it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from vllm_ext.core.feature import Feature, Judgement, Part, Verdict, effect
from vllm_ext.core.seams import Wrap

_LOAD = "vllm.model_executor.model_loader.dummy_loader:DummyModelLoader.load_weights"
_MODULE = "vllm.model_executor.model_loader.weight_utils:initialize_dummy_weights"
_TENSOR = "vllm.model_executor.model_loader.weight_utils:initialize_single_dummy_weight"

# Elements watched to learn what vLLM draws for a type.
SAMPLE = 256
# Elements a stream may keep, whatever the size of the model (64 MiB of float32) ...
STREAM = 16 << 20
# ... and the share of the model's elements it may keep beyond that.
SHARE = 16
# Elements of the 16-bit scratch for tensors of fewer bits: 2 MiB on the CPU, where pieces don't
# change values, 128 MiB on devices, where a tensor of more than one piece gets other values.
PIECE = 1 << 20
DEVICE_PIECE = 64 << 20

Call = Callable[..., Any]


@dataclass(frozen=True)
class Drawing:
    """What vLLM draws for a tensor: uniform numbers of ``dtype`` from a seeded generator."""

    dtype: Any
    low: float
    high: float
    seed: int

    def generator(self, device: Any) -> Any:
        """A generator at the start of the stream."""
        import torch

        return torch.Generator(device=device).manual_seed(self.seed)

    def draw(self, flat: Any, generator: Any, piece: int = PIECE) -> None:
        """Continue the stream in ``flat`` [n], with scratch for at most ``piece`` elements."""
        import torch

        for target in flat.split(piece):
            if target.dtype == self.dtype:
                target.uniform_(self.low, self.high, generator=generator)
            else:
                scratch = torch.empty_like(target, dtype=self.dtype)
                target.copy_(scratch.uniform_(self.low, self.high, generator=generator))


@contextmanager
def _watching(
    skip: int | None = None,
) -> Iterator[list[tuple[Any, tuple[Any, ...], dict[str, Any]]]]:
    """Collects the uniform_ calls of this thread: tensor, other arguments, keywords.

    Tensors of more than ``skip`` elements are left as they are.
    """
    from torch.overrides import TorchFunctionMode

    calls = []

    class Watch(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self, function: Call, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if getattr(function, "__name__", "") == "uniform_":
                calls.append((args[0], args[1:], kwargs or {}))
                if skip is not None and args[0].numel() > skip:
                    return args[0]
            return function(*args, **kwargs or {})

    with Watch():
        yield calls


def _drawing(
    original: Call, dtype: Any, device: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Drawing | None:
    """What vLLM draws for tensors of a type, None if that can't be repeated bit for bit."""
    import torch

    theirs = torch.empty(SAMPLE, dtype=dtype, device=device)
    with _watching() as calls:
        original(theirs, *args, **kwargs)
    if len(calls) != 1:
        return None
    tensor, bounds, options = calls[0]
    if tensor.shape != theirs.shape or len(bounds) != 2 or options.keys() != {"generator"}:
        return None
    drawing = Drawing(tensor.dtype, *bounds, options["generator"].initial_seed())
    ours = torch.empty_like(theirs)
    drawing.draw(ours, drawing.generator(device))
    same = torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    return drawing if same else None


def _storage_order(param: Any) -> Any:
    """The elements of a dense tensor as [n] in the order of its storage, which is vLLM's order.

    None for a tensor with gaps or overlaps, or one that isn't plain.
    """
    import torch

    data = param.data
    if type(data) is not torch.Tensor or data.layout != torch.strided:
        return None
    if data.is_contiguous():
        return data.view(-1)
    order = sorted(range(data.dim()), key=data.stride, reverse=True)
    ordered = data.permute(order)
    return ordered.view(-1) if ordered.is_contiguous() else None


def _is_drawn(param: Any) -> bool:
    return (
        param.is_floating_point()
        and param.numel() > 0
        and getattr(param, "dummy_weight_value", None) is None
    )


class Stream:
    """The start of one random stream on the CPU, kept in segments that grow with demand."""

    def __init__(self, drawing: Drawing, dtype: Any) -> None:
        self._drawing, self._dtype = drawing, dtype
        self._segments: list[Any] = []
        self._length = 0
        self._generator = drawing.generator("cpu")

    def fill(self, flat: Any, wanted: int) -> None:
        """Copy ``wanted`` elements of the stream to ``flat`` [n], draw the others in place.

        Where ``wanted`` is less than n, the stream never gets longer than that.
        """
        import torch

        if wanted > self._length:
            segment = torch.empty(wanted - self._length, dtype=self._dtype, device="cpu")
            self._drawing.draw(segment, self._generator)
            self._segments.append(segment.view(torch.uint8).numpy())
            self._length = wanted
        # numpy copies in this thread: torch's threads cost more than they gain on busy cores.
        target, at = flat.view(torch.uint8).numpy(), 0
        for source in self._segments:
            piece = target[at : at + len(source)]
            piece[:] = source[: len(piece)]
            at += len(piece)
        if flat.numel() > wanted:
            # The stream is as long as it may get, so its generator stands right there.
            onward = torch.Generator(device="cpu")
            onward.set_state(self._generator.get_state())
            self._drawing.draw(flat[wanted:], onward)


class Streams:
    """The streams of one load, by what they depend on; gone when the load ends."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._drawings: dict[Any, Drawing | None] = {}
        self._streams: dict[Any, Stream] = {}

    @functools.cached_property
    def limit(self) -> int:
        """Elements each stream may keep; it grows with the model."""
        tensors = (t for t in self._model.parameters() if t.device.type == "cpu")
        return max(STREAM, sum(tensor.numel() for tensor in tensors) // SHARE)

    def fill(self, original: Call, param: Any, args: Any, kwargs: Any) -> bool:
        """Fill a CPU tensor as ``original`` would; False if that is left to it."""
        key = (param.dtype, args, tuple(sorted(kwargs.items())))
        if key not in self._drawings:
            self._drawings[key] = _drawing(original, param.dtype, param.device, args, kwargs)
        drawing, flat = self._drawings[key], _storage_order(param)
        if drawing is None or flat is None:
            return False
        stream = self._streams.get((param.dtype, drawing))
        if stream is None:
            stream = self._streams[param.dtype, drawing] = Stream(drawing, param.dtype)
        length = flat.numel()
        # The model is gone through only when a tensor asks for it.
        stream.fill(flat, length if length <= STREAM else min(length, self.limit))
        return True


_loading: ContextVar[bool] = ContextVar("loading", default=False)
_streams: ContextVar[Streams | None] = ContextVar("streams", default=None)


def mark_load(original: Call, *args: Any, **kwargs: Any) -> Any:
    """Let ``initialise_own_tensors`` know that the loader goes through all modules itself."""
    token = _loading.set(True)
    try:
        return original(*args, **kwargs)
    finally:
        _loading.reset(token)


def initialise_own_tensors(original: Call, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Have vLLM initialise what a module itself has, as Parameters that keep their attributes.

    The loader calls vLLM's function for every module, and that function goes through
    ``model.state_dict()``, which includes all descendants. Persistent buffers count, others don't.
    """
    if not _loading.get():
        return original(model, *args, **kwargs)
    import torch

    own: dict[str, Any] = {}
    model._save_to_state_dict(own, "", True)
    tensors = {name: value for name, value in own.items() if isinstance(value, torch.Tensor)}
    # Two parts may hold this place; the one below is to pass the stand-in on as it is.
    token = _loading.set(False)
    try:
        result = original(SimpleNamespace(state_dict=lambda: tensors), *args, **kwargs)
    finally:
        _loading.reset(token)
    effect("DUMMY_LOAD.once", len(tensors))
    return result


def fill_constant(original: Call, param: Any, *args: Any, **kwargs: Any) -> Any:
    """Fill a tensor whose ``dummy_weight_value`` is set with that value, of whatever type it is."""
    value = getattr(param, "dummy_weight_value", None)
    if value is None or param.is_meta:
        return original(param, *args, **kwargs)
    param.data.fill_(value)
    effect("DUMMY_LOAD.constant_fill")
    return None


def bound_scratch(original: Call, param: Any, *args: Any, **kwargs: Any) -> Any:
    """Draw a long FP8 tensor in pieces, so that the 16-bit scratch is one piece long.

    The values are vLLM's on the CPU. Other devices consume their stream per call, so a tensor of
    more than one piece gets other values of the same distribution.
    """
    piece = PIECE if param.device.type == "cpu" else DEVICE_PIECE
    if param.is_meta or param.numel() <= piece or param.element_size() > 1 or not _is_drawn(param):
        return original(param, *args, **kwargs)
    flat = _storage_order(param)
    drawing = flat is not None and _drawing(original, param.dtype, param.device, args, kwargs)
    if not drawing:
        return original(param, *args, **kwargs)
    drawing.draw(flat, drawing.generator(param.device), piece)
    effect("DUMMY_LOAD.fp8_scratch")
    return None


def open_streams(original: Call, self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Keep the streams of a load for its length."""
    token = _streams.set(Streams(model))
    try:
        return original(self, model, *args, **kwargs)
    finally:
        _streams.reset(token)


def copy_stream(original: Call, param: Any, *args: Any, **kwargs: Any) -> Any:
    """Copy a CPU tensor from the stream it is a prefix of.

    torch's ``uniform_`` on the CPU is serial, and vLLM seeds its generator anew for each tensor: of
    two tensors of a type, one is the other's start.
    """
    streams = _streams.get()
    if streams is None or param.device.type != "cpu" or not _is_drawn(param):
        return original(param, *args, **kwargs)
    if not streams.fill(original, param, args, kwargs):
        return original(param, *args, **kwargs)
    effect("DUMMY_LOAD.stream")
    return None


def _load(model: Any) -> None:
    """vLLM's dummy load of a module."""
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    DummyModelLoader(LoadConfig(load_format="dummy")).load_weights(model, None)


def _nested(*lengths: int) -> Any:
    """Modules in one another, three deep, the innermost with one float32 parameter per length."""
    import torch

    leaf = torch.nn.Module()
    for at, length in enumerate(lengths):
        leaf.register_parameter(f"weight{at}", torch.nn.Parameter(torch.zeros(length)))
    return torch.nn.Sequential(torch.nn.Sequential(leaf))


def _probe_once() -> Judgement:
    import torch

    model = _nested(8)
    # A tensor with gaps: `stream` leaves it alone.
    tensor = torch.zeros(16)[::2]
    model[0][0].weight0 = torch.nn.Parameter(tensor)
    with _watching() as calls:
        _load(model)
    count = sum(drawn.data_ptr() == tensor.data_ptr() for drawn, _, _ in calls)
    told = f"initialisations of a tensor three modules deep: {count}"
    return Judgement(Verdict.NATIVE if count == 1 else Verdict.ACTIVE, told)


def _probe_constant_fill() -> Judgement:
    model = _nested(8)
    model[0][0].weight0.dummy_weight_value = 1.0
    _load(model)
    found = model[0][0].weight0.data
    if bool((found == 1).all()):
        return Judgement(Verdict.NATIVE, "dummy_weight_value=1.0 gives a tensor of 1.0")
    shown = f"dummy_weight_value=1.0 is ignored: the tensor begins with {found[0]:.6f}"
    return Judgement(Verdict.ACTIVE, shown)


def _probe_fp8_scratch() -> Judgement:
    import torch
    from vllm.model_executor.model_loader.weight_utils import initialize_single_dummy_weight

    length = DEVICE_PIECE + 1
    # The numbers of the long tensor don't matter here, so they aren't drawn.
    with _watching(skip=SAMPLE) as calls:
        initialize_single_dummy_weight(torch.empty(length, dtype=torch.float8_e4m3fn))
    drawn = [(tensor.numel(), tensor.dtype) for tensor, _, _ in calls]
    if not drawn:
        return Judgement(Verdict.IDLE, "FP8 tensors are not drawn")
    most, dtype = max(drawn, key=lambda draw: draw[0])
    shown = f"{length} FP8 values take scratch for {most} values of {dtype}"
    return Judgement(Verdict.ACTIVE if most >= length else Verdict.NATIVE, shown)


def _probe_stream() -> Judgement:
    with _watching() as calls:
        _load(_nested(1000, 500))
    # By place, since releases without `once` draw a tensor several times; less our own samples.
    places = {(tensor.data_ptr(), tensor.numel()) for tensor, _, _ in calls}
    drawn = sum(length for _, length in places if length != SAMPLE)
    shown = f"tensors of 1000 and of 500 values, one the other's start, take {drawn} random numbers"
    return Judgement(Verdict.NATIVE if drawn <= 1000 else Verdict.ACTIVE, shown)


_OWN_TENSORS = (Wrap(_LOAD, mark_load), Wrap(_MODULE, initialise_own_tensors))

FEATURE = Feature(
    name="DUMMY_LOAD",
    area="loading",
    summary="load_format=dummy initialises each tensor once, on the CPU from one random stream.",
    why=(
        "vLLM 0.29.0 initialises a tensor once per module it is nested in, about six times in a "
        "Llama, and ignores the attribute dummy_weight_value. Every release draws each tensor anew "
        "from the same seed, though on the CPU all tensors of a type are the start of one stream, "
        "and converts FP8 tensors from a 16-bit copy twice their size. On the CPU every value "
        "stays vLLM's own, bit for bit; on devices, too, but for FP8 tensors of more than 64 Mi "
        "elements. Modules that replace state_dict() and its hooks are not consulted any more, as "
        "in vLLM 0.30.0; their _save_to_state_dict() is. While the load lasts, streams take up to "
        "64 MiB per type or a sixteenth of the model."
    ),
    upstream_pr=(56682, 56688),
    parts=(
        Part(
            name="once",
            summary="Each tensor is initialised for the module that owns it, not per ancestor.",
            seams=_OWN_TENSORS,
            relies_on=(_TENSOR,),
            probe=_probe_once,
        ),
        Part(
            name="constant_fill",
            summary="A tensor with the attribute dummy_weight_value is filled with that value.",
            # Without these the attribute is lost: state_dict() hands out detached tensors.
            seams=(*_OWN_TENSORS, Wrap(_TENSOR, fill_constant)),
            probe=_probe_constant_fill,
        ),
        Part(
            name="fp8_scratch",
            summary="FP8 tensors are drawn in pieces instead of from a 16-bit copy of full size.",
            seams=(Wrap(_TENSOR, bound_scratch),),
            probe=_probe_fp8_scratch,
        ),
        Part(
            name="stream",
            summary="CPU tensors of a type are copied from one stream instead of drawn one by one.",
            seams=(Wrap(_LOAD, open_streams), Wrap(_TENSOR, copy_stream)),
            probe=_probe_stream,
        ),
    ),
)
