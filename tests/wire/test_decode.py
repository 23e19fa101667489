"""decode: what vLLM's own decoder reads, by name; damage is a sentence; pickles are refused."""

from __future__ import annotations

import base64
import dataclasses
import enum
import json
import math
import pickle
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.beds.layout import ROOT
from vllm_ext.cli import main
from vllm_ext.wire.capture import CaptureError, as_line, read_capture
from vllm_ext.wire.decode import Decoded, Record, Tensor, as_data, decode
from vllm_ext.wire.schema import Schema, stored


def table(name: str) -> Schema:
    found = stored(name)
    assert found is not None
    return found


def run(path: Path, *arguments: str) -> Result:
    command = ["wire", "decode", str(path), *arguments]
    return CliRunner().invoke(main, command, env={"COLUMNS": "160"})


def expected(value: Any) -> Any:
    """A message as vLLM's decoder gave it, in the form of ``as_data``."""
    import torch
    from vllm.v1.serial_utils import UtilityResult

    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        widened = value.float() if value.dtype == torch.bfloat16 else value
        return {"dtype": dtype, "shape": list(value.shape), "values": expected(widened.tolist())}
    if isinstance(value, np.ndarray):
        shape = list(value.shape)
        return {"dtype": value.dtype.str, "shape": shape, "values": expected(value.tolist())}
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, UtilityResult):
        return [None, expected(value.result)]
    if isinstance(value, msgspec.Struct):
        return {name: expected(getattr(value, name)) for name in value.__struct_fields__}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: expected(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: expected(item) for name, item in value._asdict().items()}
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, list | tuple | set):
        return [expected(item) for item in value]
    if isinstance(value, dict):
        return {str(key): expected(item) for key, item in value.items()}
    return value


def named(message: Decoded) -> Any:
    return as_data(message)["value"]


@pytest.mark.parametrize("threshold", [1, 256, 2**40], ids=["own frames", "stock", "inline"])
def test_outputs_are_what_vllms_decoder_reads(installed_release: str, threshold: int) -> None:
    from tests.beds import wire_messages as bed

    packed = bed.frames(bed.outputs(), threshold)
    found = decode(packed, table(installed_release))
    assert (found.kind, found.direction.value) == ("EngineCoreOutputs", "engine to frontend")
    assert named(found) == expected(bed.as_vllm_reads(packed, bed.EngineCoreOutputs))


def test_nan_and_rank_0_are_shown_as_they_are(installed_release: str) -> None:
    from tests.beds import wire_messages as bed

    value = named(decode(bed.frames(bed.outputs()), table(installed_release)))
    logprobs = value["outputs"][0]["new_logprobs"]
    assert logprobs["logprobs"]["values"] == [["NaN", "NaN", "-Infinity"]]
    assert logprobs["sampled_token_ranks"]["values"] == [0]
    assert value["outputs"][0]["finish_reason"] == "ERROR"
    assert value["outputs"][0]["num_nans_in_logits"] == 3


@pytest.mark.parametrize("identity", [None, b"\x00\x00", b"\x01\x00"])
def test_requests_are_what_vllms_decoder_reads(
    installed_release: str, identity: bytes | None
) -> None:
    from tests.beds import wire_messages as bed

    sent = bed.request_frames(identity)
    found = decode(sent, table(installed_release))
    assert (found.kind, found.direction.value) == ("EngineCoreRequest", "frontend to engine")
    assert found.identity == identity
    read = bed.as_vllm_reads(sent[1 if identity is None else 2 :], bed.EngineCoreRequest)
    ours, theirs = named(found), expected(read)
    # A map without its defaults, and an item that vLLM packs in a form of its own.
    parameters = ours.pop("sampling_params")
    assert parameters == {k: theirs["sampling_params"][k] for k in parameters}
    assert {"temperature", "stop", "logit_bias"} <= parameters.keys()
    del theirs["sampling_params"]
    data = ours["mm_features"][0].pop("data")
    item = read.mm_features[0].data["dummy"].data
    assert data["dummy"]["data"]["values"] == item.tolist()
    del theirs["mm_features"][0]["data"]
    assert ours == theirs


