"""docs: generated pages are fresh, links lead somewhere, the README names what exists."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.conftest import FEATURES
from vllm_ext.cli import main
from vllm_ext.cli.compatibility import COMPATIBILITY, compatibility, with_table
from vllm_ext.cli.markdown import MARK
from vllm_ext.cli.pages import feature_pages
from vllm_ext.settings import variables

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
AGAIN = "run .venv/bin/vllm-ext pages"
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)[^)]*\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
VARIABLE = re.compile(r"VLLM_EXT_[A-Z0-9_]*")
NAME = re.compile(r"`([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)(?:=[^`]*)?`")
# Variables of others that a README of ours may speak of.
OTHERS = ("VLLM_", "PIP_", "HF_", "XDG_", "CUDA_", "TORCH", "LD_")


def _pages() -> dict[str, str]:
    return {path.name: path.read_text() for path in (DOCS / "features").iterdir()}


def test_feature_pages_are_what_the_declarations_give() -> None:
    made, there = feature_pages(), _pages()
    assert there.keys() - made.keys() == set(), f"pages of no feature: {AGAIN}"
    assert made.keys() - there.keys() == set(), f"features without a page: {AGAIN}"
    outdated = sorted(name for name in made if made[name] != there[name])
    assert outdated == [], f"older than the declarations: {AGAIN}"


def test_the_compatibility_page_is_what_the_evidence_gives() -> None:
    page = (DOCS / COMPATIBILITY).read_text()
    assert page == compatibility(DOCS / "evidence"), f"older than the evidence: {AGAIN}"


def test_the_readme_shows_what_the_evidence_gives() -> None:
    text = README.read_text()
    assert text == with_table(text, DOCS / "evidence"), f"older than the evidence: {AGAIN}"
    assert all(f"| [{name}](docs/features/{name.lower()}.md) |" in text for name in FEATURES)


def test_pages_tell_all_that_is_declared() -> None:
    pages = _pages()
    for name, feature in FEATURES.items():
        page = pages[f"{name.lower()}.md"]
        assert f"[{name}]({name.lower()}.md)" in pages["README.md"]
        names = [feature.toggle, *(feature.variable(option) for option in feature.options)]
        names += [target for part in feature.parts for target in (*part.targets, *part.relies_on)]
        assert [name for name in names if f"`{name}`" not in page] == []
        assert all(f"### {part.name}\n" in page for part in feature.parts)


def test_the_command_writes_the_pages_and_removes_only_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "docs" / "features"
    folder.mkdir(parents=True)
    (folder / "gone.md").write_text(f"{MARK}\n\n# GONE\n")
    (folder / "mine.md").write_text("# Written by hand\n")
    done = CliRunner().invoke(main, ["pages", "--to", str(folder)])
    assert done.exit_code == 0, done.output
    written = {path.name: path.read_text() for path in folder.iterdir()}
    assert written.pop("mine.md") == "# Written by hand\n"
    assert written == feature_pages()
    assert (folder.parent / COMPATIBILITY).read_text() == compatibility(tmp_path / "none")


def test_evidence_becomes_a_table_oldest_release_first(tmp_path: Path) -> None:
    outcomes = [
        {"release": "0.30.0", "plugin": "with", "passed": 12, "failed": 1},
        {"release": "0.29.0", "plugin": "without", "red": 7},
        {"release": "0.29.0", "plugin": "with", "passed": 13},
        {"release": "any", "plugin": "any", "passed": 3},
    ]
    whole = [feature.part_id(part) for feature in FEATURES.values() for part in feature.parts]
    tested = {"verdict": "active", "passed": 4, "red": 2}
    data = {
        "area": "serving",
        "date": "2026-01-02",
        "python": "3.11.9",
        "command": "make test-all AREA=serving",
        "exit_status": 1,
        "outcomes": outcomes,
        "parts": {
            part: {"0.29.0": tested, "0.30.0": {**tested, "verdict": "native", "failed": 1}}
            for part in whole
            if part.startswith("SCORE_USAGE.")
        },
        "failed": ["tests/a.py::b[0.30.0-with]"],
    }
    (tmp_path / "serving.json").write_text(json.dumps(data))
    page = compatibility(tmp_path)
    section = page.partition("## serving\n")[2].partition("\n## ")[0]
    begin = "2026-01-02, Python 3.11.9, `make test-all AREA=serving`. **This run failed.**"
    assert begin in section
    parts, _, counts = section.partition("All tests of the area")
    assert (
        "| `SCORE_USAGE.prompt_tokens` | active: 4 passed, 2 red | native: 4 passed, 2 red, "
        "1 failed | no evidence | no evidence | no evidence |" in parts
    )
    assert [line for line in counts.splitlines() if line.startswith("| `")] == [
        "| `any` | `any` | 3 | 0 | 0 |",
        "| `0.29.0` | `with` | 13 | 0 | 0 |",
        "| `0.29.0` | `without` | 0 | 7 | 0 |",
        "| `0.30.0` | `with` | 12 | 0 | 1 |",
    ]
    assert "- `tests/a.py::b[0.30.0-with]`" in section
    assert "run `make test-all AREA=caches`" in page
    small = with_table(README.read_text(), tmp_path).splitlines()
    (row,) = [line for line in small if line.startswith("| [SCORE_USAGE]")]
    assert row.split(" | ")[2:] == [
        "active",
        "native, **tests failed**",
        "no evidence",
        "no evidence",
        "no evidence |",
    ]


def _anchors(text: str) -> set[str]:
    headings = HEADING.findall(FENCE.sub("", text))
    return {
        re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings
    }


def _broken(page: Path) -> list[str]:
    """Links of a Markdown page to files or headings that aren't there."""
    broken = []
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        there = target.exists()
        if there and anchor and target.suffix == ".md":
            there = anchor in _anchors(target.read_text())
        if not there:
            broken.append(link)
    return broken


