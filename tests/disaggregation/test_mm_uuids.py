"""MM_UUIDS: how items are identified, refused and stored, with vLLM's own classes; no engine."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.beds.registered import counted, registered
from vllm_ext.features import played_scheduler
from vllm_ext.features.disaggregation import mm_uuids
from vllm_ext.features.disaggregation.mm_uuids import folder_name
from vllm_ext.features.disaggregation.mm_uuids_probes import (
    FIRST,
    encoder_request,
    encoder_scheduler,
    identifiers,
    identities,
    picture,
    renderer,
    sizes,
    take_step,
)

EXPLICIT = "MM_UUIDS.explicit"
FALLBACK = "MM_UUIDS.fallback"
REFUSAL = "MM_UUIDS.refusal"
STORE_PATH = "MM_UUIDS.store_path"
EMBED_COUNT = "MM_UUIDS.embed_count"

Given = Mapping[str, Sequence[str | None] | None]


@pytest.fixture
def patched(installed_release: str, plugin: str) -> Iterator[None]:
    """The process with the plugin registered, or as it came."""
    import vllm.distributed.ec_transfer.ec_connector.example_connector
    import vllm.multimodal.processing
    import vllm.renderers.base
    import vllm.v1.core.sched.scheduler  # noqa: F401

    with registered(plugin == "with"):
        yield


def _data(**counts: int) -> dict[str, Any]:
    import numpy as np

    made: dict[str, Any] = {}
    if "image" in counts:
        made["image"] = [picture(n) for n in range(counts["image"])]
    if "video" in counts:
        made["video"] = [np.full((2, 28, 28, 3), n, np.uint8) for n in range(counts["video"])]
    return made


def _refusal(instance: Any, data: Mapping[str, Any], uuids: Given | None = None) -> str:
    """The sentence a request is refused with; empty if it is taken."""
    from vllm.exceptions import VLLMValidationError

    try:
        identities(instance, data, uuids)
    except (ValueError, VLLMValidationError) as error:
        return str(error)
    return ""


# Explicit UUIDs


@pytest.mark.behaviour(EXPLICIT, wrong=r"became .*renderer0-mm-1-image-0")
@pytest.mark.parametrize(
    "given",
    [
        {"image": ["a", "b"], "video": ["c"]},
        {"image": ["a", None], "video": None},
        {"image": [None, ""], "video": ["c"]},
        {"image": ("", ""), "video": [None]},
    ],
    ids=["all", "some", "empty-and-none", "empty-twice"],
)
@pytest.mark.parametrize("ec", [False, True], ids=["alone", "ec"])
def test_what_the_caller_gives_is_kept(patched: None, given: Given, ec: bool) -> None:
    before = counted(EXPLICIT)
    made = identities(renderer(ec=ec), _data(image=2, video=1), given)
    assert set(made) == {"image", "video"}
    for modality, names in made.items():
        listed = given[modality] or [None]
        assert names is not None and len(names) == len(listed)
        for told, name in zip(listed, names, strict=True):
            assert told in (None, name), f"{told!r} became {names}"
            assert name is not None or ec
    kept = sum(uuid is not None for listed in given.values() for uuid in listed or ())
    assert counted(EXPLICIT) - before in (0, kept)


@pytest.mark.behaviour(EXPLICIT, wrong=r"taken, 1 for 2")
@pytest.mark.parametrize("caching", [False, True], ids=["off", "prefix-cache"])
def test_a_list_of_another_length_is_refused(patched: None, caching: bool) -> None:
    instance = renderer(caching=caching)
    for uuids in (["a"], ["a", "b", "c"], []):
        if caching:
            # vLLM's own rule, on every release.
            assert "same length" in _refusal(instance, _data(image=2), {"image": uuids})
    sentence = _refusal(renderer(), _data(image=2), {"image": ["a"]})
    assert "must have same length" in sentence, "taken, 1 for 2"


# Without a UUID


@pytest.mark.behaviour(FALLBACK, wrong=r"both pictures are renderer0-mm-1-image-0")
@pytest.mark.parametrize(
    "how", [{"ec": True}, {"kv": "kv_both"}, {"kv": "kv_consumer"}, {}], ids=str
)
def test_two_instances_never_share_a_name_for_two_pictures(
    patched: None, how: dict[str, Any]
) -> None:
    """The same process once restarted is another instance, too: its counters begin anew."""
    one = identifiers(renderer(**how), {"image": [picture(1)]})["image"]
    other = identifiers(renderer(**how), {"image": [picture(2)]})["image"]
    assert one != other, f"both pictures are {one[0]}"


@pytest.mark.behaviour(FALLBACK, wrong=r"encoder: renderer0-mm-1-image-0, consumer: [0-9a-f]{64}")
@pytest.mark.parametrize("uuids", [None, {"image": [None, "mine"]}], ids=["none", "one-of-two"])
def test_encoder_and_consumer_agree(patched: None, uuids: Given | None) -> None:
    """Whichever of them has its caches off."""
    data = _data(image=2)
    consumer = identifiers(renderer(ec=True, caching=True), data, uuids)["image"]
    for caching in (False, True):
        encoder = identifiers(renderer(ec=True, caching=caching), data, uuids)["image"]
        assert encoder == consumer, f"encoder: {encoder[0]}, consumer: {consumer[0]}"


@pytest.mark.behaviour(FALLBACK, wrong=r"a guess")
def test_no_caller_can_name_what_has_no_uuid(patched: None) -> None:
    """Where nothing is shared no content is hashed, and names are still nobody else's."""
    first = identities(renderer(), _data(image=2, video=1))
    second = identities(renderer(), _data(image=2, video=1))
    for modality, names in first.items():
        assert names is not None
        for at, name in enumerate(names):
            assert name is not None
            assert name.startswith(FIRST) and name.endswith(f"{modality}-{at}")
            assert name != f"{FIRST}-{modality}-{at}", f"{name} is a guess"
        assert not set(names) & set(second[modality] or [])


