"""What a release makes of max_load_tokens, and the plugin: real connectors, no model, no worker."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vllm_ext.core.feature import Judgement, Verdict
from vllm_ext.features.kv.offload_probe import Offload

CAP = 32
_TOKENS = range(1, 114)


def _found(groups: Sequence[str], **transfer: Any) -> int | None:
    """Tokens of a stored prompt of 113 that a request may load."""
    bed = Offload(groups)
    bed.store(_TOKENS)
    return bed.lookup(bed.request("probe", _TOKENS, **transfer), 0)


def cap() -> Judgement:
    """One group of full attention, cap 32."""
    found = _found(["full"], max_load_tokens=CAP)
    if found == CAP:
        return Judgement(Verdict.NATIVE, f"a request capped at {CAP} tokens loads {found}")
    return Judgement(Verdict.ACTIVE, f"a request capped at {CAP} tokens loads {found}")


def exact() -> Judgement:
    """Full attention and a sliding window, cap 32, which is two chunks."""
    found = _found(["full", "window"], max_load_tokens=CAP)
    if found == CAP:
        return Judgement(Verdict.NATIVE, f"a hybrid model loads {found} of {CAP} allowed tokens")
    if found is not None and found > CAP:
        return Judgement(
            Verdict.IDLE, "this release has no cap of its own, and that of part cap is exact"
        )
    return Judgement(
        Verdict.ACTIVE, f"a hybrid model loads {found} of {CAP} allowed tokens in chunks of 16"
    )


def simple_cpu() -> Judgement:
    """SimpleCPUOffloadConnector, cap 32."""
    bed = Offload(["full"], connector="SimpleCPUOffloadConnector")
    # 0.29.0 stores nothing when a request ends, so this one runs for a few steps.
    bed.scheduler.add_request(bed.request("storing", _TOKENS, answer=4))
    bed.run()
    found = bed.lookup(bed.request("probe", _TOKENS, max_load_tokens=CAP), 0)
    if found == CAP:
        return Judgement(Verdict.NATIVE, f"a request capped at {CAP} tokens loads {found}")
    return Judgement(Verdict.ACTIVE, f"a request capped at {CAP} tokens loads {found}")


def default() -> Judgement:
    """A request without a cap: there is nothing in vLLM to bound it."""
    found = _found(["full"])
    return Judgement(
        Verdict.ACTIVE, f"no setting of the server bounds a request that loads {found} tokens"
    )


def check_default() -> Judgement:
    """The same on a server whose cap is 32 while this looks, whatever the operator set."""
    from vllm_ext.features.kv.max_load_tokens import FEATURE

    with _environment(FEATURE.variable("DEFAULT"), str(CAP)):
        found = _found(["full"])
    told = f"a request without a cap loads {found} tokens from a server whose cap is {CAP}"
    return Judgement(Verdict.NATIVE if found == CAP else Verdict.ACTIVE, told)


def invalid_values() -> Judgement:
    """The text '8' as cap: is it told?"""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler

    with _warnings(scheduler.logger) as told:
        found = _found(["full"], max_load_tokens="8")
    how = "with a warning that nothing counts" if told else "without a word"
    return Judgement(Verdict.ACTIVE, f"the text '8' as cap is ignored {how}, {found} tokens load")


def check_invalid_values() -> Judgement:
    """The same: one warning, by the release or the plugin, and one count."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler

    from vllm_ext.core.effects import PAGE

    name = "MAX_LOAD_TOKENS.invalid_values"
    before = PAGE.read().get(name, 0)
    with _warnings(scheduler.logger, logging.getLogger("vllm.v1.request")) as told:
        _found(["full"], max_load_tokens="8")
    counted = PAGE.read().get(name, 0) - before
    return Judgement(
        Verdict.NATIVE if len(told) == counted == 1 else Verdict.ACTIVE,
        f"warnings about the text '8' as cap: {len(told)}, counted: {counted}",
    )


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """One variable set to another value for the length of a ``with`` block."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


@contextmanager
def _warnings(*loggers: logging.Logger) -> Iterator[list[logging.LogRecord]]:
    """What is logged in the ``with`` block, also where the operator asked for errors alone."""
    told: list[logging.LogRecord] = []
    listener = logging.Handler()
    listener.addFilter(lambda record: told.append(record) or False)  # type: ignore[func-returns-value]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
        logger.addHandler(listener)
    try:
        yield told
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(listener)
            logger.setLevel(level)


def strict() -> Judgement:
    """The text '8' as cap of a completion request."""
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    request = CompletionRequest(prompt="a", kv_transfer_params={"max_load_tokens": "8"})
    try:
        request.to_sampling_params(1, {})
    except Exception as error:
        return Judgement(Verdict.NATIVE, f"the text '8' as cap is refused: {error}")
    return Judgement(Verdict.ACTIVE, "a request with the text '8' as cap is accepted")
