"""What changed between two releases' wires, and whether one can read what the other writes.

The rules are those of msgspec's decoders, which both sides of a Python vLLM use; the Rust frontend
may be stricter. Every rule is proved against msgspec itself in the tests.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from vllm_ext.wire.schema import (
    REQUEST_TYPES,
    Direction,
    Enumeration,
    Field,
    Form,
    Message,
    Schema,
)
from vllm_ext.wire.types import alternatives, generic

_ARRAYS = {"list", "set", "frozenset", "tuple", "Sequence", "Iterable"}
_MAPS = {"dict", "Mapping"}
_ANYTHING = {"Any", "object"}


class Rule(StrEnum):
    """What keeps two releases readable to each other."""

    APPEND_ONLY = "append-only"
    TRAILING_DEFAULTS = "trailing defaults"
    NO_SURPLUS = "no surplus"
    SAME_TYPE = "same type"
    SAME_DEFAULT = "same default"
    SAME_FORM = "same form"
    KNOWN_VALUES = "known values"


EXPLAINED = {
    Rule.APPEND_ONLY: "fields keep their positions, new ones come last",
    Rule.TRAILING_DEFAULTS: "a field the sender may not send has a default at the receiver",
    Rule.NO_SURPLUS: "the receiver of a tuple, or a strict one, knows every field that is sent",
    Rule.SAME_TYPE: "the receiver accepts every type that the sender declares",
    Rule.SAME_DEFAULT: "a field the sender leaves out means the same at the receiver",
    Rule.SAME_FORM: "a class is packed the same way on both sides",
    Rule.KNOWN_VALUES: "the receiver knows every enum value that can be sent",
}


class Pairing(StrEnum):
    """Which side is old and which is new."""

    NEW_ENGINE = "old frontend with new engine"
    NEW_FRONTEND = "new frontend with old engine"


@dataclass(frozen=True)
class Change:
    """One difference: what happened to a field (or to the message, if ``field`` is empty)."""

    message: str
    field: str
    what: str
    position: int | None
    detail: str


@dataclass(frozen=True)
class Breach:
    """One reason why a receiver can't read what a sender writes."""

    message: str
    field: str
    direction: Direction
    rule: Rule
    found: str


@dataclass(frozen=True)
class Comparison:
    """Two schemas side by side. A pairing without breaches is compatible."""

    old: str
    new: str
    changes: tuple[Change, ...]
    breaches: dict[Pairing, tuple[Breach, ...]]

    @property
    def compatible(self) -> bool:
        """Whether both pairings are."""
        return not any(self.breaches.values())


def compare(old: Schema, new: Schema) -> Comparison:
    """Changes from ``old`` to ``new``, and the breaches of each pairing in both directions."""
    pairings = {Pairing.NEW_ENGINE: (old, new), Pairing.NEW_FRONTEND: (new, old)}
    breaches = {}
    for pairing, (frontend, engine) in pairings.items():
        to_engine = _Reading(frontend, engine, Direction.TO_ENGINE)
        to_frontend = _Reading(engine, frontend, Direction.TO_FRONTEND)
        breaches[pairing] = (*to_engine.breaches(), *to_frontend.breaches())
    return Comparison(old.release, new.release, tuple(changes(old, new)), breaches)


