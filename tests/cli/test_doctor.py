"""doctor: what it says of real and of altered releases, and what it costs to ask."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.beds.copies import root_of, skeleton
from tests.beds.foreign import make_plugin
from tests.beds.layout import IN_VENV
from tests.conftest import FEATURES, find_part
from vllm_ext.checks.behaviour import every_option
from vllm_ext.checks.recording import targets_of
from vllm_ext.cli.doctor import _contradictions
from vllm_ext.core.feature import Feature, Judgement, Part, Verdict, worst
from vllm_ext.core.fingerprint import source_file
from vllm_ext.core.plan import plan
from vllm_ext.core.release import Record, installation, record
from vllm_ext.core.seams import module_of, split
from vllm_ext.settings import Settings, variables

COMMAND = Path(sys.executable).with_name("vllm-ext")
EVERY_OPTION = every_option(list(FEATURES.values()))
BUILD_RESPONSE = "vllm.entrypoints.pooling.scoring.serving:ServingScores._build_response"
SIMPLE = (ast.Return, ast.Expr, ast.Assign, ast.AnnAssign, ast.Raise, ast.Assert)


def _environ(variables: Mapping[str, str] = {}) -> dict[str, str]:
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("VLLM_") and name not in ("PYTHONPATH", "COLUMNS")
    }
    return {**clean, **variables}


def _run(*arguments: str | Path, env: Mapping[str, str] = {}) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, "doctor", *arguments], env=_environ(env), capture_output=True, text=True
    )


def _ask(*arguments: str | Path, status: int = 0, env: Mapping[str, str] = {}) -> dict[str, Any]:
    done = _run("--json", *arguments, env=env)
    assert done.returncode == status, done.stdout + done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _parts(answer: dict[str, Any]) -> dict[str, dict[str, str]]:
    return {
        f"{feature['name']}.{part['name']}": part
        for feature in answer["features"]
        for part in feature["parts"]
    }


def _every_part() -> list[tuple[Feature, Part]]:
    return [(feature, part) for feature in FEATURES.values() for part in feature.parts]


def _record(release: str) -> Record:
    known = record(release)
    assert known is not None
    return known


def test_the_answer_has_the_promised_shape() -> None:
    answer = _ask()
    assert answer["vllm"]["version"] == IN_VENV and answer["vllm"]["supported"] is True
    assert Path(answer["vllm"]["path"]) == root_of(IN_VENV) / "vllm"
    assert answer["plugin"]["registered"] is True
    assert [feature["name"] for feature in answer["features"]] == sorted(FEATURES)
    for feature in answer["features"]:
        assert {"name", "verdict", "reason", "parts"} <= feature.keys()
        assert [p["name"] for p in feature["parts"]] == [
            p.name for p in FEATURES[feature["name"]].parts
        ]
        assert all(p["verdict"] in list(Verdict) and p["reason"] for p in feature["parts"])
    assert answer["foreign_plugins"] == [] and answer["problems"] == []


def test_the_tables_show_every_part_with_its_verdict() -> None:
    shown = _run(env={"COLUMNS": "80"})
    assert shown.returncode == 0, shown.stderr
    assert f"vLLM {IN_VENV} in {root_of(IN_VENV) / 'vllm'}\n" in shown.stdout
    lines = shown.stdout.splitlines()
    for part_id, part in _parts(_ask()).items():
        name = part_id.partition(".")[2]
        assert any(name in line and part["verdict"] in line for line in lines), part_id


def test_costs_under_three_seconds_of_cpu() -> None:
    process = subprocess.Popen(
        [COMMAND, "doctor", "--json"], env=_environ(), stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    assert usage.ru_utime + usage.ru_stime < 3


def test_imports_neither_vllm_nor_torch() -> None:
    program = (
        "import json, sys\nfrom vllm_ext.cli import main\nmain(['doctor'], standalone_mode=False)\n"
    )
    ending = "except SystemExit: pass\nprint('\\n' + json.dumps(sorted(sys.modules)))"
    body, call = program.rsplit("main(", 1)
    done = subprocess.run(
        [sys.executable, "-c", f"{body}try: main({call}{ending}"],
        env=_environ(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "SCORE_USAGE" in done.stdout
    modules = json.loads(done.stdout.splitlines()[-1])
    assert "vllm_ext.cli.doctor" in modules
    assert {"vllm", "torch", "numpy", "transformers"}.isdisjoint(modules)


def test_tells_of_each_release_what_was_recorded(release: str) -> None:
    answer = _ask("--vllm", root_of(release), env=EVERY_OPTION)
    assert answer["vllm"]["version"].startswith(release) and answer["vllm"]["supported"]
    known = _record(release)
    parts = _parts(answer)
    for feature, part in _every_part():
        judgement = known.judgement(feature, part)
        shown = parts[feature.part_id(part)]
        assert shown["verdict"] == judgement.verdict
        assert shown["reason"].endswith(judgement.reason)
    for shown in answer["features"]:
        feature = FEATURES[shown["name"]]
        judged = (known.judgement(feature, part) for part in feature.parts)
        assert shown["verdict"] == worst(judged).verdict


def test_an_option_that_is_not_set_is_off_and_says_how_to_set_it() -> None:
    part = _parts(_ask())["SCORE_USAGE.cached_tokens"]
    assert part["verdict"] == "off" and "VLLM_EXT_SCORE_USAGE_CACHED_TOKENS=1" in part["reason"]


@pytest.mark.parametrize(
    "version",
    ["0.28.0", "0.29.1.dev3+g123", "0.30.0rc1", "0.29.0.post1", "0.29", "0.34.0", "1.0.0+cpu"],
)
def test_any_other_version_is_unsupported(version: str, tmp_path: Path) -> None:
    tree = skeleton(tmp_path, IN_VENV, version)
    answer = _ask("--vllm", tree, env=EVERY_OPTION)
    assert answer["vllm"] == {"version": version, "path": f"{tree}/vllm", "supported": False}
    for part in _parts(answer).values():
        assert part["verdict"] == "unsupported"
        assert version in part["reason"] and "0.29.0, 0.30.0, 0.31.0" in part["reason"]
    for asked in ({"VLLM_EXT_STRICT": "1"}, {"VLLM_EXT_CACHE_KEYS": "1"}):
        refused = _ask("--vllm", tree, status=1, env=asked)
        assert f"{next(iter(asked))}=1 can't be honoured" in refused["problems"][0]


@pytest.mark.parametrize("version", ["0.29.0", "0.29.0+cu129", "0.29.0+cpu"])
def test_a_local_version_part_is_ignored(version: str, tmp_path: Path) -> None:
    answer = _ask("--vllm", skeleton(tmp_path, "0.29.0", version))
    assert answer["vllm"]["supported"] is True
    assert answer["features"] == _ask()["features"]


def test_the_version_may_stand_in_the_metadata_alone(tmp_path: Path) -> None:
    tree = skeleton(tmp_path, "0.30.0", "")
    (tree / "vllm" / "_version.py").unlink()
    said = _ask("--vllm", tree, status=2)["problems"]
    assert "tells no version" in said[0]
    info = tree / "vllm-0.30.0+cu129.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.30.0+cu129\n")
    assert _ask("--vllm", tree)["vllm"]["version"] == "0.30.0+cu129"


def _change_one_line(file: Path, target: str) -> int:
    """Change the last simple statement of a function, or the bases of a class; which line it is."""
    tree = ast.parse(file.read_text())
    node: ast.AST = tree
    for name in split(target)[1]:
        node = next(n for n in ast.iter_child_nodes(node) if getattr(n, "name", "") == name)
    lines = file.read_text().splitlines(keepends=True)
    if isinstance(node, ast.ClassDef):
        line = node.lineno
        bases = ("(", "(Another, ") if "(" in lines[line - 1] else (":", "(Another):")
        lines[line - 1] = lines[line - 1].replace(*bases, 1)
    else:
        last = max((n for n in ast.walk(node) if isinstance(n, SIMPLE)), key=lambda n: n.lineno)
        line = last.lineno
        text = lines[line - 1]
        lines[line - 1] = f"{text[: last.col_offset]}pass; {text[last.col_offset :]}"
    file.write_text("".join(lines))
    return line


@pytest.mark.parametrize(
    "target", [t for t in targets_of(list(FEATURES.values())) if _record("0.31.0").targets[t]]
)
def test_one_changed_line_of_a_target_is_drift(target: str, tmp_path: Path) -> None:
    tree = skeleton(tmp_path, "0.31.0", "0.31.0")
    file = source_file(tree, module_of(target))
    assert file is not None
    line = _change_one_line(tree / file, target)
    answer = _ask("--vllm", tree, env=EVERY_OPTION)
    drifted = {name for name, part in _parts(answer).items() if part["verdict"] == "drifted"}
    assert drifted == {f.part_id(p) for f, p in _every_part() if target in p.fingerprinted}
    for name in drifted:
        assert f"{file}, line {line}: {target} was changed" in _parts(answer)[name]["reason"]
    for asked in (find_part(min(drifted))[0].toggle, "VLLM_EXT_STRICT"):
        refused = _run("--vllm", tree, env={**EVERY_OPTION, asked: "1"})
        assert refused.returncode == 1
        assert f"{asked}=1 can't be honoured" in refused.stdout
        assert f"{file}, line {line}: " in refused.stdout


def test_comments_and_formatting_are_fine(tmp_path: Path) -> None:
    tree = skeleton(tmp_path, "0.31.0", "0.31.0")
    for file in _record("0.31.0").files:
        formatted = ast.unparse(ast.parse((tree / file).read_text()))
        commented = "\n# a comment\n".join(["# another licence", formatted, "# the end"])
        assert commented != (tree / file).read_text()
        (tree / file).write_text(commented)
    answer = _ask("--vllm", tree, env={"VLLM_EXT_STRICT": "1", **EVERY_OPTION})
    assert _parts(answer)["SCORE_USAGE.missing_inputs"]["verdict"] == "active"
    stock = _ask("--vllm", root_of("0.31.0"), env=EVERY_OPTION)
    assert _parts(answer) == _parts(stock)


@pytest.mark.parametrize("name", ["VLLM_EXT_STRICT", *(f.toggle for f in FEATURES.values())])
def test_what_can_be_honoured_is_fine(name: str) -> None:
    assert _ask(env={name: "1"})["problems"] == []


@pytest.mark.parametrize("name", variables(FEATURES.values()))
def test_an_invalid_value_is_named(name: str) -> None:
    words = [f.variable(o) for f in FEATURES.values() for o in f.options if o.type is str]
    if name in ("VLLM_EXT_SERVER_ID", *words):
        assert _ask(env={name: "maybe"})["problems"] == []
        return
    done = _run(env={name: "maybe"})
    assert done.returncode == 1
    assert done.stderr.startswith(f"{name} is 'maybe', but it takes ")
    assert _ask(status=1, env={name: "maybe"})["problems"] == [done.stderr.strip()]


def test_a_misspelt_variable_is_a_warning() -> None:
    (warning,) = _ask(env={"VLLM_EXT_SCORE_USAG": "1"})["warnings"]
    assert "did you mean VLLM_EXT_SCORE_USAGE?" in warning


@pytest.mark.parametrize("names", ["", "lora_filesystem_resolver", "vllm_ext_other"])
def test_being_filtered_out_is_a_problem(names: str) -> None:
    assert _ask(env={"VLLM_PLUGINS": f"{names},vllm_ext"})["problems"] == []
    (sentence,) = _ask(status=1, env={"VLLM_PLUGINS": names})["problems"]
    assert sentence.startswith(f"VLLM_PLUGINS={names} keeps") and "add vllm_ext" in sentence


@pytest.mark.parametrize("switch", ["VLLM_EXT_DISABLE=1", "VLLM_EXT_SCORE_USAGE=0"])
def test_what_is_switched_off_says_by_what(switch: str) -> None:
    name, _, value = switch.partition("=")
    parts = _parts(_ask(env={"VLLM_EXT_STRICT": "1", name: value}))
    off = {part_id for part_id, part in parts.items() if switch in part["reason"]}
    assert off == {part_id for part_id in parts if "DISABLE" in name or "SCORE_USAGE" in part_id}
    assert all(parts[part_id]["verdict"] == "off" for part_id in off)


@pytest.mark.parametrize("made", [True, False], ids=["empty", "missing"])
def test_a_folder_without_vllm_can_not_be_looked_at(made: bool, tmp_path: Path) -> None:
    folder = tmp_path / "wheel"
    if made:
        folder.mkdir()
    done = _run("--vllm", folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"There is no vLLM in {folder}: ")
    answer = _ask("--vllm", folder, status=2)
    assert answer["vllm"] is None and answer["features"] == answer["foreign_plugins"] == []
    assert answer["problems"] == [done.stderr.strip()]


def test_an_environment_without_vllm_can_not_be_looked_at(tmp_path: Path) -> None:
    for name in ("vllm_ext", "click", "rich", "markdown_it", "mdurl", "packaging", "pygments"):
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None
        (tmp_path / name).symlink_to(Path(spec.origin).parent)
    program = (
        "import sys; sys.path.append(sys.argv.pop(1))\n"
        "from vllm_ext.cli import main; main(prog_name='vllm-ext')"
    )

    def alone(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-I", "-S", "-c", program, str(tmp_path), *arguments]
        return subprocess.run(command, env=_environ(), capture_output=True, text=True)

    done = alone("doctor")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("There is no vLLM in this Python environment: ")
    assert "pip install vllm" in done.stderr
    assert alone("list").returncode == 0
    static = alone("doctor", "--vllm", str(root_of("0.30.0")), "--json")
    assert static.returncode == 1
    assert "not installed as a vLLM plugin" in json.loads(static.stdout)["problems"][0]


def test_probes_agree_with_the_record() -> None:
    parts = _parts(_ask("--probe"))
    known = _record(IN_VENV)
    for feature, part in _every_part():
        judgement = known.judgement(feature, part)
        shown = parts[feature.part_id(part)]["probe"]
        assert shown == f"{judgement.verdict}: {judgement.reason}"


def test_a_probe_that_fails_contradicts_the_record(tmp_path: Path) -> None:
    """The target files alone are as recorded, but nothing can be imported from them."""
    tree = skeleton(tmp_path, IN_VENV, IN_VENV)
    problems = _ask("--probe", "--vllm", tree, status=1)["problems"]
    for part in FEATURES["SCORE_USAGE"].parts:
        assert [s for s in problems if s.startswith(f"SCORE_USAGE.{part.name} is ")], problems
    assert "but the probe shows failed: the probe raised ModuleNotFoundError" in problems[-1]


def test_a_probe_that_shows_something_else_is_told_also_of_an_option_that_is_off() -> None:
    installed = installation()
    assert installed is not None
    planned = plan(list(FEATURES.values()), Settings(), installed)
    known = _record(IN_VENV)
    shown = {entry.id: known.judgement(entry.feature, entry.part) for entry in planned}
    assert _contradictions(installed, planned, shown) == []
    for part_id in shown:
        other = {**shown, part_id: Judgement(Verdict.NATIVE, "it has it")}
        (sentence,) = _contradictions(installed, planned, other)
        assert sentence.startswith(f"{part_id} is ")
        assert sentence.endswith("the probe shows native: it has it.")


def test_probes_that_end_with_the_process_can_not_look(tmp_path: Path) -> None:
    tree = skeleton(tmp_path, IN_VENV, IN_VENV)
    (tree / "vllm" / "__init__.py").write_text("import os\nos._exit(3)\n")
    done = _run("--probe", "--vllm", tree)
    assert done.returncode == 2 and "the probes failed" in done.stderr


@pytest.fixture
def stranger(tmp_path: Path) -> Path:
    """A foreign plugin that can't be imported without being noticed."""
    folder = make_plugin(tmp_path / "stranger", "stranger_fix")
    code = folder / "stranger_fix.py"
    code.write_text(f"raise SystemExit('imported')\n{code.read_text()}")
    return folder


