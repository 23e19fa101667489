"""Derive the wire schema of a vLLM from its source files; nothing of vLLM is imported.

Every message that crosses the sockets is reached from a few roots through the types of its fields.
What isn't understood for certain is an error, never a guess.
"""

from __future__ import annotations

import ast
import builtins
import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import UnionType

from vllm_ext.core.release import Installation
from vllm_ext.wire.schema import (
    REQUEST_TYPES,
    Direction,
    Enumeration,
    Field,
    Form,
    Message,
    Root,
    Schema,
)
from vllm_ext.wire.source import Found, Module, Sources, UnderivableError
from vllm_ext.wire.types import union

ROOTS = (
    ("vllm.v1.engine", "EngineCoreRequest", Direction.TO_ENGINE),
    ("vllm.v1.engine", "ReconfigureDistributedRequest", Direction.TO_ENGINE),
    ("vllm.v1.engine.utils", "EngineHandshakeMetadata", Direction.TO_ENGINE),
    ("vllm.v1.engine", "EngineCoreReadyResponse", Direction.TO_FRONTEND),
    ("vllm.v1.engine", "EngineCoreOutputs", Direction.TO_FRONTEND),
)
SERIALIZER = "vllm.v1.serial_utils"
EXTENSION = "CUSTOM_TYPE_"

_STRUCT = "msgspec.Struct"
_TUPLE = "typing.NamedTuple"
_ENUMS = {f"enum.{name}" for name in ("Enum", "IntEnum", "StrEnum", "Flag", "IntFlag")}
_DATACLASS = {
    "dataclasses.dataclass",
    "pydantic.dataclasses.dataclass",
    "vllm.config.utils.config",
}
_HARMLESS = {"functools.total_ordering", "enum.unique", "typing.final", "typing.runtime_checkable"}
_FIELDS = {"dataclasses.field", "msgspec.field", "pydantic.Field", "pydantic.fields.Field"}
_ABSTRACT = {"abc.ABC", "typing.Generic", "typing.Protocol", "typing_extensions.Protocol"}
_EMPTY = {"list": "[]", "dict": "{}", "set": "set()", "frozenset": "frozenset()", "tuple": "()"}
_BUILTINS = {"int", "float", "str", "bytes", "bool", "bytearray", "memoryview", "object", "slice"}
_GENERIC = {
    **{f"typing.{name}": name for name in ("Any", "Sequence", "Mapping", "Iterable", "Callable")},
    **{f"collections.abc.{name}": name for name in ("Sequence", "Mapping", "Iterable", "Callable")},
    **{
        f"typing.{name}": name.lower()
        for name in ("List", "Dict", "Set", "Tuple", "Type", "FrozenSet")
    },
    **{f"typing.{name}": name for name in ("Optional", "Union", "Literal", "Annotated")},
    **{f"typing.{name}": name for name in ("ClassVar", "Final")},
    **{name: name for name in ("list", "dict", "set", "tuple", "type", "frozenset")},
}


def derive(installed: Installation) -> Schema:
    """The schema of a vLLM on disk. Raises UnderivableError where a source can't be told."""
    return _Derivation(Sources(installed.root)).schema(installed.release)