@dataclass
class _Reading:
    """One side reads what the other writes."""

    writer: Schema
    reader: Schema
    direction: Direction
    found: list[Breach] = field(default_factory=list)
    seen: set[tuple[str, str]] = field(default_factory=set)

    def breaches(self) -> list[Breach]:
        known = {root.message for root in self.reader.roots}
        for root in self.writer.roots:
            if root.direction is not self.direction:
                continue
            if root.message not in known:
                self._breach(root.message, "", Rule.SAME_FORM, "the receiver has no such message")
            else:
                self._accepts_one(root.message, root.message)
        if self.direction is Direction.TO_ENGINE and REQUEST_TYPES in self.writer.enums:
            self._accepts_one(REQUEST_TYPES, REQUEST_TYPES)
        for name, code in self.writer.extensions.items():
            if self.reader.extensions.get(name) != code:
                self._breach(
                    "extension types",
                    name,
                    Rule.SAME_FORM,
                    f"{code} at the sender, {self.reader.extensions.get(name)} at the receiver",
                )
        return self.found

    def _breach(self, message: str, name: str, rule: Rule, found: str) -> None:
        self.found.append(Breach(message, name, self.direction, rule, found))

    def _message(self, name: str, sent: Message, read: Message) -> None:
        if (sent.form, sent.tag) != (read.form, read.tag):
            told = f"{_form(sent)} at the sender, {_form(read)} at the receiver"
            self._breach(name, "", Rule.SAME_FORM, told)
        elif sent.form is Form.MAP:
            self._map(name, sent, read)
        else:
            self._array(name, sent, read)

    def _array(self, name: str, sent: Message, read: Message) -> None:
        for at, (ours, theirs) in enumerate(zip(sent.fields, read.fields, strict=False)):
            if ours.name != theirs.name:
                told = f"position {at} is {ours.name} to the sender, {theirs.name} to the receiver"
                self._breach(name, theirs.name, Rule.APPEND_ONLY, told)
                return
            self._typed(name, ours, theirs)
        for at, theirs in enumerate(read.fields[len(sent.fields) :], len(sent.fields)):
            if theirs.default is None:
                told = f"position {at} has no default and isn't sent"
                self._breach(name, theirs.name, Rule.TRAILING_DEFAULTS, told)
        surplus = sent.fields[len(read.fields) :]
        if surplus and (read.form is Form.TUPLE or read.strict):
            told = f"{len(sent.fields)} values are sent, {len(read.fields)} are read"
            self._breach(name, surplus[0].name, Rule.NO_SURPLUS, told)

    def _map(self, name: str, sent: Message, read: Message) -> None:
        ours_by_name = {entry.name: entry for entry in sent.fields}
        for theirs in read.fields:
            ours = ours_by_name.pop(theirs.name, None)
            if ours is None:
                if theirs.default is None:
                    told = "it has no default and isn't sent"
                    self._breach(name, theirs.name, Rule.TRAILING_DEFAULTS, told)
                continue
            self._typed(name, ours, theirs)
            if not sent.omits_defaults or ours.default is None:
                continue
            if theirs.default is None:
                told = f"it has no default and isn't sent where it is {ours.default}"
                self._breach(name, theirs.name, Rule.TRAILING_DEFAULTS, told)
            elif theirs.default != ours.default:
                told = f"left out for {ours.default}, read as {theirs.default}"
                self._breach(name, theirs.name, Rule.SAME_DEFAULT, told)
        if read.strict:
            for surplus in ours_by_name:
                told = "it is sent, and the receiver refuses what it doesn't know"
                self._breach(name, surplus, Rule.NO_SURPLUS, told)

    def _typed(self, name: str, ours: Field, theirs: Field) -> None:
        refused = [one for one in alternatives(ours.type) if not self._accepts(one, theirs.type)]
        if refused:
            told = f"{' | '.join(refused)} is sent, {theirs.type} is read"
            self._breach(name, theirs.name, Rule.SAME_TYPE, told)

    def _accepts(self, sent: str, read: str) -> bool:
        """Whether ``read`` takes all values of ``sent``; breaches inside are noted on the way."""
        options = alternatives(read)
        if any(option in _ANYTHING for option in options):
            return True
        literals = [item for option in options for item in _literal(option)]
        for one in alternatives(sent):
            if values := _literal(one):
                plain = {type(value).__name__ for value in values}
                if set(values) <= set(literals) or plain <= set(options):
                    continue
                return False
            # A class of the same name first: it is the one that is meant.
            order = sorted(options, key=lambda option: option != one)
            if not any(self._accepts_one(one, option) for option in order):
                return False
        return True

    def _accepts_one(self, sent: str, read: str) -> bool:
        ours, theirs = self.writer.messages.get(sent), self.reader.messages.get(read)
        if ours and theirs:
            if (sent, read) not in self.seen:
                self.seen.add((sent, read))
                self._message(read, ours, theirs)
            return True
        values, known = self.writer.enums.get(sent), self.reader.enums.get(read)
        if values:
            return self._enum(read, values, known)
        if ours or theirs or known:
            return False
        (name, inner), (other, wanted) = generic(sent), generic(read)
        if {name, other} <= _ARRAYS or {name, other} <= _MAPS:
            return self._inside(name in _MAPS, inner, wanted)
        return sent == read or (sent, read) == ("int", "float")

    def _inside(self, mapping: bool, sent: list[str], read: list[str]) -> bool:
        """Elements of containers; no parameters stand for anything."""
        if not read:
            return True
        if not mapping and ("..." in sent + read or len(sent) != len(read)):
            sent, read = [s for s in sent if s != "..."], [r for r in read if r != "..."]
            if len(sent) > 1 or len(read) > 1:
                return False
        sent = sent or ["Any"] * len(read)
        return all(self._accepts(a, b) for a, b in zip(sent, read, strict=True))

    def _enum(self, read: str, sent: Enumeration, known: Enumeration | None) -> bool:
        values = set(sent.members.values())
        if known is None:
            return {type(ast.literal_eval(value)).__name__ for value in values} <= {read}
        if (read, read) not in self.seen:
            self.seen.add((read, read))
            for name, value in sent.members.items():
                if value not in known.members.values():
                    told = f"{name} = {value} can be sent, the receiver doesn't know it"
                    self._breach(read, name, Rule.KNOWN_VALUES, told)
                elif known.members.get(name) != value:
                    told = f"{value} is {name} to the sender, something else to the receiver"
                    self._breach(read, name, Rule.KNOWN_VALUES, told)
        return True


