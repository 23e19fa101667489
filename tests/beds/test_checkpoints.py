"""The checkpoints: every release loads all of them whole, and log-probabilities notice changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.beds.answers import TOLERANCE
from tests.beds.checkpoints import FAMILIES
from tests.beds.engines import call

pytestmark = pytest.mark.area("beds")

VISION = ("idefics3", "qwen25_vl", "nemotron_vl")
TEXT = tuple(name for name in FAMILIES if name not in VISION)
# Least differences of a log-probability that the controls must show, and what must show none.
CLEAR = 0.05
SAME = ("repeated", "restored", "batched", "mixed")
# Their values are kept in bfloat16, whose rounding depends on the shape of a batch.
ROUNDED = {"nemotron_vl": 0.1}


def _judge(name: str, found: dict[str, float], *expected: str) -> None:
    missing = {"repeated", "norm", "cache", *expected} - found.keys()
    assert not missing, f"{name} was not asked about {missing}"
    allowed = ROUNDED.get(name, TOLERANCE)
    wrong = {key: value for key, value in found.items() if key in SAME and value > allowed}
    blind = {key: value for key, value in found.items() if key not in SAME and value < CLEAR}
    assert not wrong, f"{name} changed by itself: {wrong}"
    assert not blind, f"{name} doesn't notice: {blind}"


def test_every_release_fills_every_parameter(release: str, tmp_path: Path) -> None:
    told = call(
        release,
        "tests.beds.checkpoints.loading:unset_after_loading",
        tmp_path,
        *FAMILIES,
        needs=("torchvision",),
        plugin="without",
    )
    assert told.pop("broken") == ["mlp1.1.weight"]
    assert told == {name: [] for name in FAMILIES}


@pytest.mark.engine
@pytest.mark.parametrize("model", TEXT)
def test_text_notices_norms_cache_and_adapters(release: str, model: str, tmp_path: Path) -> None:
    found = call(release, "tests.beds.controls:generation", model, tmp_path)
    _judge(model, found, *(() if model in ("mla", "qwen3_moe") else ("adapter",)))


@pytest.mark.engine
@pytest.mark.parametrize("model", VISION)
def test_vision_notices_pictures_too(release: str, model: str, tmp_path: Path) -> None:
    needs = ("torchvision",)
    found = call(release, "tests.beds.controls:generation", model, tmp_path, needs=needs)
    _judge(model, found, "picture")
