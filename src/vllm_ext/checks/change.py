"""What became of a target between two vLLMs, from their sources alone: nothing is imported."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from enum import StrEnum
from pathlib import Path

from vllm_ext.core.fingerprint import (
    Fingerprint,
    definitions,
    fingerprint,
    members,
    source_file,
    statements,
)
from vllm_ext.core.release import Installation, Record
from vllm_ext.core.seams import module_of, split

_WIDTH = 72
# A body of fewer statements proves nothing if the name differs.
_TELLING = 3
# A name that so many files define is no lead.
_COMMON = 40
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class State(StrEnum):
    """What became of a target, the gravest first."""

    DISAPPEARED = "disappeared"
    MOVED = "moved"
    DRIFTED = "drifted"
    SAME = "same"


@dataclass(frozen=True)
class Change:
    """A target in a new vLLM: where it differs (file, line; line 0: nowhere), how in one line."""

    target: str
    state: State
    file: str
    line: int
    what: str

    def __str__(self) -> str:
        where = f"{self.file}, line {self.line}: " if self.line else ""
        return f"{where}{self.what}"


@dataclass(frozen=True)
class Side:
    """One vLLM of a comparison: on disk, or (``root`` None) as it was recorded."""

    version: str
    root: Path | None
    record: Record | None

    @classmethod
    def on_disk(cls, installed: Installation, record: Record | None) -> Side:
        """A vLLM whose sources can be read."""
        return cls(installed.version, installed.root, record)

    def file(self, target: str) -> str:
        """The file of a target's module, relative; the one it would have if it isn't there."""
        module = module_of(target)
        found = source_file(self.root, module) if self.root else None
        return found or f"{module.replace('.', '/')}.py"

    def source(self, target: str) -> str | None:
        """Text of the file of a target's module, None if there is none; ValueError if no UTF-8."""
        path = self.root / self.file(target) if self.root else None
        return path.read_text(encoding="utf-8") if path and path.is_file() else None

    def fingerprint(self, target: str) -> Fingerprint | None:
        """Fingerprint of a target; SyntaxError or ValueError if its file can't be parsed."""
        if self.root is None:
            return self.record.targets.get(target) if self.record else None
        source = self.source(target)
        return fingerprint(source, target) if source is not None else None


def compare(old: Side, new: Side, target: str) -> Change:
    """What became of a target of ``old`` in ``new``."""
    try:
        text = old.source(target)
        if text is not None and text == new.source(target):
            return Change(target, State.SAME, new.file(target), 0, "same file")
        before, after = old.fingerprint(target), new.fingerprint(target)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        what = f"this Python can't parse it ({error})"
        return Change(target, State.DRIFTED, new.file(target), line, what)
    name = target.partition(":")[2]
    if before is None and after is None:
        return Change(target, State.SAME, new.file(target), 0, "neither has it")
    if before is None and after is not None:
        what = f"{name} appeared: {old.version} hasn't got it"
        return Change(target, State.DRIFTED, new.file(target), after.line, what)
    if before is not None and after is None:
        return _gone(new, target, before)
    assert before is not None and after is not None
    if before.digest == after.digest:
        return Change(target, State.SAME, new.file(target), 0, "same code")
    line, what = _difference(old, new, target, before, after)
    return Change(target, State.DRIFTED, new.file(target), line, f"{name}: {what}")


def _gone(new: Side, target: str, before: Fingerprint) -> Change:
    found = next(_elsewhere(new.root, target, before), None) if new.root else None
    if found:
        file, line, qualname, same = found
        module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        what = f"is {module}:{qualname} now" + ("" if same else ", and was changed")
        return Change(target, State.MOVED, file, line, what)
    what = f"{target} is gone"
    return Change(target, State.DISAPPEARED, new.file(target), 0, what)


def _elsewhere(
    root: Path, target: str, before: Fingerprint
) -> Iterator[tuple[str, int, str, bool]]:
    """Where else a definition stands: file, line, qualified name, whether its body is the same.

    First in its own file under another name, then under its name in others, equal bodies first.
    """
    _, path = split(target)
    body = before.split()[1:]
    own = source_file(root, module_of(target))
    other: list[tuple[str, int, str, bool]] = []
    for file in [*([own] if own else []), *_naming(root, path, own)]:
        try:
            source = (root / file).read_text(encoding="utf-8")
            names = list(definitions(source))
        except (SyntaxError, ValueError):
            continue
        for qualname in names:
            full = qualname.split(".") == path
            alike = full or (len(body) >= _TELLING and (file == own or _last(qualname) == path[-1]))
            found = fingerprint(source, f"m:{qualname}") if alike else None
            if found is None:
                continue
            # A class has no body here: its digest tells, which is without its name.
            same = found.split()[1:] == body if body else found.digest == before.digest
            if same:
                yield file, found.line, qualname, True
            elif full:
                other.append((file, found.line, qualname, False))
    yield from other


def _last(qualname: str) -> str:
    return qualname.rpartition(".")[2]


def _naming(root: Path, path: list[str], own: str | None) -> list[str]:
    """Files besides the target's own that define something of its name."""
    wanted = re.compile(rb"^\s*(?:async def|def|class) " + path[-1].encode() + rb"\b", re.MULTILINE)
    outer = re.compile(rb"^\s*class " + path[0].encode() + rb"\b", re.MULTILINE)
    found, within = [], []
    for file in sorted((root / "vllm").rglob("*.py")):
        name, text = str(file.relative_to(root)), file.read_bytes()
        if name != own and wanted.search(text):
            found.append(name)
            if len(path) > 1 and outer.search(text):
                within.append(name)
    if len(found) > _COMMON:
        return within
    return [*within, *(name for name in found if name not in within)]


