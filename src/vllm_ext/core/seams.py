"""How a part touches vLLM: the target's place, and the object to put there.

Wrappers are plain functions rather than proxy objects: they pickle by reference, are traced by
Dynamo like the function they stand for, and cost one call (docs/design.md has the figures).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "<missing>"})()


class SeamError(Exception):
    """A target that can't be patched as declared; the message says what was found."""


@dataclass(frozen=True)
class Place:
    """Where a target lives: a name in a module, in a class or in a registry (a dict)."""

    owner: Any
    name: str

    def read(self) -> Any:
        """The raw attribute (descriptors unbound), MISSING where the owner has none itself."""
        held = self.owner if isinstance(self.owner, dict) else vars(self.owner)
        return held.get(self.name, MISSING)

    def write(self, value: Any) -> None:
        """Put a raw attribute there; MISSING takes the attribute away."""
        if isinstance(self.owner, dict):
            if value is MISSING:
                del self.owner[self.name]
            else:
                self.owner[self.name] = value
        elif value is MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, value)


def split(target: str) -> tuple[str, list[str]]:
    """``module:Class.method`` as module name and path inside the module."""
    module, _, path = target.partition(":")
    if not module or not path:
        raise ValueError(f"{target!r} is not a target of the form module:qualname")
    return module, path.split(".")


def module_of(target: str) -> str:
    """Name of the module a target lives in."""
    return split(target)[0]


def locate(target: str) -> Place:
    """The place of a target whose module is loaded; reads vars(), so nothing is imported.

    ``module:Class.registry[name]`` is an entry of a registry. Raises SeamError if the module isn't
    loaded, or a class or the registry on the way is missing.
    """
    attribute, bracket, entry = target.partition("[")
    if bracket:
        registry = locate(attribute).read()
        if not isinstance(registry, dict):
            raise SeamError(f"{attribute} is not a registry but {registry!r}")
        return Place(registry, entry.removesuffix("]"))
    module_name, path = split(target)
    owner: Any = sys.modules.get(module_name)
    if not isinstance(owner, ModuleType):
        raise SeamError(f"module {module_name} is not loaded")
    for depth, name in enumerate(path[:-1], start=1):
        owner = vars(owner).get(name)
        if not isinstance(owner, type):
            raise SeamError(f"{module_name}:{'.'.join(path[:depth])} is not a class")
    return Place(owner, path[-1])


@dataclass(frozen=True)
class Seam:
    """One touch of vLLM at ``target`` (``module:qualname``)."""

    target: str

    @property
    def evidence(self) -> tuple[str, ...]:
        """What must be as recorded before this seam may be used."""
        return (self.target,)

    def layer(self, place: Place, below: Any) -> Any:
        """The object to put at ``place``, given the one that is there (MISSING if none)."""
        raise NotImplementedError


@dataclass(frozen=True)
class Wrap(Seam):
    """A wrapper round a function or method: ``behaviour(original, *args, **kwargs)``.

    For methods args[0] is self, for classmethods cls. Plain, static and class methods, plain and
    coroutine functions and asynchronous generators are taken; anything else raises SeamError. In
    the place of an asynchronous generator ``behaviour`` is one, too.
    """

    behaviour: Callable[..., Any]

    def layer(self, place: Place, below: Any) -> Any:
        if below is MISSING:
            raise SeamError(f"{self.target} is not defined there")
        if isinstance(below, (staticmethod, classmethod)):
            return type(below)(_wrapper(self.behaviour, below.__func__))
        return _wrapper(self.behaviour, below)


@dataclass(frozen=True)
class Add(Seam):
    """An attribute the class itself lacks: ``build(owner)`` returns it."""

    build: Callable[[Any], Any]

    @property
    def evidence(self) -> tuple[str, ...]:
        """The name must be absent and the class have the recorded bases and members."""
        return (self.target, self.target.rpartition(".")[0])

    def layer(self, place: Place, below: Any) -> Any:
        if below is not MISSING:
            raise SeamError(f"{self.target} exists already")
        value = self.build(place.owner)
        if isinstance(value, FunctionType):
            value.__name__ = place.name
            value.__qualname__ = f"{place.owner.__qualname__}.{place.name}"
        return value


@dataclass(frozen=True)
class Register(Seam):
    """An entry in one of vLLM's registries, made by vLLM's own registering function.

    ``target`` is ``module:Class.registry[name]``, ``through`` the class method that registers and
    ``arguments`` what it is given. A name that is taken already raises SeamError.
    """

    through: str
    arguments: tuple[Any, ...]

    @property
    def evidence(self) -> tuple[str, ...]:
        """The function must be the recorded one, in a class with the recorded members."""
        return (self.through, self.through.rpartition(".")[0])

    def layer(self, place: Place, below: Any) -> Any:
        if below is not MISSING:
            raise SeamError(f"{self.target} is taken already")
        function = locate(self.through)
        getattr(function.owner, function.name)(*self.arguments)
        entry = place.read()
        if entry is MISSING:
            raise SeamError(f"{self.through} made no entry {place.name!r}")
        return entry


def _wrapper(behaviour: Callable[..., Any], original: Any) -> FunctionType:
    if not isinstance(original, FunctionType):
        raise SeamError(f"{original!r} is not a function")
    # The wrapper is of the original's kind: FastAPI and inspect look at that.
    if inspect.iscoroutinefunction(original):

        @functools.wraps(original)
        async def coroutine_wrapper(*args: Any, **kwargs: Any) -> Any:
            return await behaviour(original, *args, **kwargs)

        return coroutine_wrapper  # type: ignore[return-value]

    if inspect.isasyncgenfunction(original):

        @functools.wraps(original)
        async def generator_wrapper(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            # What is given up early is closed at once, as the original would be.
            async with contextlib.aclosing(behaviour(original, *args, **kwargs)) as items:
                async for item in items:
                    yield item

        return generator_wrapper  # type: ignore[return-value]

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return behaviour(original, *args, **kwargs)

    return wrapper  # type: ignore[return-value]


def function_of(raw: Any) -> Any:
    """The function behind a raw attribute (static and class methods unwrapped)."""
    return raw.__func__ if isinstance(raw, (staticmethod, classmethod)) else raw
