"""MM_UUIDS: what identifies an image, video or audio between instances (upstream PR 56432).

An encoder instance stores an embedding under the item's identifier, and a consumer looks it up by
the same one. It is the caller's UUID, or a hash of the content, or, where both caches are off and
nothing would be reused, a name made up for the request.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from vllm_ext.core.feature import Feature, Part, effect
from vllm_ext.core.seams import Wrap
from vllm_ext.features.disaggregation import mm_uuids_probes as probes

logger = logging.getLogger("vllm.vllm_ext")

_RENDERER = "vllm.renderers.base:BaseRenderer"
_PROCESS = f"{_RENDERER}._process_mm_uuids"
_VALIDATE = f"{_RENDERER}._validate_mm_uuids"
_CALLER = f"{_RENDERER}._process_multimodal"
_HASHES = "vllm.multimodal.processing.inputs:ProcessorInputs.get_mm_hashes"
_FIELDS = "vllm.multimodal.parse:MultiModalDataParser.placeholder_metadata_fields"
_STORE = "vllm.distributed.ec_transfer.ec_connector.example_connector:ECExampleConnector"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_ENCODER_CACHE = "vllm.v1.core.encoder_cache_manager:EncoderCacheManager"

# File systems take names of up to 255 bytes.
_LONGEST = 255
_ESCAPED = "%"

# What stands for the UUIDs of a modality: a name, or None for each item.
Uuids = Mapping[str, Sequence[str | None] | None]

_warned_of_empty = False


def _caches_off(renderer: Any) -> bool:
    """True where vLLM makes identifiers up: no processor cache and no prefix cache."""
    multimodal = renderer.model_config.multimodal_config
    return bool(
        multimodal
        and multimodal.mm_processor_cache_gb == 0
        and not renderer.config.cache_config.enable_prefix_caching
    )


def _encodings_are_shared(config: Any) -> bool:
    """True for an encoder instance or one that takes its embeddings: an EC connector is set."""
    transfer = config.ec_transfer_config
    return transfer is not None and transfer.ec_connector is not None


def _identifiers_are_shared(config: Any) -> bool:
    """True where what is stored under an identifier may leave, or outlive, this instance.

    KV connectors key what they store by block hashes, which the identifiers are part of.
    """
    transfer = config.kv_transfer_config
    with_kv = transfer is not None and transfer.kv_connector is not None
    return with_kv or _encodings_are_shared(config)


def _is_sizes_only(renderer: Any, modality: str, items: Any, at: int) -> bool:
    """True for an embedding input that names its sizes (such as a grid) and brings no tensor."""
    from vllm.multimodal.parse import DictEmbeddingItems

    if not isinstance(items, DictEmbeddingItems):
        return False
    roles = renderer.get_mm_processor().info.data_parser.embedding_fields.get(modality, {})
    values = {field for field, role in roles.items() if role == "values"}
    return bool(values) and not values & items.get(at).keys()


def _given(uuids: Uuids, modality: str, at: int) -> str | None:
    listed = uuids.get(modality)
    return listed[at] if listed is not None and at < len(listed) else None


def keep_explicit_uuids(
    original: Callable[..., Any],
    self: Any,
    mm_data: Any,
    mm_data_items: Any,
    mm_uuid_items: Uuids,
    mm_req_id: str,
) -> Any:
    """Put the caller's UUIDs back where vLLM has replaced them, and judge them as ever.

    ``None`` is no UUID, the empty string is one. Modalities without data keep theirs. Raises what
    vLLM raises with a cache on (ValueError) for a list that is longer or shorter than the data.
    """
    made = original(self, mm_data, mm_data_items, mm_uuid_items, mm_req_id)
    if not _caches_off(self):
        return made
    merged: dict[str, Any] = dict(mm_uuid_items)
    for modality, names in made.items():
        given = mm_uuid_items.get(modality)
        if given is None:
            merged[modality] = names
        elif len(given) == len(names):
            merged[modality] = [
                name if uuid is None else uuid for uuid, name in zip(given, names, strict=True)
            ]
            effect("MM_UUIDS.explicit", sum(uuid is not None for uuid in given))
    self._validate_mm_uuids(mm_data, mm_data_items, merged)
    return merged


def identify_without_uuid(
    original: Callable[..., Any],
    self: Any,
    mm_data: Any,
    mm_data_items: Any,
    mm_uuid_items: Uuids,
    mm_req_id: str,
) -> Any:
    """Have the content decide where identifiers are shared; elsewhere make them unique.

    An item whose entry is ``None`` is hashed by vLLM, as it is with a cache on.
    """
    if not _caches_off(self):
        return original(self, mm_data, mm_data_items, mm_uuid_items, mm_req_id)
    unique = f"{mm_req_id}-{secrets.token_hex(16)}"
    made = original(self, mm_data, mm_data_items, mm_uuid_items, unique)
    shared = _identifiers_are_shared(self.config)
    identified: dict[str, Any] = dict(made)
    for modality, names in made.items():
        items = mm_data_items.get(modality)
        if items is None:
            continue
        missing = [at for at in range(len(names)) if _given(mm_uuid_items, modality, at) is None]
        if missing:
            effect("MM_UUIDS.fallback", len(missing))
        if shared and missing:
            # Sizes are the same for many pictures: no hash of them tells one from another.
            hashed = {at for at in missing if not _is_sizes_only(self, modality, items, at)}
            identified[modality] = [None if at in hashed else name for at, name in enumerate(names)]
    return identified


def refuse_unidentified(
    original: Callable[..., Any],
    self: Any,
    mm_data: Any,
    mm_data_items: Any,
    mm_uuid_items: Uuids,
    mm_req_id: str,
) -> Any:
    """Refuse an item that has neither data nor UUID, before anything is looked up for it.

    Raises VLLMValidationError, which is an answer of status 400.
    """
    for modality, at, lacks in _unidentified(self, mm_data_items, mm_uuid_items):
        from vllm.exceptions import VLLMValidationError

        effect("MM_UUIDS.refusal")
        raise VLLMValidationError(
            f"multi_modal_data[{modality!r}][{at}] has {lacks} and no UUID, so nothing says which "
            f"{modality} it is. Send the {modality} itself, or the UUID under which an encoder "
            "instance has stored it (multi_modal_uuids, in a chat message the part's `uuid`; "
            "`mm_hash` in the encoder's answer).",
            parameter="multi_modal_uuids",
        )
    if any("" in listed for listed in mm_uuid_items.values() if listed):
        _warn_of_empty()
    return original(self, mm_data, mm_data_items, mm_uuid_items, mm_req_id)


def _unidentified(renderer: Any, all_items: Any, uuids: Uuids) -> Iterator[tuple[str, int, str]]:
    """Modality and place of each item without data and UUID, and what it lacks in words."""
    for modality, listed in uuids.items():
        if modality not in all_items and listed is not None:
            for at, uuid in enumerate(listed):
                if uuid is None:
                    yield modality, at, "no data"
    for modality, items in all_items.items():
        listed = uuids.get(modality)
        if listed is not None and len(listed) != len(items):
            # vLLM's own sentence says it better.
            continue
        for at in range(len(items)):
            if listed is not None and listed[at] is not None:
                continue
            if items.get_item_for_hash(at) is None:
                yield modality, at, "no data"
            elif not _kv_says_all(renderer) and _is_sizes_only(renderer, modality, items, at):
                yield modality, at, "no embedding tensor"


def _kv_says_all(renderer: Any) -> bool:
    """True where an item may be anonymous, since the KV of its tokens comes with the request.

    A decode instance that reuses nothing never looks an identifier up.
    """
    config = renderer.config
    transfer = config.kv_transfer_config
    return (
        transfer is not None
        and transfer.kv_connector is not None
        and transfer.kv_role == "kv_consumer"
        and not _encodings_are_shared(config)
        and _caches_off(renderer)
    )


def _warn_of_empty() -> None:
    global _warned_of_empty
    if not _warned_of_empty:
        _warned_of_empty = True
        logger.warning(
            "A request identifies a multimodal item by an empty string. vLLM takes that for a "
            "UUID, so all items of that name are one to its caches and connectors; send null, or "
            "no uuid, for an item that has none."
        )


def folder_name(identifier: str) -> str:
    """Name of the one folder in a store that belongs to an identifier; never two have the same.

    An ordinary identifier is its own. One that is no name of a file (empty, ``.``, ``..``, with a
    separator or NUL, of more than 255 bytes) becomes ``%`` and its SHA-256.
    """
    raw = identifier.encode("utf-8", "surrogatepass")
    ordinary = (
        identifier not in ("", ".", "..")
        and not identifier.startswith(_ESCAPED)
        and not {"/", "\0"} & set(identifier)
        and len(raw) <= _LONGEST
        and not any("\ud800" <= character <= "\udfff" for character in identifier)
    )
    return identifier if ordinary else _ESCAPED + hashlib.sha256(raw).hexdigest()


def stay_inside_store(
    original: Callable[..., Any], self: Any, mm_hash: str, *args: Any, **kwargs: Any
) -> Any:
    """Look for, and store, an embedding in a folder directly below the connector's own."""
    name = folder_name(mm_hash)
    if name != mm_hash:
        effect("MM_UUIDS.store_path")
    return original(self, name, *args, **kwargs)


