"""The wire tables: equal to the source, to what Python itself says, and to nothing else."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.beds.copies import altered
from tests.beds.layout import RELEASES, release_path
from tests.beds.records import record_wire
from vllm_ext.cli import main
from vllm_ext.core.release import installation, recorded_releases
from vllm_ext.wire.derive import derive
from vllm_ext.wire.schema import SCHEMAS, parse, stored, stored_releases

ENGINE = "vllm/v1/engine/__init__.py"


def wire(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["wire", *map(str, arguments)])


@pytest.mark.parametrize("laid_out", RELEASES)
def test_stored_tables_are_what_the_sources_give(laid_out: str) -> None:
    installed = installation(release_path(laid_out))
    assert installed is not None
    text = derive(installed).as_text()
    assert text == (SCHEMAS / f"{laid_out}.json").read_text(), "run make record"
    assert parse(text).as_text() == text


def test_recording_writes_the_shipped_table(tmp_path: Path) -> None:
    folder = release_path("0.33.0")
    assert folder is not None
    assert record_wire(folder, tmp_path)
    (made,) = tmp_path.iterdir()
    assert made.read_bytes() == (SCHEMAS / "0.33.0.json").read_bytes()
    assert not record_wire(tmp_path, tmp_path)


def test_every_recorded_release_has_a_table() -> None:
    assert stored_releases() == recorded_releases() == list(RELEASES)


def test_the_table_is_what_the_imported_classes_are(installed_release: str) -> None:
    from tests.beds.introspection import Introspection, evaluated

    seen, known = Introspection(), stored(installed_release)
    assert known is not None
    assert seen.messages.keys() == known.messages.keys()
    for name, message in known.messages.items():
        real = seen.messages[name]
        ours = (message.module, message.form.value, message.omits_defaults, message.strict)
        assert ours == (real.module, real.form, real.omits_defaults, real.strict), name
        assert (message.tag and ast.literal_eval(message.tag)) == real.tag, name
        written = [(f.name, f.type, evaluated(f.default, message.module)) for f in message.fields]
        assert written == real.fields, name
    enums = {
        name: {member: ast.literal_eval(value) for member, value in entry.members.items()}
        for name, entry in known.enums.items()
    }
    assert enums == seen.enums
    assert known.extensions == seen.extensions


def test_positions_of_the_outputs_are_those_on_the_wire() -> None:
    names = {
        (release, message): [field.name for field in known.messages[message].fields]
        for release in RELEASES
        if (known := stored(release))
        for message in ("EngineCoreOutputs", "EngineCoreOutput")
    }
    assert names["0.29.0", "EngineCoreOutputs"][:8] == [
        "engine_index", "outputs", "scheduler_stats", "timestamp",
        "utility_output", "finished_requests", "wave_complete", "start_wave",
    ]  # fmt: skip
    assert names["0.32.0", "EngineCoreOutputs"].index("weight_version") == 8
    assert names["0.31.0", "EngineCoreOutput"].index("prompt_token_id_logprobs") == 17
    assert names["0.33.0", "EngineCoreOutput"].index("error") == 18


# What is changed in 0.29.0, and what `wire check` says of it.
MUTATIONS = {
    "inserted in the middle": (
        "    prompt_token_ids: list[int] | None\n",
        "    intruder: int\n    prompt_token_ids: list[int] | None\n",
        "append-only: position 1 is prompt_token_ids to the sender, intruder to the receiver",
    ),
    "inserted with a default": (
        "    new_logprobs: LogprobsLists | None = None\n",
        "    intruder: int = 0\n    new_logprobs: LogprobsLists | None = None\n",
        "position 2 is intruder to the sender, new_logprobs to the receiver",
    ),
    "appended": (
        "    start_wave: int | None = None\n",
        "    start_wave: int | None = None\n    weight: str | None = None\n",
        "weight",
    ),
    "removed": ("    cache_salt: str | None\n", "", "cache_salt"),
    "renamed": ("    arrival_time: float\n", "    arrived: float\n", "arrived"),
    "default": ("    priority: int = 0\n", "    priority: int = 1\n", "0 -> 1"),
    "type": ("    stop_reason: int | str | None", "    stop_reason: str | None", "stop_reason"),
    "enum": ("    LENGTH = 1\n", "    LENGTH = 7\n", "1 -> 7"),
    "request type": ('UTILITY = b"\\x03"', 'UTILITY = b"\\x09"', "UTILITY"),
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A linked copy of 0.29.0 whose one file is a real one."""
    line = "import enum\n"
    return altered("0.29.0", tmp_path_factory.mktemp("copy"), ENGINE, line, line)


