"""CACHE_KEYS.modelinfos: a plugin's capability flag is seen while it is there, and only then."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.beds import capability
from tests.beds.children import environment
from tests.beds.foreign import metadata
from tests.beds.registered import registered
from vllm_ext.core import caches


@pytest.fixture
def lazy(installed_release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's Llama as it inspects it: in a process of its own, with a cache that is empty here."""
    metadata(tmp_path, "bare_flag", "bare_flag = tests.beds.capability:bare_flag")
    metadata(tmp_path, "kept_flag", "kept_flag = tests.beds.capability:kept_flag")
    environ = environment(installed_release)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([environ["PYTHONPATH"], str(tmp_path)]))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("VLLM_EXT_SERVER_ID", "test")
    from vllm.model_executor.models import registry

    return registry._LazyRegisteredModel("vllm.model_executor.models.llama", "LlamaForCausalLM")


def _ask(lazy: Any, patch: pytest.MonkeyPatch, cache: Path, name: str) -> bool:
    """Whether Llama has the flag, asked with that plugin in the asking process and its child."""
    patch.setenv("VLLM_CACHE_ROOT", str(cache))
    patch.setenv("VLLM_PLUGINS", name)
    process = capability.kept_flag() if name == "kept_flag" else None
    try:
        return bool(lazy.inspect_model_cls().has_noops)
    finally:
        if process:
            process.stop()


@pytest.mark.engine
@pytest.mark.area("caches")
def test_a_bare_flag_poisons_the_cache_and_a_part_does_not(
    lazy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(cache: str, name: str) -> bool:
        return _ask(lazy, monkeypatch, tmp_path / cache, name)

    added = [ask("one", ""), ask("one", "bare_flag")]
    removed = [ask("two", "bare_flag"), ask("two", "")]
    assert (added, removed) == ([False, False], [True, True]), "the fault is gone from vLLM"
    # The same cache, which holds stock's answer, and our remedy: added and removed again.
    assert [ask("one", "kept_flag"), ask("one", "")] == [True, False]


@pytest.mark.behaviour("CACHE_KEYS.modelinfos", wrong="the key of a changed model is stock's")
def test_the_key_changes_for_the_models_a_part_changes_and_only_for_those(
    installed_release: str, plugin: str
) -> None:
    from vllm.model_executor.models import llama, registry

    lazy = registry._LazyRegisteredModel
    changed, other = Path(llama.__file__), Path(registry.__file__)
    with registered(plugin == "with"):
        stock = [lazy._get_modelinfo_module_hash(path) for path in (changed, other)]
        caches.note_inspected("TEST.flag", [changed])
        try:
            ours = [lazy._get_modelinfo_module_hash(path) for path in (changed, other)]
        finally:
            caches.forget("TEST.flag")
        again = [lazy._get_modelinfo_module_hash(path) for path in (changed, other)]
    assert again == stock and ours[1] == stock[1]
    assert ours[0] != stock[0], "the key of a changed model is stock's"


def test_without_a_part_that_changes_models_the_key_is_stocks(installed_release: str) -> None:
    from vllm.model_executor.models import llama, registry

    path = Path(llama.__file__)
    stock = registry._LazyRegisteredModel._get_modelinfo_module_hash(path)
    with registered(True):
        assert registry._LazyRegisteredModel._get_modelinfo_module_hash(path) == stock
