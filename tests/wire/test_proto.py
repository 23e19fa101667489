"""The gate of the gRPC schemas: build, lint, no break of the released ones, fresh stubs."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet

from tests.beds.layout import ROOT
from tests.beds.protos import PROTO, RELEASED, SOURCES, buf, generate, schemas
from vllm_ext import __version__
from vllm_ext.wire.proto import control_pb2, inference_pb2

AGAINST = ("breaking", ".", "--against", str(RELEASED))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of all that the gate looks at."""
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    (tmp_path / "src" / PROTO).mkdir(parents=True)
    for name in schemas():
        shutil.copy(SOURCES / name, tmp_path / "src" / name)
    return tmp_path


@pytest.mark.parametrize("step", [("build", "."), ("lint", "."), AGAINST], ids=lambda step: step[0])
def test_the_gate_is_passed(step: tuple[str, ...]) -> None:
    done = buf(*step)
    assert done.returncode == 0, done.stdout


# What a release must not do to the clients of the last one, and what buf says of it.
BREAKING = {
    "number": ("string cache_salt = 2;", "string cache_salt = 5;", "cache_salt"),
    "type": ("uint32 num_tokens = 3;", "string num_tokens = 3;", "num_tokens"),
    "presence": ("optional float temperature = 5;", "float temperature = 5;", "temperature"),
    "label": ("repeated uint32 token_ids = 4;", "uint32 token_ids = 4;", "token_ids"),
    "name": ("uint32 num_output_tokens = 1;", "uint32 output_tokens = 1;", "num_output_tokens"),
    "field gone": ("  int32 priority = 12;\n", "", "priority"),
    "oneof left": ("    bool all = 3;\n  }\n", "  }\n  bool all = 3;\n", "all"),
    "enum value": (
        "    LENGTH = 1;\n    STOP = 2;\n",
        "    LENGTH = 2;\n    STOP = 1;\n",
        "LENGTH",
    ),
    "call gone": (
        "  rpc Generate(GenerateRequest) returns (GenerateResponse);\n",
        "",
        "Generate",
    ),
    "no stream": ("returns (stream GenerateResponse)", "returns (GenerateResponse)", "stream"),
    "package": ("package vllm;", "package vllm_ext;", "package"),
}


@pytest.mark.parametrize("name", BREAKING)
def test_a_break_is_found(name: str, tree: Path) -> None:
    old, new, told = BREAKING[name]
    path = tree / "src" / PROTO / "inference.proto"
    text = path.read_text()
    assert text.count(old) >= 1
    path.write_text(text.replace(old, new, 1))
    if name == "package":
        other = path.with_name("control.proto")
        other.write_text(other.read_text().replace(old, new, 1))
    assert buf("build", ".", cwd=tree).returncode == 0
    done = buf(*AGAINST, cwd=tree)
    assert done.returncode == 100, done.stdout
    assert told in done.stdout


def test_an_addition_is_no_break(tree: Path) -> None:
    path = tree / "src" / PROTO / "inference.proto"
    text = path.read_text()
    field = "  int32 priority = 12;\n"
    assert field in text
    path.write_text(text.replace(field, f"{field}  string extra = 900;\n"))
    done = buf(*AGAINST, cwd=tree)
    assert done.returncode == 0, done.stdout


def test_lint_and_build_find_what_is_wrong(tree: Path) -> None:
    path = tree / "src" / PROTO / "inference.proto"
    text = path.read_text()
    path.write_text(text.replace("package vllm;", "package vllm_ext;"))
    assert buf("lint", ".", cwd=tree).returncode == 100
    path.write_text(text.replace("int32 priority = 12;", "int32 priority = 11;"))
    assert buf("build", ".", cwd=tree).returncode == 100


def test_the_stubs_are_what_the_schemas_give(tmp_path: Path) -> None:
    made = {path.name: path.read_text() for path in generate(tmp_path)}
    there = {path.name: path.read_text() for path in (SOURCES / PROTO).glob("*_pb2*")}
    assert made == there, "run python -m tests.beds.protos"


def test_the_baseline_holds_the_files_of_the_package() -> None:
    released = FileDescriptorSet.FromString(RELEASED.read_bytes())
    ours = {file.name: file for file in released.file if file.package == "vllm"}
    assert set(ours) == set(schemas())
    assert {service.name for file in ours.values() for service in file.service} == {
        "Control",
        "Inference",
    }


@pytest.mark.parametrize("page", ["README.md", "docs/wire.md"])
def test_the_pages_pin_this_version(page: str) -> None:
    pins = re.findall(r"vllm-ext\[grpc\]==([\w.]+)", (ROOT / page).read_text())
    assert pins == [__version__]


def test_the_stubs_import_with_the_installed_runtime() -> None:
    request = inference_pb2.GenerateRequest(text="x", temperature=0.0)
    assert request.HasField("temperature") and request.WhichOneof("prompt") == "text"
    assert inference_pb2.GenerateRequest.FromString(request.SerializeToString()) == request
    assert control_pb2.DESCRIPTOR.services_by_name["Control"].full_name == "vllm.Control"
