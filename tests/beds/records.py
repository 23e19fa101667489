"""Record every release anew: `python -m tests.beds.records` (that is `make record`).

For each release it fetches the CUDA wheel, which proves that the CPU build's Python files are the
same, and runs `vllm-ext record`, which prints what changed. Wheels are cached like all others.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

from rich.progress import Progress

from tests.beds.layout import (
    RELEASES,
    console,
    fetch,
    release_path,
    sole_user_of,
    wheel_cache,
)
from vllm_ext.core.release import RECORDS


def main() -> int:
    """Record all releases, or those named on the command line; status 1 if one fails."""
    names = sys.argv[1:] or RELEASES
    cache = wheel_cache()
    failed = []
    for release in names:
        with sole_user_of(cache), Progress(console=console, transient=True) as progress:
            wheel = fetch(f"vllm=={release}", cache, progress)
        folder = release_path(release) or Path(sysconfig.get_path("purelib"))
        command = [str(Path(sys.executable).with_name("vllm-ext")), "record"]
        command += ["--vllm", str(folder), "--reference", str(wheel), "--to", str(RECORDS)]
        if subprocess.run(command).returncode:
            failed.append(release)
    if failed:
        console.print(f"not recorded: {', '.join(failed)}", style="red")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
