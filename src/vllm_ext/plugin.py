"""register(): what vLLM calls in every process, before it imports what we patch."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any

from vllm_ext.names import DISABLE, PREFIX, SERVER_ID, STRICT

_process: Any = None


def register() -> None:
    """Entry point ``vllm.general_plugins``; may run several times in a process.

    Never lets an exception out, with one exception of its own: in a server's first process the
    start is refused, in one sentence, when ``VLLM_EXT_<FEATURE>=1`` or ``VLLM_EXT_STRICT=1`` can't
    be honoured or a variable has a value it can't have. ``vllm serve`` then exits with status 1; a
    program that embeds vLLM gets StartRefused.
    """
    global _process
    if os.environ.get(DISABLE, "").strip() == "1":
        _make_known(_set_by_operator())
        return
    try:
        from vllm_ext.core.process import StartRefused, claim_server, is_server_command, logger
    except Exception:
        damaged = "vllm-ext is damaged in this environment, install it again; vLLM runs without it"
        logging.getLogger("vllm.vllm_ext").exception(damaged)
        return

    if _process is not None:
        _process.look_again()
        return
    first = claim_server(os.environ)
    try:
        _process = _start(first)
    except Exception as error:
        asked = [] if isinstance(error, StartRefused) else _asked_for()
        if first and (isinstance(error, StartRefused) or asked):
            # The next attempt in this process is a first one again.
            os.environ.pop(SERVER_ID, None)
            sentence = str(error)
            if asked:
                sentence = (
                    f"{asked[0]}=1 can't be honoured, the plugin could not start "
                    f"({type(error).__name__}: {error}); unset it to start without the plugin."
                )
            if is_server_command():
                raise SystemExit(f"vllm-ext: {sentence}") from None
            raise StartRefused(sentence) from None
        logger.exception(
            "vllm-ext could not start in process %d; vLLM runs without it", os.getpid()
        )


def running() -> Any:
    """The plugin in this process (``core.process.Process``), None while it does nothing."""
    return _process


def _start(first: bool) -> Any:
    from vllm_ext import features
    from vllm_ext.core.feature import Verdict
    from vllm_ext.core.plan import catalogue
    from vllm_ext.core.process import Process
    from vllm_ext.core.release import installation
    from vllm_ext.settings import variables

    installed = installation()
    if installed is None:
        raise ModuleNotFoundError("vLLM is not installed")
    known = catalogue(features)
    process = Process(known, installed, first)
    try:
        process.start()
    except BaseException:
        process.stop()
        raise
    touched = any(p.judgement.verdict in (Verdict.ARMED, Verdict.ACTIVE) for p in process.planned)
    _make_known(variables(known) if touched else _set_by_operator())
    return process


def _set_by_operator() -> list[str]:
    return [name for name in os.environ if name.startswith(PREFIX)]


def _asked_for() -> list[str]:
    """The switches that are set to 1, for which an error at the start must not be passed over."""
    try:
        from vllm_ext import features
        from vllm_ext.core.plan import catalogue

        names = [STRICT, *(feature.toggle for feature in catalogue(features))]
    except Exception:  # the catalogue itself may be what is broken
        names = _set_by_operator()
    return [name for name in names if os.environ.get(name, "").strip() == "1"]


def _make_known(names: Iterable[str]) -> None:
    """Register variables with vLLM, which warns about or refuses names it doesn't know."""
    registered = getattr(sys.modules.get("vllm.envs"), "environment_variables", {})
    for name in names:
        registered.setdefault(name, functools.partial(_read, name))


def _read(name: str) -> str | None:
    """Value of a variable, except for vLLM's compile key, which then stays stock's.

    vLLM leaves a variable that can't be read out of the key. While CACHE_KEYS is in force it takes
    them out itself, and the key is computed one call further down.
    """
    if sys._getframe(1).f_code.co_name == "compile_factors":
        above = sys._getframe(2).f_code
        if (above.co_name, PurePath(above.co_filename).name) != ("compile_factors", "caches.py"):
            raise LookupError("variables of vllm-ext stay out of the compile key")
    return os.environ.get(name)