@pytest.fixture
def source(copy: Path) -> Iterator[Path]:
    """The copy's engine module, put back afterwards."""
    path = copy / ENGINE
    text = path.read_text()
    yield path
    path.write_text(text)


@pytest.mark.parametrize("name", MUTATIONS)
def test_check_finds_a_changed_wire(name: str, source: Path, copy: Path) -> None:
    old, new, told = MUTATIONS[name]
    text = source.read_text()
    assert text.count(old) >= 1
    source.write_text(text.replace(old, new, 1))
    done = wire("check", "--vllm", copy)
    assert done.exit_code == 1, done.output
    rows = json.loads(wire("check", "--vllm", copy, "--json").output)["changes"]
    assert rows and told in done.output + json.dumps(rows), done.output


def test_check_passes_what_only_looks_different(source: Path, copy: Path) -> None:
    text = source.read_text()
    text = text.replace(
        "    arrival_time: float\n", "    # A comment.\n    arrival_time: (float)\n"
    )
    source.write_text(text.replace("    priority: int = 0\n", "    priority: 'int' = (0)\n"))
    done = wire("check", "--vllm", copy)
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("laid_out", RELEASES)
def test_check_passes_every_release(laid_out: str) -> None:
    folder = release_path(laid_out)
    done = wire("check", *(("--vllm", folder) if folder else ()))
    assert done.exit_code == 0, done.output
    assert f"as stored for {laid_out}." in done.output


@pytest.mark.parametrize("version", ["0.33.1", "0.30.0rc1", "1.0.0"])
def test_check_fails_closed_on_an_unknown_release(version: str, copy: Path) -> None:
    stamp = copy / "vllm" / "_version.py"
    target = stamp.resolve()
    stamp.unlink()
    stamp.write_text(f"__version__ = version = '{version}'\n")
    try:
        done = wire("check", "--vllm", copy)
    finally:
        stamp.unlink()
        stamp.symlink_to(target)
    assert done.exit_code == 2, done.output
    assert f"vLLM {version} has no stored wire table" in done.output


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            "class EngineCoreEvent(msgspec.Struct):",
            "class EngineCoreEvent(Unknown):",
            "from Unknown",
        ),
        ("class EngineCoreEvent(", "@made\nclass EngineCoreEvent(", "made by a decorator, @made"),
        ("    timestamp: float\n", "    timestamp: Mystery\n", "the type Mystery"),
        ("    array_like=True,", "    array_like=bool(1),", "array_like=bool(1)"),
        ("import enum\n", "import enum\n)\n", "can't parse"),
        ("class EngineCoreOutputs(", "class Outputs(", "no class vllm.v1.engine.EngineCoreOutputs"),
    ],
)
def test_what_is_not_understood_is_an_error_not_a_guess(
    old: str, new: str, told: str, source: Path, copy: Path
) -> None:
    text = source.read_text()
    assert old in text
    source.write_text(text.replace(old, new, 1))
    done = wire("schema", "--vllm", copy)
    assert done.exit_code == 2, done.output
    assert told in done.output


