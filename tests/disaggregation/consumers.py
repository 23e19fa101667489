"""Consumers as they are started: real engine arguments, and what their config comes to."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.beds.tokenizer import save_tokenizer

_WITHOUT = {"image": 0}


@dataclass(frozen=True)
class Start:
    """What a consumer is started with: roles, connector of its KV transfer, its modalities."""

    kv: str = ""
    ec: str = ""
    connector: str = "ExampleConnector"
    language_model_only: bool = False
    limits: bool = False
    given: bool = False

    def arguments(self, folder: Path) -> dict[str, Any]:
        """Keyword arguments of ``EngineArgs``; what connectors store goes into ``folder``."""
        from vllm.config import ECTransferConfig, KVTransferConfig

        stored = {"shared_storage_path": str(folder / "stored")}
        told: dict[str, Any] = {}
        if self.kv:
            told["kv_transfer_config"] = KVTransferConfig(
                kv_connector=self.connector, kv_role=self.kv, kv_connector_extra_config=stored
            )
        if self.ec:
            told["ec_transfer_config"] = ECTransferConfig(
                ec_connector="ECExampleConnector",
                ec_role=self.ec,
                ec_connector_extra_config=stored,
            )
        if self.language_model_only:
            told["language_model_only"] = True
        if self.limits:
            told["limit_mm_per_prompt"] = _WITHOUT
        if self.given:
            told["enable_mm_embeds"] = True
        return told


# By the names in the first column of docs/disaggregation.md.
STARTS = {
    "none": Start(),
    "kv_consumer": Start(kv="kv_consumer"),
    "kv_producer": Start(kv="kv_producer"),
    "kv_both, transfer": Start(kv="kv_both", connector="NixlConnector"),
    "kv_both, store": Start(kv="kv_both"),
    "ec_consumer": Start(ec="ec_consumer"),
    "ec_both": Start(ec="ec_both"),
    "ec_producer": Start(ec="ec_producer"),
    "kv_consumer, language_model_only": Start(kv="kv_consumer", language_model_only=True),
    "ec_consumer, language_model_only": Start(ec="ec_consumer", language_model_only=True),
    "kv_consumer, all limits 0": Start(kv="kv_consumer", limits=True),
    "ec_consumer, all limits 0": Start(ec="ec_consumer", limits=True),
    "none, all limits 0": Start(limits=True),
}
FLAG = "--enable-mm-embeds"


def gemma3(folder: Path) -> Path:
    """The config of a Gemma 3, whose attention over images is bidirectional; it has no weights."""
    from transformers import Gemma3Config

    folder.mkdir(parents=True, exist_ok=True)
    shape = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    text = {**shape, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 128}
    config = Gemma3Config(text_config=text, vision_config=shape).to_dict()
    config["architectures"] = ["Gemma3ForConditionalGeneration"]
    (folder / "config.json").write_text(json.dumps(config, default=str))
    save_tokenizer(folder, 512, 128)
    return folder


def configured(folder: Path, start: Start) -> Any:
    """The VllmConfig that an engine of the release in this process would be started with."""
    from vllm.engine.arg_utils import EngineArgs

    model = folder / "gemma3"
    if not model.exists():
        gemma3(model)
    common = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "block_size": 32}
    return EngineArgs(model=str(model), **common, **start.arguments(folder)).create_engine_config()


def flags(config: Any) -> str:
    """Embedding inputs taken / also without a tensor / any multimodal input taken: as ``T/T/T``."""
    model = config.model_config
    taken = model.multimodal_config
    supported = getattr(model, "supports_multimodal_inputs", None)
    if supported is None:
        from vllm.multimodal import MULTIMODAL_REGISTRY

        supported = MULTIMODAL_REGISTRY.supports_multimodal_inputs(model)
    answers = (taken.enable_mm_embeds, taken.allow_missing_mm_embeddings, supported)
    return "/".join("T" if answer else "F" for answer in answers)


def told(folder: str) -> dict[str, list[Any]]:
    """For each start its flags and whether attention is bidirectional over images.

    For ``engines.call``; a Gemma 3 can only be looked into with torchvision.
    """
    made = {name: configured(Path(folder), start) for name, start in STARTS.items()}
    return {name: [flags(c), bool(c.model_config.is_mm_prefix_lm)] for name, c in made.items()}