def test_the_documented_capture_is_decoded(
    installed_release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.beds import wire_messages as bed

    for owner, name in ((bed.MsgpackEncoder, "encode"), (bed.MsgpackDecoder, "decode")):
        monkeypatch.setattr(owner, name, vars(owner)[name])
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "wire.md").read_text()
    exec(page.partition("```python\n")[2].partition("```")[0], {})
    packed = bed.frames(bed.outputs())
    bed.as_vllm_reads(packed, bed.EngineCoreOutputs)
    bed.MsgpackEncoder().encode(bed.request())
    for payload in ((0, 7, "sleep", (1,)), ["r", "s"]):
        bed.MsgpackEncoder().encode(payload)
    read = list(read_capture(tmp_path / "wire.jsonl"))
    assert [number for number, _ in read] == [1, 2, 3, 4, 5]
    assert read[0][1] == read[1][1] == packed
    found = [decode(frames, table(installed_release)) for _, frames in read]
    assert [message.kind for message in found] == [
        "EngineCoreOutputs", "EngineCoreOutputs", "EngineCoreRequest", "UTILITY", "ABORT",
    ]  # fmt: skip
    assert [message.direction.value for message in found] == (
        ["engine to frontend"] * 2 + ["frontend to engine"] * 3
    )
    assert named(found[2]) == named(decode(bed.request_frames(), table(installed_release)))


def test_handshake_messages_are_told_by_their_fields(installed_release: str) -> None:
    from vllm.v1.engine.utils import EngineHandshakeMetadata, EngineZmqAddresses

    sent = EngineHandshakeMetadata(EngineZmqAddresses(["a"], ["b"]), {"size": 1})
    found = decode([msgspec.msgpack.encode(sent)], table(installed_release))
    assert (found.kind, found.direction.value) == ("EngineHandshakeMetadata", "frontend to engine")
    assert named(found)["addresses"]["inputs"] == ["a"]


# Without vLLM: frames written by hand for the table of 0.32.0.

KNOWN = "0.32.0"
LOGPROBS = [
    ["<i8", [1, 2], msgspec.msgpack.Ext(3, np.array([0, 0]).tobytes())],
    ["<f4", [1, 2], msgspec.msgpack.Ext(3, np.array([math.nan, -1.5], "<f4").tobytes())],
    ["<i8", [1], msgspec.msgpack.Ext(3, np.array([0]).tobytes())],
    None,
]
OUTPUT = ["r", [0], LOGPROBS]
PACKED = msgspec.msgpack.encode([0, [OUTPUT], None, 1.5])


def capture(folder: Path, *messages: list[bytes]) -> Path:
    path = folder / "capture.jsonl"
    path.write_text("".join(as_line(message) + "\n" for message in messages))
    return path


def test_a_capture_file_comes_back_as_it_was(tmp_path: Path) -> None:
    messages = [[PACKED, b"\x00" * 300], [b"\x01", msgspec.msgpack.encode(["r"])]]
    path = capture(tmp_path, *messages)
    assert [frames for _, frames in read_capture(path)] == messages


def test_the_command_prints_tables_and_json(tmp_path: Path) -> None:
    utility = [b"\x03", msgspec.msgpack.encode([0, 9, "sleep", [1]])]
    abort = [b"\x00\x00", b"\x01", msgspec.msgpack.encode(["r"])]
    path = capture(tmp_path, [PACKED], utility, abort, [b"ENGINE_CORE_DEAD"])
    done = run(path, "--release", KNOWN)
    assert done.exit_code == 0, done.output
    assert "1: EngineCoreOutputs, engine to frontend" in done.output
    said = " ".join(done.output.split())
    assert "outputs[0].new_logprobs.logprobs │ <f4 [1, 2]: nan, -1.5 1 not finite" in said
    assert "outputs[0].new_logprobs.sampled_token_ranks │ <i8 [1]: 0" in said
    assert "2: UTILITY" in said and "'sleep'" in said
    assert "4: ENGINE_CORE_DEAD" in said
    messages = json.loads(run(path, "--release", KNOWN, "--json").output)
    assert [m["message"] for m in messages] == [
        "EngineCoreOutputs", "UTILITY", "ABORT", "ENGINE_CORE_DEAD",
    ]  # fmt: skip
    assert messages[0]["value"]["outputs"][0]["new_logprobs"]["logprobs"]["values"] == [
        ["NaN", -1.5]
    ]
    assert messages[1]["value"] == {"client_index": 0, "call_id": 9, "method": "sleep", "args": [1]}
    assert (messages[2]["identity"], messages[2]["value"]) == ("0000", ["r"])


def test_positions_beyond_the_table_are_shown() -> None:
    """A newer engine's appended field, seen by an older table."""
    message = ["r", [1], *[None] * 11, 0, *[None] * 4, ["code", "text", False]]
    found = decode([msgspec.msgpack.encode([0, [message]])], table("0.29.0"))
    assert isinstance(found.value, Record)
    (output,) = found.value.fields["outputs"]
    assert output.surplus == {"position 17": None, "position 18": ["code", "text", False]}