@pytest.mark.behaviour(FALLBACK, wrong=r"both pictures are renderer0-mm-1-image-0")
def test_sizes_alone_are_no_content(patched: None) -> None:
    """A decode instance that gets all KV with the request needs no identifier, but no wrong one."""
    one, other = (
        identifiers(renderer(kv="kv_consumer"), {"image": sizes()})["image"] for _ in range(2)
    )
    assert one != other, f"both pictures are {one[0]}"


def test_with_a_cache_on_nothing_changes(installed_release: str) -> None:
    import vllm.renderers.base  # noqa: F401

    given = {"image": [None, "mine", ""]}
    with registered(True):
        assert identities(renderer(ec=True, caching=True), _data(image=3), given) == given
        assert identities(renderer(ec=True, caching=True), _data(image=3)) == {}


# Neither data nor UUID


@pytest.mark.behaviour(REFUSAL, wrong=r"was taken|refused otherwise: .* is missing")
@pytest.mark.parametrize(
    ("data", "uuids", "lacks"),
    [
        ({"image": [None]}, None, "no data"),
        ({"image": [None]}, {"image": [None]}, "no data"),
        ({"image": [None, None]}, {"image": ["mine", None]}, "no data"),
        ({"image": None}, {"image": [None]}, "no data"),
        ({"image": "sizes"}, None, "no embedding tensor"),
        ({"image": "sizes"}, {"image": [None]}, "no embedding tensor"),
    ],
    ids=["none", "none-listed", "one-of-two", "no-list", "sizes", "sizes-listed"],
)
def test_what_nothing_identifies_is_refused(
    patched: None, data: dict[str, Any], uuids: Given | None, lacks: str
) -> None:
    if data["image"] == "sizes":
        data = {"image": sizes()}
    at = 1 if uuids == {"image": ["mine", None]} else 0
    sentence = _refusal(renderer(ec=True), data, uuids)
    assert sentence, f"{data} with {uuids} was taken"
    expected = f"multi_modal_data['image'][{at}] has {lacks} and no UUID"
    assert expected in sentence, f"refused otherwise: {sentence}"
    assert "multi_modal_uuids" in sentence and "`uuid`" in sentence


@pytest.mark.behaviour(REFUSAL, wrong=r"sizes alone were taken by \{'ec': True, 'caching': False\}")
def test_sizes_alone_are_refused_where_they_would_be_an_identity(patched: None) -> None:
    refused = [
        {"ec": True, "caching": False},
        {"ec": True, "caching": True},
        {"kv": "kv_both", "caching": False},
        {"kv": "kv_consumer", "caching": True},
        {"ec": True, "kv": "kv_consumer", "caching": False},
    ]
    for how in refused:
        assert _refusal(renderer(**how), {"image": sizes()}), f"sizes alone were taken by {how}"
        assert not _refusal(renderer(**how), {"image": sizes()}, {"image": ["mine"]})
    assert not _refusal(renderer(kv="kv_consumer"), {"image": sizes()})


