"""Which consumers take embedding inputs: the roles of a VllmConfig, read before it is complete."""

from __future__ import annotations

import functools
import logging
from typing import Any

_OPTION = "VLLM_EXT_CONSUMER_EMBEDS_KV_BOTH"
EVERY = "*"
_OPENED = (
    "{role}: embedding inputs are accepted, also without their tensor, though --enable-mm-embeds "
    "was not given. VLLM_EXT_CONSUMER_EMBEDS=0 leaves that to the release; for kv_both, {option} "
    "names the connectors it is done for."
)
_CLOSED = (
    "kv_both of {names}: embedding inputs are refused unless --enable-mm-embeds is given, and "
    "always without their tensor. If prompts are transferred to this instance, name the connector "
    "in {option} (*: every one, as in vLLM 0.30.0 and later)."
)


def multimodal(config: Any) -> Any:
    """The MultiModalConfig of a VllmConfig; None without a model, or for a text model."""
    model = config.model_config
    return None if model is None else model.multimodal_config


def is_ec_consumer(config: Any) -> bool:
    """True for ``ec_consumer`` and ``ec_both``."""
    transfer = config.ec_transfer_config
    return transfer is not None and bool(transfer.is_ec_consumer)


def is_kv_consumer(config: Any) -> bool:
    """True for ``kv_consumer`` and ``kv_both``."""
    transfer = config.kv_transfer_config
    return transfer is not None and bool(transfer.is_kv_consumer)


def connectors(transfer: Any) -> set[str]:
    """Names of the KV connectors of a KVTransferConfig, with those in a MultiConnector."""
    found, left = set(), [(transfer.kv_connector, transfer.kv_connector_extra_config)]
    while left:
        name, extra = left.pop()
        found.add(name)
        for inner in (extra or {}).get("connectors", ()):
            extra = inner.get("kv_connector_extra_config")
            left.append((inner.get("kv_connector"), extra))
    return found


def transfers_prompts(transfer: Any, named: str) -> bool:
    """Whether a ``kv_both`` receives prompts from other instances by the list in ``named``."""
    names = {name.strip() for name in named.split(",")}
    return EVERY in names or bool(connectors(transfer) & names)


def stores_only(config: Any, named: str) -> bool:
    """A KV consumer only since ``kv_both`` is what offload and prefix stores are started with."""
    return (
        is_kv_consumer(config)
        and not is_ec_consumer(config)
        and config.kv_transfer_config.kv_role == "kv_both"
        and not transfers_prompts(config.kv_transfer_config, named)
    )


def text_only(config: Any) -> bool:
    """A KV consumer that is started without any modality, whichever way that is said.

    ``language_model_only`` is documented as a limit of 0 for every modality. Ask it before
    ``enable_mm_embeds`` is overridden: embedding inputs count as a modality.
    """
    if not is_kv_consumer(config) or is_ec_consumer(config):
        return False
    model = config.model_config
    if model.multimodal_config.language_model_only:
        return True
    # A property of 0.31.0 and later.
    supported = getattr(model, "supports_multimodal_inputs", None)
    if supported is None:
        from vllm.multimodal import MULTIMODAL_REGISTRY

        supported = MULTIMODAL_REGISTRY.supports_multimodal_inputs(model)
    return not supported


def opens(config: Any, named: str) -> bool:
    """Whether this role takes embedding inputs though nobody has asked for them."""
    if multimodal(config) is None or multimodal(config).enable_mm_embeds:
        return False
    if not (is_ec_consumer(config) or is_kv_consumer(config)):
        return False
    return not stores_only(config, named) and not text_only(config)


def open_now(config: Any) -> None:
    """Take embedding inputs, with the attention of a model that takes them."""
    multimodal(config).enable_mm_embeds = True
    _decide_attention_again(config.model_config)


def _decide_attention_again(model: Any) -> None:
    """Set ``is_mm_prefix_lm`` as it is with the present ``enable_mm_embeds``."""
    # The cache of 0.29.0 and 0.30.0; later ones have the flag in its key.
    vars(model).pop("_supports_multimodal_inputs_cached", None)
    decided = model.get_model_arch_config().is_mm_prefix_lm
    model.model_arch_config.is_mm_prefix_lm = decided
    # A cached property, which has been read by now.
    vars(model).pop("is_mm_prefix_lm", None)


def close(config: Any, given: bool) -> None:
    """Take no embedding inputs without a tensor, and others only if the user has said so."""
    multimodal(config).enable_mm_embeds = given
    multimodal(config).allow_missing_mm_embeddings = False


def tell_opened(config: Any) -> None:
    """Say that a default was overridden; louder where the server may well be a public one."""
    transfer = config.kv_transfer_config
    role = transfer.kv_role if is_kv_consumer(config) else config.ec_transfer_config.ec_role
    level = logging.WARNING if role == "kv_both" else logging.INFO
    _say(type(config).__module__, level, _OPENED.format(role=role, option=_OPTION))


def tell_closed(config: Any) -> None:
    """Say which option opens a ``kv_both``."""
    names = ", ".join(sorted(map(str, connectors(config.kv_transfer_config))))
    _say(type(config).__module__, logging.WARNING, _CLOSED.format(names=names, option=_OPTION))


@functools.cache
def _say(logger: str, level: int, sentence: str) -> None:
    """Once in a process: a VllmConfig is completed again whenever a copy is made of it."""
    logging.getLogger(logger).log(level, "%s", sentence)
