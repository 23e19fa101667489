"""The real ``vllm-rs`` of a release before a CPU engine, with its process tree in a ``Server``.

The binary is only in the CUDA wheels (and needs nothing of CUDA). It is unpacked once beside the
cached wheels; a wheel that isn't cached is fetched, so this is for tests marked ``rust_frontend``.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.progress import Progress

from tests.beds.layout import console, fetch, release_path, sole_user_of, wheel_cache
from vllm_ext.checks.server import Server


def vllm_rs(release: str) -> Path:
    """The executable of a release."""
    cache = wheel_cache()
    binary = cache / f"vllm-rs-{release}"
    with sole_user_of(cache):
        if not binary.exists():
            with Progress(console=console, transient=True) as progress:
                wheel = fetch(f"vllm=={release}", cache, progress)
            # Renamed when complete: an interrupted run leaves no half of a binary.
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open("vllm/vllm-rs") as packed,
                tempfile.NamedTemporaryFile(dir=cache, prefix=".partial-", delete=False) as file,
            ):
                shutil.copyfileobj(packed, file)
            os.chmod(file.name, 0o755)
            os.replace(file.name, binary)
    return binary


def rust_server(
    model: Path,
    release: str,
    log: Path,
    *,
    binary: Path | None = None,
    plugin: str = "with",
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Server:
    """``vllm serve`` of a release that starts ``vllm-rs`` (default: that release's); not started.

    ``/health`` of this frontend answers 503 for good once it has given up.
    """
    folder = release_path(release)
    return Server(
        model,
        log=log,
        args=args,
        env={
            "VLLM_USE_RUST_FRONTEND": "1",
            "VLLM_RUST_FRONTEND_PATH": str(binary or vllm_rs(release)),
            "VLLM_EXT_DISABLE": "1" if plugin == "without" else "0",
            **(env or {}),
        },
        pythonpath=[folder] if folder else [],
    )
