"""Fingerprints: the same under every Python, blind to form, sharp for everything else."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.beds.layout import release_path
from vllm_ext.core.fingerprint import Fingerprint, fingerprint, first_difference
from vllm_ext.core.release import installation

SOURCE = '''
class Thing(Base):
    """A thing."""
    limit = 3

    @property
    def size(self) -> int:
        return self._size

    @size.setter
    def size(self, value):
        self._size = value

    def run(self, items, *, deep=True):
        """Run."""
        total = 0
        for item in items:
            if item:
                total += item
            else:
                total -= 1
        return total
'''
PROGRAM = """
import ast, json, sys
sys.path.insert(0, sys.argv[1])
from vllm_ext.core.fingerprint import fingerprint
def names(body, prefix=""):
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield prefix + node.name
            if isinstance(node, ast.ClassDef):
                yield from names(node.body, prefix + node.name + ".")
digests = {}
for path in sys.stdin.read().split():
    source = open(path).read()
    for name in names(ast.parse(source).body):
        found = fingerprint(source, "m:" + name)
        digests[path + ":" + name] = [found.line, found.digest, found.statements]
json.dump(digests, sys.stdout)
"""


def _print(source: str, path: str) -> Fingerprint:
    found = fingerprint(source, f"m:{path}")
    assert found is not None
    return found


def _python(version: str) -> str:
    """An interpreter of another version, from PATH or beside pyenv's others."""
    candidates = [shutil.which(f"python{version}")]
    candidates += map(str, sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python")))
    for candidate in filter(None, candidates):
        done = subprocess.run([candidate, "--version"], capture_output=True, text=True)
        if done.returncode == 0 and done.stdout.startswith(f"Python {version}."):
            return candidate
    raise AssertionError(f"this test needs a Python {version} on PATH, there is none")


def _digests(python: str, files: list[Path]) -> dict[str, list[object]]:
    done = subprocess.run(
        [python, "-c", PROGRAM, str(Path(__file__).parents[2] / "src")],
        input="\n".join(map(str, files)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, list[object]] = json.loads(done.stdout)
    return answer


def test_the_same_under_python_3_11_3_12_and_3_13(tmp_path: Path) -> None:
    stock = installation(release_path("0.30.0"))
    assert stock is not None
    files = sorted((stock.root / "vllm" / "v1" / "core").rglob("*.py"))
    files += sorted((stock.root / "vllm" / "entrypoints" / "pooling").rglob("*.py"))
    # f-strings are where the syntax trees of the three versions differ most.
    tricky = tmp_path / "tricky.py"
    tricky.write_text('def f(x, w):\n    return f"a{x!r:>{w}}" "b" f"{x=}{w:{w}.{x}}" f"{{}}"\n')
    reference = _digests(sys.executable, [*files, tricky])
    assert len(reference) > 500
    for version in ("3.11", "3.12", "3.13"):
        assert _digests(_python(version), [*files, tricky]) == reference, version


def test_form_does_not_matter() -> None:
    formatted = ast.unparse(ast.parse(SOURCE)).replace('"""Run."""', '"""Runs quickly."""')
    for path in ("Thing", "Thing.run", "Thing.size"):
        assert _print(SOURCE, path).digest == _print("# comment\n" + formatted, path).digest


@pytest.mark.parametrize(
    ("path", "old", "new", "line"),
    [
        ("Thing.run", "total -= 1", "total -= 2", 21),
        ("Thing.run", "deep=True", "deep=False", 14),
        ("Thing.run", "if item:", "if not item:", 18),
        ("Thing.run", "        return total\n", "", 21),
        ("Thing.size", "self._size = value", "self._size = 1", 12),
        ("Thing", "limit = 3", "limit = 3; other = 4", 2),
        ("Thing", "Thing(Base)", "Thing(Other)", 2),
        ("Thing.run", "        return total\n", "        return total\nThing.run = print\n", 23),
        ("Thing.run", "        return total\n", "        return total\n    del run\n", 23),
    ],
)
def test_a_change_is_seen_and_its_line_is_told(path: str, old: str, new: str, line: int) -> None:
    assert old in SOURCE
    changed = SOURCE.replace(old, new)
    recorded = _print(SOURCE, path)
    assert _print(changed, path).digest != recorded.digest
    assert first_difference(changed, f"m:{path}", recorded) == line


def test_a_method_body_is_not_the_class() -> None:
    changed = SOURCE.replace("total = 0", "total = 1")
    assert _print(changed, "Thing").digest == _print(SOURCE, "Thing").digest


def test_what_is_not_defined_has_no_fingerprint() -> None:
    assert fingerprint(SOURCE, "m:Thing.gone") is None
    assert fingerprint(SOURCE, "m:Gone.run") is None