class Evil:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("code", [1, 2, 5])
@pytest.mark.parametrize("place", ["field", "surplus", "request"])
def test_pickles_are_refused_wherever_they_stand(code: int, place: str, tmp_path: Path) -> None:
    ext = msgspec.msgpack.Ext(code, pickle.dumps(Evil(tmp_path / "ran")))
    values: dict[str, list[bytes]] = {
        "field": [msgspec.msgpack.encode([0, [["r", [0], None, None, None, None, ext]]])],
        "surplus": [msgspec.msgpack.encode([0, [], None, 0.0, None, None, None, None, None, ext])],
        "request": [b"\x03", msgspec.msgpack.encode([0, 1, "collective_rpc", [ext]])],
    }
    done = run(capture(tmp_path, values[place]), "--release", KNOWN)
    assert done.exit_code == 1
    name = {1: "pickle", 2: "cloudpickle", 5: "unknown to vLLM"}[code]
    assert f"line 1: extension type {code} ({name}) is refused" in done.output
    assert not (tmp_path / "ran").exists()


DAMAGED = {
    "no msgpack": ([b"\xc1"], "no msgpack"),
    "cut": ([PACKED[:-3]], "no msgpack"),
    "rest": ([PACKED + b"\x00"], "no msgpack"),
    "empty": ([b""], "no msgpack"),
    "a number": ([b"\x2a"], "has 42, where vLLM 0.32.0 sends EngineCoreOutputs;"),
    "huge array": ([b"\xdd\xff\xff\xff\xff"], "no msgpack"),
    "deep": ([b"\x91" * 100_000 + b"\x90"], "no msgpack"),
    "lost frame": (
        [msgspec.msgpack.encode([0, [["r", [0], None, None, ["float32", [64], 1]]]])],
        "data in frame 1",
    ),
    "short frame": (
        [msgspec.msgpack.encode([0, [["r", [0], None, None, ["float32", [64], 1]]]]), b"\x00" * 9],
        "has 9 bytes, expected 256",
    ),
    "object array": (
        [msgspec.msgpack.encode([0, [["r", [0], None, None, ["float32", [-1], 1]]]]), b""],
        "the message has an array",
    ),
    "required field": ([msgspec.msgpack.encode([0, [["r"]]])], "lacks new_token_ids"),
    "another type": (
        [msgspec.msgpack.encode([0, [[5, [0]]]])],
        "has 5 at EngineCoreOutputs.outputs[0].request_id, where vLLM 0.32.0 sends str;",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_a_sentence(name: str, tmp_path: Path) -> None:
    frames, told = DAMAGED[name]
    done = run(capture(tmp_path, frames), "--release", KNOWN)
    assert done.exit_code == 1, done.output
    assert told in done.output and done.output.startswith("line 1: ")
    assert done.exception is None or isinstance(done.exception, SystemExit)
    assert len(done.output.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "holds no message"),
        (b"\n\n", "holds no message"),
        (b"not json\n", "line 1 is no captured message"),
        (b"[]\n", "at least one frame"),
        (b'["no base64!"]\n', "line 1 is no captured message"),
        (b"[1]\n", "line 1 is no captured message"),
        (b'{"frames": []}\n', "line 1 is no captured message"),
        (b"\xff\xfe\n", "line 1 is no captured message"),
    ],
)
def test_a_file_that_is_no_capture_is_a_sentence(content: bytes, told: str, tmp_path: Path) -> None:
    path = tmp_path / "capture.jsonl"
    path.write_bytes(content)
    done = run(path, "--release", KNOWN)
    assert done.exit_code == 1
    assert told in done.output and len(done.output.strip().splitlines()) == 1


def test_an_unknown_release_is_not_guessed(tmp_path: Path) -> None:
    done = run(capture(tmp_path, [PACKED]), "--release", "0.34.0")
    assert done.exit_code == 2
    assert "no stored wire table" in done.output


@pytest.mark.parametrize(
    "dtype", ["object", "O", "V8", "S3", "U2", "M8[s]", "(2,)i4", "x", "f4,f4", ""]
)
def test_types_numpy_should_not_make_stay_without_values(dtype: str) -> None:
    packed = msgspec.msgpack.encode([0, [["r", [0], None, None, [dtype, [1], 1]]]])
    found = decode([packed, b"\x00" * 8], table(KNOWN))
    (output,) = found.value.fields["outputs"]
    assert output.fields["pooling_output"] == Tensor(dtype, (1,), None)


