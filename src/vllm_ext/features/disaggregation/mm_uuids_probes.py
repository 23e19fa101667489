"""What a release makes of identifiers: its real renderer methods, scheduler and example store."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from vllm_ext.core.feature import Judgement, Verdict
from vllm_ext.features import played_scheduler

# What vLLM's renderers call the first multimodal request of a process.
FIRST = "renderer0-mm-1"


def renderer(*, ec: bool = False, kv: str = "", caching: bool = False) -> Any:
    """Stands for a renderer: its configuration, its parser and BaseRenderer's two functions.

    ``ec``: an EC connector is set. ``kv``: role of a KV connector. ``caching``: of prefixes; the
    processor cache is off. Embedding inputs need no tensor, as on a consumer.
    """
    from vllm.multimodal.inputs import MultiModalFieldConfig
    from vllm.multimodal.parse import (
        DictEmbeddingItems,
        MultiModalDataParser,
    )
    from vllm.renderers.base import BaseRenderer

    class Parser(MultiModalDataParser):  # type: ignore[misc]
        embedding_fields: ClassVar = {
            "image": {"image_embeds": "values", "image_grid_thw": "metadata"}
        }

        def _parse_image_data(self, data: Any) -> Any:
            if not isinstance(data, dict):
                return super()._parse_image_data(data)
            needed, rest = self.embedding_field_sets("image")
            fields = dict.fromkeys((*needed, *rest), MultiModalFieldConfig.batched("image"))
            return DictEmbeddingItems(data, "image", needed, lambda given: fields, rest)

    parser = Parser(allow_missing_mm_embeddings=True)
    stand_in = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=SimpleNamespace(mm_processor_cache_gb=0)),
        config=SimpleNamespace(
            cache_config=SimpleNamespace(enable_prefix_caching=caching),
            ec_transfer_config=SimpleNamespace(ec_connector="any") if ec else None,
            kv_transfer_config=SimpleNamespace(kv_connector="any", kv_role=kv) if kv else None,
        ),
        get_mm_processor=lambda: SimpleNamespace(info=SimpleNamespace(data_parser=parser)),
        parser=parser,
    )
    stand_in._validate_mm_uuids = functools.partial(BaseRenderer._validate_mm_uuids, stand_in)
    return stand_in


def identities(
    instance: Any,
    data: Mapping[str, Any],
    uuids: Mapping[str, Sequence[str | None] | None] | None = None,
) -> dict[str, list[str | None] | None]:
    """What a renderer identifies the items of a request by; None lets vLLM hash the content."""
    from vllm.renderers.base import BaseRenderer

    items = instance.parser.parse_mm_data(data)
    made = BaseRenderer._process_mm_uuids(instance, data, items, dict(uuids or {}), FIRST)
    return {modality: list(names) if names else names for modality, names in made.items()}


def identifiers(
    instance: Any,
    data: Mapping[str, Any],
    uuids: Mapping[str, Sequence[str | None] | None] | None = None,
) -> dict[str, list[str]]:
    """The identifiers that connectors and caches see, by vLLM's own hashing."""
    from vllm.multimodal.processing import ProcessorInputs

    items = instance.parser.parse_mm_data(data)
    inputs = ProcessorInputs([], items, identities(instance, data, uuids), {})
    return {m: list(n) for m, n in inputs.get_mm_hashes("model", "blake3").items()}


def picture(shade: int) -> Any:
    """A small picture of one colour."""
    from PIL import Image

    return Image.new("RGB", (28, 28), (shade, shade, shade))


def sizes() -> dict[str, Any]:
    """An embedding input without its tensor."""
    import torch

    return {"image_grid_thw": torch.tensor([[1, 4, 4]])}


def explicit() -> Judgement:
    """A request with the caller's UUIDs, both caches off."""
    given = ["mine", ""]
    data = {"image": [picture(1), picture(2)]}
    kept = identities(renderer(), data, {"image": given})["image"]
    if kept == given:
        return Judgement(Verdict.NATIVE, "UUIDs of the caller are kept with both caches off")
    assert kept is not None
    return Judgement(Verdict.ACTIVE, f"with both caches off, {given[0]!r} becomes {kept[0]!r}")


