"""Synthetic plugins of somebody else, as folders for PYTHONPATH."""

from __future__ import annotations

from pathlib import Path

_CODE = """
import functools


def register():
    from vllm.entrypoints.pooling.scoring.serving import ServingScores

    original = ServingScores._build_response

    @functools.wraps(original)
    def marked_response(self, ctx):
        response = original(self, ctx)
        response.headers["x-{name}"] = "was here"
        return response

    ServingScores._build_response = marked_response
"""


def make_plugin(folder: Path, name: str) -> Path:
    """A distribution whose general plugin wraps ``ServingScores._build_response``."""
    folder.mkdir(parents=True)
    (folder / f"{name}.py").write_text(_CODE.replace("{name}", name))
    _metadata(folder, name, f"{name} = {name}:register")
    return folder


def make_first(folder: Path) -> Path:
    """Metadata of vllm-ext alone: a folder that puts our entry point first on the path."""
    _metadata(folder, "vllm_ext", "vllm_ext = vllm_ext.plugin:register")
    return folder


def _metadata(folder: Path, name: str, entry: str) -> None:
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    dashed = name.replace("_", "-")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dashed}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{entry}\n")
    (info / "RECORD").write_text(f"{name}.py,,\n")