def _difference(
    old: Side, new: Side, target: str, before: Fingerprint, after: Fingerprint
) -> tuple[int, str]:
    """Line in ``new`` at which a target begins to differ, and how."""
    text, source = old.source(target), new.source(target)
    was = statements(text, target) if text else []
    now = statements(source, target) if source else []
    operations = [
        operation
        for operation in SequenceMatcher(
            None, before.split(), after.split(), autojunk=False
        ).get_opcodes()
        if operation[0] != "equal"
    ]
    if now and isinstance(now[0], ast.ClassDef):
        return _line(now[0]), _class_change(was, now[0])
    if not operations:
        return after.line, "the same statements, nested otherwise"
    _, i, i_end, j, j_end = operations[0]
    more = f" (and {count(len(operations) - 1, 'more place')})" if len(operations) > 1 else ""
    line = _line(now[min(j, len(now) - 1)]) if now else after.line
    if i == j == 0 and i_end and j_end:
        return line, _header_change(was[0] if was else None, now[0] if now else None) + more
    gone, come = was[i:i_end], now[j:j_end]
    return line, _statement_change(gone, come, i_end - i, j_end - j) + more


def _line(node: ast.AST) -> int:
    return int(getattr(node, "lineno", 1))


def _statement_change(gone: list[ast.AST], come: list[ast.AST], less: int, plus: int) -> str:
    if less and plus:
        if gone and come:
            return " became ".join(_pair(ast.unparse(gone[0]), ast.unparse(come[0])))
        return f"{count(max(less, plus), 'statement')} changed"
    if plus:
        return f"added {_code(come[0])}" if come else f"{count(plus, 'statement')} added"
    return f"removed {_code(gone[0])}" if gone else f"{count(less, 'statement')} removed"


def count(number: int, noun: str) -> str:
    """``1 place``, ``2 places``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _code(node: ast.AST) -> str:
    """The first line of a statement, in backquotes, no longer than a line."""
    return _cut(ast.unparse(node).partition("\n")[0], 0)


def _pair(before: str, now: str) -> tuple[str, str]:
    """Two statements, each cut to a line that shows where they differ."""
    lines = [text.partition("\n")[0] for text in (before, now)]
    if lines[0] == lines[1]:
        lines = [" ".join(text.split()) for text in (before, now)]
    pairs = zip(*lines, strict=False)
    equal = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    start = equal - _WIDTH // 3 if equal > _WIDTH * 2 // 3 else 0
    return _cut(lines[0], start), _cut(lines[1], start)


def _cut(text: str, start: int) -> str:
    shown = text[start : start + _WIDTH]
    return f"`{'...' if start else ''}{shown}{'...' if start + _WIDTH < len(text) else ''}`"


def _class_change(was: list[ast.AST], now: ast.ClassDef) -> str:
    before = was[0] if was else None
    if not isinstance(before, ast.ClassDef):
        return "its bases or the names of its members changed"
    come, gone = members(now) - members(before), members(before) - members(now)
    told = [
        f"member `{name}` {verb}"
        for names, verb in ((come, "added"), (gone, "removed"))
        for name in sorted(names)
    ]
    return ", ".join(told) or "its bases or decorators changed"


def _header_change(before: ast.AST | None, now: ast.AST | None) -> str:
    """How the line that begins a function changed."""
    if not isinstance(before, _FUNCTIONS) or not isinstance(now, _FUNCTIONS):
        return "the signature or a decorator changed"
    if type(before) is not type(now):
        return (
            "it is a coroutine now"
            if isinstance(now, ast.AsyncFunctionDef)
            else ("it is no coroutine any more")
        )
    return ", ".join(_signature_changes(before, now)) or "a decorator or a default changed"


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, str]:
    """Each parameter by its name (with stars), and its annotation."""
    given = node.args
    named = {arg.arg: arg for arg in (*given.posonlyargs, *given.args)}
    if given.vararg:
        named[f"*{given.vararg.arg}"] = given.vararg
    named.update({arg.arg: arg for arg in given.kwonlyargs})
    if given.kwarg:
        named[f"**{given.kwarg.arg}"] = given.kwarg
    return {n: ast.unparse(arg.annotation) if arg.annotation else "" for n, arg in named.items()}


def _signature_changes(
    before: ast.FunctionDef | ast.AsyncFunctionDef, now: ast.FunctionDef | ast.AsyncFunctionDef
) -> Iterator[str]:
    for decorated, verb in ((now, "added"), (before, "removed")):
        other = {ast.unparse(d) for d in (before if decorated is now else now).decorator_list}
        for decorator in decorated.decorator_list:
            if ast.unparse(decorator) not in other:
                yield f"decorator `@{ast.unparse(decorator)}` {verb}"
    was, has = _parameters(before), _parameters(now)
    come, gone = [n for n in has if n not in was], [n for n in was if n not in has]
    if len(come) == len(gone) == 1 and list(has).index(come[0]) == list(was).index(gone[0]):
        yield f"parameter `{gone[0]}` is called `{come[0]}` now"
    else:
        yield from (f"parameter `{name}` added" for name in come)
        yield from (f"parameter `{name}` removed" for name in gone)
        if not come and not gone and list(was) != list(has):
            yield f"parameters reordered: {', '.join(has)}"
    for name in was:
        if name in has and was[name] != has[name]:
            yield f"parameter `{name}` is `{has[name] or 'not annotated'}` now"
    if ast.dump(before.args) != ast.dump(now.args) and was == has and list(was) == list(has):
        yield f"a default changed: `{ast.unparse(now.args)}`"
    returns = [ast.unparse(node.returns) if node.returns else "" for node in (before, now)]
    if returns[0] != returns[1]:
        yield f"returns `{returns[1] or 'anything'}` now"
