"""The finder notices imports and changes nothing about them."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

from vllm_ext.core.imports import PostImportFinder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An import folder with the package ``watched``."""
    (tmp_path / "watched").mkdir()
    (tmp_path / "watched" / "__init__.py").write_text("")
    (tmp_path / "watched" / "one.py").write_text("import watched.two\nvalue = 1\n")
    (tmp_path / "watched" / "two.py").write_text("value = 2\n")
    (tmp_path / "watched" / "broken.py").write_text("raise OSError('as broken as ever')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    finders = list(sys.meta_path)
    yield tmp_path
    sys.meta_path[:] = finders
    for name in [n for n in sys.modules if n.partition(".")[0] == "watched"]:
        del sys.modules[name]


def _watch(*names: str) -> tuple[PostImportFinder, list[str]]:
    seen: list[str] = []
    finder = PostImportFinder(names, seen.append)
    finder.install()
    return finder, seen


def test_it_reports_each_module_once_its_code_ran(folder: Path) -> None:
    finder, seen = _watch("watched.one", "watched.two")
    module = importlib.import_module("watched.one")
    assert seen == ["watched.two", "watched.one"]
    assert module.value == 1
    assert finder not in sys.meta_path, "a finder with nothing left to watch goes away"


def test_the_loader_is_the_original_and_the_shadow_is_gone(folder: Path) -> None:
    _watch("watched.one")
    module = importlib.import_module("watched.one")
    loader = module.__spec__.loader
    assert type(loader) is SourceFileLoader
    assert "exec_module" not in vars(loader)
    assert loader.get_resource_reader("watched.one") is not None
    assert module.__file__ == str(folder / "watched" / "one.py")


def test_looking_for_a_module_is_not_importing_it(folder: Path) -> None:
    _, seen = _watch("watched.one")
    assert importlib.util.find_spec("watched.one") is not None
    assert seen == []
    importlib.import_module("watched.one")
    assert seen == ["watched.one"]


def test_an_import_that_fails_fails_as_without_us(folder: Path) -> None:
    finder, seen = _watch("watched.broken")
    for _ in range(2):
        with pytest.raises(OSError, match="as broken as ever"):
            importlib.import_module("watched.broken")
    assert seen == [] and finder in sys.meta_path


def test_other_finders_that_ask_importlib_again_do_not_loop(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Curious:
        """Like the import hooks of tracing tools: finds a module by asking importlib for it."""

        asked = 0

        def find_spec(self, name: str, path: object = None, target: object = None) -> object:
            if name != "watched.two" or self.asked:
                return None
            self.asked += 1
            return importlib.util.find_spec(name)

    curious = Curious()
    sys.meta_path.insert(0, curious)  # type: ignore[arg-type]
    _, seen = _watch("watched.two")
    importlib.import_module("watched.two")
    assert curious.asked == 1 and seen == ["watched.two"]


def test_modules_nobody_watches_are_left_to_the_others(folder: Path) -> None:
    finder, seen = _watch("watched.one")
    assert finder.find_spec("watched.two", None) is None
    importlib.import_module("watched.two")
    assert seen == []


def test_a_watched_module_that_does_not_exist_is_missing_as_ever(folder: Path) -> None:
    _watch("watched.absent")
    with pytest.raises(ModuleNotFoundError, match=r"watched\.absent"):
        importlib.import_module("watched.absent")
