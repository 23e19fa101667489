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
    metadata(folder, name, f"{name} = {name}:register")
    return folder


def make_first(folder: Path) -> Path:
    """Metadata of vllm-ext alone: a folder that puts our entry point first on the path."""
    metadata(folder, "vllm_ext", "vllm_ext = vllm_ext.plugin:register")
    return folder


def metadata(folder: Path, name: str, entry: str) -> None:
    """Metadata of a distribution with one general plugin."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    dashed = name.replace("_", "-")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dashed}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{entry}\n")
    (info / "RECORD").write_text(f"{name}.py,,\n")


_THIEF = """
import importlib
import os


def register():
    # Workers are the children of a child of the server; the first of them is robbed.
    grandparent = open(f"/proc/{os.getppid()}/cmdline").read()
    if "EngineCore" not in grandparent:
        return
    try:
        descriptor = os.open("{taken}", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return
    os.write(descriptor, str(os.getpid()).encode())
    *path, name = "{function}".split(".")
    owner = importlib.import_module("{module}")
    for step in path:
        owner = getattr(owner, step)
    held = getattr(owner, name)
    stock = getattr(held, "__wrapped__", held)
    setattr(owner, name, lambda *args, **kwargs: stock(*args, **kwargs))
"""


def make_thief(
    folder: Path,
    name: str,
    taken: Path,
    module: str = "vllm.envs",
    function: str = "compile_factors",
) -> Path:
    """A plugin that, in one worker only, puts vLLM's own behaviour back; ``taken`` gets its pid.

    So that worker loses whatever feature has a wrapper on ``module:function``, and works on.
    """
    folder.mkdir(parents=True)
    filled = {"taken": str(taken), "module": module, "function": function}
    code = _THIEF
    for key, value in filled.items():
        code = code.replace("{" + key + "}", value)
    (folder / f"{name}.py").write_text(code)
    metadata(folder, name, f"{name} = {name}:register")
    return folder