@dataclass
class _Derivation:
    sources: Sources
    messages: dict[str, Message] = field(default_factory=dict)
    enums: dict[str, Enumeration] = field(default_factory=dict)
    # Names already given out, with the dotted class each stands for.
    names: dict[str, str] = field(default_factory=dict)

    def schema(self, release: str) -> Schema:
        roots = []
        for module, name, direction in ROOTS:
            self._visit(self._class(module, name))
            roots.append(Root(name, direction))
        self._visit(self._class("vllm.v1.engine", REQUEST_TYPES))
        codes = self._module(SERIALIZER).values
        extensions = {
            name: ast.literal_eval(value)
            for name, value in codes.items()
            if name.startswith(EXTENSION)
        }
        if not extensions:
            raise UnderivableError(f"{SERIALIZER} defines no {EXTENSION}* code")
        return Schema(release, tuple(roots), self.messages, self.enums, extensions)

    def _module(self, name: str) -> Module:
        module = self.sources.module(name)
        if module is None:
            raise UnderivableError(f"there is no module {name}")
        return module

    def _class(self, module: str, name: str) -> Found:
        found = self.sources.find(self._module(module), ast.Name(name))
        if found is None or not isinstance(found.node, ast.ClassDef):
            raise UnderivableError(f"there is no class {module}.{name}")
        return found

    # Classes

    def _visit(self, found: Found) -> str:
        """Take a class into the schema; returns the name it has there."""
        assert isinstance(found.node, ast.ClassDef) and found.module is not None
        name = found.node.name
        if self.names.get(name, found.dotted) != found.dotted:
            raise UnderivableError(f"{found.dotted} and {self.names[name]} have the same name")
        if name in self.names:
            return name
        self.names[name] = found.dotted
        bases = list(self._bases(found))
        kinds = {base.dotted for base in bases if base.node is None}
        dataclass_like = self._is_dataclass(found)
        if kinds & _ENUMS:
            members = self._members(found.module, found.node)
            self.enums[name] = Enumeration(found.module.name, members)
        elif _STRUCT in kinds:
            self.messages[name] = self._struct(found, bases)
        elif _TUPLE in kinds:
            fields = self._fields(found.module, found.node)
            self.messages[name] = Message(found.module.name, Form.TUPLE, tuple(fields))
        elif dataclass_like:
            self.messages[name] = Message(found.module.name, Form.MAP, self._inherited(bases))
        return name

    def _bases(self, found: Found) -> Iterator[Found]:
        """The class and all it inherits from, bases first; outside bases by name alone."""
        assert isinstance(found.node, ast.ClassDef) and found.module is not None
        for expression in found.node.bases:
            while isinstance(expression, ast.Subscript):
                expression = expression.value
            base = self.sources.find(found.module, expression)
            name = ast.unparse(expression)
            if base is None and not hasattr(builtins, name):
                raise UnderivableError(f"{found.dotted} inherits from {name}, which isn't known")
            if base and isinstance(base.node, ast.ClassDef):
                yield from self._bases(base)
            else:
                yield base or Found(name)
        yield found

    def _is_dataclass(self, found: Found) -> bool:
        assert isinstance(found.node, ast.ClassDef) and found.module is not None
        for decorator in found.node.decorator_list:
            called = decorator.func if isinstance(decorator, ast.Call) else decorator
            known = self.sources.find(found.module, called)
            if known and known.dotted in _DATACLASS:
                return True
            if known is None or known.dotted not in _HARMLESS:
                what = ast.unparse(decorator)
                raise UnderivableError(f"{found.dotted} is made by a decorator, @{what}")
        return False

    def _struct(self, found: Found, bases: list[Found]) -> Message:
        options: dict[str, ast.expr] = {}
        ours = [base for base in bases if isinstance(base.node, ast.ClassDef)]
        for base in ours:
            assert isinstance(base.node, ast.ClassDef)
            options.update(_keywords(base))
        for name in ("rename", "tag_field"):
            if name in options and ast.unparse(options[name]) != "None":
                raise UnderivableError(f"{found.dotted} sets {name}, which is not understood")
        array = _true(options, "array_like")
        tag = ast.unparse(options["tag"]) if "tag" in options else None
        assert found.module is not None
        # Without effect on arrays: msgspec sends every position of them.
        omits = not array and _true(options, "omit_defaults")
        return Message(
            found.module.name,
            Form.ARRAY if array else Form.MAP,
            self._inherited(bases, positional=True, omits=omits),
            omits_defaults=omits,
            strict=_true(options, "forbid_unknown_fields"),
            tag=None if tag in ("None", "False") else tag,
        )

    def _inherited(
        self, bases: list[Found], positional: bool = False, omits: bool = False
    ) -> tuple[Field, ...]:
        """Fields of a class and its bases; keyword-only ones of a Struct go last."""
        fields: dict[str, Field] = {}
        later: dict[str, Field] = {}
        for base in bases:
            if not isinstance(base.node, ast.ClassDef) or base.module is None:
                if base.dotted not in {_STRUCT, "object"} | _ABSTRACT:
                    raise UnderivableError(f"{bases[-1].dotted} inherits from {base.dotted}")
                continue
            options = _keywords(base)
            kept = later if positional and _true(options, "kw_only") else fields
            for entry in self._fields(base.module, base.node, omits):
                if positional and entry.name in fields.keys() | later.keys():
                    raise UnderivableError(f"{base.dotted} defines {entry.name} a second time")
                kept[entry.name] = entry
        return (*fields.values(), *later.values())

    def _fields(self, module: Module, node: ast.ClassDef, omits: bool = False) -> Iterator[Field]:
        known: dict[str, Field] = {}
        for entry in node.body:
            if isinstance(entry, ast.Assign) and known.keys() & set(_names(entry)):
                where = f"{module.name}.{node.name}"
                raise UnderivableError(f"{where} gives a field its default: {ast.unparse(entry)}")
            _plain(module, node, entry, ast.AnnAssign)
            if not isinstance(entry, ast.AnnAssign) or not isinstance(entry.target, ast.Name):
                continue
            what = self._generic(module, entry.annotation)
            text = ast.unparse(entry.annotation)
            if what == "ClassVar" or "ClassVar[" in text:
                continue
            if "InitVar" in text:
                raise UnderivableError(f"{module.name}.{node.name}.{entry.target.id} is an InitVar")
            one = Field(entry.target.id, self._type(module, entry.annotation))
            if entry.value is not None:
                one = self._with_default(module, one, entry.value, omits)
            known[entry.target.id] = one
        yield from known.values()

    def _with_default(self, module: Module, known: Field, value: ast.expr, omits: bool) -> Field:
        made = value.func if isinstance(value, ast.Call) else None
        maker = self.sources.find(module, made) if made is not None else None
        if maker is None or maker.dotted not in _FIELDS or not isinstance(value, ast.Call):
            return replace(known, default=self._value(module, value, omits))
        options = {keyword.arg: keyword.value for keyword in value.keywords}
        if None in options or len(value.args) > 1:
            raise UnderivableError(f"{module.name}: {ast.unparse(value)} is not understood")
        if "name" in options:
            known = replace(known, name=str(ast.literal_eval(options["name"])))
        default = options.get("default", value.args[0] if value.args else None)
        if default is not None and ast.unparse(default) != "...":
            return replace(known, default=self._value(module, default, omits))
        if "default_factory" in options:
            factory = ast.unparse(options["default_factory"])
            made_by = _EMPTY.get(factory, f"({factory})()" if " " in factory else f"{factory}()")
            return replace(known, default=made_by)
        return known

    def _value(self, module: Module, value: ast.expr, needed: bool) -> str:
        """A default as text, the names in it followed to what they stand for.

        Where a default is left out on the wire (``needed``), one that can't be told is an error.
        """
        return ast.unparse(_Constants(self, module, needed).visit(copy.deepcopy(value)))

    def _members(self, module: Module, node: ast.ClassDef) -> dict[str, str]:
        members: dict[str, str] = {}
        where = f"{module.name}.{node.name}"
        counts = True
        for entry in node.body:
            _plain(module, node, entry, ast.Assign | ast.AnnAssign)
            if isinstance(entry, ast.FunctionDef) and entry.name == "__new__":
                raise UnderivableError(f"{where} makes its values itself, in __new__")
            if not isinstance(entry, ast.Assign | ast.AnnAssign) or entry.value is None:
                continue
            text = ast.unparse(entry.value)
            names = [name for name in _names(entry) if not name.startswith("_")]
            if text in ("auto()", "enum.auto()"):
                bases = [ast.unparse(base) for base in node.bases]
                own = any(getattr(e, "name", "") == "_generate_next_value_" for e in node.body)
                plain = bases in (["Enum"], ["IntEnum"], ["enum.Enum"], ["enum.IntEnum"])
                if own or not plain or not counts:
                    raise UnderivableError(f"{where} numbers itself: {text}")
                text = str(len(members) + 1)
            elif names:
                counts = counts and text == str(len(members) + 1)
                if text in members:
                    text = members[text]
                else:
                    text = _literal(where, self._value(module, entry.value, needed=True))
            members.update(dict.fromkeys(names, text))
            counts = counts and len(names) < 2
        if not members:
            raise UnderivableError(f"{where} is an enum without members")
        return members

    # Types

    def _generic(self, module: Module, expression: ast.expr) -> str | None:
        """The plain name of a builtin or typing form, None for anything else."""
        if isinstance(expression, ast.Subscript):
            expression = expression.value
        if isinstance(expression, ast.Name) and expression.id in _BUILTINS | _GENERIC.keys():
            return expression.id
        found = self.sources.find(module, expression)
        return _GENERIC.get(found.dotted) if found and found.node is None else None

    def _type(self, module: Module, node: ast.expr, inside: tuple[str, ...] = ()) -> str:
        """A type as text: unions with None last, aliases expanded, own classes by short name."""
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str):
                return self._type(module, ast.parse(node.value, mode="eval").body, inside)
            return "..." if node.value is ... else repr(node.value)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            return union(self._type(module, side, inside) for side in (node.left, node.right))
        if isinstance(node, ast.List):
            return f"[{', '.join(self._type(module, item, inside) for item in node.elts)}]"
        generic = self._generic(module, node)
        if isinstance(node, ast.Subscript):
            return self._subscript(module, node, generic, inside)
        if generic:
            return generic
        found = self.sources.find(module, node)
        if found is None:
            raise UnderivableError(
                f"{module.name}: nothing is known of the type {ast.unparse(node)}"
            )
        if isinstance(found.node, ast.ClassDef):
            return self._visit(found)
        if found.node is None or found.module is None:
            return found.dotted
        if found.dotted in inside:
            return found.dotted.rpartition(".")[2]
        if _makes_type(found.node):
            return self._type(found.module, found.node, (*inside, found.dotted))
        return found.dotted.rpartition(".")[2]

    def _subscript(
        self, module: Module, node: ast.Subscript, generic: str | None, inside: tuple[str, ...]
    ) -> str:
        inner = list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
        if generic == "Literal":
            return f"Literal[{', '.join(ast.unparse(item) for item in inner)}]"
        if generic == "Annotated":
            return self._type(module, inner[0], inside)
        if generic in ("Callable", "type"):
            return generic
        rendered = [self._type(module, item, inside) for item in inner]
        if generic == "Optional":
            return union([*rendered, "None"])
        if generic == "Union":
            return union(rendered)
        if generic is None:
            # A class with parameters of its own: they say nothing about what is sent.
            return self._type(module, node.value, inside)
        return f"{generic}[{', '.join(rendered)}]"


