"""MM_UUIDS on real engines: what comes out of a store that encoder and consumer share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.beds.answers import TOLERANCE
from tests.beds.encoder_pair import Pair, encoder_pair, part, sizes_part
from tests.beds.engines import call
from vllm_ext.checks.server import Reply, ServerDied

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


@pytest.mark.full
@pytest.mark.behaviour("MM_UUIDS.embed_count", wrong=r"answered|the engine died of")
def test_a_uuid_for_another_size_ends_its_request_alone(
    release: str, plugin: str, tmp_path: Path
) -> None:
    target = "tests.beds.encoder_store:reused"
    found = call(release, target, tmp_path, plugin=plugin, needs=VISION)
    assert found["second"] == "error", found["second"]
    assert found["after"] <= TOLERANCE


@pytest.fixture(scope="session")
def pair(release: str, plugin: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """An encoder and a consumer per release and plugin setting, for the tests below."""
    folder = tmp_path_factory.mktemp(f"pair-{release}-{plugin}")
    with encoder_pair(release, folder, plugin) as servers:
        yield servers


def _words(answer: list[tuple[str, float]]) -> list[str]:
    return [word for word, _ in answer]


@pytest.mark.full
@pytest.mark.behaviour("MM_UUIDS.fallback", wrong=r"answered as if it were shown the first picture")
def test_a_consumer_answers_as_one_instance_does(pair: Pair) -> None:
    """Pictures with and without UUID. The consumer alone, before anything is stored, is the one."""
    alone = {seed: pair.answer(part(seed, f"alone-{seed}")) for seed in (1, 2, 3)}
    both = pair.answer(part(4, "alone-4"), part(2, "alone-5"))
    assert pair.loaded() == []
    assert len({tuple(_words(answer)) for answer in (*alone.values(), both)}) == 4
    # The consumer has met four requests, so that its fifth picture has the number of this fifth.
    for seed in (11, 12, 13, 14, 1, 2):
        pair.encode(part(seed))
    shown = pair.answer(part(2))
    assert shown != alone[1], "answered as if it were shown the first picture"
    assert _words(shown) == _words(alone[2])
    assert len(pair.loaded()) == 1
    pair.encode(part(3, "mine"))
    assert "mine" in pair.stored()
    assert _words(pair.answer(part(3, "mine"))) == _words(alone[3])
    assert pair.loaded()[1:] == ["mine"]
    pair.encode(part(4, "yours"))
    assert _words(pair.answer(part(4, "yours"), part(2))) == _words(both)
    assert pair.loaded()[2:] == ["yours"]


@pytest.mark.full
@pytest.mark.behaviour(
    "MM_UUIDS.store_path", wrong=r"is stored in \.\./outside|answered for another picture"
)
def test_uuids_stay_in_the_store(pair: Pair) -> None:
    before = len(pair.loaded())
    alone = pair.answer(part(21, "alone-21"))
    for uuid in ("../outside", "", "x" * 300):
        pair.encode(part(21, uuid))
        outside = {str(path.name) for path in pair.store.parent.glob("outside*")}
        assert not outside, f"{uuid!r} is stored in ../{outside.pop()}"
        shown = _words(pair.answer(part(21, uuid)))
        assert shown == _words(alone), "answered for another picture"
        assert pair.loaded()[before:] == [uuid]
        before += 1
    assert all("/" not in name and name != "." for name in pair.stored())


def _asked(pair: Pair) -> Reply:
    try:
        return pair.asked(sizes_part())
    except ServerDied as death:
        raise AssertionError(f"the consumer died: {death.reason}") from death


@pytest.mark.full
@pytest.mark.behaviour("MM_UUIDS.refusal", wrong=r"replied 500|the consumer died")
def test_what_nothing_identifies_is_refused(pair: Pair) -> None:
    """The last test of a pair: a consumer without the plugin doesn't survive it."""
    reply = _asked(pair)
    assert reply.status_code == 400, f"replied {reply.status_code}: {reply.text[:300]}"
    assert "has no embedding tensor and no UUID" in reply.json()["error"]["message"]
    assert pair.asked(part(1)).status_code == 200
