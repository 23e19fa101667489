"""CACHE_KEYS: what an operator's toggles do to vLLM's compile key."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.beds.registered import registered
from vllm_ext.core import caches


@pytest.fixture
def patched(installed_release: str, plugin: str) -> Iterator[None]:
    """The process with the plugin registered, or as it came."""
    with registered(plugin == "with"):
        yield


@pytest.mark.behaviour("CACHE_KEYS.compile_key", wrong="VLLM_EXT_SCORE_USAGE is in the compile key")
def test_toggles_stay_out_of_the_compile_key(
    patched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import envs
    from vllm.config.utils import hash_factors

    name = "VLLM_EXT_SCORE_USAGE"
    monkeypatch.setenv(name, "0")
    # Registered in any case, as a plugin must for --fail-on-environ-validation.
    monkeypatch.setitem(envs.environment_variables, name, lambda: "0")
    factors = envs.compile_factors()
    assert name not in factors, f"{name} is in the compile key"
    monkeypatch.setitem(envs.environment_variables, name, lambda: "1")
    assert hash_factors(envs.compile_factors()) == hash_factors(factors)


@pytest.mark.behaviour("CACHE_KEYS.compile_key", wrong="a patch to traced code leaves the key")
def test_a_part_that_changes_traced_code_changes_the_key_and_only_while_active(
    patched: None,
) -> None:
    from vllm import envs
    from vllm.config.utils import hash_factors

    before = hash_factors(envs.compile_factors())
    caches.note("TEST.traced")
    try:
        during = hash_factors(envs.compile_factors())
    finally:
        caches.forget("TEST.traced")
    assert during != before, "a patch to traced code leaves the key as it was"
    assert hash_factors(envs.compile_factors()) == before
