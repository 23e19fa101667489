"""The differences between releases, and the rules of msgspec that decide whether they break."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vllm_ext.cli import main
from vllm_ext.wire.compare import EXPLAINED, Breach, Pairing, Rule, changes, compare
from vllm_ext.wire.schema import (
    Direction,
    Enumeration,
    Field,
    Form,
    Message,
    Root,
    Schema,
    stored,
    stored_releases,
)

# Fields that the specification lists as added after 0.29.0, with their first release and position.
ADDED = {
    ("0.31.0", "EngineCoreOutput", "prompt_token_id_logprobs", 17),
    ("0.32.0", "EngineCoreOutputs", "weight_version", 8),
    ("0.33.0", "EngineCoreOutput", "error", 18),
}


def table(release: str) -> Schema:
    found = stored(release)
    assert found is not None
    return found


def diff(old: str, new: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(main, ["wire", "diff", old, new, "--json"])
    return done.exit_code, json.loads(done.output)


def test_every_listed_addition_is_found() -> None:
    _, found = diff("0.29.0", "0.33.0")
    added = {
        (row["message"], row["field"], row["position"])
        for row in found["changes"]
        if row["what"] == "added"
    }
    assert {entry[1:] for entry in ADDED} <= added
    releases = stored_releases()
    for release, message, field, position in ADDED:
        before = releases[releases.index(release) - 1]
        _, step = diff(before, release)
        rows = [r for r in step["changes"] if (r["message"], r["field"]) == (message, field)]
        assert [(row["what"], row["position"]) for row in rows] == [("added", position)]


def test_appended_fields_with_defaults_are_compatible_both_ways() -> None:
    for old, new in (("0.30.0", "0.31.0"), ("0.32.0", "0.33.0")):
        status, found = diff(old, new)
        assert status == 0
        assert found["changes"]
        assert {p["verdict"] for p in found["pairings"].values()} == {"compatible"}


def test_a_field_removed_from_the_middle_breaks_both_ways() -> None:
    """0.32.0 took tensorizer_config_dict out of the positions of LoRARequest."""
    status, found = diff("0.31.0", "0.32.0")
    assert status == 1
    for pairing in Pairing:
        entry = found["pairings"][pairing.value]
        assert entry["verdict"] == "breaking"
        rules = {(b["message"], b["rule"]) for b in entry["breaches"]}
        assert ("LoRARequest", "append-only") in rules


def test_an_optional_that_was_required_breaks_one_way() -> None:
    """0.30.0 sends None where 0.29.0 reads an array, in SamplingMaskLists; not the other way."""
    _, found = diff("0.29.0", "0.30.0")
    verdicts = {name: entry["verdict"] for name, entry in found["pairings"].items()}
    assert verdicts == {Pairing.NEW_ENGINE: "breaking", Pairing.NEW_FRONTEND: "compatible"}
    (breach,) = found["pairings"][Pairing.NEW_ENGINE]["breaches"]
    assert (breach["message"], breach["field"], breach["rule"]) == (
        "SamplingMaskLists",
        "offsets",
        "same type",
    )


@pytest.mark.parametrize("known", stored_releases())
def test_a_release_has_no_difference_from_itself(known: str) -> None:
    found = compare(table(known), table(known))
    assert found.compatible and found.changes == ()


def test_diff_names_the_rules_it_applied() -> None:
    done = CliRunner().invoke(main, ["wire", "diff", "0.31.0", "0.32.0"])
    assert done.exit_code == 1
    said = " ".join(done.output.split())
    for rule in (Rule.APPEND_ONLY, Rule.SAME_TYPE, Rule.SAME_DEFAULT):
        assert f"{rule.value}: {EXPLAINED[rule]}" in said
    assert "position 4 is tensorizer_config_dict to the sender, load_inplace to the" in said


def test_diff_says_what_it_can_not_compare() -> None:
    done = CliRunner().invoke(main, ["wire", "diff", "0.29.0", "0.34.0"])
    assert done.exit_code == 2
    assert done.output.startswith("0.34.0 is neither a folder with an unpacked vLLM, nor a wheel, ")
    assert "nor a release with a stored wire table (0.29.0, 0.30.0," in done.output


# A wire of one message M, sent by the engine, in many versions.


def wire(form: Form, fields: list[Field], **options: Any) -> Schema:
    message = Message("m", form, tuple(fields), **options)
    roots = (Root("M", Direction.TO_FRONTEND),)
    kinds = Enumeration("m", {"A": "0", "B": "1"})
    return Schema("x", roots, {"M": message}, {"Kind": kinds}, {})


def breaches(sent: Schema, read: Schema) -> list[Breach]:
    """What keeps a frontend of ``read`` from an engine of ``sent``."""
    return list(compare(read, sent).breaches[Pairing.NEW_ENGINE])


VALUES = {"int": 7, "str": "word", "float": 1.5, "list[int]": [1, 2], "bool": True}
DEFAULTS = {"int": "0", "str": "''", "float": "0.25", "list[int]": "[]", "bool": "False"}
HINTS: dict[str, Any] = {
    "int": int,
    "str": str,
    "float": float,
    "list[int]": list[int],
    "bool": bool,
    "None": None,
}


@st.composite
def fields(draw: st.DrawFn) -> list[Field]:
    """Fields in an order that Python allows: those without a default first."""
    names = draw(st.lists(st.sampled_from("abcde"), unique=True, max_size=5))
    required = draw(st.integers(0, len(names)))
    made = []
    for at, name in enumerate(names):
        kind = draw(st.sampled_from(list(VALUES)))
        optional = draw(st.booleans())
        text = f"{kind} | None" if optional else kind
        choices = ["None"] if optional else []
        default = draw(st.sampled_from([*choices, DEFAULTS[kind]])) if at >= required else None
        made.append(Field(name, text, default))
    return made


@st.composite
def versions(draw: st.DrawFn) -> tuple[list[Field], list[Field]]:
    """Two versions of a message: at random, or one grown, cut or altered from the other."""
    one = draw(fields())
    how = draw(st.sampled_from(["random", "append", "cut", "insert", "retype", "redefault"]))
    if how == "random" or not one:
        return one, draw(fields())
    at = draw(st.integers(0, len(one) - 1))
    other = list(one)
    if how == "append":
        other.append(Field("z", "int", draw(st.sampled_from([None, "0"]))))
    elif how == "cut":
        del other[at:]
    elif how == "insert":
        other.insert(at, Field("z", "int", one[at].default and "0"))
    elif how == "retype":
        other[at] = replace(other[at], type=f"{one[at].type.removesuffix(' | None')} | None")
    elif one[at].default is not None and one[at].type.startswith("int"):
        other[at] = replace(other[at], default="5")
    pair = (one, other) if draw(st.booleans()) else (other, one)
    return pair if all(_possible(side) for side in pair) else (one, one)


def _possible(side: list[Field]) -> bool:
    optional = [entry.default is not None for entry in side]
    return optional == sorted(optional)


def real(form: Form, side: list[Field], options: dict[str, Any]) -> type:
    """The class that such a table stands for."""
    hints = [HINTS[p] for f in side for p in [f.type.removesuffix(" | None")]]
    hints = [h | None if f.type.endswith("None") else h for h, f in zip(hints, side, strict=True)]
    named = [(f.name, h) for f, h in zip(side, hints, strict=True)]
    if form is Form.TUPLE:
        made = NamedTuple("M", named)  # type: ignore[misc]
        defaults = {f.name: eval(f.default) for f in side if f.default is not None}
        made._field_defaults = defaults  # type: ignore[attr-defined]
        made.__new__.__defaults__ = tuple(defaults.values())
        return made
    specs = [
        (name, hint) if f.default is None else (name, hint, eval(f.default))
        for (name, hint), f in zip(named, side, strict=True)
    ]
    return msgspec.defstruct(
        "M",
        specs,
        array_like=form is Form.ARRAY,
        omit_defaults=options.get("omits_defaults", False),
        forbid_unknown_fields=options.get("strict", False),
    )


def samples(side: list[Field]) -> list[dict[str, Any]]:
    """Values that bring out a difference: all set, all default, each in turn None or default."""
    full = {f.name: VALUES[f.type.removesuffix(" | None")] for f in side}
    defaults = {f.name: eval(f.default) for f in side if f.default is not None}
    found = [full, {**full, **defaults}]
    for entry in side:
        if entry.type.endswith("None"):
            found.append({**full, entry.name: None})
        if entry.default is not None:
            found.append({**full, entry.name: defaults[entry.name]})
    return found


def readable(sender: type, receiver: type, sent: list[Field], read: list[Field]) -> bool:
    """Whether msgspec's decoder of one class gets out what its encoder of the other put in."""
    both = [f.name for f in sent if f.name in {g.name for g in read}]
    for values in samples(sent):
        packed = msgspec.msgpack.encode(sender(**values))
        try:
            found = msgspec.msgpack.decode(packed, type=receiver)
        except msgspec.MsgspecError:
            return False
        told = {f.name: getattr(found, f.name) for f in read}
        if any(told[name] != values[name] for name in both):
            return False
        # A value that appears where nobody sent it.
        defaults = {f.name: f.default for f in read if f.name not in both}
        if any(told[name] != eval(text or "None") for name, text in defaults.items()):
            return False
    return True


