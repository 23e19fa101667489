"""Releases reduced to a part's targets, so that they are quick to change and to judge again."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable
from pathlib import Path

from tests.beds.layout import release_path
from vllm_ext.core.fingerprint import source_file
from vllm_ext.core.release import Installation, installation
from vllm_ext.core.seams import module_of, split

Function = ast.FunctionDef | ast.AsyncFunctionDef


def node_of(tree: ast.Module, target: str) -> Function | ast.ClassDef:
    """The first definition of a target in its module; raises StopIteration if there is none."""
    node: ast.AST = tree
    for name in split(target)[1]:
        node = next(
            child
            for child in ast.iter_child_nodes(node)
            if isinstance(child, Function | ast.ClassDef) and child.name == name
        )
    assert isinstance(node, Function | ast.ClassDef)
    return node


@functools.cache
def stock(release: str) -> Installation:
    """A release as it lies there."""
    found = installation(release_path(release))
    assert found is not None
    return found


@functools.cache
def _tree(release: str, file: str) -> ast.Module:
    return ast.parse((stock(release).root / file).read_text())


def _only(body: list[ast.stmt], paths: list[list[str]]) -> list[ast.stmt]:
    """The definitions among ``body`` that these paths name, classes reduced to what they name."""
    kept: list[ast.stmt] = []
    for node in body:
        if not isinstance(node, Function | ast.ClassDef):
            continue
        named = [path[1:] for path in paths if path[0] == node.name]
        if isinstance(node, ast.ClassDef) and named and [] not in named:
            inner = _only(node.body, named)
            kept.append(
                ast.ClassDef(node.name, node.bases, node.keywords, inner or [ast.Pass()], [])
            )
        elif named:
            kept.append(node)
    return kept


def reduced(release: str, targets: Iterable[str], to: Path) -> Installation:
    """A vLLM that consists of nothing but these targets."""
    paths: dict[str, list[list[str]]] = {}
    for target in targets:
        file = source_file(stock(release).root, module_of(target))
        if file:
            paths.setdefault(file, []).append(split(target)[1])
    for file, named in paths.items():
        (to / file).parent.mkdir(parents=True, exist_ok=True)
        module = ast.Module(_only(_tree(release, file).body, named), [])
        (to / file).write_text(ast.unparse(ast.fix_missing_locations(module)))
    return Installation(to, stock(release).version)