def fallback() -> Judgement:
    """Two instances, each with a picture of its own and no UUID, both caches off."""
    for ec in (True, False):
        names = [identifiers(renderer(ec=ec), {"image": [picture(n)]})["image"][0] for n in (1, 2)]
        if names[0] == names[1]:
            return Judgement(
                Verdict.ACTIVE, f"different pictures are {names[0]} on two instances, for both"
            )
    same = [identifiers(renderer(ec=True), {"image": [picture(1)]}) for _ in range(2)]
    if same[0] != same[1]:
        return Judgement(Verdict.ACTIVE, "two instances with EC call one picture by two names")
    return Judgement(
        Verdict.NATIVE, "pictures without UUID have one name on all instances, and no two the same"
    )


def refusal() -> Judgement:
    """Items with neither data nor UUID, on an instance with an EC connector, both caches off."""
    from vllm.exceptions import VLLMValidationError

    for told, data in (("no data", {"image": [None]}), ("sizes alone", {"image": sizes()})):
        try:
            identities(renderer(ec=True), data)
        except VLLMValidationError:
            continue
        return Judgement(Verdict.ACTIVE, f"an item with {told} and no UUID is taken")
    return Judgement(Verdict.NATIVE, "an item with neither data nor UUID is refused")


def store_path() -> Judgement:
    """The file of an identifier that leads out of the store."""
    from vllm.distributed.ec_transfer.ec_connector.example_connector import ECExampleConnector

    with tempfile.TemporaryDirectory(prefix="store-") as folder:
        connector = object.__new__(ECExampleConnector)
        connector._storage_path = str(Path(folder, "store"))
        file = Path(connector._generate_filename_debug("../outside")).resolve()
        inside = Path(folder, "store").resolve() in file.parents
    if inside:
        return Judgement(Verdict.NATIVE, "the UUID '../outside' stays inside the store")
    return Judgement(Verdict.ACTIVE, "the UUID '../outside' leaves the folder of the store")


def encoder_scheduler(**how: Any) -> Any:
    """A scheduler with a real encoder cache, for 64 embeddings."""
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

    scheduler = played_scheduler.make_scheduler(**how)
    scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=64)
    scheduler.max_num_encoder_input_tokens = 64
    return scheduler


def encoder_request(name: str, *items: tuple[str, int], answer: int = 4) -> Any:
    """A request of pictures, given as identifier and number of embeddings, a word before each.

    Each holds something to encode, as one element of a field.
    """
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    features, at = [], 1
    for identifier, count in items:
        features.append(
            MultiModalFeatureSpec(
                data={"pixel_values": SimpleNamespace(data=0)},
                modality="image",
                identifier=identifier,
                mm_position=PlaceholderRange(offset=at, length=count),
            )
        )
        at += count + 1
    request = played_scheduler.make_request(name, range(1, at + 1), answer)
    request.mm_features = features
    return request


def take_step(scheduler: Any) -> Any:
    """Plan a step and have it carried out; the planned step."""
    planned = scheduler.schedule()
    scheduler.update_from_output(planned, played_scheduler.output_of(scheduler, planned))
    return planned


def embed_count() -> Judgement:
    """A UUID of a picture of 4 embeddings is used again for one of 8."""
    scheduler = encoder_scheduler(caching=False)
    scheduler.add_request(encoder_request("first", ("again", 4)))
    take_step(scheduler)
    second = encoder_request("second", ("again", 8))
    scheduler.add_request(second)
    if "second" in take_step(scheduler).num_scheduled_tokens:
        return Judgement(Verdict.ACTIVE, "a picture of 8 embeddings is given 4 cached ones")
    if second.status.name == "FINISHED_ERROR":
        return Judgement(
            Verdict.NATIVE, "a picture of 8 embeddings for which 4 are cached ends its request"
        )
    return Judgement(Verdict.ACTIVE, f"the request is {second.status.name} and not scheduled")
