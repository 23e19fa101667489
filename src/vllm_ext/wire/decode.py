"""Decode messages between frontend and engine without vLLM: msgspec, numpy and a stored schema.

Positions get their names from the table of a release. NaN logprobs and rank 0 are shown as they
are; pickled values are refused, never loaded.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from vllm_ext.wire.capture import CaptureError
from vllm_ext.wire.schema import REQUEST_TYPES, Direction, Form, Message, Schema
from vllm_ext.wire.types import alternatives, generic

DEAD = b"ENGINE_CORE_DEAD"
TENSORS = {"torch.Tensor", "numpy.ndarray"}
_RAW_VIEW = "CUSTOM_TYPE_RAW_VIEW"
# Payloads that vLLM packs as plain arrays; no class names their elements.
_PAYLOADS = {
    "ABORT": None,
    "START_DP_WAVE": ("wave", "exclude_engine_index"),
    "UTILITY": ("client_index", "call_id", "method", "args"),
}
_SCALARS: dict[str, type | tuple[type, ...]] = {
    "int": int,
    "float": (float, int),
    "str": str,
    "bool": bool,
    "bytes": bytes,
}
_ARRAYS = {"list", "set", "frozenset", "tuple", "Sequence", "Iterable"}


@dataclass(frozen=True)
class RawView:
    """Bytes of an array that was packed inline."""

    data: bytes


@dataclass(frozen=True)
class Tensor:
    """An array or tensor; bfloat16 values are widened to float32, which is exact.

    ``values`` is None where numpy has no such dtype or the data went another way.
    """

    dtype: str
    shape: tuple[int, ...]
    values: np.ndarray[Any, Any] | None


@dataclass(frozen=True)
class Named:
    """An enum value; ``name`` is None if the table doesn't know it."""

    name: str | None
    value: Any


@dataclass(frozen=True)
class Record:
    """A message: its fields by name, and what was sent beyond the last known position or name."""

    message: str
    fields: dict[str, Any]
    positions: dict[str, int | None]
    surplus: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Decoded:
    """One multipart message. ``kind`` is its class, or the request type of a plain payload."""

    kind: str
    direction: Direction
    sizes: tuple[int, ...]
    identity: bytes | None
    value: Any


def decode(frames: Sequence[bytes], schema: Schema) -> Decoded:
    """Decode the frames of one message, as the table of a release has it.

    Whose message it is, is told from its frames: a frontend's begins with a request type, which an
    engine's identity may stand before. Raises CaptureError, with a sentence, for all else.
    """
    if not frames:
        raise CaptureError("a message has at least one frame, this one has none")
    sizes = tuple(map(len, frames))
    if tuple(frames) == (DEAD,):
        return Decoded("ENGINE_CORE_DEAD", Direction.TO_FRONTEND, sizes, None, None)
    types = {
        ast.literal_eval(value): name for name, value in schema.enums[REQUEST_TYPES].members.items()
    }
    identity = None
    if len(frames) > 2 and len(frames[0]) == 2 and frames[1] in types:
        identity, frames = frames[0], frames[1:]
    reading = _Reading(schema, frames)
    if frames[0] not in types:
        kind, value = reading.untold(frames[0])
        direction = Direction.TO_FRONTEND
        to_engine = {r.message for r in schema.roots if r.direction is Direction.TO_ENGINE}
        if kind in to_engine or kind in types.values():
            direction = Direction.TO_ENGINE
        return Decoded(kind, direction, sizes, None, value)
    kind = types[frames[0]]
    reading.frames = frames[1:]
    value = reading.request(kind)
    if isinstance(value, Record):
        kind = value.message
    return Decoded(kind, Direction.TO_ENGINE, sizes, identity, value)


