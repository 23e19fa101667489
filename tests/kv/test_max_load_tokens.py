"""MAX_LOAD_TOKENS without an engine: real schedulers, connectors and tiers, caps against an oracle.

The oracle is one line: what an uncapped request would load, or the last boundary within the cap.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from tests.beds.registered import counted, registered
from tests.conftest import FEATURES, recorded
from vllm_ext.core.effects import PAGE
from vllm_ext.core.feature import Verdict
from vllm_ext.features.kv.offload_probe import Offload, counted_lookups

CAPS = (0, 1, 15, 16, 17, 31, 32, 33, 48, 64, 1000)
LOCALS = (0, 16, 48)
TOKENS = list(range(1, 201))
PROMPT = TOKENS[:181]
SIMPLE = "SimpleCPUOffloadConnector"
INVALID = ["8", 8.5, 8.0, -1, True, [], {"tokens": 8}]
DEFAULT = "VLLM_EXT_MAX_LOAD_TOKENS_DEFAULT"
STRICT = "VLLM_EXT_MAX_LOAD_TOKENS_STRICT"


def oracle(uncapped: int, local: int, cap: int, unit: int) -> int:
    """Tokens that may be loaded beyond the local prefix; less than a unit is not loaded."""
    return next(n for n in range(min(uncapped, cap), -1, -1) if (local + n) % unit == 0 or n == 0)


@contextmanager
def _registered(plugin: str, **environ: str) -> Iterator[None]:
    import vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler
    import vllm.entrypoints.openai.chat_completion.protocol
    import vllm.entrypoints.openai.completion.protocol
    import vllm.entrypoints.openai.responses.protocol
    import vllm.v1.simple_kv_offload.manager  # noqa: F401

    with registered(plugin == "with", environ):
        yield


@pytest.fixture
def patched(installed_release: str, plugin: str) -> Iterator[None]:
    """The process with the plugin registered, or as it came."""
    with _registered(plugin):
        yield


@pytest.fixture
def default(installed_release: str, plugin: str, request: pytest.FixtureRequest) -> Iterator[int]:
    """The server-wide cap set to the test's parameter, with the plugin registered or not."""
    with _registered(plugin, **{DEFAULT: str(request.param)}):
        yield request.param


@pytest.fixture
def strict(installed_release: str, plugin: str) -> Iterator[None]:
    """Invalid caps are to be refused, with the plugin registered or not."""
    with _registered(plugin, **{STRICT: "1"}):
        yield


@contextmanager
def _slow(bed: Offload) -> Iterator[None]:
    """The tier has an answer for a key only when it is asked for the second time."""
    from vllm.v1.kv_offload.base import LookupResult

    manager, asked = bed.offloading.manager, set()
    lookup = manager.lookup

    def later(key: Any, context: Any) -> Any:
        if key in asked:
            return lookup(key, context)
        asked.add(key)
        return LookupResult.RETRY

    manager.lookup = later
    yield
    manager.lookup = lookup


def _wrong(
    groups: Sequence[str], step: int, *, partial: bool = False, **how: Any
) -> tuple[list[str], int]:
    """Every cap and local prefix whose answer is not the oracle's, and how many were asked."""
    bed = Offload(groups, **how)
    bed.store(TOKENS, partial=partial)
    wrong, asked = [], 0
    for local in LOCALS:
        uncapped = bed.lookup(bed.request(f"all-{local}", PROMPT), local)
        assert uncapped is not None and uncapped >= 96
        # A tail that is still to be promoted isn't waited for.
        for cap, slow in itertools.product(CAPS, (False,) if partial else (False, True)):
            request = bed.request(f"{cap}-{local}-{slow}", PROMPT, max_load_tokens=cap)
            if slow:
                with _slow(bed):
                    # A tier with nothing to promote has nothing to wait for.
                    found = bed.lookup(request, local)
                    while found is None:
                        found = bed.ask(request, local)
            else:
                found = bed.lookup(request, local)
            asked += 1
            right = oracle(uncapped, local, cap, step)
            # A connector loads nothing if less than a chunk is left beyond the local prefix.
            right = right if partial or right >= step else 0
            if found != right:
                wrong.append(
                    f"cap {cap} beyond {local} local tokens of {'+'.join(groups)}: "
                    f"{found} tokens instead of {right}"
                )
    return wrong, asked


