"""Make the gRPC stubs anew: `python -m tests.beds.protos`; `--release` also moves the baseline.

The baseline `released.binpb` is the descriptor set that later schemas may not break; it is moved
when a wheel is released, and at no other time.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.beds.layout import ROOT

SOURCES = ROOT / "src"
PROTO = Path("vllm_ext/wire/proto")
RELEASED = SOURCES / PROTO / "released.binpb"


def schemas(sources: Path = SOURCES) -> list[str]:
    """The schema files, as the paths by which they import each other."""
    return sorted(str(path.relative_to(sources)) for path in (sources / PROTO).glob("*.proto"))


def generate(folder: Path, sources: Path = SOURCES) -> list[Path]:
    """Write the stubs of all schemas below ``folder``; returns them, sorted."""
    out = [f"--{kind}_out={folder}" for kind in ("python", "pyi", "grpc_python")]
    compiler = (sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={sources}")
    subprocess.run([*compiler, *out, *schemas(sources)], check=True)
    return sorted((folder / PROTO).iterdir())


def buf(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run the buf of the test environment; it needs no network and no registry."""
    found = Path(sys.executable).with_name("buf")
    command = str(found) if found.is_file() else shutil.which("buf") or str(found)
    with tempfile.TemporaryDirectory() as cache:
        return subprocess.run(
            [command, *arguments],
            cwd=cwd,
            env={"PATH": "", "HOME": cache, "BUF_CACHE_DIR": cache},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def main() -> int:
    """Generate into the package, and with --release move the baseline as well."""
    generate(SOURCES)
    if "--release" in sys.argv[1:]:
        made = buf(
            "build", ".", "--as-file-descriptor-set", "--exclude-source-info", "-o", str(RELEASED)
        )
        print(made.stdout, end="")
        return made.returncode
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
