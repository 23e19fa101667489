"""Fingerprints of vLLM objects, from source text alone: nothing of vLLM is imported.

Two levels: the hash of the file, and for a file that differs the normalised syntax tree of the
target, which is the same under Python 3.11 to 3.13 and blind to comments, formatting and
docstrings.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vllm_ext.core.seams import split

# ast.dump differs between Python versions in what it leaves out; these carry no behaviour.
_IGNORED = {"kind", "ctx", "type_comment", "type_ignores"}
_BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Fingerprint:
    """A target in one source file: first line, digest, and a short digest per statement."""

    line: int
    digest: str
    statements: str

    WIDTH = 8

    def split(self) -> list[str]:
        """The statements' digests, in source order."""
        return [
            self.statements[at : at + self.WIDTH]
            for at in range(0, len(self.statements), self.WIDTH)
        ]


@dataclass(frozen=True)
class Drift:
    """Where a source differs from the recorded one."""

    file: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {self.what}"


def file_hash(path: Path) -> str:
    """SHA-256 of a source file, hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def source_file(root: Path, module: str) -> str | None:
    """The file of a module below ``root`` as a relative path, None if there is none."""
    stem = module.replace(".", "/")
    for name in (f"{stem}.py", f"{stem}/__init__.py"):
        if (root / name).is_file():
            return name
    return None


def fingerprint(source: str, target: str) -> Fingerprint | None:
    """Fingerprint of ``target`` in its module's source text, None if it isn't defined there.

    A class counts as its header and the names of its members; a function as all it does.
    """
    nodes = _find(_tree(source), split(target)[1])
    if not nodes:
        return None
    whole = "".join(_class_shape(n) if isinstance(n, ast.ClassDef) else _normal(n) for n in nodes)
    digests = (_digest(_header(node), Fingerprint.WIDTH) for node in statements(source, target))
    return Fingerprint(nodes[0].lineno, _digest(whole, 32), "".join(digests))


def definitions(source: str) -> Iterator[str]:
    """Qualified names of all functions and classes a source defines at module or class level."""
    return _names(_tree(source), "")


def _names(scope: ast.AST, prefix: str) -> Iterator[str]:
    for node in _scope(scope):
        if isinstance(node, _DEFINITIONS):
            yield prefix + node.name
        if isinstance(node, ast.ClassDef):
            yield from _names(node, f"{prefix}{node.name}.")


def statements(source: str, target: str) -> list[ast.AST]:
    """The statements of a target in source order, those a fingerprint has a digest for each."""
    nodes = _find(_tree(source), split(target)[1])
    return list(itertools.chain.from_iterable(_statements(node) for node in nodes))


def members(node: ast.ClassDef) -> set[str]:
    """Names that a class body binds."""
    return {name for child in _scope(node) for name in _binds(child)}


def first_difference(source: str, target: str, recorded: Fingerprint) -> int:
    """Line of ``source`` at which ``target`` begins to differ from the recorded one."""
    current = statements(source, target)
    first = line = getattr(current[0], "lineno", 1)
    for node, old in itertools.zip_longest(current, recorded.split()):
        if node is None:
            return line
        line = getattr(node, "lineno", line)
        if _digest(_header(node), Fingerprint.WIDTH) != old:
            return line
    return first


@functools.lru_cache(maxsize=4)
def _tree(source: str) -> ast.Module:
    """The syntax tree of a source; the targets of a file are asked for one after another."""
    return ast.parse(source)


def _digest(text: str, width: int) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:width]


def _find(tree: ast.AST, path: list[str]) -> list[ast.stmt]:
    """All definitions of a name at its place: overloads, property setters, if/else twins."""
    dotted = ".".join(path)
    found = [node for node in _scope(tree) if path[0] in _binds(node)]
    if len(path) == 1:
        return found
    inner = (_find(node, path[1:]) for node in found if isinstance(node, ast.ClassDef))
    later = [node for node in _scope(tree) if dotted in _binds(node)]
    return [*itertools.chain.from_iterable(inner), *later]


def _binds(node: ast.stmt) -> list[str]:
    """What a statement binds or deletes in its scope: names, and attributes such as C.f."""
    if isinstance(node, _DEFINITIONS):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.Assign | ast.Delete):
        targets = node.targets
    else:
        targets = [node.target] if isinstance(node, ast.AnnAssign | ast.AugAssign) else []
    return [ast.unparse(t) for t in targets if isinstance(t, ast.Name | ast.Attribute)]


def _scope(tree: ast.AST) -> Iterator[ast.stmt]:
    """Statements that bind names in this scope, also inside if, try and with."""
    for node in _children(tree):
        if isinstance(node, ast.stmt):
            yield node
        if not isinstance(node, _DEFINITIONS):
            yield from _scope(node)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    for name in _BLOCKS:
        block = getattr(node, name, None)
        if isinstance(block, list):
            yield from block


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    if not isinstance(node, ast.ClassDef):
        for child in _without_docstring(node, list(_children(node))):
            yield from _statements(child)


def _without_docstring(node: ast.AST, children: list[ast.AST]) -> list[ast.AST]:
    if isinstance(node, _DEFINITIONS) and children and _is_string(children[0]):
        return children[1:]
    return children


def _is_string(node: ast.AST) -> bool:
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _class_shape(node: ast.ClassDef) -> str:
    return _header(node) + " ".join(sorted(members(node)))


def _header(node: ast.AST) -> str:
    """A statement without the blocks inside it."""
    if isinstance(node, ast.ClassDef):
        return "".join(map(_normal, [*node.decorator_list, *node.bases, *node.keywords]))
    return type(node).__name__ + "".join(
        f"{name}={_normal(value)};"
        for name, value in ast.iter_fields(node)
        if name not in _BLOCKS and name not in _IGNORED and value not in (None, [])
    )


def _normal(node: object) -> str:
    if isinstance(node, list):
        return f"[{','.join(map(_normal, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = []
    for name, value in ast.iter_fields(node):
        if name in _IGNORED or value is None or value == []:
            continue
        if name == "body" and isinstance(value, list):
            value = _without_docstring(node, value)
        elif isinstance(node, ast.JoinedStr):
            value = _merge(value)
        fields.append(f"{name}={_normal(value)}")
    return f"{type(node).__name__}({','.join(fields)})"


def _merge(values: list[ast.expr]) -> list[ast.expr]:
    """Neighbouring texts of an f-string as one: Python 3.12 splits them differently."""
    merged: list[ast.expr] = []
    for value in values:
        last = merged[-1] if merged else None
        if not isinstance(value, ast.Constant):
            merged.append(value)
        elif isinstance(last, ast.Constant):
            merged[-1] = ast.Constant(str(last.value) + str(value.value))
        elif value.value:
            merged.append(value)
    return merged
