"""Who holds what: parts are applied as a whole, read back, rolled back and undone exactly."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

from vllm_ext.core import caches
from vllm_ext.core.feature import Judgement, Part, Verdict
from vllm_ext.core.plan import Planned
from vllm_ext.core.seams import MISSING, Place, Seam, SeamError, function_of, locate, module_of

Step = Callable[[str], None]


class Conflict(SeamError):
    """Somebody else's object stands where vLLM's own was expected."""


@dataclass
class Holding:
    """A place we hold: vLLM's object, our layers from the bottom up, and what is there now."""

    place: Place
    original: Any
    installed: Any
    layers: list[tuple[str, Seam]] = field(default_factory=list)
    aliases: int = 0


@dataclass
class Entry:
    """A planned part, the verdict it got when it was applied, and its verdict now."""

    planned: Planned
    judgement: Judgement
    applied: Judgement | None = None
    waiting: set[str] = field(default_factory=set)


class Ledger:
    """All patches of this process, to the vLLM below ``root``."""

    def __init__(self, planned: tuple[Planned, ...], root: Path | None = None) -> None:
        self.entries = {entry.id: Entry(entry, entry.judgement) for entry in planned}
        self._own = [str(root / "vllm")] if root else []
        self._lock = threading.RLock()
        self._changing = False
        self._holdings: dict[str, Holding] = {}

    def planned(self) -> tuple[Planned, ...]:
        """Every part with its present judgement."""
        return tuple(replace(e.planned, judgement=e.judgement) for e in self.entries.values())

    def steps(self, part: Part) -> list[str]:
        """The steps ``apply`` takes for a part, in order."""
        targets = [seam.target for seam in part.seams]
        return [
            *(f"locate {target}" for target in targets),
            *(f"check {target}" for target in targets),
            *(f"{verb} {target}" for target in targets for verb in ("apply", "rebind")),
            *(f"read back {target}" for target in targets),
            "record",
        ]

    def apply(self, part_id: str, step: Step = lambda name: None) -> Judgement:
        """Apply an armed part, all its seams or none; never raises an Exception.

        ``step`` is called with the name of each step before it is taken.
        """
        entry = self.entries[part_id]
        part = entry.planned.part
        try:
            with self._all_or_nothing(part_id, part):
                if entry.judgement.verdict is Verdict.ARMED:
                    entry.judgement = self._apply(part_id, part, entry.judgement, step)
                    entry.applied = entry.judgement
        except Conflict as conflict:
            entry.judgement = Judgement(Verdict.CONFLICT, str(conflict))
        except Exception as error:
            entry.judgement = Judgement(
                Verdict.FAILED, f"{type(error).__name__}: {error}; rolled back, vLLM is as it was"
            )
        return entry.judgement

    def _apply(self, part_id: str, part: Part, armed: Judgement, step: Step) -> Judgement:
        places = {}
        for seam in part.seams:
            step(f"locate {seam.target}")
            places[seam.target] = locate(seam.target)
        for seam in part.seams:
            step(f"check {seam.target}")
            self._check(seam.target, places[seam.target])
        for seam in part.seams:
            step(f"apply {seam.target}")
            holding = self._hold(seam.target, places[seam.target])
            rebind = functools.partial(step, f"rebind {seam.target}")
            holding.aliases = self._install(seam.target, [*holding.layers, (part_id, seam)], rebind)
        for seam in part.seams:
            step(f"read back {seam.target}")
            holding = self._holdings[seam.target]
            if holding.place.read() is not holding.installed:
                raise SeamError(f"{seam.target} did not keep the patch")
        step("record")
        if part.traced:
            caches.note(part_id)
        aliases = sum(self._holdings[target].aliases for target in part.targets)
        rebound = f", {aliases} other references rebound" if aliases else ""
        return Judgement(Verdict.ACTIVE, armed.reason + rebound)

    def undo(self, part_id: str) -> None:
        """Take a part away: every object is again the one that was there before.

        Raises Conflict, and changes nothing, if somebody patched one of its targets after us.
        """
        entry = self.entries[part_id]
        part = entry.planned.part
        for target in part.targets:
            holding = self._holdings.get(target)
            if holding and holding.place.read() is not holding.installed:
                raise Conflict(f"{target} now holds {describe(holding.place.read())}")
        with self._change():
            self._withdraw(part_id, part)
        entry.judgement, entry.applied = entry.planned.judgement, None

    def reread(self) -> list[Entry]:
        """Look again at every part that was applied; returns those whose verdict changed.

        A foreign wrapper that refers to ours is named and the part stays active; one that replaced
        ours is a conflict, for as long as it stands there.
        """
        changed: list[Entry] = []
        if self._changing:  # the garbage collector may call in the middle of a change
            return changed
        for entry in self.entries.values():
            if entry.applied is None:
                continue
            judgement = self._look(entry, entry.applied)
            if judgement != entry.judgement:
                entry.judgement = judgement
                changed.append(entry)
        return changed

    def _look(self, entry: Entry, applied: Judgement) -> Judgement:
        for target in entry.planned.part.targets:
            holding = self._holdings[target]
            try:
                owner = locate(target).owner
            except SeamError as error:
                return Judgement(Verdict.CONFLICT, f"after we patched {target}, {error}")
            if owner is not holding.place.owner:
                return Judgement(
                    Verdict.CONFLICT,
                    f"{target}: what holds it was replaced after us by {describe(owner)}",
                )
            current = holding.place.read()
            if current is holding.installed:
                continue
            if not _reaches(current, function_of(holding.installed)):
                return Judgement(
                    Verdict.CONFLICT, f"{target} was replaced after us by {describe(current)}"
                )
            return Judgement(
                Verdict.ACTIVE,
                f"{target} was wrapped after us by {describe(current)}, which refers to us",
            )
        return applied

    def _check(self, target: str, place: Place) -> None:
        """Whether what stands there is ours or vLLM's own; raises Conflict naming who it is."""
        owner, current = place.owner, place.read()
        module = sys.modules[module_of(target)]
        if isinstance(owner, type) and owner.__module__ != module.__name__:
            raise Conflict(
                f"{target}: the class was replaced by {owner.__module__}.{owner.__qualname__}"
            )
        holding = self._holdings.get(target)
        if holding is not None and current is holding.installed:
            return
        if holding is None and current is MISSING:
            return
        function: Any = function_of(current)
        while isinstance(function, FunctionType) and self._is_own(function, module):
            inner = getattr(function, "__wrapped__", None)
            if inner is None:
                if function.__code__.co_filename != module.__file__ or (
                    function.__code__.co_qualname == target.partition(":")[2]
                ):
                    return
                break
            function = inner
        raise Conflict(f"{target} is already {describe(function)}")

    def _is_own(self, function: FunctionType, module: ModuleType) -> bool:
        """Code of the module's own file, or of a decorator that vLLM uses."""
        file = function.__code__.co_filename
        own = [module.__file__ or "", *_decorator_homes(), *self._own]
        return any(file == path or file.startswith(path + "/") for path in own)

    def _hold(self, target: str, place: Place) -> Holding:
        current = place.read()
        return self._holdings.setdefault(target, Holding(place, current, current))

    def _install(
        self,
        target: str,
        layers: list[tuple[str, Seam]],
        before_rebind: Callable[[], None] = lambda: None,
    ) -> int:
        """Put the original with ``layers`` on it at the target's place and at its aliases.

        Returns the number of aliases.
        """
        holding = self._holdings[target]
        value = holding.original
        for _, seam in layers:
            value = seam.layer(holding.place, value)
        previous, holding.installed, holding.layers = holding.installed, value, layers
        if holding.place.read() is not value:
            holding.place.write(value)
        before_rebind()
        return _rebind(previous, value, holding.place)

    def _withdraw(self, part_id: str, part: Part) -> None:
        for target in reversed(part.targets):
            holding = self._holdings.get(target)
            if holding is None:
                continue
            layers = [layer for layer in holding.layers if layer[0] != part_id]
            if layers != holding.layers:
                self._install(target, layers)
            if not layers:
                del self._holdings[target]
        caches.forget(part_id)

    @contextmanager
    def _all_or_nothing(self, part_id: str, part: Part) -> Iterator[None]:
        with self._change():
            try:
                yield
            except BaseException:
                self._withdraw(part_id, part)
                raise

    @contextmanager
    def _change(self) -> Iterator[None]:
        with self._lock:
            before, self._changing = self._changing, True
            try:
                yield
            finally:
                self._changing = before


