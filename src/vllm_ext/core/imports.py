"""Notice that a module was imported, without changing how it is imported."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class PostImportFinder(MetaPathFinder):
    """Calls ``loaded(name)`` right after the code of a watched module ran.

    Every module is found by the other finders; its loader keeps its type and its resources, only
    ``exec_module`` of that one loader instance is shadowed, until the moment it is called.
    """

    def __init__(self, names: Iterable[str], loaded: Callable[[str], None]) -> None:
        self.names = set(names)
        self._loaded = loaded
        self._busy = threading.local()

    def install(self) -> None:
        """Start to watch, if there is anything to watch."""
        if self.names and self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Stop to watch."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec the other finders give, its loader prepared; None for all other modules."""
        if fullname not in self.names or getattr(self._busy, "name", None) == fullname:
            return None
        # Finders that ask importlib again would come back here.
        self._busy.name = fullname
        try:
            spec = _delegate(self, fullname, path, target)
        finally:
            self._busy.name = None
        if spec is not None and hasattr(spec.loader, "exec_module"):
            self._shadow(spec)
        return spec

    def _shadow(self, spec: ModuleSpec) -> None:
        loader = spec.loader
        if not hasattr(loader, "__dict__"):
            return  # found by the next look instead

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            loader.exec_module(module)  # type: ignore[union-attr]
            # Archives have one loader for all their modules.
            if module.__name__ == spec.name:
                self._done(spec.name)

        loader.exec_module = exec_module  # type: ignore[union-attr,method-assign]

    def _done(self, name: str) -> None:
        self.names.discard(name)
        if not self.names:
            self.remove()
        self._loaded(name)


def _delegate(
    self: MetaPathFinder, name: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    for finder in list(sys.meta_path):
        find = getattr(finder, "find_spec", None)
        if finder is self or find is None:
            continue
        spec: ModuleSpec | None = find(name, path, target)
        if spec is not None:
            return spec
    return None