@dataclass
class _Reading:
    """The frames of one message; index 0 is the packed one, the others hold arrays."""

    schema: Schema
    frames: Sequence[bytes]

    def request(self, kind: str) -> Any:
        """What follows a request type; the sentinels have nothing to say."""
        if not self.frames or not any(self.frames):
            return None
        return self.payload(kind, self.unpack(self.frames[0]))

    def payload(self, kind: str, raw: Any) -> Any:
        if kind == "ADD":
            return self.value("EngineCoreRequest", raw, "EngineCoreRequest")
        names = _PAYLOADS.get(kind)
        if names and isinstance(raw, list):
            pairs = dict(zip(names, raw, strict=False))
            beyond = {f"position {at}": raw[at] for at in range(len(names), len(raw))}
            shown = {name: self.plain(value) for name, value in {**pairs, **beyond}.items()}
            return Record(kind, shown, {name: at for at, name in enumerate(shown)})
        return self.plain(raw)

    def untold(self, packed: bytes) -> tuple[str, Any]:
        """A message without a request type, told by what it begins with or by its keys.

        Outputs begin with a number and a list, requests with a text. A capture of the encoder's
        frames has requests without their type, which is sent as a frame before them.
        """
        raw = self.unpack(packed)
        if isinstance(raw, list) and raw and isinstance(raw[0], str):
            if all(isinstance(item, str) for item in raw):
                return "ABORT", raw
            return "EngineCoreRequest", self.payload("ADD", raw)
        if isinstance(raw, list) and len(raw) == 4 and isinstance(raw[2], str):
            return "UTILITY", self.payload("UTILITY", raw)
        if isinstance(raw, dict):
            for root in self.schema.roots:
                message = self.schema.messages[root.message]
                needed = {entry.name for entry in message.fields if entry.default is None}
                if message.form is Form.MAP and needed <= raw.keys():
                    return root.message, self.value(root.message, raw, root.message)
            return "handshake", self.plain(raw)
        return "EngineCoreOutputs", self.value("EngineCoreOutputs", raw, "EngineCoreOutputs")

    def unpack(self, packed: bytes) -> Any:
        try:
            return msgspec.msgpack.decode(packed, ext_hook=self._extension)
        except CaptureError:
            raise
        except (ValueError, TypeError, RecursionError, MemoryError, OverflowError) as error:
            raise CaptureError(f"a frame of {len(packed)} bytes is no msgpack: {error}") from error

    def _extension(self, code: int, data: memoryview) -> RawView:
        name = next((n for n, c in self.schema.extensions.items() if c == code), None)
        if name == _RAW_VIEW:
            return RawView(bytes(data))
        told = name.removeprefix("CUSTOM_TYPE_").lower() if name else "unknown to vLLM"
        raise CaptureError(
            f"extension type {code} ({told}) is refused: loading it would run code of whoever sent "
            "it (vLLM sends it only with VLLM_ALLOW_INSECURE_SERIALIZATION=1)"
        )

    def value(self, declared: str, raw: Any, path: str) -> Any:
        """A value by its declared type."""
        options = alternatives(declared)
        if raw is None:
            if {"None", "Any", "object"}.isdisjoint(options):
                raise self._misfit(path, declared, raw)
            return None
        for option in options:
            if option in self.schema.enums:
                return self._named(option, raw)
            message = self.schema.messages.get(option)
            if message and isinstance(raw, dict if message.form is Form.MAP else list):
                return self._record(option, message, raw, path)
            if option in TENSORS and isinstance(raw, list):
                return self._tensor(raw, path)
            name, inner = generic(option)
            if name in _ARRAYS and isinstance(raw, list):
                return self._items(inner, raw, path)
            if name in ("dict", "Mapping") and isinstance(raw, dict):
                item = inner[1] if len(inner) == 2 else "Any"
                return {
                    key: self.value(item, entry, f"{path}[{key!r}]") for key, entry in raw.items()
                }
            if name == "Literal" or (name in _SCALARS and isinstance(raw, _SCALARS[name])):
                return raw
        known = (
            *_SCALARS, *_ARRAYS, *TENSORS, *self.schema.messages, "None", "dict", "Mapping",
        )  # fmt: skip
        if all(generic(option)[0] in known for option in options):
            raise self._misfit(path, declared, raw)
        return self.plain(raw)

    def _named(self, enum: str, raw: Any) -> Named:
        members = self.schema.enums[enum].members.items()
        name = next((name for name, value in members if ast.literal_eval(value) == raw), None)
        return Named(name, raw)

    def _items(self, inner: list[str], raw: list[Any], path: str) -> list[Any]:
        types = [item for item in inner if item != "..."]
        one = types[0] if len(types) == 1 else "Any"
        each = types if len(types) == len(raw) else [one] * len(raw)
        return [
            self.value(item, entry, f"{path}[{at}]")
            for at, (item, entry) in enumerate(zip(each, raw, strict=True))
        ]

    def _record(self, name: str, message: Message, raw: Any, path: str) -> Record:
        by_name = message.form is Form.MAP
        sent = raw if by_name else dict(enumerate(raw))
        fields: dict[str, Any] = {}
        positions: dict[str, int | None] = {}
        keys = [entry.name if by_name else at for at, entry in enumerate(message.fields)]
        for at, (key, entry) in enumerate(zip(keys, message.fields, strict=True)):
            if key in sent:
                where = f"{path}.{entry.name}"
                fields[entry.name] = self.value(entry.type, sent[key], where)
                positions[entry.name] = None if by_name else at
            elif entry.default is None:
                raise CaptureError(
                    f"{path} lacks {entry.name}, which vLLM {self.schema.release} always sends; is "
                    "it another release's message? name that one with --release"
                )
        surplus = {
            str(key) if by_name else f"position {key}": self.plain(entry)
            for key, entry in sent.items()
            if key not in keys
        }
        return Record(name, fields, positions, surplus)

    def plain(self, raw: Any) -> Any:
        """A value nothing is declared of; an array is still told by what it looks like."""
        if isinstance(raw, list):
            if len(raw) == 3 and isinstance(raw[0], str) and isinstance(raw[2], RawView | int):
                try:
                    return self._tensor(raw, "an array")
                except CaptureError:
                    if isinstance(raw[2], RawView):
                        raise
            return [self.plain(item) for item in raw]
        if isinstance(raw, dict):
            return {key: self.plain(item) for key, item in raw.items()}
        return raw.data if isinstance(raw, RawView) else raw

    def _tensor(self, raw: list[Any], path: str) -> Tensor:
        shape = raw[1] if len(raw) == 3 else None
        if not isinstance(shape, list) or not all(
            type(size) is int and 0 <= size < 2**48 for size in shape
        ):
            raise self._misfit(path, "[dtype, shape, data]", raw)
        name, _, data = raw
        if isinstance(data, dict):
            return Tensor(str(name), tuple(shape), None)
        if isinstance(data, RawView):
            content = data.data
        elif type(data) is int and 0 < data < len(self.frames):
            content = self.frames[data]
        else:
            raise CaptureError(
                f"{path} has its data in frame {data!r}, the message has frames 1 to "
                f"{len(self.frames) - 1}; were all of them captured?"
            )
        dtype = _dtype(name)
        if dtype is None:
            return Tensor(str(name), tuple(shape), None)
        expected = math.prod(shape) * dtype.itemsize
        if len(content) != expected:
            raise CaptureError(
                f"{path} has {len(content)} bytes, expected {expected} for {name} of shape {shape}"
            )
        values = np.frombuffer(content, dtype)
        if name == "bfloat16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        return Tensor(name, tuple(shape), values.reshape(shape))

    def _misfit(self, path: str, declared: str, raw: Any) -> CaptureError:
        found = {list: "an array", dict: "a map", type(None): "nil"}.get(type(raw), repr(raw)[:40])
        where = "" if path == declared else f" at {path}"
        return CaptureError(
            f"the message has {found}{where}, where vLLM {self.schema.release} sends {declared}; "
            "is it another release's? name that one with --release"
        )