def _literal(text: str) -> list[object]:
    name, values = generic(text)
    return [ast.literal_eval(value) for value in values] if name == "Literal" else []


def _form(message: Message) -> str:
    return message.form.value + (f" tagged {message.tag}" if message.tag else "")


def changes(old: Schema, new: Schema) -> Iterator[Change]:
    """Every difference between two schemas, message by message."""
    for name in sorted(old.messages.keys() | new.messages.keys()):
        before, after = old.messages.get(name), new.messages.get(name)
        if before is None or after is None:
            there = before or after
            assert there is not None
            told = f"{there.form.value} of {len(there.fields)} fields"
            yield Change(name, "", "new message" if after else "message gone", None, told)
        else:
            yield from _fields(name, before, after)
    for name in sorted(old.enums.keys() | new.enums.keys()):
        had = old.enums[name].members if name in old.enums else {}
        has = new.enums[name].members if name in new.enums else {}
        yield from _values(name, had, has)
    codes = ({n: str(c) for n, c in schema.extensions.items()} for schema in (old, new))
    yield from _values("extension types", *codes)
    if old.roots != new.roots:
        told = ", ".join(root.message for root in new.roots)
        yield Change("messages sent as such", "", "changed", None, told)


def _fields(name: str, before: Message, after: Message) -> Iterator[Change]:
    for what in ("module", "form", "omits_defaults", "strict", "tag"):
        was, now = getattr(before, what), getattr(after, what)
        if was != now:
            yield Change(name, "", what.replace("_", " "), None, f"{was} -> {now}")
    positions = [
        {entry.name: (at, entry) for at, entry in enumerate(side.fields)}
        for side in (before, after)
    ]
    had, has = positions
    by_position = Form.MAP not in (before.form, after.form)
    for field_name, (at, entry) in has.items():
        place = at if after.form is not Form.MAP else None
        if field_name not in had:
            default = "required" if entry.default is None else f"default {entry.default}"
            yield Change(name, field_name, "added", place, f"{entry.type}, {default}")
            continue
        was_at, was = had[field_name]
        if by_position and was_at != at:
            yield Change(name, field_name, "moved", place, f"{was_at} -> {at}")
        if was.type != entry.type:
            yield Change(name, field_name, "type", place, f"{was.type} -> {entry.type}")
        if was.default != entry.default:
            yield Change(
                name,
                field_name,
                "default",
                place,
                f"{was.default or 'required'} -> {entry.default or 'required'}",
            )
    for field_name, (at, entry) in had.items():
        if field_name not in has:
            place = at if before.form is not Form.MAP else None
            yield Change(name, field_name, "removed", place, entry.type)


def _values(name: str, had: dict[str, str], has: dict[str, str]) -> Iterator[Change]:
    for member in [*has, *(gone for gone in had if gone not in has)]:
        was, now = had.get(member), has.get(member)
        if was != now:
            what = "added" if was is None else "removed" if now is None else "value"
            detail = f"{was} -> {now}" if was and now else was or now or ""
            yield Change(name, member, what, None, detail)