A, B = Field("a", "int"), Field("b", "int", "0")


@settings(max_examples=400, deadline=None)
@example(([A, B], [A, replace(B, default="5")]), Form.MAP, False, True)
@example(([A, B], [A, replace(B, default=None)]), Form.MAP, False, True)
@example(([A, B], [A, replace(B, default="5")]), Form.MAP, False, False)
@example(([A, B], [A]), Form.MAP, True, False)
@example(([A, B], [A]), Form.MAP, False, False)
@given(
    versions(),
    st.sampled_from([Form.ARRAY, Form.MAP, Form.TUPLE]),
    st.booleans(),
    st.booleans(),
)
def test_the_verdict_is_msgspecs(
    pair: tuple[list[Field], list[Field]], form: Form, strict: bool, omit: bool
) -> None:
    sent, read = pair
    options: dict[str, Any] = {} if form is Form.TUPLE else {"strict": strict}
    if form is Form.MAP:
        options["omits_defaults"] = omit
    found = breaches(wire(form, sent, **options), wire(form, read, **options))
    sender, receiver = real(form, sent, options), real(form, read, options)
    works = readable(sender, receiver, sent, read)
    if not found:
        assert works, (sent, read)
    elif works:
        # Stricter than msgspec in one thing: a position may not change its name.
        assert {breach.rule for breach in found} == {Rule.APPEND_ONLY}, (found, sent, read)
        assert [f.name for f in sent] != [f.name for f in read]


