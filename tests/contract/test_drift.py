"""A target that isn't the recorded one is refused, however it differs; a formatted one isn't."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable
from pathlib import Path

from tests.beds.reduced import Function, node_of, reduced, stock
from tests.conftest import FEATURES, find_part
from vllm_ext.core.feature import Judgement, Verdict
from vllm_ext.core.fingerprint import source_file
from vllm_ext.core.plan import plan
from vllm_ext.core.release import Installation, record
from vllm_ext.core.seams import Add, Register, Wrap, module_of, split
from vllm_ext.settings import Settings


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


def _judge(part: str, installed: Installation) -> Judgement:
    feature, declared = find_part(part)
    options = {feature.variable(declared.option): True} if declared.option else {}
    alone = dataclasses.replace(feature, parts=(declared,))
    (planned,) = plan([alone], Settings(options=options), installed)
    return planned.judgement


def _functions(installed: Installation, part: str) -> list[tuple[str, str]]:
    """File and name of the part's fingerprinted functions that exist in this release."""
    found = []
    for target in find_part(part)[1].fingerprinted:
        file = source_file(installed.root, module_of(target))
        if file is None:
            continue
        try:
            node = node_of(ast.parse((installed.root / file).read_text()), target)
        except StopIteration:
            continue
        if isinstance(node, Function):
            found.append((file, target))
    return found


def test_a_mutated_target_is_refused(release: str, part: str, tmp_path: Path) -> None:
    installed = reduced(release, find_part(part)[1].fingerprinted, tmp_path)
    judgement = _judge(part, installed)
    assert judgement.verdict is Verdict.ARMED, judgement.reason
    functions = _functions(installed, part)
    assert functions
    for file, target in functions:
        source = (tmp_path / file).read_text()
        for mutate in MUTATIONS:
            tree = ast.parse(source)
            node = node_of(tree, target)
            assert isinstance(node, Function)
            mutate(node)
            (tmp_path / file).write_text(ast.unparse(tree))
            judgement = _judge(part, installed)
            assert judgement.verdict is Verdict.DRIFTED, f"{target} with {mutate.__name__}"
            assert file in judgement.reason and ", line " in judgement.reason
        (tmp_path / file).write_text(source)


def test_a_member_that_appears_is_refused_where_a_part_adds_it(
    release: str, part: str, tmp_path: Path
) -> None:
    installed = reduced(release, find_part(part)[1].fingerprinted, tmp_path)
    declared = find_part(part)[1]
    added = [seam.target for seam in declared.seams if isinstance(seam, Add)]
    for target in added:
        file = source_file(tmp_path, module_of(target))
        assert file is not None
        tree = ast.parse((tmp_path / file).read_text())
        owner = node_of(tree, target.rpartition(".")[0])
        name = split(target)[1][-1]
        owner.body += ast.parse(f"def {name}(self): pass").body
        (tmp_path / file).write_text(ast.unparse(tree))
        assert _judge(part, installed).verdict is Verdict.DRIFTED
    # What a Register calls is mutated above; an entry that appears is tests/core/test_seams.py's.
    assert all(isinstance(seam, Add | Wrap | Register) for seam in declared.seams), (
        "a seam without a mutation"
    )


def test_comments_and_formatting_are_no_drift(release: str, tmp_path: Path) -> None:
    """Every file that holds a target, whole, with other comments and another form."""
    known = record(release)
    assert known is not None
    for file in known.files:
        source = (stock(release).root / file).read_text()
        formatted = "# another licence\n\n\n" + ast.unparse(ast.parse(source)) + "\n# the end\n"
        assert formatted != source
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(formatted)
    installed = Installation(tmp_path, stock(release).version)
    options = {f.variable(option): True for f in FEATURES.values() for option in f.options}
    planned = plan(list(FEATURES.values()), Settings(options=options), installed)
    assert [(e.id, e.judgement) for e in planned if not e.judgement.verdict.honoured] == []
