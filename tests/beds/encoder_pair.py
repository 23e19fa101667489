"""An encoder instance and one that takes its pictures, on loopback, with both caches off."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.beds.checkpoints import write
from tests.beds.checkpoints.pictures import VisionCheckpoint, picture
from tests.beds.encoder_store import transfer_config
from tests.beds.layout import extra_path
from tests.beds.pair import together
from tests.beds.serving import serve
from tests.beds.tokenizer import sentence
from vllm_ext.checks.server import Reply, Server

_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
_LOADED = re.compile(r"Success load encoder cache for hash (\S*)")
_TOKENS = 8


def part(seed: int, uuid: str | None = None) -> dict[str, Any]:
    """A picture of a chat message, by value."""
    written = io.BytesIO()
    picture(seed).save(written, "png")
    url = "data:image/png;base64," + base64.b64encode(written.getvalue()).decode()
    shown: dict[str, Any] = {"type": "image_url", "image_url": {"url": url}}
    return shown if uuid is None else {**shown, "uuid": uuid}


def sizes_part() -> dict[str, Any]:
    """A picture of which only the grid is told, as to a consumer."""
    import torch

    written = io.BytesIO()
    torch.save(torch.tensor([1, 4, 4]), written)
    grid = base64.b64encode(written.getvalue()).decode()
    return {"type": "image_embeds", "image_embeds": {"image_grid_thw": grid}}


@dataclass(frozen=True)
class Pair:
    """The two servers, the folder they share, and the model they serve."""

    encoder: Server
    consumer: Server
    store: Path
    model: VisionCheckpoint

    def encode(self, *parts: dict[str, Any]) -> None:
        """Have the encoder store the pictures of a message."""
        _chat(self.encoder, self.model, parts, 1).raise_for_status()

    def asked(self, *parts: dict[str, Any]) -> Reply:
        """What the consumer replies to a message of pictures and words."""
        return _chat(self.consumer, self.model, parts, _TOKENS)

    def answer(self, *parts: dict[str, Any]) -> list[tuple[str, float]]:
        """The consumer's greedy tokens with their log-probabilities."""
        (choice,) = self.asked(*parts).raise_for_status().json()["choices"]
        return [(told["token"], told["logprob"]) for told in choice["logprobs"]["content"]]

    def loaded(self) -> list[str]:
        """What the consumer has taken from the store so far."""
        return _LOADED.findall(self.consumer.log_text())

    def stored(self) -> set[str]:
        """What is in the store, as paths relative to it."""
        files = self.store.rglob("encoder_cache.safetensors")
        return {str(file.parent.relative_to(self.store)) for file in files}


def _chat(
    server: Server, model: VisionCheckpoint, parts: tuple[dict[str, Any], ...], tokens: int
) -> Reply:
    content = [*parts, {"type": "text", "text": sentence(12, 0)}]
    body = {
        "model": str(model.path),
        "messages": [{"role": "user", "content": content}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": True,
    }
    return server.post("/v1/chat/completions", body)


@contextmanager
def encoder_pair(release: str, folder: Path, plugin: str) -> Iterator[Pair]:
    """Both servers of a release, with or without the plugin, healthy; no process is left."""
    model = write("qwen25_vl", folder / "model")
    assert isinstance(model, VisionCheckpoint)
    store = folder / "store"

    def server(role: str) -> Server:
        args = ["--ec-transfer-config", json.dumps(transfer_config(store, role))]
        args += ["--mm-processor-cache-gb", "0", "--no-enable-prefix-caching"]
        args += ["--enable-mm-embeds"]
        args += ["--chat-template", _TEMPLATE, "--chat-template-content-format", "string"]
        return serve(
            model,
            release,
            folder / f"{role}.log",
            plugin=plugin,
            env={"VLLM_LOGGING_LEVEL": "DEBUG"},
            args=args,
            pythonpath=[extra_path("torchvision")],
        )

    with together(server("ec_producer"), server("ec_consumer")) as (encoder, consumer):
        yield Pair(encoder, consumer, store, model)