@pytest.mark.behaviour("MAX_LOAD_TOKENS.cap", wrong=r"cap 0 beyond 0 .*: \d+ tokens instead of 0")
def test_caps_of_models_with_one_group(patched: None) -> None:
    found = []
    for groups, unit, how in (
        (["full"], 16, {}),
        (["full:32"], 32, {}),
        (["full"], 32, {"blocks_per_chunk": 2}),
        (["full:16:draft"], 16, {}),
    ):
        wrong, asked = _wrong(groups, unit, **how)
        assert asked == len(CAPS) * len(LOCALS) * 2
        found += wrong
    assert not found, "; ".join(found)


@pytest.mark.behaviour("MAX_LOAD_TOKENS.exact", wrong=r"cap 16 .*: 0 tokens instead of 16")
def test_caps_of_hybrid_models(patched: None) -> None:
    found = []
    for groups in (
        ["full", "window"],
        ["full", "mamba"],
        ["full", "window", "mamba"],
        ["window", "mamba"],
        ["full", "window:8"],
        ["full", "window:32"],
        ["full:16:draft", "window:16:draft"],
        ["full", "window:16:draft"],
    ):
        sizes = [int((group + ":16").split(":")[1]) for group in groups]
        found += _wrong(groups, math.lcm(*sizes))[0]
    found += _wrong(["full", "window"], 32, blocks_per_chunk=2)[0]
    assert not found, "; ".join(found)


@pytest.mark.behaviour("MAX_LOAD_TOKENS.exact", wrong=r"cap 16 .*: 12 tokens instead of 16")
def test_caps_of_models_whose_chunks_have_tails(patched: None) -> None:
    """Mamba states at every key of the prefix cache: loads end between chunks."""
    found = _wrong(["full", "mamba"], 4, partial=True, unit=4)[0]
    assert not found, "; ".join(found)


@pytest.mark.behaviour("MAX_LOAD_TOKENS.cap", wrong=r"asked for \d+ keys")
def test_what_lies_beyond_the_cap_is_not_asked_for(patched: None) -> None:
    """A tier that is asked begins to promote what it has from the tiers below it."""
    bed = Offload(["full"])
    bed.store(TOKENS)
    asked_for = []
    for cap in CAPS[:-1]:
        with counted_lookups(bed.offloading.manager) as keys:
            bed.lookup(bed.request(f"cap-{cap}", PROMPT, max_load_tokens=cap), 16)
        if len(keys) != cap // 16:
            asked_for.append(f"asked for {len(keys)} keys with cap {cap}")
    assert not asked_for, "; ".join(asked_for)


@pytest.mark.parametrize("groups", [["full", "window"], ["full", "mamba"]], ids="+".join)
@pytest.mark.parametrize("partial", [False, True], ids=["chunks", "tails"])
def test_cap_0_asks_no_tier_of_a_hybrid_model(
    installed_release: str, groups: list[str], partial: bool
) -> None:
    unit = 4 if partial else 16
    with _registered("with"):
        bed = Offload(groups, unit=unit)
        bed.store(TOKENS, partial=partial)
        with counted_lookups(bed.offloading.manager) as keys:
            assert bed.lookup(bed.request("none", PROMPT, max_load_tokens=0), 0) == 0
            assert keys == []
            assert bed.lookup(bed.request("all", PROMPT), 0)
        assert keys


@pytest.mark.behaviour("MAX_LOAD_TOKENS.cap", wrong=r"loaded \[.*\('preempted', \d\d\d?\)")
def test_a_preempted_request_is_capped_again(patched: None) -> None:
    """Two requests outgrow a pool of 20 blocks: one is preempted, and looked up again."""
    prompts = {"first": TOKENS[:140], "preempted": TOKENS[50:190]}
    bed = Offload(["full"], blocks=20)
    for tokens in prompts.values():
        bed.store(tokens)
    bed.forget_local()
    requests = [
        bed.request(name, tokens, 40, max_load_tokens=32) for name, tokens in prompts.items()
    ]
    for request in requests:
        bed.scheduler.add_request(request)
    while not requests[1].num_preemptions:
        bed.step()
    # What it had computed is evicted meanwhile.
    bed.scheduler.kv_cache_manager.evict_blocks(set(range(1, 21)))
    bed.run(200)
    assert [request.num_preemptions for request in requests] == [0, 1]
    assert [request.num_output_tokens for request in requests] == [40, 40]
    expected = [("first", 32), ("preempted", 32), ("preempted", 32)]
    assert bed.loads == expected, f"loaded {bed.loads}"


