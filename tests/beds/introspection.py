"""The wire of an imported vLLM, told by msgspec, dataclasses and typing themselves.

It is what the tables derived from source files are compared with; nothing is shared with them but
the roots and the form of the result.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import importlib
import sys
import types
import typing
from typing import Any

import msgspec
import numpy as np
import torch

from vllm_ext.wire.derive import EXTENSION, ROOTS, SERIALIZER
from vllm_ext.wire.schema import REQUEST_TYPES

ABC_NAMES = {
    collections.abc.Mapping: "Mapping",
    collections.abc.Sequence: "Sequence",
    collections.abc.Iterable: "Iterable",
}
MISSING = object()


@dataclasses.dataclass
class Seen:
    """A class as Python has it: form, options, and (name, type, default) of its fields in order."""

    module: str
    form: str
    fields: list[tuple[str, str, Any]]
    omits_defaults: bool = False
    strict: bool = False
    tag: Any = None


class Introspection:
    """All messages and enums that are reached from the roots of an imported vLLM."""

    def __init__(self) -> None:
        self.messages: dict[str, Seen] = {}
        self.enums: dict[str, dict[str, Any]] = {}
        for module, name, _ in ROOTS:
            self._visit(getattr(importlib.import_module(module), name))
        self._visit(getattr(importlib.import_module("vllm.v1.engine"), REQUEST_TYPES))
        serializer = vars(importlib.import_module(SERIALIZER))
        self.extensions = {n: v for n, v in serializer.items() if n.startswith(EXTENSION)}

    def _visit(self, cls: type) -> str:
        name = cls.__name__
        if name in self.messages or name in self.enums:
            return name
        if issubclass(cls, enum.Enum):
            self.enums[name] = {member.name: member.value for member in cls}
        elif issubclass(cls, msgspec.Struct):
            config = cls.__struct_config__
            seen = Seen(
                cls.__module__,
                "array" if config.array_like else "map",
                [],
                config.omit_defaults and not config.array_like,
                config.forbid_unknown_fields,
                config.tag,
            )
            self.messages[name] = seen
            hints = typing.get_type_hints(cls)
            for entry in msgspec.structs.fields(cls):
                default = _default(entry.default, entry.default_factory, msgspec.NODEFAULT)
                seen.fields.append((entry.encode_name, self._type(hints[entry.name]), default))
        elif dataclasses.is_dataclass(cls):
            seen = self.messages[name] = Seen(cls.__module__, "map", [])
            hints = typing.get_type_hints(cls)
            for field in dataclasses.fields(cls):
                default = _default(field.default, field.default_factory, dataclasses.MISSING)
                default = _of_pydantic(default)
                seen.fields.append((field.name, self._type(hints[field.name]), default))
        elif issubclass(cls, tuple) and hasattr(cls, "_field_defaults"):
            seen = self.messages[name] = Seen(cls.__module__, "tuple", [])
            hints = typing.get_type_hints(cls)
            for field_name in getattr(cls, "_fields", ()):
                default = vars(cls)["_field_defaults"].get(field_name, MISSING)
                seen.fields.append((field_name, self._type(hints[field_name]), default))
        return name

    def _type(self, hint: Any) -> str:
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if hint is type(None):
            return "None"
        if hint is typing.Any:
            return "Any"
        if origin in (typing.Union, types.UnionType):
            parts = list(dict.fromkeys(self._type(item) for item in arguments))
            return " | ".join(sorted(parts, key=lambda part: part == "None"))
        if origin is typing.Literal:
            return f"Literal[{', '.join(map(repr, arguments))}]"
        if origin is np.ndarray or hint is np.ndarray:
            return "numpy.ndarray"
        if hint is torch.Tensor:
            return "torch.Tensor"
        if origin is not None:
            name = ABC_NAMES.get(origin, origin.__name__)
            inner = ("..." if item is ... else self._type(item) for item in arguments)
            return f"{name}[{', '.join(inner)}]"
        return self._visit(hint) if hint.__module__.startswith("vllm.") else hint.__name__


def _default(value: Any, factory: Any, missing: Any) -> Any:
    if factory is not missing:
        return factory()
    return MISSING if value is missing else value


def _of_pydantic(default: Any) -> Any:
    """pydantic keeps its own field objects where a dataclass keeps a default."""
    if type(default).__name__ != "FieldInfo":
        return default
    return MISSING if default.is_required() else default.get_default(call_default_factory=True)


def evaluated(text: str | None, module: str) -> Any:
    """The value of a default's source text in its module."""
    return MISSING if text is None else eval(text, vars(sys.modules[module]))