def reject_other_embed_count(
    original: Callable[..., Any],
    self: Any,
    request: Any,
    num_computed_tokens: int,
    num_new_tokens: int,
    encoder_compute_budget: int,
    shift_computed_tokens: int = 0,
) -> Any:
    """End a request whose item has another number of embeddings than what its UUID stands for.

    vLLM would give it those, and the model runner can't fit them in. The request ends as one
    whose grammar can't be compiled does, with the next report of the workers.
    """
    end = num_computed_tokens + num_new_tokens + shift_computed_tokens
    if num_new_tokens and request.has_encoder_inputs and not self.is_encoder_decoder:
        found = _other_count(self, request, num_computed_tokens, end)
        if found:
            identifier, held, expected = found
            logger.warning(
                "Request %s is ended with an error: its multimodal item %r has %d embeddings, and "
                "what is cached under that identifier has %d. A UUID must not be used again for "
                "another content.",
                request.request_id,
                identifier,
                expected,
                held,
            )
            if request.request_id not in self.grammar_compile_error_reqs:
                self.grammar_compile_error_reqs.add(request.request_id)
                effect("MM_UUIDS.embed_count")
            return [], 0, encoder_compute_budget, []
    return original(
        self,
        request,
        num_computed_tokens,
        num_new_tokens,
        encoder_compute_budget,
        shift_computed_tokens=shift_computed_tokens,
    )


