"""What tests talk to: Mooncake's engine over TCP, and pairs of servers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.beds import kv_store
from tests.beds.checkpoints import write
from tests.beds.layout import extra_path
from tests.beds.mooncake import Peer
from tests.beds.pair import together
from tests.beds.serving import serve, settled_metric
from vllm_ext.checks.server import Server

if TYPE_CHECKING:
    from tests.beds.checkpoints.checkpoint import Checkpoint

pytestmark = pytest.mark.area("beds")

SIZE = 1 << 20
PROMPT = 100
UNIT = 32


def test_mooncake_moves_the_right_bytes_over_tcp() -> None:
    with Peer(SIZE) as source, Peer(SIZE) as target:
        empty, sent = target.digest(), source.fill(1)
        assert source.write_to(target, parts=16) == 0
        assert target.digest() == sent != empty
        target.fill(2)
        assert source.digest() == sent


def test_an_ended_mooncake_peer_is_an_error_and_no_hang() -> None:
    with Peer(SIZE) as source:
        with Peer(SIZE) as gone:
            pass
        assert source.write_to(gone) != 0


def test_torchvision_is_importable_where_it_is_asked_for_only() -> None:
    words = [sys.executable, "-c", "import torchvision.transforms, torchvision.io"]
    bare = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    asked = {**bare, "PYTHONPATH": str(extra_path("torchvision"))}
    assert subprocess.run(words, env=asked).returncode == 0
    refused = subprocess.run(words, env=bare, capture_output=True, text=True)
    assert "No module named 'torchvision'" in refused.stderr


def _answer(server: Server, model: Checkpoint) -> list[dict[str, float]]:
    body = {
        "model": str(model.path),
        "prompt": model.prompt(PROMPT),
        "max_tokens": 4,
        "temperature": 0,
        "logprobs": 5,
    }
    (choice,) = server.post("/v1/completions", body).raise_for_status().json()["choices"]
    told: list[dict[str, float]] = choice["logprobs"]["top_logprobs"]
    return told


@pytest.mark.engine
def test_one_server_decodes_what_another_has_prefilled(release: str, tmp_path: Path) -> None:
    model = write("llama", tmp_path / "model")
    store = tmp_path / "store"

    def server(role: str) -> Server:
        config = kv_store.transfer_config(store, role=role)
        return serve(
            model,
            release,
            tmp_path / f"{role}.log",
            args=["--kv-transfer-config", kv_store.as_json(config)],
            pythonpath=[Path(__file__).parents[2]],
        )

    with together(server("kv_producer"), server("kv_consumer")) as (prefill, decode):
        right = _answer(prefill, model)
        assert _answer(decode, model) == right
        stored = PROMPT // UNIT * UNIT
        assert settled_metric(decode, "vllm:external_prefix_cache_hits_total", stored) == stored
        assert len(prefill.processes() + decode.processes()) > 2
    assert prefill.processes() + decode.processes() == []
