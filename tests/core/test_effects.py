"""Effect counters: exact under threads, carried over, readable by others and after death."""

from __future__ import annotations

import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from vllm_ext.core.effects import Page, decode

FULL = """
import sys
from pathlib import Path
from vllm_ext.core.effects import Page
page = Page()
page.add("FEATURE.part", 1)
try:
    page.publish(Path(sys.argv[1]))
except OSError as error:
    page.add("FEATURE.part", 1)
    print(f"{error.strerror}; counted", page.read()["FEATURE.part"])
"""
KILLED = """
import os, signal, sys
from pathlib import Path
from vllm_ext.core.effects import Page
page = Page()
page.publish(Path(sys.argv[1]))
for _ in range(3):
    page.add("FEATURE.part", 1)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_counts_are_exact_under_threads(tmp_path: Path) -> None:
    page = Page()
    page.publish(tmp_path / "page")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda at: page.add(f"F.part{at % 3}", 2), range(3000)))
    assert page.read() == {f"F.part{at}": 2000 for at in range(3)}
    assert decode((tmp_path / "page").read_bytes()) == page.read()


def test_what_was_counted_before_is_published(tmp_path: Path) -> None:
    page = Page()
    page.add("F.early", 5)
    page.publish(tmp_path / "page")
    page.add("F.early", 1)
    assert decode((tmp_path / "page").read_bytes()) == {"F.early": 6}
    assert (tmp_path / "page").stat().st_mode & 0o777 == 0o600


def test_counts_survive_sigkill(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "page")])
    assert done.returncode == -9
    assert decode((tmp_path / "page").read_bytes()) == {"FEATURE.part": 3}


def test_a_page_that_is_full_counts_on() -> None:
    page = Page()
    for at in range(200):
        page.add(f"F.part{at}", 1)
    assert page.read()["F.part126"] == 1 and page.read()["OTHERS.others"] == 73
    page.restart()
    assert page.read() == {}


def test_a_full_disk_is_an_error_and_not_a_signal(tmp_path: Path) -> None:
    """A sparse page on a full disk would kill the process by SIGBUS when it is written."""
    program = "mount -t tmpfs -o size=64k none {0} && dd if=/dev/zero of={0}/full 2>/dev/null; "
    script = (
        program.format(tmp_path) + f"exec {sys.executable} -c {shlex.quote(FULL)} {tmp_path}/page"
    )
    done = subprocess.run(["unshare", "-rm", "bash", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert done.stdout.strip() == "No space left on device; counted 2"
