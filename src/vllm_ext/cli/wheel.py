"""What an argument can name besides a release: a wheel, or a folder with a vLLM in it."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path


def unpacked(wheel: Path, folder: Path) -> Path:
    """The Python files and the metadata of a wheel, in a folder; ValueError with a sentence."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if n.endswith((".py", ".dist-info/METADATA"))]
            archive.extractall(folder, names)
    except (
        zipfile.BadZipFile,
        zlib.error,
        RuntimeError,  # encrypted
        NotImplementedError,  # packed in a way that Python doesn't know
        EOFError,
        OSError,
        ValueError,
    ) as error:
        told = str(error) or type(error).__name__
        raise ValueError(f"{wheel} can't be unpacked: {told} (download it again)") from error
    return folder


def holder(folder: Path) -> Path:
    """The folder that holds the package: the one above where the package itself is named."""
    own = folder.name == "vllm" and (folder / "__init__.py").is_file()
    return folder.parent if own and not (folder / "vllm").is_dir() else folder


def is_wheel(path: Path) -> bool:
    """Whether an argument is a wheel, a damaged one too: it goes by that name."""
    return path.is_file() and (path.suffix == ".whl" or zipfile.is_zipfile(path))