@dataclass
class _Constants(ast.NodeTransformer):
    """Puts what names stand for in their place; enum members of a table keep their name there."""

    derivation: _Derivation
    module: Module
    needed: bool
    hops: int = 0

    def visit_Call(self, node: ast.Call) -> ast.expr:
        known = self.derivation.sources.find(self.module, node.func)
        builtin = isinstance(node.func, ast.Name) and hasattr(builtins, node.func.id)
        if self.needed and not (known is None and builtin):
            self._unknown(node)
        node.args = [self.visit(value) for value in node.args]
        for keyword in node.keywords:
            keyword.value = self.visit(keyword.value)
        return node

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._followed(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        owner = self.derivation.sources.find(self.module, node.value)
        if owner and isinstance(owner.node, ast.ClassDef):
            name = self.derivation._visit(owner)
            enum = self.derivation.enums.get(name)
            if enum and node.attr in enum.members:
                return ast.Attribute(ast.Name(name), node.attr)
            return self._unknown(node)
        return self._followed(node)

    def _followed(self, node: ast.Name | ast.Attribute) -> ast.expr:
        found = self.derivation.sources.find(self.module, node)
        if found is None or found.module is None or not isinstance(found.node, ast.expr):
            return self._unknown(node)
        if found.dotted.rpartition(".")[2] in found.module.again or self.hops > 20:
            return self._unknown(node)
        inner = _Constants(self.derivation, found.module, self.needed, self.hops + 1)
        value: ast.expr = inner.visit(copy.deepcopy(found.node))
        return value

    def _unknown(self, node: ast.expr) -> ast.expr:
        if self.needed:
            raise UnderivableError(
                f"{self.module.name}: the value of {ast.unparse(node)} can't be told"
            )
        return node


def _keywords(found: Found) -> dict[str, ast.expr]:
    """The keywords of a class, such as array_like."""
    assert isinstance(found.node, ast.ClassDef)
    options = {}
    for keyword in found.node.keywords:
        if keyword.arg is None:
            what = ast.unparse(keyword.value)
            raise UnderivableError(f"{found.dotted} takes keywords from **{what}")
        options[keyword.arg] = keyword.value
    return options


def _names(entry: ast.Assign | ast.AnnAssign) -> list[str]:
    """The names that a statement gives a value; an error for anything but plain names."""
    targets = entry.targets if isinstance(entry, ast.Assign) else [entry.target]
    if not all(isinstance(target, ast.Name) for target in targets):
        raise UnderivableError(f"a class body sets more than names: {ast.unparse(entry)}")
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _plain(
    module: Module, node: ast.ClassDef, entry: ast.stmt, kinds: type[ast.stmt] | UnionType
) -> None:
    """An error for a field or member that stands inside if, try, with or a loop."""
    for inner in _inside(entry):
        if isinstance(inner, kinds):
            what = f"{module.name}.{node.name} has `{ast.unparse(inner)}` inside another statement"
            raise UnderivableError(f"{what}, so it can't be told whether it is there")


def _inside(entry: ast.AST) -> Iterator[ast.AST]:
    """What runs as part of a statement of a class body, without the bodies of definitions."""
    if isinstance(entry, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.expr):
        return
    for inner in ast.iter_child_nodes(entry):
        yield inner
        yield from _inside(inner)


def _literal(where: str, text: str) -> str:
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError) as error:
        raise UnderivableError(f"{where}: the value {text} can't be told") from error
    return text


def _makes_type(node: ast.expr) -> bool:
    """Whether the value of a name is a type expression: an alias, not a call or a number."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) or node.value is None
    return isinstance(node, ast.Name | ast.Attribute | ast.Subscript | ast.BinOp)


def _true(options: dict[str, ast.expr], name: str) -> bool:
    if name not in options:
        return False
    value = options[name]
    if not isinstance(value, ast.Constant) or not isinstance(value.value, bool):
        raise UnderivableError(f"{name}={ast.unparse(value)} is not understood")
    return value.value
