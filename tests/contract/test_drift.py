"""A target that isn't the recorded one is refused, however it differs; a formatted one isn't."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.beds.layout import release_path
from tests.conftest import FEATURES, find_part
from vllm_ext.core.feature import Judgement, Verdict
from vllm_ext.core.fingerprint import source_file
from vllm_ext.core.plan import plan
from vllm_ext.core.release import Installation, installation
from vllm_ext.core.seams import module_of, split
from vllm_ext.settings import Settings

Function = ast.FunctionDef | ast.AsyncFunctionDef


def _node(tree: ast.Module, target: str) -> Function | ast.ClassDef:
    node: ast.AST = tree
    for name in split(target)[1]:
        node = next(
            child
            for child in ast.iter_child_nodes(node)
            if isinstance(child, Function | ast.ClassDef) and child.name == name
        )
    assert isinstance(node, Function | ast.ClassDef)
    return node


def rename(node: Function) -> None:
    node.name += "_renamed"


def add_parameter(node: Function) -> None:
    node.args.args.append(ast.arg("added"))
    node.args.defaults.append(ast.Constant(None))


def reorder(node: Function) -> None:
    node.args.args.reverse()
    if len(node.args.args) < 2:
        node.args.args.append(ast.arg("another"))


def change_default_or_annotation(node: Function) -> None:
    node.returns = ast.Name("object_of_another_type", ast.Load())


def change_last_line(node: Function) -> None:
    node.body.append(ast.parse("print('changed')").body[0])


def change_first_line(node: Function) -> None:
    node.body.insert(1 if ast.get_docstring(node) else 0, ast.parse("changed = 1").body[0])


def change_deep_inside(node: Function) -> None:
    constants = [n for n in ast.walk(node) if isinstance(n, ast.Name | ast.Constant)]
    deepest = constants[-1]
    if isinstance(deepest, ast.Name):
        deepest.id += "_other"
    else:
        deepest.value = "another constant"


def decorate(node: Function) -> None:
    node.decorator_list.append(ast.Name("staticmethod", ast.Load()))


MUTATIONS: list[Callable[[Function], None]] = [
    rename,
    add_parameter,
    reorder,
    change_default_or_annotation,
    change_first_line,
    change_last_line,
    change_deep_inside,
    decorate,
]


def _copy(release: str, part: str, to: Path) -> Installation:
    """A vLLM that consists of nothing but the files the part looks at."""
    stock = installation(release_path(release))
    assert stock is not None
    for target in find_part(part)[1].fingerprinted:
        file = source_file(stock.root, module_of(target))
        if file:
            (to / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(stock.root / file, to / file)
    return Installation(to, stock.version)


def _judge(part: str, installed: Installation) -> Judgement:
    feature, declared = find_part(part)
    options = {feature.variable(declared.option): True} if declared.option else {}
    planned = plan(list(FEATURES.values()), Settings(options=options), installed)
    return next(entry.judgement for entry in planned if entry.id == part)


def _functions(installed: Installation, part: str) -> list[str]:
    """The part's fingerprinted functions that exist in this release."""
    found = []
    for target in find_part(part)[1].fingerprinted:
        file = source_file(installed.root, module_of(target))
        if file is None:
            continue
        tree = ast.parse((installed.root / file).read_text())
        try:
            node = _node(tree, target)
        except StopIteration:
            continue
        if isinstance(node, Function):
            found.append(target)
    return found


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda function: function.__name__)
def test_a_mutated_target_is_refused(
    release: str, part: str, mutate: Callable[[Function], None], tmp_path: Path
) -> None:
    installed = _copy(release, part, tmp_path)
    assert _judge(part, installed).verdict is Verdict.ARMED
    targets = _functions(installed, part)
    assert targets
    for target in targets:
        file = source_file(tmp_path, module_of(target))
        assert file is not None
        source = (tmp_path / file).read_text()
        tree = ast.parse(source)
        node = _node(tree, target)
        assert isinstance(node, Function)
        mutate(node)
        (tmp_path / file).write_text(ast.unparse(tree))
        judgement = _judge(part, installed)
        assert judgement.verdict is Verdict.DRIFTED, f"{target} with {mutate.__name__}"
        assert file in judgement.reason and ", line " in judgement.reason
        (tmp_path / file).write_text(source)


def test_a_member_added_or_removed_is_refused_where_a_part_adds_one(
    release: str, part: str, tmp_path: Path
) -> None:
    installed = _copy(release, part, tmp_path)
    declared = find_part(part)[1]
    added = [seam.target for seam in declared.seams if seam.evidence != (seam.target,)]
    for target in added:
        file = source_file(tmp_path, module_of(target))
        assert file is not None
        tree = ast.parse((tmp_path / file).read_text())
        owner = _node(tree, target.rpartition(".")[0])
        name = split(target)[1][-1]
        owner.body += ast.parse(f"def {name}(self): pass").body
        (tmp_path / file).write_text(ast.unparse(tree))
        assert _judge(part, installed).verdict is Verdict.DRIFTED
    assert len(added) < len(declared.seams) or added


def test_comments_and_formatting_are_no_drift(release: str, part: str, tmp_path: Path) -> None:
    installed = _copy(release, part, tmp_path)
    for path in tmp_path.rglob("*.py"):
        source = path.read_text()
        formatted = "# another licence\n\n\n" + ast.unparse(ast.parse(source)) + "\n# the end\n"
        assert formatted != source
        path.write_text(formatted)
    judgement = _judge(part, installed)
    assert judgement.verdict is Verdict.ARMED, judgement.reason
