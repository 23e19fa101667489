"""list and explain: what is declared and recorded, as tables and as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from tests.beds.layout import RELEASES
from tests.conftest import FEATURES
from vllm_ext.cli import main
from vllm_ext.core.feature import Verdict
from vllm_ext.core.release import RECORDS

VERDICTS = {
    "CACHE_KEYS": {
        "compile_key": "active active active active active",
        "modelinfos": "active active active active active",
    },
    "CONSUMER_EMBEDS": {
        "accept": "active native native native native",
        **dict.fromkeys(("kv_both", "text_only", "mm_prefix"), "idle active active active active"),
        "lacking_items": "active active active active active",
        "client_error": "active active active active native",
        "tensor_sizes": "active active active active active",
        "unreadable": "active active active active active",
    },
    "NAN_LOGPROBS": {
        **dict.fromkeys(
            ("completions", "chat", "responses", "prompt_logprobs", "transcription"),
            "active active active active active",
        ),
        "token_in": "active active active native native",
        "token_in_inf": "idle idle idle active active",
        "rust_ranks": "active active native native native",
    },
    "NAN_CONTAINMENT": {
        "notice": "active active active active active",
        "contain": "active active active active active",
        "wipe": "active active active active active",
        "notice_v2": "active active active active active",
        "wipe_v2": "active active active active active",
        "error_policy": "active active active active active",
        "error_message": "active active active active native",
    },
    "MAX_LOAD_TOKENS": {
        "cap": "active active native native native",
        "exact": "idle idle active active active",
        "simple_cpu": "active active active active active",
        "default": "active active active active active",
        "invalid_values": "active active active active active",
        "strict": "active active active active active",
    },
    "HOST_OFFLOAD": {
        "spec": "active active active active active",
        "default_spec": "active active active active active",
        "simple_worker": "active active active active active",
    },
    "HYBRID_PREFIX_HITS": {
        **dict.fromkeys(
            ("fine_hits", "stepping", "stats", "lazy", "skip_reading"),
            "active native native native native",
        ),
        "lost_keys": "active active active active active",
        "chunk_start": "active active active active native",
        "preempted_rows": "active active active native native",
        "full_rows": "active active active active native",
        "reset_pins": "active active active native native",
        "counters": "active active native native native",
    },
    "MOE_RSLORA": {
        "scaling": "active active active native native",
        "patterns": "active active active native native",
        "uneven_experts": "active active active active active",
    },
    "LORA_BASE_REQUESTS": {
        "base_rows": "active active active active native",
        "prompt_rows": "active active active active active",
    },
    "MOONCAKE_HETERO_PP": {
        "hetero_pp": "active native native native native",
        "peers": "active active active active active",
        "failed_pulls": "active native native native native",
        "unreported": "idle active active active native",
        "stages": "active active active active active",
        "old_peer": "active active active active active",
    },
    "MM_UUIDS": {
        "explicit": "active native native native native",
        "fallback": "active active active active active",
        "refusal": "active active active active active",
        "store_path": "active active active active active",
        "embed_count": "active active native native native",
    },
    "SCORE_USAGE": {
        "prompt_tokens": "active native native native native",
        "missing_inputs": "idle active active active active",
        "cached_tokens": "active active active active active",
    },
}


def _run(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "80"}).invoke(main, list(arguments), prog_name="vllm-ext")


def _listed() -> dict[str, dict[str, Any]]:
    done = _run("list", "--json")
    assert done.exit_code == 0, done.output
    return {feature["name"]: feature for feature in json.loads(done.stdout)}


def test_the_real_command_prints_the_same() -> None:
    command = Path(sys.executable).with_name("vllm-ext")
    done = subprocess.run([command, "list", "--json"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == _run("list", "--json").stdout


def test_json_has_the_promised_shape_for_every_feature() -> None:
    listed = _listed()
    assert list(listed) == sorted(FEATURES)
    for name, feature in listed.items():
        declared = FEATURES[name]
        assert feature["toggle"] == f"VLLM_EXT_{name}"
        assert (feature["area"], feature["summary"]) == (declared.area, declared.summary)
        assert feature["upstream_pr"] == list(declared.upstream_pr)
        assert [o["name"] for o in feature["options"]] == [
            f"VLLM_EXT_{name}_{option.name}" for option in declared.options
        ]
        assert list(feature["releases"]) == list(RELEASES)
        for part, declared_part in zip(feature["parts"], declared.parts, strict=True):
            assert part["name"] == declared_part.name
            assert set(part["seam"].split(", ")) <= {"Wrap", "Add", "Register", "Subclass", "Edit"}
            assert part["targets"] == [seam.target for seam in declared_part.seams]
            assert list(part["releases"]) == list(RELEASES)


def test_verdicts_are_the_recorded_ones() -> None:
    """Read from the record files themselves."""
    listed = _listed()
    for release in RELEASES:
        recorded = json.loads((RECORDS / f"{release}.json").read_text())["parts"]
        shown = {
            f"{name}.{part['name']}": part["releases"][release]
            for name, feature in listed.items()
            for part in feature["parts"]
        }
        assert shown == {part: entry["verdict"] for part, entry in recorded.items()}


@pytest.mark.parametrize("name", VERDICTS)
def test_verdicts_per_release(name: str) -> None:
    feature = _listed()[name]
    shown = {p["name"]: " ".join(p["releases"].values()) for p in feature["parts"]}
    assert shown == VERDICTS[name]


def test_a_features_verdict_is_its_worst_parts() -> None:
    order = list(map(str, Verdict))
    for feature in _listed().values():
        for release, verdict in feature["releases"].items():
            parts = [part["releases"][release] for part in feature["parts"]]
            assert verdict == min(parts, key=order.index)


def test_the_table_shows_every_feature_and_part_on_a_narrow_terminal() -> None:
    lines = _run("list").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    for name, feature in _listed().items():
        at = next(at for at, line in enumerate(lines) if f" {name} " in line)
        assert f" {feature['area']}" in lines[at + 1]
        for part in feature["parts"]:
            (line,) = [line for line in lines if f"   {part['name']} " in line]
            assert [word for word in line.split() if word in list(Verdict)] == list(
                part["releases"].values()
            )
            assert ("(option)" in line) == bool(part["option"])


def test_connectors_have_a_configuration_to_paste() -> None:
    """vLLM takes it as it stands: tests/kv/test_host_offload.py."""
    done = _run("list", "--connectors", "--json")
    assert done.exit_code == 0, done.output
    listed = json.loads(done.stdout)
    shown = _run("list", "--connectors").stdout.splitlines()
    assert [one["name"] for one in listed] == [
        "HostOffloadingSpec",
        "CPUOffloadingSpec",
        "SimpleCPUOffload",
    ]
    for one in listed:
        config = json.loads(one["kv_transfer_config"])
        assert (config["kv_role"], set(one["releases"])) == ("kv_both", set(RELEASES))
        assert f"--kv-transfer-config '{one['kv_transfer_config']}'" in shown
        (row,) = [line for line in shown if f"│ {one['name']} " in line]
        assert [word for word in row.split() if word in list(Verdict)] == list(
            one["releases"].values()
        )
        assert f"{one['name']}: {one['summary']}" in shown


def test_listing_connectors_imports_neither_vllm_nor_torch() -> None:
    code = (
        "import sys; from vllm_ext.cli import main; "
        "main(['list', '--connectors'], standalone_mode=False); "
        "print({'vllm', 'torch', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize("spelt", ["SCORE_USAGE", "score_usage", "vllm_ext_Score_Usage"])
def test_explain_tells_everything_declared(spelt: str) -> None:
    done = _run("explain", spelt)
    assert done.exit_code == 0, done.output
    told = " ".join(done.stdout.replace("│", " ").split())
    feature = FEATURES["SCORE_USAGE"]
    assert feature.summary in told and feature.why in told
    assert "VLLM_EXT_SCORE_USAGE = auto (default) | 1 | 0" in told
    assert all(f"#{number}" in told for number in feature.upstream_pr)
    assert all(f"{feature.variable(o)} (" in told and o.summary in told for o in feature.options)
    for part in feature.parts:
        assert f"{part.name}: {part.summary}" in told
        assert all(target in told for target in (*part.targets, *part.relies_on))
    reason = json.loads((RECORDS / "0.29.0.json").read_text())["parts"][
        "SCORE_USAGE.prompt_tokens"
    ]["reason"]
    assert f"0.29.0 active {reason}" in told


@pytest.mark.parametrize("name", sorted(FEATURES))
def test_explain_knows_every_feature(name: str) -> None:
    assert _run("explain", name.lower()).exit_code == 0


def test_explain_of_an_unknown_feature_names_the_known_ones() -> None:
    done = _run("explain", "SCORE_USAG")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "there is no feature 'SCORE_USAG'" in done.stderr
    assert all(name in done.stderr for name in FEATURES)


def test_help_lists_the_commands() -> None:
    done = _run("--help")
    assert done.exit_code == 0
    listed = done.stdout.partition("Commands:")[2].split("\n")
    names = {line.split()[0] for line in listed if line.startswith("  ") and line[2] != " "}
    assert {"list", "explain", "doctor", "demo", "record"} <= names
    assert names == {name for name, command in main.commands.items() if not command.hidden}
    for name, command in main.commands.items():
        assert isinstance(command, click.Command) and command.help, name