def _other_count(scheduler: Any, request: Any, start: int, end: int) -> tuple[str, int, int] | None:
    """The first item between two tokens that can't be what is cached: its identifier and counts."""
    features = request.mm_features
    last = features[-1].mm_position
    if last.offset + last.length <= start:
        # All of it is behind, as in every step that decodes.
        return None
    counts: dict[str, int] = {}
    for at, feature in enumerate(features):
        position = feature.mm_position
        if position.offset >= end:
            break
        if position.offset + position.length <= start:
            continue
        identifier = feature.identifier
        expected = request.get_num_encoder_embeds(at)
        held = counts.setdefault(identifier, _cached_count(scheduler, identifier) or expected)
        if held != expected:
            return identifier, held, expected
    return None


def _cached_count(scheduler: Any, identifier: str) -> int | None:
    """Embeddings in the encoder cache under an identifier; None if there are none."""
    cache = scheduler.encoder_cache_manager
    if identifier not in cache.cached:
        return None
    if identifier in cache.freeable:
        return int(cache.freeable[identifier])
    for name in cache.cached[identifier]:
        if (holder := scheduler.requests.get(name)) is None:
            continue
        for at, feature in enumerate(holder.mm_features):
            if feature.identifier == identifier:
                return int(holder.get_num_encoder_embeds(at))
    return None


FEATURE = Feature(
    name="MM_UUIDS",
    area="disaggregation",
    summary="Images, videos and audio are never taken for others, within and between instances.",
    why=(
        "Encoder and consumer instances find an embedding by the identifier of its item. With "
        "--mm-processor-cache-gb 0 and --no-enable-prefix-caching vLLM 0.29.0 replaces the UUIDs "
        "that callers give. Every release up to 0.33.0 then calls an item without UUID "
        "renderer0-mm-1-image-0 or the like, on each instance and after each restart anew, so an "
        "instance takes the embedding of another picture from a shared store and answers wrongly. "
        "An embedding input that gives its sizes alone, without a UUID, is any picture of that "
        "size. A UUID of two dots and a slash leaves the folder of ECExampleConnector, one that is "
        "too long or has a NUL in it ends the engine, and so does, on 0.29.0 and 0.30.0, a UUID "
        "that is used again for a picture of another size."
    ),
    upstream_pr=(56432,),
    parts=(
        Part(
            "explicit",
            "UUIDs of the caller are kept with both caches off, entry by entry.",
            (Wrap(_PROCESS, keep_explicit_uuids),),
            probes.explicit,
            relies_on=(_VALIDATE, _CALLER),
        ),
        Part(
            "fallback",
            "Without a UUID the content decides where instances share; elsewhere names are unique.",
            (Wrap(_PROCESS, identify_without_uuid),),
            probes.fallback,
            relies_on=(_CALLER, _HASHES, _FIELDS),
        ),
        Part(
            "refusal",
            "An item with neither data nor UUID is refused in the frontend.",
            (Wrap(_PROCESS, refuse_unidentified),),
            probes.refusal,
            relies_on=(_CALLER, _FIELDS),
        ),
        Part(
            "store_path",
            "No UUID leads out of the folder of ECExampleConnector, or ends the engine there.",
            (Wrap(f"{_STORE}._generate_foldername_debug", stay_inside_store),),
            probes.store_path,
        ),
        Part(
            "embed_count",
            "A UUID used again for a content of another size ends its request, not the engine.",
            (Wrap(f"{_SCHEDULER}._try_schedule_encoder_inputs", reject_other_embed_count),),
            probes.embed_count,
            relies_on=(
                f"{_SCHEDULER}.update_from_output",
                f"{_ENCODER_CACHE}.check_and_update_cache",
                f"{_ENCODER_CACHE}.free_encoder_input",
            ),
        ),
    ),
)