def _simple(groups: Sequence[str]) -> Offload:
    """SimpleCPUOffloadConnector whose tier holds what vLLM stored of TOKENS, 32 a step."""
    bed = Offload(groups, connector=SIMPLE, batched_tokens=32)
    bed.scheduler.add_request(bed.request("storing", TOKENS, answer=4))
    bed.run()
    bed.forget_local()
    return bed


@pytest.mark.behaviour("MAX_LOAD_TOKENS.simple_cpu", wrong=r"cap 16 .*: 176 tokens instead of 16")
def test_caps_of_the_simple_connector(patched: None) -> None:
    found = []
    for groups, unit in (
        (["full"], 16),
        (["full:32"], 32),
        (["full", "window"], 16),
        # Mamba states are there at the ends of steps.
        (["full", "mamba"], 32),
        (["full", "window:32"], 32),
        (["full:16:draft"], 16),
        (["full", "window:16:draft"], 16),
    ):
        bed = _simple(groups)
        for local in (0, 32):
            uncapped = bed.lookup(bed.request(f"all-{local}", PROMPT), local)
            assert uncapped is not None and uncapped >= 96
            for cap in CAPS:
                request = bed.request(f"{cap}-{local}", PROMPT, max_load_tokens=cap)
                answer = bed.lookup(request, local)
                right = oracle(uncapped, local, cap, unit)
                if answer != right:
                    found.append(
                        f"cap {cap} beyond {local} local tokens of {'+'.join(groups)}: "
                        f"{answer} tokens instead of {right}"
                    )
    assert not found, "; ".join(found)


@pytest.mark.behaviour("MAX_LOAD_TOKENS.simple_cpu", wrong=r"loaded \[.*\('cap-0', 144\)")
def test_loads_of_the_simple_connector(patched: None) -> None:
    """Whole requests: what is loaded, and that no block of the tier stays pinned."""
    bed = _simple(["full", "window"])
    pool = bed.connector.scheduler_manager.cpu_block_pool
    free = pool.get_num_free_blocks()
    for cap in (0, 16, 33, 64):
        bed.scheduler.add_request(bed.request(f"cap-{cap}", PROMPT[:150], 2, max_load_tokens=cap))
        bed.run()
        bed.forget_local()
    assert pool.get_num_free_blocks() == free
    assert bed.loads == [("cap-16", 16), ("cap-33", 32), ("cap-64", 64)], f"loaded {bed.loads}"


@pytest.mark.parametrize("connector", ["OffloadingConnector", SIMPLE])
def test_a_request_without_a_cap_is_left_alone(installed_release: str, connector: str) -> None:
    """The connector sees the very request, and nothing is counted."""
    seen = []
    with _registered("with"):
        bed = _simple(["full"]) if connector == SIMPLE else Offload(["full"])
        before = PAGE.read()
        for transfer in ({}, {"max_load_tokens": None}, {"other": 1}):
            request = bed.request(str(transfer), PROMPT, **transfer)
            if connector == SIMPLE:
                assert bed.lookup(request, 0) == 176
                continue
            bed.store(TOKENS) if not seen else None
            complete = bed.offloading._lookup_complete_chunks

            def spy(state: Any, *args: Any, complete: Any = complete) -> Any:
                seen.append(state.req)
                return complete(state, *args)

            bed.offloading._lookup_complete_chunks = spy
            assert bed.lookup(request, 0) == 176
            assert seen[-1] is request
            bed.offloading._lookup_complete_chunks = complete
        assert PAGE.read() == before


