"""NAN_CONTAINMENT_POLICY=error on a real server: HTTP 500 for the request with NaN alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.beds.corrupt import CorruptLlama, corrupt_llama
from tests.beds.layout import release_path
from vllm_ext.checks.server import Reply, Server

pytestmark = pytest.mark.engine
PART = "NAN_CONTAINMENT.error_policy"
POLICY = "VLLM_EXT_NAN_CONTAINMENT_POLICY"
COUNTER = 'vllm_ext_effects_total{feature="NAN_CONTAINMENT",part="contain"}'


class Served:
    """A running server and its checkpoint."""

    def __init__(self, server: Server, model: CorruptLlama) -> None:
        self.server, self.model = server, model

    def ask(self, *words: str, chat: bool = False, **body: Any) -> Reply:
        """One request of these words, greedy, 8 tokens."""
        text = " ".join(words)
        asked = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
        common = {"model": str(self.model.path), "max_tokens": 8, "temperature": 0.0}
        path = "/v1/chat/completions" if chat else "/v1/completions"
        return self.server.post(path, {**common, **asked, **body})


@pytest.fixture(scope="session")
def erring(release: str, plugin: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server under policy ``error``, with the plugin or without."""
    folder = tmp_path_factory.mktemp(f"nan-{release}-{plugin}")
    model = corrupt_llama(folder / "model", dtype="bfloat16")
    found = release_path(release)
    with Server(
        model.path,
        log=folder / "log",
        args=model.serve_args,
        env={"VLLM_EXT_DISABLE": "1" if plugin == "without" else "0", POLICY: "error"},
        pythonpath=[found] if found else [],
    ) as server:
        yield Served(server, model)


def _events(reply: Reply) -> list[Any]:
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.behaviour(PART, wrong="answered HTTP 200")
def test_a_request_with_nan_is_an_error_that_names_it(erring: Served) -> None:
    """Completions and chat, at once and in a stream; innocent ones before and after."""
    clean, nan = erring.model.clean_words, erring.model.nan_word
    innocent = [*clean[3:9]]
    before = erring.ask(*innocent).raise_for_status().json()["choices"][0]["text"]
    bad = [*clean[:40], nan, *clean[:60]]
    for chat in (False, True):
        reply = erring.ask(*bad, chat=chat)
        assert reply.status_code == 500, f"a request with NaN answered HTTP {reply.status_code}"
        error = reply.json()["error"]
        assert error["type"] == "InternalServerError" and error["code"] == 500
        kind = "chatcmpl-" if chat else "cmpl-"
        assert f"Request {kind}" in error["message"] and "logits are NaN" in error["message"]
        *rest, last = _events(erring.ask(*bad, chat=chat, stream=True))
        assert f"Request {kind}" in last["error"]["message"]
        assert "logits are NaN" in last["error"]["message"]
        assert not any("error" in event for event in rest)
        after = erring.ask(*innocent).raise_for_status().json()["choices"][0]["text"]
        assert after == before
    assert erring.server.get("/health").status_code == 200
    assert f"{COUNTER} 4.0" in erring.server.get("/metrics").text.splitlines()


@pytest.mark.behaviour(PART, wrong="answered HTTP 200")
def test_one_bad_choice_fails_its_request_only(erring: Served) -> None:
    """Two prompts in one request share its fate; n=2 has NaN twice."""
    clean, nan = erring.model.clean_words, erring.model.nan_word
    for body in ({"prompt": [" ".join(clean[:5]), f"{clean[0]} {nan}"]}, {"n": 2}):
        reply = erring.ask(clean[0], nan, **body, **({"temperature": 1.0} if "n" in body else {}))
        assert reply.status_code == 500, f"a request with NaN answered HTTP {reply.status_code}"
        assert "logits are NaN" in reply.json()["error"]["message"]
    assert erring.ask(*clean[:5]).status_code == 200
