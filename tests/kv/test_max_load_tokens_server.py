"""MAX_LOAD_TOKENS on real servers: what is loaded for a cap, equal logprobs, and HTTP 400."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.beds.checkpoints import write
from tests.beds.serving import serve
from tests.beds.tokenizer import WORDS, sentence
from vllm_ext.checks.server import Server
from vllm_ext.connectors import CONNECTORS

pytestmark = [pytest.mark.engine, pytest.mark.full]

BLOCK = 32
PROMPT = [4 + (7 * at * at + at) % len(WORDS) for at in range(140)]
OTHER = [4 + (5 * at * at + 3 * at) % len(WORDS) for at in range(140)]
CAPS = (0, 1, 31, 32, 33, 63, 64, 65, 96, 127, 128, 1000)
LEFT = 128


@dataclass
class Answer:
    """Cached tokens of one completion, and the logprobs of its tokens."""

    cached: int
    logprobs: list[float]


@dataclass
class Served:
    """A server whose connector has stored the whole blocks of PROMPT."""

    server: Server
    reference: list[float]

    def ask(self, prompt: Sequence[int], cap: int | None = None) -> Answer:
        """A completion of 4 tokens; nothing is in the local prefix cache."""
        self.server.post("/reset_prefix_cache", {}).raise_for_status()
        body: dict[str, Any] = {"prompt": list(prompt), "max_tokens": 4, "temperature": 0}
        body |= {"logprobs": 1, "ignore_eos": True}
        if cap is not None:
            body["kv_transfer_params"] = {"max_load_tokens": cap}
        reply = self.server.post("/v1/completions", body).raise_for_status().json()
        cached = (reply["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        return Answer(cached, reply["choices"][0]["logprobs"]["token_logprobs"])

    def store(self, prompt: Sequence[int], tokens: int) -> None:
        """Ask until so many tokens of a prompt come from the connector."""
        for _ in range(50):
            if self.ask(prompt).cached == tokens:
                return
        raise AssertionError(f"never loaded {tokens} tokens of a stored prompt")


@contextmanager
def _serve(model: str, connector: str, release: str, plugin: str, folder: Path) -> Iterator[Served]:
    checkpoint = write(model, folder / "model")
    config = json.loads(next(c.config for c in CONNECTORS if c.name == connector))
    config["kv_connector_extra_config"]["cpu_bytes_to_use"] = 1 << 26
    args = [
        *("--kv-transfer-config", json.dumps(config), "--enable-prompt-tokens-details"),
        *("--chat-template", "{{ messages[0]['content'] }}"),
    ]
    env = {"VLLM_EXT_MAX_LOAD_TOKENS_STRICT": "1", "VLLM_SERVER_DEV_MODE": "1"}
    # Without the feature, not without the plugin: offloading on the CPU is one of its own.
    if plugin == "without":
        env["VLLM_EXT_MAX_LOAD_TOKENS"] = "0"
    with serve(checkpoint, release, folder / "log", env=env, args=args) as server:
        served = Served(server, [])
        served.reference = served.ask(PROMPT).logprobs
        yield served


def _check(served: Served, expected: dict[int, int]) -> None:
    """Every cap loads what is expected, and changes no logprob."""
    wrong = []
    for cap, tokens in expected.items():
        answer = served.ask(PROMPT, cap)
        if answer.cached != tokens:
            wrong.append(f"cap {cap} loads {answer.cached} tokens, not {tokens}")
        assert answer.logprobs == pytest.approx(served.reference, abs=1e-4), cap
    assert served.ask(OTHER).logprobs != pytest.approx(served.reference, abs=0.05)
    assert not wrong, "; ".join(wrong)


@pytest.mark.behaviour("MAX_LOAD_TOKENS.cap", wrong=r"cap 32 loads 128 tokens, not 32")
def test_caps_of_a_served_model(release: str, plugin: str, tmp_path: Path) -> None:
    with _serve("llama", "HostOffloadingSpec", release, plugin, tmp_path) as served:
        served.store(PROMPT, LEFT)
        _check(served, {cap: min(LEFT, cap // BLOCK * BLOCK) for cap in CAPS})
        if plugin == "with":
            _refuses_invalid_caps(served.server)


def _refuses_invalid_caps(server: Server) -> None:
    """Every endpoint answers HTTP 400 with the field and what was found; valid caps pass."""
    text = sentence(8, 1)
    bodies = {
        "/v1/completions": {"prompt": text, "max_tokens": 1},
        "/v1/chat/completions": {
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 1,
        },
        "/v1/responses": {"input": text, "max_output_tokens": 1},
    }
    for path, body in bodies.items():
        for value in ("8", 8.0, -1, True):
            for stream in (False, True):
                reply = server.post(
                    path,
                    {**body, "stream": stream, "kv_transfer_params": {"max_load_tokens": value}},
                )
                assert reply.status_code == 400, (path, value, stream, reply.text)
                error = reply.json()["error"]
                assert "kv_transfer_params.max_load_tokens" in error["message"]
                assert f"found {value!r} ({type(value).__name__})" in error["message"]
        passed = server.post(path, {**body, "kv_transfer_params": {"max_load_tokens": 8}})
        assert passed.status_code == 200, passed.text


@pytest.mark.behaviour("MAX_LOAD_TOKENS.exact", wrong=r"cap 64 loads 32 tokens, not 64")
def test_caps_of_a_served_hybrid_model(release: str, plugin: str, tmp_path: Path) -> None:
    """The windows of 64 tokens at the ends of two prompts are all chunks of the longer one."""
    with _serve("gemma3", "HostOffloadingSpec", release, plugin, tmp_path) as served:
        served.store(PROMPT[:70], 64)
        served.store(PROMPT, LEFT)
        _check(served, {0: 0, 64: 64, 127: 96, 128: 128, 1000: 128})


@pytest.mark.behaviour("MAX_LOAD_TOKENS.simple_cpu", wrong=r"cap 32 loads 128 tokens, not 32")
def test_caps_of_a_served_model_with_the_simple_connector(
    release: str, plugin: str, tmp_path: Path
) -> None:
    with _serve("llama", "SimpleCPUOffload", release, plugin, tmp_path) as served:
        served.store(PROMPT, LEFT)
        _check(served, {cap: min(LEFT, cap // BLOCK * BLOCK) for cap in CAPS})