@pytest.mark.behaviour(REFUSAL, wrong=r"is no VLLMValidationError")
def test_a_refusal_is_the_clients_error(patched: None) -> None:
    from vllm.exceptions import VLLMValidationError

    before = counted(REFUSAL)
    caught: Exception | None = None
    try:
        identities(renderer(), {"image": [None]})
    except Exception as error:
        caught = error
    assert isinstance(caught, VLLMValidationError), f"{caught!r} is no VLLMValidationError"
    assert caught.parameter == "multi_modal_uuids"
    assert counted(REFUSAL) == before + 1


def test_an_empty_uuid_is_taken_and_warned_of_once(
    installed_release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm.renderers.base  # noqa: F401

    monkeypatch.setattr(mm_uuids, "_warned_of_empty", False)
    told: list[str] = []
    listener = logging.Handler(logging.WARNING)
    listener.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    mm_uuids.logger.addHandler(listener)
    try:
        with registered(True):
            for _ in range(3):
                made = identities(renderer(), _data(image=2), {"image": ["", None]})
                assert made["image"] is not None and made["image"][0] == ""
    finally:
        mm_uuids.logger.removeHandler(listener)
    assert len([sentence for sentence in told if "empty string" in sentence]) == 1


# The example store

ORDINARY = ["0123abcd" * 8, "mine", "lora:mine", f"{FIRST}-image-0", "a b", "ä", "..a", "x" * 255]
ESCAPING = ["", ".", "..", "../outside", "/outside", "a/../../outside", "a/b", "%", "x" * 256]
DEADLY = ["a\0b", "ä" * 128 + "ö"]


def _store(folder: Path) -> Any:
    """The connector of an instance that stores and loads."""
    from vllm.config import ECTransferConfig, VllmConfig
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
    from vllm.distributed.ec_transfer.ec_connector.example_connector import ECExampleConnector

    transfer = ECTransferConfig(
        ec_connector="ECExampleConnector",
        ec_role="ec_both",
        ec_connector_extra_config={"shared_storage_path": str(folder)},
    )
    return ECExampleConnector(VllmConfig(ec_transfer_config=transfer), ECConnectorRole.WORKER)


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.behaviour(
    STORE_PATH, wrong=r"left the store: \{.*outside|died of (ValueError|OSError)"
)
@pytest.mark.parametrize(
    "identifier", ["../outside", "a/../../outside", "a/b/../../../outside", *DEADLY]
)
def test_no_identifier_leaves_the_store_or_kills(
    patched: None, identifier: str, tmp_path: Path
) -> None:
    import torch

    inside = tmp_path / "store"
    try:
        _store(inside).save_caches({identifier: torch.ones(2, 4)}, identifier)
        found = _store(inside).has_cache_item(identifier)
    except Exception as error:
        raise AssertionError(f"the store died of {type(error).__name__}: {error}") from error
    left = {file for file in _files(tmp_path) if not file.startswith("store/")}
    assert not left, f"left the store: {left}"
    assert found and len(_files(inside)) == 1


@pytest.mark.behaviour(STORE_PATH, wrong=r"'/outside' is stored in /outside|died of")
def test_every_identifier_has_a_folder_of_its_own(patched: None, tmp_path: Path) -> None:
    """What is stored under one is found and loaded under it, and under no other."""
    import torch
    from vllm.distributed.ec_transfer.ec_connector.example_connector import (
        ECExampleConnectorMetadata,
        MMMeta,
    )

    producer, consumer = _store(tmp_path), _store(tmp_path)
    names = ["/outside", *ORDINARY, *ESCAPING, *DEADLY]
    for name in names:
        try:
            path = Path(producer._generate_foldername_debug(name, create_folder=False))
        except Exception as error:
            raise AssertionError(f"{name!r} died of {type(error).__name__}") from error
        assert path.parent == tmp_path and path.name not in ("", "..", "."), (
            f"{name!r} is stored in {path}"
        )
    held = {name: torch.full((2, 4), float(at)) for at, name in enumerate(names)}
    for at, name in enumerate(dict.fromkeys(names)):
        assert not consumer.has_cache_item(name), f"{name!r} is there before it is stored"
        producer.save_caches(held, name)
        assert consumer.has_cache_item(name)
        assert len(_files(tmp_path)) == at + 1
    loaded: dict[str, Any] = {}
    told = ECExampleConnectorMetadata()
    for name in names:
        told.add_mm_data(MMMeta.make_meta(name, 2))
    consumer.bind_connector_metadata(told)
    consumer.start_load_caches(loaded)
    assert all(torch.equal(loaded[name], held[name]) for name in names)


def test_ordinary_identifiers_keep_their_folder(installed_release: str, tmp_path: Path) -> None:
    """A store that vLLM has filled without the plugin stays a store."""
    import torch

    ordinary = _store(tmp_path)
    for name in ORDINARY:
        ordinary.save_caches({name: torch.ones(1, 2)}, name)
    filled = _files(tmp_path)
    assert filled == {f"{name}/encoder_cache.safetensors" for name in ORDINARY}
    with registered(True):
        before = counted(STORE_PATH)
        assert all(_store(tmp_path).has_cache_item(name) for name in ORDINARY)
        assert counted(STORE_PATH) == before
    assert _files(tmp_path) == filled


NASTY = st.text(st.sampled_from("./%ab\0\ud800"), max_size=8) | st.text(max_size=300)


@given(st.lists(NASTY, unique=True, max_size=8))
def test_folder_names_are_names_and_never_the_same(identifiers_: list[str]) -> None:
    names = [folder_name(identifier) for identifier in identifiers_]
    assert len(set(names)) == len(names)
    for name in names:
        assert name not in ("", ".", "..") and not {"/", "\0"} & set(name)
        assert len(name.encode()) <= 255
    # Nobody can ask for the folder of another by its escaped name.
    assert all(folder_name(name) != name or name in identifiers_ for name in names)


# Embed counts


def _outcome(scheduler: Any, request: Any) -> str:
    """What becomes of a request that is added now, in one step."""
    scheduler.add_request(request)
    planned = take_step(scheduler)
    if request.request_id in planned.num_scheduled_tokens:
        return "was given what is cached"
    return str(request.status.name)


@pytest.mark.behaviour(EMBED_COUNT, wrong=r"was given what is cached")
@pytest.mark.parametrize("overlapped", [False, True], ids=["one-batch", "two-batches"])
@pytest.mark.parametrize("running", [True, False], ids=["held", "left-over"])
@pytest.mark.parametrize("count", [2, 8])
def test_another_count_ends_its_request_alone(
    patched: None, count: int, running: bool, overlapped: bool
) -> None:
    scheduler = encoder_scheduler(caching=False, overlapped=overlapped)
    pool = scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    first = encoder_request("first", ("again", 4), answer=20 if running else 1)
    scheduler.add_request(first)
    take_step(scheduler)
    found = _outcome(scheduler, encoder_request("second", ("again", count)))
    assert found == "FINISHED_ERROR", found
    assert "second" not in scheduler.requests
    third = encoder_request("third", ("again", 4), ("other", count))
    scheduler.add_request(third)
    while scheduler.has_unfinished_requests():
        take_step(scheduler)
    assert third.status.name == "FINISHED_LENGTH_CAPPED"
    assert pool.get_num_free_blocks() == free


@pytest.mark.behaviour(EMBED_COUNT, wrong=r"was given what is cached")
def test_another_count_in_one_request_ends_it(patched: None) -> None:
    scheduler = encoder_scheduler(caching=False)
    found = _outcome(scheduler, encoder_request("twice", ("again", 4), ("again", 8)))
    assert found == "FINISHED_ERROR", found


@pytest.mark.behaviour(EMBED_COUNT, wrong=r"goes on to .* second chunk")
def test_another_count_in_a_later_chunk_ends_the_request(patched: None) -> None:
    """The first chunk of 16 tokens ends behind the first picture."""
    scheduler = encoder_scheduler(caching=False, batched_tokens=16)
    request = encoder_request("chunked", ("again", 14), ("again", 8))
    scheduler.add_request(request)
    assert take_step(scheduler).num_scheduled_tokens == {"chunked": 16}
    planned = take_step(scheduler).num_scheduled_tokens
    assert not planned, f"goes on to {planned['chunked']} tokens of the second chunk"
    assert request.status.name == "FINISHED_ERROR"


@pytest.mark.behaviour(EMBED_COUNT, wrong=r"was given what is cached")
def test_the_client_hears_of_it(patched: None) -> None:
    scheduler = encoder_scheduler(caching=False)
    scheduler.add_request(encoder_request("first", ("again", 4)))
    take_step(scheduler)
    scheduler.add_request(encoder_request("second", ("again", 8)))
    planned = scheduler.schedule()
    assert "second" not in planned.num_scheduled_tokens, "was given what is cached"
    report = played_scheduler.output_of(scheduler, planned)
    outputs = scheduler.update_from_output(planned, report)[0].outputs
    (told,) = [output for output in outputs if output.request_id == "second"]
    assert str(told.finish_reason) == "error"
