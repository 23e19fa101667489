"""Whatever is done to a target, diff finds it, names file, line and change, and what is lost."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.beds.reduced import Function, node_of, reduced
from tests.conftest import find_part
from vllm_ext.checks.change import Side, State
from vllm_ext.checks.difference import Difference, differences
from vllm_ext.core.feature import Verdict
from vllm_ext.core.fingerprint import source_file
from vllm_ext.core.release import record
from vllm_ext.core.seams import module_of, split

# Fewer statements in a body are no evidence for a function under another name.
TELLING = 3


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Where the old and the new vLLM lie."""
    return tmp_path / "old", tmp_path / "new"


def _sides(release: str, part: str, folders: tuple[Path, Path]) -> tuple[Side, Side]:
    targets = find_part(part)[1].fingerprinted
    known = record(release)
    made = [reduced(release, targets, folder) for folder in folders]
    return Side.on_disk(made[0], known), Side.on_disk(made[1], known)


def _difference(part: str, old: Side, new: Side) -> Difference:
    feature, declared = find_part(part)
    alone = dataclasses.replace(feature, parts=(declared,))
    (found,) = differences([alone], old, new)
    return found


def _function(part: str, root: Path) -> tuple[str, str]:
    """File and name of the first function that a part patches or reads."""
    for target in find_part(part)[1].fingerprinted:
        file = source_file(root, module_of(target))
        try:
            node = node_of(ast.parse((root / file).read_text()), target) if file else None
        except StopIteration:
            continue
        if file and isinstance(node, Function):
            return file, target
    raise AssertionError(f"{part} has no function among its targets")


def _mutate(file: Path, target: str, mutate: Callable[[Function], None]) -> str:
    tree = ast.parse(file.read_text())
    node = node_of(tree, target)
    assert isinstance(node, Function)
    mutate(node)
    text = ast.unparse(ast.fix_missing_locations(tree))
    file.write_text(text)
    return text


def test_the_same_sources_are_the_same(release: str, part: str, folders: tuple[Path, Path]) -> None:
    found = _difference(part, *_sides(release, part, folders))
    assert (found.state, found.changes, found.lost) == (State.SAME, (), False)
    assert found.old.verdict is found.new.verdict is Verdict.ACTIVE


def test_a_changed_body_is_found(release: str, part: str, folders: tuple[Path, Path]) -> None:
    old, new = _sides(release, part, folders)
    file, target = _function(part, folders[1])

    def insert(node: Function) -> None:
        node.body.append(ast.parse("changed = 1").body[0])

    lines = _mutate(folders[1] / file, target, insert).splitlines()
    found = _difference(part, old, new)
    assert found.state == State.DRIFTED and found.lost
    (change,) = found.changes
    assert (change.target, change.file) == (target, file)
    assert lines[change.line - 1].strip() == "changed = 1"
    assert change.what == f"{target.partition(':')[2]}: added `changed = 1`"


def test_an_added_parameter_is_found(release: str, part: str, folders: tuple[Path, Path]) -> None:
    old, new = _sides(release, part, folders)
    file, target = _function(part, folders[1])

    def add(node: Function) -> None:
        node.args.kwonlyargs.append(ast.arg("added"))
        node.args.kw_defaults.append(ast.Constant(None))

    lines = _mutate(folders[1] / file, target, add).splitlines()
    found = _difference(part, old, new)
    assert found.state == State.DRIFTED and found.lost
    (change,) = found.changes
    assert "added" in lines[change.line - 1] and "def " in lines[change.line - 1]
    assert change.what == f"{target.partition(':')[2]}: parameter `added` added"


def test_a_renamed_function_is_found(release: str, part: str, folders: tuple[Path, Path]) -> None:
    old, new = _sides(release, part, folders)
    file, target = _function(part, folders[1])
    before = old.fingerprint(target)
    assert before is not None

    def rename(node: Function) -> None:
        node.name = "called_otherwise"

    _mutate(folders[1] / file, target, rename)
    found = _difference(part, old, new)
    assert found.lost
    change = next(change for change in found.changes if change.target == target)
    if len(before.split()) > TELLING:
        module, path = split(target)
        name = ".".join([*path[:-1], "called_otherwise"])
        assert (change.state, change.file) == (State.MOVED, file)
        assert change.what == f"is {module}:{name} now"
    else:
        assert (change.state, change.what) == (State.DISAPPEARED, f"{target} is gone")


def test_a_module_that_moved_is_found(release: str, part: str, folders: tuple[Path, Path]) -> None:
    old, new = _sides(release, part, folders)
    file, target = _function(part, folders[1])
    (folders[1] / file).rename(folders[1] / "vllm" / "elsewhere.py")
    found = _difference(part, old, new)
    assert found.lost
    change = next(change for change in found.changes if change.target == target)
    assert (change.state, change.file) == (State.MOVED, "vllm/elsewhere.py")
    assert change.what == f"is vllm.elsewhere:{target.partition(':')[2]} now"
    (folders[1] / "vllm" / "elsewhere.py").unlink()
    gone = _difference(part, old, new)
    assert gone.state == State.DISAPPEARED and gone.lost
