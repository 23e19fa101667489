"""Record a release: what its probes show, and the fingerprint of everything that is patched."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from vllm_ext.core.feature import Feature, Judgement, Verdict
from vllm_ext.core.fingerprint import Fingerprint, file_hash, fingerprint, source_file
from vllm_ext.core.release import Installation, Record
from vllm_ext.core.seams import module_of


class RecordingError(RuntimeError):
    """A release that can't be recorded; the message says what stands against it."""


def targets_of(features: Sequence[Feature]) -> list[str]:
    """Everything that is fingerprinted for the features, sorted."""
    return sorted({t for f in features for part in f.parts for t in part.fingerprinted})


def make_record(
    features: Sequence[Feature],
    installed: Installation,
    probes: Mapping[str, Judgement],
    reference: Path,
) -> Record:
    """The record of an installation whose Python equals that of the CUDA wheel ``reference``.

    Raises RecordingError if a probe failed or a file differs from the wheel's.
    """
    failed = [f"{p}: {j.reason}" for p, j in probes.items() if j.verdict is Verdict.FAILED]
    if failed:
        raise RecordingError("probes failed: " + "; ".join(failed))
    files: dict[str, str] = {}
    targets: dict[str, Fingerprint | None] = {}
    for target in targets_of(features):
        file = source_file(installed.root, module_of(target))
        targets[target] = None
        if file is None:
            continue
        files[file] = file_hash(installed.root / file)
        targets[target] = fingerprint((installed.root / file).read_text(encoding="utf-8"), target)
    _prove_equal(files, reference)
    return Record(installed.release, reference.name, files, targets, dict(probes))


def _prove_equal(files: Mapping[str, str], reference: Path) -> None:
    with zipfile.ZipFile(reference) as wheel:
        names = set(wheel.namelist())
        different = [
            file
            for file, digest in files.items()
            if file not in names or hashlib.sha256(wheel.read(file)).hexdigest() != digest
        ]
    if different:
        raise RecordingError(
            f"these files differ from {reference.name}, so evidence from this build says nothing "
            f"about it: {', '.join(different)}"
        )


def changes(old: Record | None, new: Record) -> list[tuple[str, str]]:
    """What a new record says differently: (target or part, what changed)."""
    if old is None:
        return [(new.release, "first record of this release")]
    rows = []
    for target in sorted(old.targets.keys() | new.targets.keys()):
        before, after = old.targets.get(target), new.targets.get(target)
        if target not in old.targets:
            rows.append((target, "new target"))
        elif target not in new.targets:
            rows.append((target, "no longer a target"))
        elif (before and before.digest) != (after and after.digest):
            rows.append(
                (target, "changed" if before and after else "appeared" if after else "gone")
            )
    for part in sorted(old.parts.keys() | new.parts.keys()):
        was, now = old.parts.get(part), new.parts.get(part)
        if (was and was.verdict) != (now and now.verdict):
            rows.append(
                (part, f"{was.verdict if was else 'unknown'} -> {now.verdict if now else 'gone'}")
            )
    return rows