@pytest.mark.behaviour("MAX_LOAD_TOKENS.default", wrong=r"without a cap loads 176")
@pytest.mark.parametrize("default", [0, 33], indirect=True)
@pytest.mark.parametrize("groups", [["full"], ["full", "window"]], ids="+".join)
def test_the_servers_cap(default: int, groups: list[str]) -> None:
    """It holds for requests that name no valid cap; their own may be larger or smaller."""
    bed = Offload(groups)
    bed.store(TOKENS)
    before = counted("MAX_LOAD_TOKENS.default")
    allowed = default // 16 * 16
    with counted_lookups(bed.offloading.manager) as keys:
        found = bed.lookup(bed.request("plain", PROMPT), 0)
    assert found == allowed, f"a request without a cap loads {found}"
    assert bool(keys) == bool(default)
    assert bed.lookup(bed.request("invalid", PROMPT, max_load_tokens="8"), 0) == allowed
    assert bed.lookup(bed.request("own", PROMPT, max_load_tokens=64), 0) == 64
    assert bed.lookup(bed.request("none", PROMPT, max_load_tokens=0), 0) == 0
    assert counted("MAX_LOAD_TOKENS.default") - before == 2 * (len(PROMPT) - allowed)


@pytest.mark.behaviour("MAX_LOAD_TOKENS.simple_cpu", wrong=r"without a cap loads 176")
@pytest.mark.parametrize("default", [33], indirect=True)
def test_the_servers_cap_of_the_simple_connector(default: int) -> None:
    bed = _simple(["full"])
    found = bed.lookup(bed.request("plain", PROMPT), 0)
    assert found == 32, f"a request without a cap loads {found}"
    assert bed.lookup(bed.request("own", PROMPT, max_load_tokens=64), 0) == 64


@pytest.mark.behaviour("MAX_LOAD_TOKENS.invalid_values", wrong=r"counted 0 of 7 invalid values")
def test_invalid_values_cap_nothing_and_are_told_once(patched: None, logged: list[str]) -> None:
    bed = Offload(["full"])
    bed.store(TOKENS)
    before = counted("MAX_LOAD_TOKENS.invalid_values")
    for at, value in enumerate(INVALID):
        logged.clear()
        request = bed.request(f"invalid-{at}", PROMPT, max_load_tokens=value)
        assert [bed.lookup(request, 0), bed.ask(request, 0)] == [176, 176]
        told = [sentence for sentence in logged if "max_load_tokens" in sentence]
        assert len(told) <= 1
        assert all(repr(value) in sentence for sentence in told)
    found = counted("MAX_LOAD_TOKENS.invalid_values") - before
    assert found == len(INVALID), f"counted {found} of {len(INVALID)} invalid values"
    assert len(told) == 1


@pytest.mark.behaviour("MAX_LOAD_TOKENS.simple_cpu", wrong=r"counted 0 of 7 invalid values")
def test_invalid_values_of_the_simple_connector(patched: None, logged: list[str]) -> None:
    bed = _simple(["full"])
    before = counted("MAX_LOAD_TOKENS.invalid_values")
    for at, value in enumerate(INVALID):
        request = bed.request(f"invalid-{at}", PROMPT, max_load_tokens=value)
        assert [bed.lookup(request, 0), bed.ask(request, 0)] == [176, 176]
    found = counted("MAX_LOAD_TOKENS.invalid_values") - before
    assert found == len(INVALID), f"counted {found} of {len(INVALID)} invalid values"
    told = [sentence for sentence in logged if "max_load_tokens" in sentence]
    assert len(told) == len(INVALID)
    assert "must be an integer of at least 0, found '8' (str)" in told[0] and STRICT in told[0]


def test_suppressed_tokens_are_counted_once_per_admission(installed_release: str) -> None:
    """All that was not looked for, of lookups that the cap ended, also while blocks are scarce."""
    with _registered("with"):
        bed = Offload(["full", "window"], batched_tokens=32)
        bed.store(TOKENS[:48])
        part = "exact" if hasattr(_state(bed), "max_load_tokens") else "cap"
        for cap, suppressed in ((0, 181), (15, 181), (16, 165), (40, 149), (48, 133), (64, 0)):
            before = counted(f"MAX_LOAD_TOKENS.{part}")
            request = bed.request(f"cap-{cap}", PROMPT, max_load_tokens=cap)
            bed.lookup(request, 0)
            bed.ask(request, 0)
            assert counted(f"MAX_LOAD_TOKENS.{part}") - before == suppressed, cap
            request.num_preemptions += 1
            bed.ask(request, 0)
            assert counted(f"MAX_LOAD_TOKENS.{part}") - before == 2 * suppressed, cap


