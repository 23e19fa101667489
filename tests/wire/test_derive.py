"""derive: sources made for one question each; what isn't understood is an error, never a guess."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_ext.core.release import installation
from vllm_ext.wire.derive import derive
from vllm_ext.wire.schema import Schema
from vllm_ext.wire.source import UnderivableError

ENGINE = """
import enum
import msgspec
from dataclasses import dataclass
from vllm.limits import IMPORTED, TWICE, Kind
from elsewhere import OUTSIDE

HERE = IMPORTED
OPTIONS = {"omit_defaults": True}

class EngineCoreRequest(msgspec.Struct, omit_defaults=True):
    FIELD

class ReconfigureDistributedRequest(msgspec.Struct):
    a: int

class EngineCoreReadyResponse(msgspec.Struct):
    a: int

class EngineCoreOutputs(msgspec.Struct, array_like=True):
    LAST

class EngineCoreRequestType(enum.Enum):
    ADD = b"\\x00"
    MEMBER
"""
LIMITS = """
import enum

IMPORTED = {value}
TWICE = 1
try:
    TWICE = 2
except ValueError:
    pass

class Kind(enum.Enum):
    ALL = 0
    SOME = {member}
"""


def made(
    folder: Path,
    field: str = "a: int",
    member: str = "",
    last: str = "a: int",
    value: str = "5",
    kind: str = "1",
    replaced: tuple[str, str] = ("", ""),
) -> Schema:
    engine = folder / "vllm" / "v1" / "engine"
    engine.mkdir(parents=True, exist_ok=True)
    text = ENGINE.replace("FIELD", field).replace("MEMBER", member).replace("LAST", last)
    assert replaced[0] in text
    (engine / "__init__.py").write_text(text.replace(*replaced) if replaced[0] else text)
    (engine / "utils.py").write_text(
        "import msgspec\nclass EngineHandshakeMetadata(msgspec.Struct):\n    a: int\n"
    )
    (folder / "vllm" / "v1" / "__init__.py").touch()
    (folder / "vllm" / "v1" / "serial_utils.py").write_text("CUSTOM_TYPE_RAW_VIEW = 3\n")
    (folder / "vllm" / "__init__.py").touch()
    (folder / "vllm" / "limits.py").write_text(LIMITS.format(value=value, member=kind))
    (folder / "vllm" / "_version.py").write_text("__version__ = version = '0.33.0'\n")
    installed = installation(folder)
    assert installed is not None
    return derive(installed)


def test_keywords_that_can_not_be_read_are_an_error(tmp_path: Path) -> None:
    for old in (", array_like=True", ", omit_defaults=True"):
        with pytest.raises(UnderivableError, match=r"takes keywords from \*\*OPTIONS"):
            made(tmp_path, replaced=(old, ", **OPTIONS"))


@pytest.mark.parametrize(
    ("member", "members"),
    [
        ("NEW: int = 5", {"NEW": "5"}),
        ("A = B = 1", {"A": "1", "B": "1"}),
        ("A = IMPORTED", {"A": "5"}),
        ("A = 1\n    B = A", {"A": "1", "B": "1"}),
        ("HINT: int", {}),
    ],
)
def test_every_way_to_write_a_member_counts(
    member: str, members: dict[str, str], tmp_path: Path
) -> None:
    found = made(tmp_path, member=member).enums["EngineCoreRequestType"].members
    assert found == {"ADD": "b'\\x00'", **members}


@pytest.mark.parametrize(
    ("member", "told"),
    [
        ("A, B = 1, 2", "sets more than names: A, B = (1, 2)"),
        ("if HERE:\n        A = 1", "`A = 1` inside another statement"),
        ("A = OUTSIDE", "the value of OUTSIDE can't be told"),
        ("A = 5\n    B = enum.auto()", "numbers itself"),
        ("def __new__(cls, value): ...", "makes its values itself"),
    ],
)
def test_members_that_can_not_be_told_are_an_error(member: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(UnderivableError) as caught:
        made(tmp_path, member=member)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    "last", ["if HERE:", "try:", "with HERE:", "for x in HERE:", "while HERE:"]
)
def test_a_field_inside_another_statement_is_an_error(last: str, tmp_path: Path) -> None:
    end = "\n    finally:\n        pass" if last == "try:" else ""
    with pytest.raises(UnderivableError, match="`b: int = 0` inside another statement"):
        made(tmp_path, last=f"a: int\n    {last}\n        b: int = 0{end}")
    # What stands in a method, or isn't a field, says nothing about the wire.
    made(tmp_path, last="a: int\n    def f(self):\n        b: int = 0\n    if HERE:\n        pass")


def test_a_default_given_to_a_field_afterwards_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnderivableError, match="gives a field its default: a = 1"):
        made(tmp_path, last="a: int\n    a = 1")


@pytest.mark.parametrize(
    ("default", "shown"),
    [
        ("IMPORTED", "5"),
        ("HERE", "5"),
        ("-HERE", "-5"),
        ("msgspec.field(default=HERE)", "5"),
        ("Kind.SOME", "Kind.SOME"),
        ("float('inf')", "float('inf')"),
    ],
)
def test_a_default_is_followed_to_its_value(default: str, shown: str, tmp_path: Path) -> None:
    found = made(tmp_path, f"a: int = {default}")
    assert found.messages["EngineCoreRequest"].fields[0].default == shown
    # A change of the constant, or of the member's value, is a change of the table.
    assert made(tmp_path, f"a: int = {default}", value="6", kind="7") != found or "inf" in shown


@pytest.mark.parametrize("default", ["OUTSIDE", "TWICE", "Kind.GONE", "UNKNOWN", "OUTSIDE()"])
def test_a_default_that_can_not_be_followed_is_an_error_where_it_is_left_out(
    default: str, tmp_path: Path
) -> None:
    with pytest.raises(UnderivableError, match="can't be told"):
        made(tmp_path, f"a: int = {default}")
    sent = made(tmp_path, last=f"a: int = {default}").messages["EngineCoreOutputs"]
    assert sent.fields[0].default == default
