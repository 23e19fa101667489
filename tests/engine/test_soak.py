"""Long runs: many clients at once on one real server, and many applications in one process."""

from __future__ import annotations

import importlib
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rich.progress import track

from tests.beds.pooling_models import PoolingModel, decoder_embedder
from tests.beds.serving import serve, settled_metric
from tests.beds.snapshot import differences, snapshot
from tests.beds.tokenizer import sentence
from tests.conftest import CI_RELEASE, FEATURES
from vllm_ext.checks.server import Server
from vllm_ext.core.feature import Verdict
from vllm_ext.core.ledger import Ledger
from vllm_ext.core.plan import plan
from vllm_ext.core.process import _decorator_homes
from vllm_ext.core.release import installation
from vllm_ext.settings import Settings

pytestmark = pytest.mark.soak

REQUESTS = 20_000
CLIENTS = 8


def _request(server: Server, model: PoolingModel, seed: int) -> tuple[int, int]:
    """One random request: what was billed, and what the tokenizer counts."""
    choose = random.Random(seed)
    query = sentence(choose.randint(1, 60), seed)
    docs = [sentence(choose.randint(1, 60), seed + at) for at in range(choose.randint(1, 8))]
    if choose.random() < 0.5:
        path, body = "/score", {"text_1": query, "text_2": docs}
    else:
        path, body = "/rerank", {"query": query, "documents": docs, "top_n": 1}
    answer = server.post(path, {"model": str(model.path), **body}).raise_for_status().json()
    return answer["usage"]["prompt_tokens"], model.prompt_tokens([query], docs)


@pytest.mark.engine
@pytest.mark.area("serving")
def test_thousands_of_requests_from_many_clients_are_billed_right(tmp_path: Path) -> None:
    model = decoder_embedder(tmp_path / "model")
    with serve(model, CI_RELEASE, tmp_path / "log") as server, ThreadPoolExecutor(CLIENTS) as pool:
        start = server.metric("vllm:prompt_tokens_total")
        results = pool.map(lambda seed: _request(server, model, seed), range(REQUESTS))
        billed = list(track(results, "requests", total=REQUESTS))
        assert [row for row in billed if row[0] != row[1]] == []
        total = sum(tokens for tokens, _ in billed)
        counter = "vllm:prompt_tokens_total"
        assert settled_metric(server, counter, start + total) - start == total
        assert len(server.processes()) >= 2
    assert server.processes() == [], "stopping the server leaves processes"


@pytest.mark.area("serving")
def test_a_thousand_applications_leave_no_trace(installed_release: str) -> None:
    installed = installation()
    assert installed is not None
    options = {f.variable(option): True for f in FEATURES.values() for option in f.options}
    planned = plan(list(FEATURES.values()), Settings(options=options), installed)
    ledger = Ledger(planned, (installed.root / "vllm", *_decorator_homes()))
    for entry in planned:
        for module in entry.modules:
            importlib.import_module(module)
    before = snapshot()
    armed = [e.id for e in planned if e.judgement.verdict is Verdict.ARMED]
    for _ in range(1000):
        assert {ledger.apply(name).verdict for name in armed} == {Verdict.ACTIVE}
        for name in random.sample(armed, len(armed)):
            ledger.undo(name)
    assert differences(before, snapshot()) == []
