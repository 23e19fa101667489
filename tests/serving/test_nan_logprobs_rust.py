"""NAN_LOGPROBS.rust_ranks with the real vllm-rs before a CPU engine: outage or none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.beds.corrupt import CorruptLlama, corrupt_llama
from tests.beds.layout import RELEASES
from tests.beds.rust_frontend import rust_server, vllm_rs
from tests.conftest import recorded
from vllm_ext.checks.server import Server
from vllm_ext.core.feature import Verdict
from vllm_ext.features.serving.nan_logprobs_probes import refuses_rank_0

pytestmark = pytest.mark.rust_frontend

PART = "NAN_LOGPROBS.rust_ranks"


@pytest.mark.area("serving")
@pytest.mark.parametrize("binary_of", RELEASES)
def test_the_verdicts_are_those_of_the_binaries(binary_of: str) -> None:
    """CPU builds have no binary, so the probe can't look into it; this does."""
    refuses = refuses_rank_0(vllm_rs(binary_of))
    assert refuses == (recorded(binary_of, PART) is Verdict.ACTIVE)


@pytest.fixture(scope="session")
def frontend(
    release: str, plugin: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, CorruptLlama]]:
    """vllm-rs of that release before its engine."""
    folder = tmp_path_factory.mktemp(f"rust-{release}-{plugin}")
    model = corrupt_llama(folder / "model", dtype="bfloat16")
    log = folder / "log"
    with rust_server(model.path, release, log, plugin=plugin, args=model.serve_args) as server:
        yield server, model


def _ask(server: Server, model: CorruptLlama, words: str, **how: Any) -> Any:
    body = {"model": str(model.path), "prompt": words, "max_tokens": 3, "temperature": 0, **how}
    return server.post("/v1/completions", body)


@pytest.mark.engine
@pytest.mark.behaviour(PART, wrong=r"HTTP 500 .*token_ranks must be >= 1.*/health 503")
def test_a_request_of_nan_is_no_outage(frontend: tuple[Server, CorruptLlama]) -> None:
    server, model = frontend
    clean = " ".join(model.clean_words[:3])
    before = _ask(server, model, clean, logprobs=2).raise_for_status().json()["choices"][0]
    failed = []
    for word in (model.inf_word, model.nan_word):
        for how in ({"logprobs": 2}, {"logprobs": 2, "echo": True}, {"prompt_logprobs": 1}):
            reply = _ask(server, model, f"{clean} {word} {word}", **how)
            if reply.status_code != 200:
                failed.append(f"HTTP {reply.status_code} {reply.text}")
                continue
            (choice,) = reply.json()["choices"]
            if "logprobs" in how:
                assert choice["logprobs"]["token_logprobs"][-3:] == [-9999.0] * 3
    health = server.get("/health").status_code
    assert health == 200 and not failed, f"{' '.join(failed)} /health {health}"
    assert before["logprobs"]["token_logprobs"][0] > -9999.0