def test_schema_prints_the_table_and_its_json() -> None:
    done = wire("schema")
    assert done.exit_code == 0
    assert "EngineCoreOutputs: array, engine to frontend" in done.output
    assert wire("schema", "--json").output == (SCHEMAS / "0.29.0.json").read_text()
    assert json.loads(wire("schema", "--release", "0.33.0", "--json").output)["release"] == "0.33.0"


@pytest.mark.parametrize("command", ["schema", "check"])
def test_a_folder_without_vllm_is_told(command: str, tmp_path: Path) -> None:
    done = wire(command, "--vllm", tmp_path)
    assert done.exit_code == 2
    assert f"there is no vLLM in {tmp_path}" in done.output.replace("\n", "")


def test_nothing_of_vllm_is_imported() -> None:
    program = (
        "import sys\nfrom vllm_ext.cli import main\nmain(['wire', 'check'], standalone_mode=False)"
    )
    after = "\nfinally: print(sorted({'vllm', 'torch', 'msgspec', 'numpy'} & set(sys.modules)))"
    program = program.replace("main([", "try: main([") + after
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


@pytest.mark.parametrize(
    "damage",
    [
        b"[" * 100_000,
        b"[]",
        b'{"release": "0.33.0"}',
        b"\xff\xfe",
        b"2",
        ("form", '"array"', '"shape"'),
        ("type", '"type": "int"', '"type": 5'),
        ("type text", '"type": "int"', '"type": "list["'),
        ("literal", '"type": "int"', '"type": "Literal[what]"'),
        ("member", "\"b'\\\\x00'\"", '"nothing that is known"'),
        ("unhashable member", "\"b'\\\\x00'\"", '"[]"'),
        ("members", '"ADD": ', '"ADD": 1, "X": '),
        ("code", '"CUSTOM_TYPE_RAW_VIEW": 3', '"CUSTOM_TYPE_RAW_VIEW": "3"'),
        ("release", '"release": "0.33.0"', '"release": [1]'),
        ("flag", '"strict": false', '"strict": "no"'),
        ("root", '"message": "EngineCoreOutputs"', '"message": "Gone"'),
        ("request types", '"EngineCoreRequestType"', '"Gone"'),
    ],
    ids=str,
)
def test_a_damaged_schema_file_is_a_sentence(
    damage: bytes | tuple[str, str, str], tmp_path: Path
) -> None:
    path = tmp_path / "schema.json"
    text = (SCHEMAS / "0.33.0.json").read_text()
    if isinstance(damage, tuple):
        _, old, new = damage
        assert old in text
        path.write_text(text.replace(old, new))
    else:
        path.write_bytes(damage)
    done = wire("diff", "0.33.0", path)
    assert done.exit_code == 2, done.output
    assert f"{path} holds no wire schema" in done.output
    assert len(done.output.splitlines()) == 1 and isinstance(done.exception, SystemExit)


@pytest.mark.parametrize("named", ["", "../schemas/0.33.0", "/etc/passwd", "0.33"])
def test_only_releases_name_a_stored_table(named: str, tmp_path: Path) -> None:
    capture = tmp_path / "wire.jsonl"
    capture.write_text('["AA=="]\n')
    for command in (["schema"], ["decode", capture]):
        done = wire(*command, "--release", named)
        assert done.exit_code == 2, done.output
        assert "has no stored wire table" in done.output


def test_a_wheel_is_compared_as_it_is(copy: Path, tmp_path: Path) -> None:
    wheel = tmp_path / "vllm-0.29.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in (copy / "vllm").rglob("*.py"):
            archive.write(file, file.relative_to(copy))
    done = wire("diff", "0.29.0", wheel)
    assert done.exit_code == 0 and "No difference." in done.output
    wheel.write_bytes(wheel.read_bytes()[:5000])
    done = wire("diff", "0.29.0", wheel)
    assert done.exit_code == 2 and f"{wheel} can't be unpacked: " in done.output


def test_the_package_itself_names_its_folder(copy: Path) -> None:
    assert wire("check", "--vllm", copy / "vllm").exit_code == 0
