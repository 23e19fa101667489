"""The layout of the messages between a vLLM frontend and EngineCore, as data.

vLLM has no published schema of this wire: positions are the order in which Python fields are
written down. A ``Schema`` is that order for one release, stored as JSON in the wheel.
"""

from __future__ import annotations

import ast
import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

SCHEMAS = Path(__file__).with_name("schemas")
# The enum whose values are the first frame of everything a frontend sends.
REQUEST_TYPES = "EngineCoreRequestType"


class Direction(StrEnum):
    """Who sends a message."""

    TO_ENGINE = "frontend to engine"
    TO_FRONTEND = "engine to frontend"


class Form(StrEnum):
    """How msgspec packs a class.

    ``array``: a Struct with array_like, fields by position, a reader ignores surplus ones.
    ``tuple``: a NamedTuple, by position, a reader refuses surplus ones.
    ``map``: a Struct or dataclass, fields by name, a reader ignores unknown names.
    """

    ARRAY = "array"
    TUPLE = "tuple"
    MAP = "map"


@dataclass(frozen=True)
class Root:
    """A message that is sent as such, not inside another."""

    message: str
    direction: Direction


@dataclass(frozen=True)
class Field:
    """One field: its name on the wire, its type, and its default as source text.

    ``default`` is None for a field that must be sent. Type names that are not Python's own are
    messages or enums of the same schema, or opaque: tensors, and classes with codecs of their own.
    """

    name: str
    type: str
    default: str | None = None


@dataclass(frozen=True)
class Message:
    """One class on the wire; a field's position is its index (without meaning for maps).

    ``omits_defaults``: the sender leaves out fields that hold their default (maps only; msgspec
    always sends every position of an array). ``strict``: a reader refuses fields it doesn't know.
    ``tag``: the value of the type tag, if the class has one.
    """

    module: str
    form: Form
    fields: tuple[Field, ...]
    omits_defaults: bool = False
    strict: bool = False
    tag: str | None = None


@dataclass(frozen=True)
class Enumeration:
    """An enum on the wire: values as source text, by member name."""

    module: str
    members: dict[str, str]


@dataclass(frozen=True)
class Schema:
    """All that crosses the sockets of one release."""

    release: str
    roots: tuple[Root, ...]
    messages: dict[str, Message]
    enums: dict[str, Enumeration]
    # Extension type codes of the serializer, by the name of their constant.
    extensions: dict[str, int]

    def as_text(self) -> str:
        """The stored form: JSON, sorted but for fields and members, whose order is the contract."""
        data = asdict(self)
        for group in ("messages", "enums", "extensions"):
            data[group] = dict(sorted(data[group].items()))
        return json.dumps(data, indent=1) + "\n"


def parse(text: str) -> Schema:
    """A schema from its stored form. Raises ValueError if the text isn't one."""
    try:
        data: dict[str, Any] = json.loads(text)
        found = Schema(
            release=data["release"],
            roots=tuple(Root(r["message"], Direction(r["direction"])) for r in data["roots"]),
            messages={name: _message(entry) for name, entry in data["messages"].items()},
            enums={n: Enumeration(e["module"], e["members"]) for n, e in data["enums"].items()},
            extensions=data["extensions"],
        )
        _check(found)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON: {error}") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except (KeyError, TypeError, AttributeError, ValueError, SyntaxError) as error:
        raise ValueError(f"it is not laid out as one: {error!r}") from error
    return found


def _check(found: Schema) -> None:
    """A ValueError for what has the names of a schema and other values."""
    one_of: dict[type, list[object]] = {
        str: [found.release, *(root.message for root in found.roots), *found.extensions],
        int: list(found.extensions.values()),
        bool: [flag for m in found.messages.values() for flag in (m.omits_defaults, m.strict)],
    }
    for message in found.messages.values():
        texts = [text for field in message.fields for text in (field.name, field.type)]
        optional = [*(field.default for field in message.fields), message.tag]
        one_of[str] += [message.module, *texts, *(text for text in optional if text is not None)]
        for field in message.fields:
            for node in ast.walk(ast.parse(field.type, mode="eval")):
                if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal":
                    ast.literal_eval(node.slice)
    for enum in found.enums.values():
        one_of[str] += [enum.module, *enum.members.values()]
        for text in enum.members.values():
            hash(ast.literal_eval(text))
    for kind, values in one_of.items():
        for value in values:
            if type(value) is not kind:
                raise TypeError(f"{value!r:.60} is no {kind.__name__}")
    for root in found.roots:
        if root.message not in found.messages:
            raise KeyError(root.message)
    if REQUEST_TYPES not in found.enums:
        raise KeyError(REQUEST_TYPES)


def _message(entry: dict[str, Any]) -> Message:
    known = {**entry, "form": Form(entry["form"])}
    known["fields"] = tuple(Field(**field) for field in entry["fields"])
    return Message(**known)


@cache
def stored(release: str) -> Schema | None:
    """The schema of a release as the wheel holds it, None if it isn't a recorded one."""
    if release not in stored_releases():
        return None
    return parse((SCHEMAS / f"{release}.json").read_text(encoding="utf-8"))


def stored_releases() -> list[str]:
    """The releases with a stored schema, oldest first."""
    names = (path.stem for path in SCHEMAS.glob("*.json"))
    return sorted(names, key=lambda name: [int(number) for number in name.split(".")])
