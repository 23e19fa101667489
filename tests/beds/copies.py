"""Copies of releases: whole ones that differ in one line, and the files of the targets alone."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.beds.layout import release_path
from vllm_ext.core.release import installation, record


def altered(release: str, folder: Path, file: str, old: str, new: str) -> Path:
    """The release in ``folder`` with ``old`` replaced by ``new`` in one file, the rest linked."""
    source = root_of(release)
    for name in ("vllm", f"vllm-{release}+cpu.dist-info"):
        # Caches of compiled code must not be shared: they speak of the files of the original.
        skip = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source / name, folder / name, copy_function=_link, ignore=skip)
    rewrite(folder, file, old, new)
    return folder


def rewrite(folder: Path, file: str, old: str, new: str) -> None:
    """Replace ``old``, which must stand there once, in one file of a copy."""
    path = folder / file
    text = path.read_text()
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {file}"
    path.unlink()
    path.write_text(text.replace(old, new))


def root_of(release: str) -> Path:
    """The folder that holds the package ``vllm`` of a release."""
    found = installation(release_path(release))
    assert found is not None
    return found.root


def skeleton(folder: Path, release: str, version: str) -> Path:
    """The files of a release that hold targets, under another version if wanted."""
    known = record(release)
    assert known is not None
    for file in known.files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root_of(release) / file, folder / file)
    (folder / "vllm" / "__init__.py").touch()
    (folder / "vllm" / "_version.py").write_text(f"__version__ = version = '{version}'\n")
    return folder


def _link(source: str, target: str) -> None:
    Path(target).symlink_to(source)