def test_a_foreign_plugin_and_what_it_touches_are_named(stranger: Path) -> None:
    plugin = {
        "name": "stranger_fix",
        "value": "stranger_fix:register",
        "distribution": "stranger-fix",
        "touches": [BUILD_RESPONSE],
    }
    assert _ask(env={"PYTHONPATH": str(stranger)})["foreign_plugins"] == [plugin]
    told = f"Other plugin: stranger_fix (stranger-fix) speaks of {BUILD_RESPONSE}\n"
    assert told in _run(env={"PYTHONPATH": str(stranger)}).stdout


def test_a_foreign_plugin_is_found_where_it_is_not_beside_its_metadata(
    stranger: Path, tmp_path: Path
) -> None:
    package = tmp_path / "checkout" / "stranger_fix"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    shutil.move(stranger / "stranger_fix.py", package / "patches.py")
    (plugin,) = _ask(env={"PYTHONPATH": f"{stranger}:{package.parent}"})["foreign_plugins"]
    assert plugin["touches"] == [BUILD_RESPONSE]
    (plugin,) = _ask(env={"PYTHONPATH": str(stranger)})["foreign_plugins"]
    assert plugin["touches"] is None
    assert (
        "(stranger-fix) its sources were not found"
        in _run(env={"PYTHONPATH": str(stranger)}).stdout
    )


def test_a_foreign_plugin_elsewhere_touches_nothing_of_ours(stranger: Path) -> None:
    (stranger / "stranger_fix.py").write_text("def register():\n    import vllm.v1.core\n")
    (plugin,) = _ask(env={"PYTHONPATH": str(stranger)})["foreign_plugins"]
    assert plugin["touches"] == []
    assert "speaks of nothing that we patch" in _run(env={"PYTHONPATH": str(stranger)}).stdout
