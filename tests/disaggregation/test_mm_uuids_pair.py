"""MM_UUIDS on real engines: what comes out of a store that encoder and consumer share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.beds.answers import TOLERANCE
from tests.beds.engines import call

pytestmark = [pytest.mark.engine, pytest.mark.area("disaggregation")]

VISION = ("torchvision",)
TOLD = 0.05


def test_an_instance_takes_nothing_for_its_own_picture(release: str, tmp_path: Path) -> None:
    """Nothing another instance has stored, or this one before a restart; both caches are off."""
    found = call(release, "tests.beds.encoder_store:found", tmp_path, needs=VISION)
    assert found["first"] <= TOLERANCE, "answered for what another instance has stored"
    assert found["outside"] <= TOLERANCE
    # The controls: another picture is another answer, and what the store holds is taken.
    assert found["other"] > TOLD and found["left"] > TOLD
    assert "mine" in found["stored"] and len(found["stored"]) == 4
    assert found["overwritten"] == [] and found["outside_files"] == []