@pytest.mark.parametrize(
    "page",
    sorted([README, *DOCS.rglob("*.md")]),
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_every_link_leads_somewhere(page: Path) -> None:
    assert _broken(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    (tmp_path / "other.md").write_text("# The `one` heading\n```\n# no heading\n```\n")
    page.write_text(
        "[a](other.md) [b](gone.md) [c](other.md#the-one-heading) [d](other.md#no-heading) "
        "[e](https://example.org/gone) [f](#nowhere)\n```\n[g](code.md)\n```\n"
    )
    assert _broken(page) == ["gone.md", "other.md#no-heading", "#nowhere"]


def _unknown_names(text: str) -> set[str]:
    """Variables of ours and features that a text names and that don't exist."""
    prose = text.replace("VLLM_EXT_<FEATURE>", "").replace("VLLM_EXT_*", "")
    unknown = set(VARIABLE.findall(prose)) - set(variables(FEATURES.values()))
    names = {name for name in NAME.findall(prose) if not name.startswith(OTHERS)}
    return unknown | (names - FEATURES.keys())


def test_the_readme_names_only_features_and_variables_that_exist() -> None:
    assert _unknown_names(README.read_text()) == set()


def test_a_name_that_does_not_exist_is_found() -> None:
    known = "`SCORE_USAGE`, `VLLM_EXT_DISABLE=1`, VLLM_EXT_<FEATURE>, `VLLM_PLUGINS`, `HF_HOME`"
    assert _unknown_names(known) == set()
    wrong = "`SCORE_USAG`, `GONE_FIX=1`, VLLM_EXT_DISABEL=1, `VLLM_EXT_SCORE_USAGE_CACHED`"
    assert _unknown_names(f"{known} {wrong}") == {
        "SCORE_USAG",
        "GONE_FIX",
        "VLLM_EXT_DISABEL",
        "VLLM_EXT_SCORE_USAGE_CACHED",
    }