# Whatever comes, it is decoded or told in a sentence.

leaves = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5)
    | st.binary(max_size=9)
    | st.builds(msgspec.msgpack.Ext, st.sampled_from([3, 3, 1, 77]), st.binary(max_size=9))
)  # fmt: skip
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=6)
        | st.dictionaries(st.text(max_size=4) | st.integers(0, 9), inner, max_size=4)
        | st.tuples(st.sampled_from(["<f4", "float32", "O"]), st.lists(st.integers(-1, 3)), inner)
    ),
    max_leaves=25,
)


@st.composite
def messages(draw: st.DrawFn) -> list[bytes]:
    """Frames: noise, packed trees, or a good message with bytes exchanged or cut off."""
    kind = draw(st.sampled_from(["noise", "tree", "outputs", "altered"]))
    aux = draw(st.lists(st.binary(max_size=12), max_size=2))
    head = draw(st.sampled_from([[], [b"\x00"], [b"\x03"], [b"\x00\x00", b"\x00"]]))
    if kind == "noise":
        return [*head, draw(st.binary(max_size=40)), *aux]
    if kind == "tree":
        return [*head, msgspec.msgpack.encode(draw(trees)), *aux]
    if kind == "outputs":
        row = ["r", [0], *draw(st.lists(trees, max_size=16))]
        return [msgspec.msgpack.encode([0, [row]]), *aux]
    damaged = bytearray(PACKED)
    for _ in range(draw(st.integers(0, 3))):
        damaged[draw(st.integers(0, len(damaged) - 1))] = draw(st.integers(0, 255))
    return [bytes(damaged[: draw(st.integers(0, len(damaged)))]), *aux]


@settings(max_examples=600, deadline=None)
@example([PACKED])
@example([])
@given(messages())
def test_anything_is_decoded_or_refused(frames: list[bytes]) -> None:
    try:
        found = decode(frames, table(KNOWN))
    except CaptureError as error:
        assert str(error) and "\n" not in str(error)
        return
    json.dumps(as_data(found), allow_nan=False)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_file_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes(content)
    done = run(path, "--release", KNOWN)
    assert done.exit_code in (0, 1) and isinstance(done.exception, SystemExit | None)


def test_frames_are_plain_base64() -> None:
    assert json.loads(as_line([b"\x00", memoryview(b"ab")])) == [
        base64.b64encode(b"\x00").decode(),
        "YWI=",
    ]


@pytest.mark.parametrize("bad", ["cut", '["!"]'], ids=["damaged message", "damaged line"])
def test_what_stands_before_the_damage_is_shown(bad: str, tmp_path: Path) -> None:
    path = tmp_path / "capture.jsonl"
    path.write_text(f"{as_line([PACKED])}\n{as_line([PACKED[:-3]]) if bad == 'cut' else bad}\n")
    done = run(path, "--release", KNOWN)
    assert done.exit_code == 1
    assert done.stdout.startswith("1: EngineCoreOutputs, engine to frontend")
    assert done.stderr.startswith("line 2") and len(done.stderr.splitlines()) == 1
    done = run(path, "--release", KNOWN, "--json")
    good, error = json.loads(done.stdout)
    assert done.exit_code == 1 and good["message"] == "EngineCoreOutputs"
    assert error == {"error": done.stderr.strip().rstrip(".")}


@pytest.mark.parametrize("arguments", [(), ("--json",)], ids=["table", "json"])
@pytest.mark.parametrize("depth", [150, 250, 330, 500, 900])
def test_deep_values_are_decoded_or_a_sentence(
    depth: int, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    packed = msgspec.msgpack.encode([0, 1, "method"])[:-1].replace(b"\x93", b"\x94", 1) + b"d"
    deep = packed + b"\x91" * depth + b"\x90"
    done = run(capture(tmp_path, [b"\x03", deep]), "--release", KNOWN, *arguments)
    assert done.exception is None or isinstance(done.exception, SystemExit)
    if done.exit_code:
        assert done.exit_code == 1 and "line 1: " in done.output and "nested" in done.output


def test_another_releases_message_is_told_what_to_do(tmp_path: Path) -> None:
    done = run(capture(tmp_path, [msgspec.msgpack.encode([0, [["r"]]])]), "--release", KNOWN)
    assert done.output.endswith("message? name that one with --release.\n")