def test_arrays_send_every_position_whatever_omit_defaults_says() -> None:
    made = msgspec.defstruct(
        "M", [("a", int, 1), ("b", int, 2)], array_like=True, omit_defaults=True
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made())) == [1, 2]


def test_dataclasses_send_every_field_and_ignore_unknown_ones() -> None:
    old = dataclasses.make_dataclass("M", [("a", int), ("b", int, 2)])
    new = dataclasses.make_dataclass("M", [("a", int), ("c", int, 3)])
    packed = msgspec.msgpack.encode(old(1))
    assert msgspec.msgpack.decode(packed) == {"a": 1, "b": 2}
    assert msgspec.msgpack.decode(packed, type=new) == new(1, 3)


@pytest.mark.parametrize(
    ("sent", "read", "rule"),
    [
        ("int", "float", None),
        ("float", "int", Rule.SAME_TYPE),
        ("bool", "int", Rule.SAME_TYPE),
        ("list[int]", "set[int]", None),
        ("list[int | None]", "list[int]", Rule.SAME_TYPE),
        ("tuple[int, ...]", "Sequence[int]", None),
        ("tuple[int, str]", "list[int]", Rule.SAME_TYPE),
        ("dict[str, int]", "Mapping[str, float]", None),
        ("dict[str, int]", "dict[str, str]", Rule.SAME_TYPE),
        ("int", "Any", None),
        ("Any", "int", Rule.SAME_TYPE),
        ("Literal['a']", "Literal['a', 'b'] | None", None),
        ("Literal['a', 'c']", "Literal['a', 'b']", Rule.SAME_TYPE),
        ("Literal['a', 'b']", "str", None),
        ("str", "Literal['a', 'b']", Rule.SAME_TYPE),
        ("Kind", "Kind", None),
        ("Kind", "int", None),
        ("Kind", "str", Rule.SAME_TYPE),
        ("int", "Kind", Rule.SAME_TYPE),
        ("numpy.ndarray", "torch.Tensor", Rule.SAME_TYPE),
        ("numpy.ndarray", "numpy.ndarray | None", None),
        ("M", "M | None", None),
        ("dict[str, list[M]]", "dict[str, list[M]]", None),
    ],
)
def test_what_a_type_accepts(sent: str, read: str, rule: Rule | None) -> None:
    found = breaches(wire(Form.ARRAY, [Field("a", sent)]), wire(Form.ARRAY, [Field("a", read)]))
    assert [breach.rule for breach in found] == ([rule] if rule else [])


def test_a_difference_inside_containers_is_found() -> None:
    """M holds lists of itself, and lost its only position."""
    sent = wire(Form.ARRAY, [Field("a", "dict[str, list[N]]")])
    inner = {"N": Message("m", Form.ARRAY, (Field("x", "int"),))}
    other = {"N": Message("m", Form.ARRAY, (Field("y", "int"),))}
    one = replace(sent, messages={**sent.messages, **inner})
    two = replace(sent, messages={**sent.messages, **other})
    (breach,) = breaches(one, two)
    assert (breach.message, breach.rule) == ("N", Rule.APPEND_ONLY)


def test_forms_values_codes_and_roots_count_too() -> None:
    base = wire(Form.ARRAY, [Field("a", "Kind", "None")])
    packed = replace(base, messages={"M": replace(base.messages["M"], form=Form.MAP)})
    assert [b.rule for b in breaches(packed, base)] == [Rule.SAME_FORM]
    tagged = replace(base, messages={"M": replace(base.messages["M"], tag="'x'")})
    assert [b.rule for b in breaches(tagged, base)] == [Rule.SAME_FORM]
    more = replace(base, enums={"Kind": Enumeration("m", {"A": "0", "B": "1", "C": "2"})})
    assert [b.rule for b in breaches(more, base)] == [Rule.KNOWN_VALUES]
    assert breaches(base, more) == []
    swapped = replace(base, enums={"Kind": Enumeration("m", {"A": "1", "B": "0"})})
    assert {b.rule for b in breaches(swapped, base)} == {Rule.KNOWN_VALUES}
    coded = replace(base, extensions={"CUSTOM_TYPE_X": 9})
    assert [b.rule for b in breaches(coded, base)] == [Rule.SAME_FORM]
    silent = replace(base, roots=())
    assert [b.rule for b in breaches(base, silent)] == [Rule.SAME_FORM]
    told = {(c.message, c.what) for c in changes(base, more)}
    assert told == {("Kind", "added")}
    assert {c.what for c in changes(base, packed)} == {"form"}
