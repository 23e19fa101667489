"""Medians with an interval, the machine they were measured on, and the release that is measured."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

from tests.beds.children import environment
from tests.beds.layout import RELEASES

_RELEASE = "VLLMEXT_BENCHMARK_RELEASE"


@dataclass(frozen=True)
class Spread:
    """Median of a sample and an interval that holds the true median.

    The interval lies between two order statistics, so it assumes nothing about the distribution;
    ``confidence`` is its exact coverage, at least 95 % from six values on.
    """

    median: float
    low: float
    high: float
    confidence: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float], wanted: float = 0.95) -> Spread:
        """Spread of at least one value, with the narrowest interval of the wanted coverage."""
        ordered = sorted(values)
        count = len(ordered)
        cut, coverage = 0, 1 - 2 * 0.5**count
        for candidate in range(1, count // 2):
            tail = sum(math.comb(count, k) for k in range(candidate + 1)) / 2**count
            if 1 - 2 * tail < wanted:
                break
            cut, coverage = candidate, 1 - 2 * tail
        return cls(median(ordered), ordered[cut], ordered[-1 - cut], max(coverage, 0.0), count)

    def text(self, digits: int = 1) -> str:
        """``12.3 [11.9, 13.0]``."""
        return f"{self.median:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


def machine() -> dict[str, Any]:
    """Processor, cores, load and the versions that matter."""
    versions = {}
    for name in ("vllm-ext", "vllm", "torch", "wrapt"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": versions,
        "load": [round(value, 2) for value in os.getloadavg()],
    }


def describe(where: dict[str, Any]) -> str:
    """The machine in one line."""
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    return (
        f"{where['processor']}, {where['cores']} cores, Python {where['python']}, {versions}; "
        f"load {where['load'][0]}"
    )


def save(path: Path, result: dict[str, Any]) -> None:
    """Write a result as JSON."""
    path.write_text(json.dumps(result, indent=1) + "\n")


def measured(description: str, module: str, unit: str, default: int) -> argparse.Namespace:
    """Options of a benchmark of one release, in a process that imports it.

    ``--release``, ``--json FILE`` and ``--<unit>``, a number of at least 1. Where this process is
    none of that release, it becomes one: ``module`` starts anew in its place, without plugins.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--release", choices=RELEASES, default=RELEASES[0])
    parser.add_argument(f"--{unit}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    options = parser.parse_args()
    if getattr(options, unit) < 1:
        parser.error(f"--{unit} takes a number of at least 1")
    if os.environ.get(_RELEASE) != options.release:
        quiet = {"VLLM_PLUGINS": "", "VLLM_LOGGING_LEVEL": "ERROR", _RELEASE: options.release}
        environ = {**environment(options.release), **quiet}
        os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], environ)
    return options


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