def _dtype(name: Any) -> np.dtype[Any] | None:
    """numpy's type of a numpy or torch name, None if it has none; object types are not arrays."""
    if name == "bfloat16":
        return np.dtype(np.uint16)
    try:
        found = np.dtype(name) if isinstance(name, str) else None
    except (TypeError, ValueError, SyntaxError):
        return None
    return found if found is not None and found.kind in "biufc" and found.shape == () else None


def as_data(value: Any) -> Any:
    """A decoded value as JSON data: NaN and infinities as texts, bytes as hexadecimal."""
    if isinstance(value, Decoded):
        return {
            "message": value.kind,
            "direction": value.direction.value,
            "frames": list(value.sizes),
            "identity": value.identity.hex() if value.identity is not None else None,
            "value": as_data(value.value),
        }
    if isinstance(value, Record):
        return as_data({**value.fields, **value.surplus})
    if isinstance(value, Tensor):
        values = None if value.values is None else as_data(value.values.tolist())
        return {"dtype": value.dtype, "shape": list(value.shape), "values": values}
    if isinstance(value, Named):
        return value.value if value.name is None else value.name
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, list | tuple):
        return [as_data(item) for item in value]
    if isinstance(value, dict):
        return {key if isinstance(key, str) else str(key): as_data(v) for key, v in value.items()}
    if isinstance(value, bytes):
        return value.hex()
    return value if isinstance(value, str | int | float | bool | None) else str(value)
