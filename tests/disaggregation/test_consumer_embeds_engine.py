"""CONSUMER_EMBEDS where engines are: roles of real engine arguments, a server that lives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.beds.engines import call
from tests.disaggregation.consumers import STARTS
from tests.disaggregation.embedding_requests import Consumer, consumer, image
from vllm_ext.checks.server import Reply, RequestFailed

PAGE = Path(__file__).parents[2] / "docs" / "disaggregation.md"
COLUMNS = {"0.29.0": 1, "0.30.0": 2, "0.31.0": 2, "0.32.0": 2, "0.33.0": 3}
PLUGIN = 4
HIDDEN = "all limits 0"


def table() -> dict[str, list[str]]:
    """The table of the page: for each start the cells from the first on."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines()]
    return {row[0]: row for row in rows if len(row) == 5 and row[0] in STARTS}


_TOLD: dict[tuple[str, str], Any] = {}


@pytest.fixture
def found(release: str, plugin: str, tmp_path: Path) -> Any:
    """What `consumers.told` says in a process of the release; asked once."""
    if (release, plugin) not in _TOLD:
        target = "tests.disaggregation.consumers:told"
        _TOLD[release, plugin] = call(
            release, target, tmp_path, plugin=plugin, needs=("torchvision",)
        )
    return _TOLD[release, plugin]


def _as_documented(found: Any, *starts: str) -> None:
    expected = {name: table()[name][PLUGIN] for name in starts}
    shown = {name: found[name][0] for name in starts}
    assert shown == expected, f"embedding inputs taken: {shown}"


def test_the_page_has_a_row_for_every_start() -> None:
    assert table().keys() == STARTS.keys()


@pytest.mark.full
@pytest.mark.parametrize("plugin", ["with", "without"])
@pytest.mark.area("disaggregation")
def test_roles_are_what_the_page_says(release: str, plugin: str, found: Any) -> None:
    column = PLUGIN if plugin == "with" else COLUMNS[release]
    assert {name: told[0] for name, told in found.items()} == {
        name: row[column] for name, row in table().items()
    }


@pytest.mark.full
@pytest.mark.behaviour("CONSUMER_EMBEDS.accept", wrong="'ec_consumer': 'F/T/T'")
def test_consumers_take_embedding_inputs(found: Any) -> None:
    _as_documented(found, "kv_consumer", "ec_consumer", "ec_both", f"ec_consumer, {HIDDEN}")


@pytest.mark.full
@pytest.mark.behaviour("CONSUMER_EMBEDS.kv_both", wrong="'kv_both, store': 'T/T/T'")
def test_a_store_takes_none(found: Any) -> None:
    _as_documented(found, "kv_both, store", "kv_both, transfer")


@pytest.mark.full
@pytest.mark.behaviour("CONSUMER_EMBEDS.text_only", wrong=f"'kv_consumer, {HIDDEN}': 'T/T/T'")
def test_text_only_consumers_stay_so(found: Any) -> None:
    _as_documented(found, "kv_consumer, language_model_only", f"kv_consumer, {HIDDEN}")


@pytest.mark.full
@pytest.mark.behaviour("CONSUMER_EMBEDS.mm_prefix", wrong="bidirectional: False")
def test_a_gemma_3_without_its_tower_attends_in_both_directions(found: Any) -> None:
    shown = [found[name][1] for name in (f"ec_consumer, {HIDDEN}", "ec_consumer")]
    assert all(shown), f"bidirectional: {shown[0]}"
    assert not found[f"none, {HIDDEN}"][1]


def refused(reply: Reply) -> None:
    """HTTP 400 that says what is wrong with an item that nobody can supply."""
    assert reply.status_code == 400, f"a lacking item is HTTP {reply.status_code}: {reply.text}"
    told = reply.json()["error"]["message"]
    # What has no uuid either is refused by MM_UUIDS, before anybody looks for it.
    assert told.startswith("No embeddings for item 0 of the request") or "and no UUID" in told


def lives(served: Consumer, requests: int) -> None:
    """Requests that lack their item's tensor are refused, each; the others are answered right."""
    whole = served.ask(image("whole")).raise_for_status().json()["choices"][0]["message"]
    for at in range(requests):
        # Some by one identifier, some each by its own, some without a uuid.
        uuid = (None, "one", f"own-{at}")[at % 3]
        try:
            refused(served.ask(image(uuid, rows=None)))
        except RequestFailed as error:
            raise AssertionError(f"a lacking item is an error: {error}") from error
        if at % 20 == 19:
            served.check()
    # What the encoder cache holds needs no tensor.
    again = served.ask(image("whole", rows=None)).raise_for_status().json()["choices"][0]
    assert again["message"]["content"] == whole["content"]


@pytest.mark.full
@pytest.mark.engine
@pytest.mark.behaviour("CONSUMER_EMBEDS.lacking_items", wrong="is HTTP 500")
@pytest.mark.parametrize("role", ["kv_both", "ec_consumer"])
def test_a_hundred_lacking_items_leave_the_engine_alive(
    release: str, plugin: str, role: str, tmp_path: Path
) -> None:
    with consumer(release, role, tmp_path, plugin) as served:
        lives(served, 100)


@pytest.mark.engine
@pytest.mark.ci("0.33.0")
@pytest.mark.area("disaggregation")
def test_a_consumer_refuses_what_it_lacks(release: str, tmp_path: Path) -> None:
    """At once and in a stream, beside one that is whole; and what doesn't fit or can't be read."""
    with consumer(release, "ec_consumer", tmp_path) as served:
        lives(served, 20)
        streamed = served.ask(image("none", rows=None), stream=True).text
        *_, last, done = streamed.strip().split("\n\n")
        assert done == "data: [DONE]"
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == 400
        # One in the encoder cache, one nowhere.
        beside = served.ask(image("whole", rows=None), image("none", rows=None))
        assert beside.status_code == 400
        assert "item 1 of the request" in beside.json()["error"]["message"]
        for wrong in (image("short", rows=3), {"type": "image_embeds", "image_embeds": "AAAA"}):
            assert served.ask(wrong).status_code == 400
        served.check()
        counted = served.server.get("/metrics").text
    for part, least in (("lacking_items", 15), ("tensor_sizes", 1), ("unreadable", 1)):
        name = f'vllm_ext_effects_total{{feature="CONSUMER_EMBEDS",part="{part}"}}'
        (line,) = [line for line in counted.splitlines() if line.startswith(name)]
        assert float(line.split()[-1]) >= least
