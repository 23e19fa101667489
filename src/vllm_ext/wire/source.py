"""Names in vLLM's source files and what they stand for, found without importing anything."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from vllm_ext.core.fingerprint import source_file

_BLOCKS = ("body", "orelse", "handlers", "finalbody")


class UnderivableError(ValueError):
    """A source from which the layout can't be told for certain; the message says where."""


@dataclass(frozen=True)
class Module:
    """A parsed module: its classes, the values given to its names, and its imports.

    ``again`` has the names that are given more than one value, of which the last is kept.
    ``imports`` maps a name to (module, name there), or to (module, None) for a whole module.
    """

    name: str
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    values: dict[str, ast.expr] = field(default_factory=dict)
    imports: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    again: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Found:
    """What a name stands for: a class or value in a module of vLLM, else an outside name."""

    dotted: str
    module: Module | None = None
    node: ast.ClassDef | ast.expr | None = None


class Sources:
    """The source tree below ``root``, the folder that holds the package ``vllm``."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.module = cache(self._parse)

    def _parse(self, name: str) -> Module | None:
        if name.partition(".")[0] != "vllm":
            return None
        file = source_file(self._root, name)
        if file is None:
            return None
        try:
            tree = ast.parse((self._root / file).read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError) as error:
            raise UnderivableError(f"this Python can't parse {file} ({error})") from error
        found = Module(name)
        package = name if file.endswith("/__init__.py") else name.rpartition(".")[0]
        for node in _top(tree):
            if isinstance(node, ast.ClassDef):
                found.classes[node.name] = node
            elif isinstance(node, ast.Import | ast.ImportFrom):
                found.imports.update(_imported(node, package))
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        _give(found, target.id, node.value)
            elif (
                isinstance(node, ast.AnnAssign)
                and node.value is not None
                and isinstance(node.target, ast.Name)
            ):
                _give(found, node.target.id, node.value)
            elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                found.again.add(node.target.id)
        return found

    def find(self, module: Module, expression: ast.expr) -> Found | None:
        """What a name or dotted name stands for in a module; None for names it doesn't know."""
        path = _path(expression)
        return self._follow(module, path) if path else None

    def _follow(self, module: Module, path: list[str], hops: int = 0) -> Found | None:
        head, *rest = path
        if hops > 20:
            raise UnderivableError(f"{module.name} imports {head} in a circle")
        if head in module.imports:
            origin, name = module.imports[head]
            path = [*([name] if name else []), *rest]
            return self._at(origin, path, hops + 1)
        if rest:
            return None
        if head in module.classes:
            return Found(f"{module.name}.{head}", module, module.classes[head])
        if head in module.values:
            return Found(f"{module.name}.{head}", module, module.values[head])
        return None

    def _at(self, origin: str, path: list[str], hops: int) -> Found | None:
        while path:
            deeper = self.module(f"{origin}.{path[0]}")
            here = self.module(origin)
            if here and (found := self._follow(here, path, hops)):
                return found
            if deeper is None:
                break
            origin, path = deeper.name, path[1:]
        return Found(".".join([origin, *path]))


def _give(module: Module, name: str, value: ast.expr) -> None:
    if name in module.values:
        module.again.add(name)
    module.values[name] = value


def _path(expression: ast.expr) -> list[str] | None:
    if isinstance(expression, ast.Name):
        return [expression.id]
    if isinstance(expression, ast.Attribute):
        inner = _path(expression.value)
        return [*inner, expression.attr] if inner else None
    return None


def _top(tree: ast.AST) -> Iterator[ast.stmt]:
    """Statements of the module's own scope, also inside if, try and with."""
    for block in _BLOCKS:
        for node in getattr(tree, block, []):
            if isinstance(node, ast.stmt):
                yield node
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield from _top(node)


def _imported(
    node: ast.Import | ast.ImportFrom, package: str
) -> Iterator[tuple[str, tuple[str, str | None]]]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            whole = alias.name if alias.asname else alias.name.partition(".")[0]
            yield alias.asname or whole, (whole, None)
        return
    origin = node.module or ""
    if node.level:
        above = package.split(".")[: len(package.split(".")) - node.level + 1]
        origin = ".".join([*above, *([origin] if origin else [])])
    for alias in node.names:
        yield alias.asname or alias.name, (origin, alias.name)
