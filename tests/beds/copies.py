"""Copies of a release that differ from it in one line, to be put first on PYTHONPATH."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

from tests.beds.layout import release_path


def altered(release: str, folder: Path, file: str, old: str, new: str) -> Path:
    """The release in ``folder`` with ``old`` replaced by ``new`` in one file, the rest linked."""
    source = release_path(release) or Path(sysconfig.get_path("purelib"))
    for name in ("vllm", f"vllm-{release}+cpu.dist-info"):
        # Caches of compiled code must not be shared: they speak of the files of the original.
        skip = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source / name, folder / name, copy_function=_link, ignore=skip)
    path = folder / file
    text = path.read_text()
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {file}"
    path.unlink()
    path.write_text(text.replace(old, new))
    return folder


def _link(source: str, target: str) -> None:
    Path(target).symlink_to(source)