def _rebind(old: Any, new: Any, home: Place) -> int:
    """Point every name in loaded vLLM modules that holds function ``old`` to ``new``; count them.

    Reads vars(), never getattr: vLLM's lazy modules import on attribute access.
    """
    if old is new or not isinstance(old, FunctionType) or not isinstance(home.owner, ModuleType):
        return 0
    count = 0
    for name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or name.partition(".")[0] not in _namespaces():
            continue
        for alias, value in list(vars(module).items()):
            if value is old and (module is not home.owner or alias != home.name):
                setattr(module, alias, new)
                count += 1
    return count


def _decorator_homes() -> list[str]:
    """Files and folders besides vLLM whose wrappers are part of vLLM's own functions."""
    names = ("functools", "contextlib", "typing_extensions", "torch")
    files = [getattr(sys.modules.get(name), "__file__", None) for name in names]
    return [file.removesuffix("/__init__.py") for file in files if file]


@functools.cache
def _namespaces() -> frozenset[str]:
    """Top-level packages in which vLLM's functions may have been taken by name."""
    plugins = metadata.entry_points(group="vllm.general_plugins")
    return frozenset({"vllm", *(plugin.value.split(":")[0].split(".")[0] for plugin in plugins)})


def _reaches(start: Any, ours: Any) -> bool:
    """Whether ``start`` refers to ``ours``: in a closure, as a global, in a partial or a proxy.

    ``__wrapped__`` of a plain function is no sign: functools.wraps sets it on replacements too.
    """
    seen: set[int] = set()
    queue = [start]
    while queue and len(seen) < 500:
        value = function_of(queue.pop(0))
        if value is ours:
            return True
        if id(value) not in seen:
            seen.add(id(value))
            queue += _inside(value)
    return False


def _inside(value: Any) -> list[Any]:
    """What an object may call. Asks no object for attributes: proxies would answer for others."""
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _filled(cell)]
        return [*cells, *(value.__globals__.get(name) for name in value.__code__.co_names)]
    if isinstance(value, functools.partial):
        return [value.func]
    if isinstance(value, MethodType):
        return [value.__func__]
    if type(value) in (dict, list, tuple) and len(value) < 100:
        return list(value.values() if isinstance(value, dict) else value)
    try:
        proxied = object.__getattribute__(value, "__wrapped__")
    except Exception:  # a property of somebody else's may raise anything
        return []
    return [proxied] if isinstance(proxied, FunctionType) else []


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def describe(raw: Any) -> str:
    """Who an object is: its qualified name, file and line."""
    value = function_of(raw)
    if isinstance(value, FunctionType):
        code = value.__code__
        where = f"{code.co_filename}, line {code.co_firstlineno}"
        return f"{value.__globals__.get('__name__')}.{code.co_qualname} ({where})"
    if isinstance(value, type):
        return f"class {value.__module__}.{value.__qualname__}"
    return f"an object of {type(value).__module__}.{type(value).__qualname__}"
