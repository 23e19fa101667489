"""EFFECT_METRICS: what a scrape of /metrics shows, with one API server and with several."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.beds.registered import registered
from vllm_ext.core.effects import PAGE
from vllm_ext.core.feature import effect


@pytest.fixture
def patched(
    installed_release: str, plugin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """The process with the plugin registered, or as it came, and a runtime directory of its own."""
    import vllm.v1.metrics.prometheus  # noqa: F401

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with registered(plugin == "with"):
        yield
    PAGE.restart()


def _scrape() -> dict[str, float]:
    """Our samples on vLLM's registry, by name and labels."""
    from prometheus_client import generate_latest
    from prometheus_client.parser import text_string_to_metric_families
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    text = generate_latest(get_prometheus_registry()).decode()
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return {
        f"{s.name} {s.labels.get('feature')}.{s.labels.get('part')}": s.value
        for s in samples
        if s.name.startswith("vllm_ext_")
    }


@pytest.mark.behaviour("EFFECT_METRICS.metrics", wrong="no vllm_ext_effects_total on /metrics")
@pytest.mark.parametrize("servers", ["one", "several"])
def test_effects_and_verdicts_are_on_metrics(
    patched: None, servers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if servers == "several":
        (tmp_path / "metrics").mkdir()
        monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path / "metrics"))
    for _ in range(3):
        effect("SCORE_USAGE.prompt_tokens")
    for _ in range(2):  # a second look must not register a second collector
        samples = _scrape()
    assert samples, "no vllm_ext_effects_total on /metrics"
    assert samples["vllm_ext_effects_total SCORE_USAGE.prompt_tokens"] == 3
    assert samples["vllm_ext_effects_total CACHE_KEYS.compile_key"] == 0
    assert samples["vllm_ext_feature_info SCORE_USAGE.prompt_tokens"] == 1


@pytest.mark.behaviour("EFFECT_METRICS.metrics", wrong="no vllm_ext_effects_total on /metrics")
def test_metrics_answer_when_the_runtime_directory_is_gone(
    patched: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _scrape(), "no vllm_ext_effects_total on /metrics"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for path in (tmp_path / "vllm-ext").iterdir():
        path.unlink()
    (tmp_path / "vllm-ext").rmdir()
    (tmp_path / "vllm-ext").write_text("in the way")
    assert _scrape() == {}
