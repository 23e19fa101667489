"""One fresh process of benchmarks.register: go to where vLLM loads its plugins, measure ours.

Nothing is imitated: vLLM's own code runs until it loads the entry point, so the modules that are
loaded by then are those of a real process. Only the standard library is imported before that.

Usage: register_child.py PROCESS RESULT [--phases]
"""

from __future__ import annotations

import gc
import importlib
import importlib.machinery
import importlib.metadata
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

# Label and place of what is told apart; a place that is gone is named in the result.
PHASES = {
    "plan": "vllm_ext.core.plan:plan",
    "catalogue": "vllm_ext.core.plan:catalogue",
    "find the installation": "vllm_ext.core.release:installation",
    "settings": "vllm_ext.settings:read",
    "read the record": "vllm_ext.core.release:record",
    "hash source files": "vllm_ext.core.release:file_hash",
    "compare syntax trees": "vllm_ext.core.release:fingerprint",
    "ledger: prepare": "vllm_ext.core.ledger:Ledger.__init__",
    "apply": "vllm_ext.core.ledger:Ledger.apply",
    "apply: rebind aliases": "vllm_ext.core.ledger:_rebind",
    "entry_points()": "importlib.metadata:entry_points",
    "start: arm and report": "vllm_ext.core.process:Process.start",
}
IMPORTS = "imports"
OTHER = "the rest"


class Meter:
    """CPU time by label, each nanosecond counted for the innermost label only."""

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()
        self.modules: Counter[str] = Counter()
        self._open: list[tuple[str, str]] = []
        self._since = 0

    def enter(self, label: str, module: str = "") -> None:
        """Begin a label inside the present one."""
        self._settle()
        self._open.append((label, module))

    def leave(self) -> None:
        """End the innermost label."""
        self._settle()
        self._open.pop()

    def _settle(self) -> None:
        now = time.process_time_ns()
        if self._open:
            label, module = self._open[-1]
            self.spent[label] += now - self._since
            if module:
                self.modules[module] += now - self._since
        self._since = now

    def timed(self, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its time counted for the label."""

        def measured(*args: Any, **kwargs: Any) -> Any:
            self.enter(label)
            try:
                return function(*args, **kwargs)
            finally:
                self.leave()

        return measured


class ImportMeter:
    """A finder that times every import and puts the meter round the phases of a new module."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self.missing = dict(PHASES)
        self.instrument("importlib.metadata", importlib.metadata)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The other finders' spec; the time until its code has run is the module's."""
        self._meter.enter(IMPORTS, name)
        spec = None
        for finder in sys.meta_path:
            if finder is not self and spec is None:
                spec = finder.find_spec(name, path, target)
        loader: Any = spec.loader if spec else None
        if isinstance(loader, importlib.machinery.SourceFileLoader):
            run = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                try:
                    run(module)
                    self.instrument(name, module)
                finally:
                    self._meter.leave()

            loader.exec_module = exec_module  # type: ignore[method-assign]
        else:
            self._meter.leave()
        return spec

    def instrument(self, name: str, module: ModuleType) -> None:
        """Time the phases that are functions of this module."""
        for label, place in PHASES.items():
            home, _, path = place.partition(":")
            if home != name:
                continue
            owner: Any = module
            *outer, last = path.split(".")
            for step in outer:
                owner = getattr(owner, step, None)
            if hasattr(owner, last):
                setattr(owner, last, self._meter.timed(label, getattr(owner, last)))
                del self.missing[label]


def serve() -> None:
    """API server: ``vllm serve`` loads the plugins while it builds its argument parser."""
    sys.argv = ["vllm", "serve", "--help"]
    importlib.import_module("vllm.entrypoints.cli.main").main()


def engine() -> None:
    """EngineCore: spawned, it imports its module and loads the plugins first of all."""
    os.environ["VLLM_EXT_SERVER_ID"] = "benchmark"
    importlib.import_module("vllm.v1.engine.core")
    importlib.import_module("vllm.plugins").load_general_plugins()


PROCESSES = {"server": serve, "engine": engine}


def main(process: str, result: Path, phases: bool) -> None:
    """Run a process up to the plugin, measure, write the result and end the process."""
    load = importlib.metadata.EntryPoint.load

    def measured(entry: importlib.metadata.EntryPoint) -> Any:
        if entry.value.partition(":")[0] != "vllm_ext.plugin":
            return load(entry)
        told = _phases(entry, load) if phases else _plain(entry, load)
        result.write_text(json.dumps(told))
        sys.stdout.flush()
        os._exit(0)

    importlib.metadata.EntryPoint.load = measured  # type: ignore[method-assign,assignment]
    PROCESSES[process]()
    sys.exit("vLLM did not load the plugin; is vllm-ext installed in this environment?")


def _plain(entry: importlib.metadata.EntryPoint, load: Callable[..., Any]) -> dict[str, Any]:
    before = set(sys.modules)
    collections = gc.get_stats()[2]["collections"]
    wall, start = time.perf_counter_ns(), time.process_time_ns()
    register = load(entry)
    loaded = time.process_time_ns()
    register()
    end, wall_end = time.process_time_ns(), time.perf_counter_ns()
    new = sorted(set(sys.modules) - before)
    plugin = sys.modules["vllm_ext.plugin"]
    return {
        "cpu_ns": end - start,
        "load_ns": loaded - start,
        "wall_ns": wall_end - wall,
        "modules_before": len(before),
        "modules_added": new,
        "full_collections": gc.get_stats()[2]["collections"] - collections,
        "compiled": bool(plugin.__cached__ and Path(plugin.__cached__).is_file()),
    }


def _phases(entry: importlib.metadata.EntryPoint, load: Callable[..., Any]) -> dict[str, Any]:
    meter = Meter()
    finder = ImportMeter(meter)
    sys.meta_path.insert(0, finder)
    meter.enter(OTHER)
    load(entry)()
    meter.leave()
    return {
        "phases": dict(meter.spent),
        "modules": dict(meter.modules),
        "missing": sorted(finder.missing),
    }


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), "--phases" in sys.argv[3:])
