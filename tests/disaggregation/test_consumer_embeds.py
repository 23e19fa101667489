"""CONSUMER_EMBEDS without an engine: roles, what the scheduler plans, what a client reads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.beds.registered import counted, registered
from vllm_ext.features.disaggregation import consumer_embeds_checks as checks
from vllm_ext.features.disaggregation import consumer_embeds_probes as probes
from vllm_ext.features.disaggregation import consumer_roles as roles
from vllm_ext.features.disaggregation.consumer_embeds import FEATURE
from vllm_ext.features.disaggregation.embedding_tensors import check_uuid, misfits, of_interest
from vllm_ext.features.played_scheduler import make_request, make_scheduler, output_of

OPTION = FEATURE.variable("KV_BOTH")
TRANSFERS = "NixlConnector,MooncakeConnector"


@pytest.fixture
def patched(installed_release: str, plugin: str) -> Iterator[None]:
    """The process with the plugin registered and the modules loaded, or as it came."""
    import vllm.config
    import vllm.multimodal.processing
    import vllm.renderers.base
    import vllm.v1.core.sched.async_scheduler
    import vllm.v1.engine.async_llm  # noqa: F401

    with registered(plugin == "with"):
        yield


def taken(model: Any) -> str:
    """Embedding inputs taken / also without their tensor."""
    config = model.multimodal_config
    return f"taken: {config.enable_mm_embeds}/{config.allow_missing_mm_embeddings}"


@pytest.mark.behaviour("CONSUMER_EMBEDS.accept", wrong="taken: False/True")
def test_a_consumer_takes_embedding_inputs(patched: None) -> None:
    assert taken(probes.settled("kv_consumer")) == "taken: True/True"
    assert taken(probes.settled("kv_both")) == "taken: True/True"
    assert taken(probes.settled("kv_producer")) == "taken: False/False"


@pytest.mark.behaviour("CONSUMER_EMBEDS.kv_both", wrong="taken: True/True")
def test_a_store_does_not_open_them(patched: None) -> None:
    for connector in ("OffloadingConnector", "ExampleConnector", "LMCacheConnectorV1"):
        assert taken(probes.settled("kv_both", connector)) == "taken: False/False"


@pytest.mark.behaviour("CONSUMER_EMBEDS.kv_both", wrong="taken: True/True")
def test_an_option_names_the_connectors(patched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``*`` it is as in vLLM; a name that nobody has leaves none."""
    monkeypatch.setenv(OPTION, "Mine, OffloadingConnector")
    assert taken(probes.settled("kv_both", "OffloadingConnector")) == "taken: True/True"
    monkeypatch.setenv(OPTION, "*")
    assert taken(probes.settled("kv_both", "ExampleConnector")) == "taken: True/True"
    monkeypatch.setenv(OPTION, "none")
    assert taken(probes.settled("kv_both", "NixlConnector")) == "taken: False/False"


@pytest.mark.behaviour("CONSUMER_EMBEDS.text_only", wrong="taken: True/True")
def test_a_consumer_without_modalities_stays_text_only(patched: None) -> None:
    assert taken(probes.settled("kv_consumer", text_only=True)) == "taken: False/False"


@pytest.mark.behaviour("CONSUMER_EMBEDS.mm_prefix", wrong="bidirectional: False")
def test_attention_is_that_of_a_model_that_takes_images(patched: None) -> None:
    found = probes.settled("kv_consumer").model_arch_config.is_mm_prefix_lm
    assert f"bidirectional: {found}" == "bidirectional: True"


def test_a_multi_connector_transfers_if_one_of_its_connectors_does() -> None:
    def multi(*names: str) -> Any:
        inner = [{"kv_connector": name, "kv_role": "kv_both"} for name in names]
        return SimpleNamespace(
            kv_connector="MultiConnector", kv_connector_extra_config={"connectors": inner}
        )

    assert roles.transfers_prompts(multi("OffloadingConnector", "NixlConnector"), TRANSFERS)
    assert not roles.transfers_prompts(multi("OffloadingConnector"), TRANSFERS)
    assert roles.transfers_prompts(multi("OffloadingConnector"), "*")


