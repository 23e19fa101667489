"""Effect counters: exact under threads, carried over, readable by others and after death."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from vllm_ext.core.effects import Page, decode

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


def test_a_page_that_is_full_says_so() -> None:
    page = Page()
    for at in range(128):
        page.add(f"F.part{at}", 1)
    with pytest.raises(IndexError, match=r"all 128 effect counters are taken, F\.more has none"):
        page.add("F.more", 1)
    page.restart()
    assert page.read() == {}
