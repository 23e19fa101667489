"""Servers that consume embeddings of a tiny Qwen2.5-VL, and requests with embedding parts."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.beds.checkpoints import write
from tests.beds.layout import extra_path
from tests.beds.serving import serve
from vllm_ext.checks.server import Reply, Server

WIDTH = 64
GRID = (1, 4, 4)
ROWS = 4
_TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% elif 'video' in part.type %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


def packed(tensor: torch.Tensor) -> str:
    """A tensor as a chat part holds it."""
    written = io.BytesIO()
    torch.save(tensor, written)
    return base64.b64encode(written.getvalue()).decode()


def image(
    uuid: str | None = None, rows: int | None = ROWS, grid: tuple[int, ...] = GRID
) -> dict[str, Any]:
    """An embedding part of one image; without its tensor if ``rows`` is None."""
    held = {"image_grid_thw": packed(torch.tensor(grid))}
    if rows is not None:
        drawn = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))
        held["image_embeds"] = packed(drawn)
    named = {} if uuid is None else {"uuid": uuid}
    return {"type": "image_embeds", "image_embeds": held, **named}


class Consumer:
    """A running server, and the answer to a text of which every token is known to be right."""

    def __init__(self, server: Server, model: str) -> None:
        self.server, self.model = server, model
        self.right = self._text()

    def ask(self, *parts: Mapping[str, Any], **more: Any) -> Reply:
        """A chat of these parts and a few words, greedy, 4 tokens."""
        content = [*parts, {"type": "text", "text": "bae dio fou gui"}]
        chat = [{"role": "user", "content": content}]
        asked = {"model": self.model, "messages": chat, "max_tokens": 4, "temperature": 0.0}
        return self.server.post("/v1/chat/completions", {**asked, **more})

    def _text(self) -> Any:
        choice = self.ask(logprobs=True).raise_for_status().json()["choices"][0]
        told = [(t["token"], round(t["logprob"], 3)) for t in choice["logprobs"]["content"]]
        return choice["message"]["content"], told

    def check(self) -> None:
        """The text is answered as it was when nothing had happened yet."""
        assert self._text() == self.right


@contextmanager
def consumer(release: str, role: str, folder: Path, plugin: str = "with") -> Iterator[Consumer]:
    """``vllm serve`` in a KV role with ExampleConnector or an EC role with ECExampleConnector.

    Embedding inputs are taken whatever the release says: 0.29.0 has to be told, and ``kv_both`` of
    a store is opened by the plugin's option.
    """
    model = write("qwen25_vl", folder / "model")
    template = folder / "template.jinja"
    template.write_text(_TEMPLATE)
    kind = role.partition("_")[0]
    name = {"kv": "ExampleConnector", "ec": "ECExampleConnector"}[kind]
    stored = {"shared_storage_path": str(folder / "stored")}
    transfer = {f"{kind}_connector": name, f"{kind}_role": role}
    transfer |= {f"{kind}_connector_extra_config": stored}
    args = [f"--{kind}-transfer-config", json.dumps(transfer), "--chat-template", str(template)]
    args += ["--chat-template-content-format", "openai"]
    if release == "0.29.0":
        args.append("--enable-mm-embeds")
    with serve(
        model,
        release,
        folder / "log",
        plugin=plugin,
        args=args,
        env={"VLLM_EXT_CONSUMER_EMBEDS_KV_BOTH": "*"},
        pythonpath=[extra_path("torchvision")],
    ) as server:
        yield Consumer(server, str(model.path))