def test_the_log_says_once_which_default_was_overridden(caplog: pytest.LogCaptureFixture) -> None:
    transfer = SimpleNamespace(
        kv_role="kv_both",
        is_kv_consumer=True,
        kv_connector="Unheard",
        kv_connector_extra_config={},
    )
    config = SimpleNamespace(kv_transfer_config=transfer, ec_transfer_config=None)
    for tell in (roles.tell_opened, roles.tell_closed, roles.tell_opened, roles.tell_closed):
        tell(config)
    opened, closed = caplog.records
    assert opened.levelname == closed.levelname == "WARNING"
    assert "embedding inputs are accepted" in opened.message and OPTION in opened.message
    assert closed.message.startswith("kv_both of Unheard: ") and OPTION in closed.message


class Grid:
    """A scheduler for a model whose images may leave out all but ``grid``, and one request of it.

    The image is 8 of 40 prompt tokens, from the fifth on.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *fields: str) -> None:
        from vllm.multimodal import MULTIMODAL_REGISTRY
        from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
        from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

        parser = SimpleNamespace(placeholder_metadata_fields=lambda modality: {"grid"})
        processor = SimpleNamespace(info=SimpleNamespace(data_parser=parser))
        monkeypatch.setattr(
            type(MULTIMODAL_REGISTRY), "create_processor", lambda *args, **kwargs: processor
        )
        self.scheduler = make_scheduler()
        self.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=64)
        self.scheduler.max_num_encoder_input_tokens = 64
        self.scheduler.vllm_config.model_config.multimodal_config = SimpleNamespace()
        self.request = make_request("image", range(40))
        data: Any = {name: SimpleNamespace(data=1) for name in fields}
        place = PlaceholderRange(offset=4, length=8)
        self.request.mm_features = [MultiModalFeatureSpec(data, "image", "picture", place)]
        self.scheduler.add_request(self.request)

    def step(self) -> tuple[Any, Any]:
        """What is planned, and what is told of it."""
        planned = self.scheduler.schedule()
        told = self.scheduler.update_from_output(planned, output_of(self.scheduler, planned))
        return planned, told


@pytest.mark.behaviour("CONSUMER_EMBEDS.lacking_items", wrong=r"sent to the worker: \{'image'")
def test_an_item_without_its_tensor_ends_its_request(
    patched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other request of the step goes on, and all blocks come free."""
    before = counted("CONSUMER_EMBEDS.lacking_items")
    play = Grid(monkeypatch, "grid")
    free = play.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    play.scheduler.add_request(make_request("text", range(20), 1))
    planned, told = play.step()
    assert f"sent to the worker: {planned.scheduled_encoder_inputs}" == "sent to the worker: {}"
    # A waiting request behind one that can't be planned comes a step later on 0.29.0.
    answers = [
        *told[0].outputs,
        *(play.step()[1] or {}).get(0, SimpleNamespace(outputs=[])).outputs,
    ]
    ended = {answer.request_id: answer for answer in answers}
    assert ended["image"].finish_reason.name == "ERROR"
    error = getattr(ended["image"], "error", None)
    sentence = error.message if error else ended["image"].stop_reason
    assert sentence.startswith("No embeddings for item 0 of the request (image, identifier 'pict")
    assert ended["text"].finish_reason.name == "LENGTH"
    assert not play.scheduler.requests
    assert play.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free
    assert counted("CONSUMER_EMBEDS.lacking_items") == before + 1


@pytest.mark.parametrize("fields", [("grid", "embeds"), ("address", "monotonic_id")])
def test_an_item_with_a_tensor_is_encoded(
    installed_release: str, monkeypatch: pytest.MonkeyPatch, fields: tuple[str, ...]
) -> None:
    """Also one that only the worker can read, from shared memory."""
    with registered(True):
        planned, _ = Grid(monkeypatch, *fields).step()
    assert planned.scheduled_encoder_inputs == {"image": [0]}


