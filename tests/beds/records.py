"""Record every release anew: `python -m tests.beds.records` (that is `make record`).

For each release it fetches the CUDA wheel, which proves that the CPU build's Python files are the
same, and runs `vllm-ext record`, which prints what changed. Wheels are cached like all others.
The tables of the wire are written too, from the same installation.
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
from vllm_ext.core.release import RECORDS, installation
from vllm_ext.wire.derive import derive
from vllm_ext.wire.schema import SCHEMAS
from vllm_ext.wire.source import UnderivableError


def record_wire(folder: Path, schemas: Path = SCHEMAS) -> bool:
    """Write the wire table of the vLLM in ``folder``, and say whether it is another than before."""
    installed = installation(folder)
    if installed is None:
        console.print(f"there is no vLLM in {folder}", style="red", markup=False)
        return False
    try:
        text = derive(installed).as_text()
    except UnderivableError as error:
        console.print(f"the wire of vLLM {installed.version}: {error}", style="red", markup=False)
        return False
    path = schemas / f"{installed.release}.json"
    same = path.is_file() and path.read_text() == text
    path.write_text(text)
    console.print(f"{path}: {'as recorded before' if same else 'changed'}", markup=False)
    return True


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
        if subprocess.run(command).returncode or not record_wire(folder):
            failed.append(release)
    if failed:
        console.print(f"not recorded: {', '.join(failed)}", style="red")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