def _state(bed: Offload) -> Any:
    """The connector's state of a request."""
    bed.connector.on_new_request(bed.request("state", PROMPT))
    return bed.offloading._req_status["state"]


def _bodies(**transfer: Any) -> list[Any]:
    """The same request at the three endpoints."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    how: dict[str, Any] = {"model": "m", "kv_transfer_params": transfer or None}
    return [
        CompletionRequest(prompt="a", **how),
        ChatCompletionRequest(messages=[{"role": "user", "content": "a"}], **how),
        ResponsesRequest(input="a", **how),
    ]


def _client() -> Any:
    """A client of an app with vLLM's request models and error handlers, and nothing behind them."""
    from fastapi import FastAPI
    from fastapi.testclient import TestClient
    from vllm.entrypoints.serve.exception_handling.register import init_exception_handler

    app = FastAPI()
    app.state.args = SimpleNamespace(log_error_stack=False)
    init_exception_handler(app)
    for body in _bodies():

        def accept(body: Any) -> str:
            return str(body.to_sampling_params(1, {}))

        accept.__annotations__["body"] = type(body)
        app.post(f"/{type(body).__name__}")(accept)
    return TestClient(app, raise_server_exceptions=False)


@pytest.mark.behaviour("MAX_LOAD_TOKENS.strict", wrong=r"accepted as \w+Request")
def test_strict_answers_400_to_invalid_values(strict: None) -> None:
    """Naming the field and the value, through vLLM's own error handlers."""
    client, before = _client(), counted("MAX_LOAD_TOKENS.strict")
    for value in INVALID:
        for body in _bodies(max_load_tokens=value):
            name = type(body).__name__
            sent = body.model_dump(mode="json", exclude_unset=True)
            answer = client.post(f"/{name}", json=sent)
            assert answer.status_code != 200, f"{value!r} is accepted as {name}"
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (400, 400)
            assert error["param"] == "kv_transfer_params.max_load_tokens"
            assert f"found {value!r} ({type(value).__name__})" in error["message"]
    assert counted("MAX_LOAD_TOKENS.strict") - before == 3 * len(INVALID)


def test_strict_lets_valid_values_through(installed_release: str) -> None:
    with _registered("with", **{STRICT: "1"}):
        for transfer in ({}, {"max_load_tokens": None}, {"max_load_tokens": 0}, {"other": "8"}):
            for body in _bodies(**transfer):
                params = body.to_sampling_params(1, {})
                extra = params.extra_args or {}
                assert extra.get("kv_transfer_params") == (transfer or None)


def test_without_strict_the_servers_accept_what_vllm_accepts(installed_release: str) -> None:
    with _registered("with"):
        for body in _bodies(max_load_tokens="8"):
            params = body.to_sampling_params(1, {})
            assert params.extra_args["kv_transfer_params"] == {"max_load_tokens": "8"}


def test_its_checks_hold_whatever_the_operator_set(
    installed_release: str, request: pytest.FixtureRequest
) -> None:
    """`vllm-ext verify` on a server that caps everything at a token and logs errors alone."""
    environ = {DEFAULT: "1", STRICT: "1"}
    log = logging.getLogger("vllm")
    before = log.level
    log.setLevel(logging.ERROR)
    request.addfinalizer(lambda: log.setLevel(before))
    with _registered("with", **environ):
        for part in FEATURES["MAX_LOAD_TOKENS"].parts:
            if recorded(installed_release, f"MAX_LOAD_TOKENS.{part.name}") is Verdict.ACTIVE:
                shown = part.behaviour()
                assert shown.verdict is Verdict.NATIVE, f"{part.name}: {shown.reason}"
        assert environ == {name: os.environ[name] for name in environ}