def test_an_item_whose_kv_is_there_needs_no_tensor(
    installed_release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first request has computed the image's blocks, the second finds them."""
    with registered(True):
        play = Grid(monkeypatch, "grid", "embeds")
        play.step()
        second = make_request("second", range(40))
        play.request.mm_features[0].data.pop("embeds")
        second.mm_features = play.request.mm_features
        second.block_hashes = play.request.block_hashes
        play.scheduler.add_request(second)
        # An encoder's output is no longer there either.
        play.scheduler.encoder_cache_manager.reset()
        planned, _ = play.step()
    assert planned.scheduled_new_reqs[0].num_computed_tokens >= 16
    assert "second" in play.scheduler.requests


@pytest.mark.behaviour("CONSUMER_EMBEDS.client_error", wrong="reads nothing")
def test_its_client_reads_which_item(patched: None) -> None:
    judged = checks.client_error()
    assert judged.verdict.value == "native", judged.reason


GOOD = {"embeds": (4, 8), "grid": [[1, 2, 2]]}
MISFITS = {
    "rows": ({"embeds": (3, 8)}, "image_embeds has 3 rows; by its metadata, its items have 4"),
    "none": ({"embeds": (0, 8)}, "image_embeds has 0 rows"),
    "width": ({"embeds": (4, 7)}, r"shape \(4, 7\); expected is 4 by 8"),
    "third dimension": ({"embeds": (1, 4, 8)}, r"shape \(1, 4, 8\)"),
    "negative": ({"grid": [[1, -2, -2]]}, "image_grid_thw has a number that isn't positive"),
    "frames": ({"grid": [[2, 2, 1]]}, "more than one frame"),
    "pixels": ({"pixels": (4, 8)}, "pixel_values is no embedding"),
}


def _process(embeds: Any = (4, 8), grid: Any = ((1, 2, 2),), pixels: Any = None) -> str:
    import torch

    data = {"image_embeds": torch.zeros(embeds), "image_grid_thw": torch.tensor(grid)}
    if pixels:
        data["pixel_values"] = torch.zeros(pixels)
    return f"refused for: {probes.processed(**data) or 'nothing'}"


@pytest.mark.behaviour("CONSUMER_EMBEDS.tensor_sizes", wrong="refused for: nothing")
@pytest.mark.parametrize("case", MISFITS)
def test_a_tensor_that_does_not_fit_is_refused(patched: None, case: str) -> None:
    changed, expected = MISFITS[case]
    told = _process(**changed)
    assert re.search(expected, told), told


def test_a_tensor_that_fits_is_processed(installed_release: str) -> None:
    """Rows left over are cut off by vLLM, and several images stand one behind the other."""
    import vllm.multimodal.processing  # noqa: F401

    with registered(True):
        assert _process() == "refused for: nothing"
        assert _process(embeds=(9, 8)) == "refused for: nothing"
        assert _process(embeds=(10, 8), grid=[[1, 2, 2], [1, 3, 2]]) == "refused for: nothing"
        assert "has 9 rows" in _process(embeds=(9, 8), grid=[[1, 2, 2], [1, 3, 2]])


def test_items_that_declare_nothing_are_left_to_vllm() -> None:
    info = SimpleNamespace(data_parser=SimpleNamespace(embedding_fields={}))
    assert not [*misfits(info, "image", SimpleNamespace(fields_config={}, data={"x": 1}))]
    assert not [*misfits(info, "image", SimpleNamespace())]


@pytest.mark.behaviour("CONSUMER_EMBEDS.unreadable", wrong="is HTTP 500")
def test_what_can_not_be_read_is_an_error_of_its_client(patched: None) -> None:
    judged = probes.unreadable()
    assert judged.verdict.value == "native", judged.reason


def test_a_uuid_of_half_a_surrogate_pair_is_refused(installed_release: str) -> None:
    from vllm.exceptions import VLLMValidationError

    check_uuid("any \N{SNOWMAN}")
    with pytest.raises(VLLMValidationError, match="half a surrogate pair"):
        check_uuid("\ud800")


def test_other_parts_of_a_chat_are_none_of_our_business() -> None:
    assert not of_interest({"type": "text", "text": "embeds"})
    assert of_interest({"type": "image_url", "uuid": "x"})
    assert of_interest({"type": "video_embeds"})


def test_the_option_lists_connectors_of_every_release(installed_release: str) -> None:
    """A name that a release hasn't got would be a typing error."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    default = next(option.default for option in FEATURE.options if option.name == "KV_BOTH")
    assert set(default.split(",")) <= KVConnectorFactory._registry.keys()


def test_the_page_names_every_connector_of_the_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "disaggregation.md").read_text()
    default = next(option.default for option in FEATURE.options if option.name == "KV_BOTH")
    assert [name for name in default.split(",") if f"`{name}`" not in page] == []
