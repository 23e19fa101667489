"""register(): what vLLM calls in every process, before it imports what we patch."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import PurePath
from typing import Any

from vllm_ext.names import DISABLE, PREFIX

_process: Any = None


def register() -> None:
    """Entry point ``vllm.general_plugins``; may run several times in a process.

    Never lets an exception out, with one exception of its own: in a server's first process the
    start is refused, in one sentence, when ``VLLM_EXT_<FEATURE>=1`` or ``VLLM_EXT_STRICT=1`` can't
    be honoured or a variable has a value it can't have. A ``vllm`` command then exits with
    status 1; a program that embeds vLLM gets StartRefused.
    """
    global _process
    if os.environ.get(DISABLE, "").strip() == "1":
        _make_known([n for n in os.environ if n.startswith(PREFIX)], _kept_out)
        return
    from vllm_ext.core.process import StartRefused, logger

    try:
        if _process is None:
            _process = _start()
        else:
            _process.reread()
    except StartRefused as refused:
        if _is_vllm_command():
            raise SystemExit(f"vllm-ext: {refused}") from None
        raise
    except Exception:
        logger.exception(
            "vllm-ext could not start in process %d; vLLM runs without it", os.getpid()
        )


def _start() -> Any:
    from vllm_ext import features
    from vllm_ext.core.plan import catalogue
    from vllm_ext.core.process import Process, is_first
    from vllm_ext.core.release import installation
    from vllm_ext.settings import variables

    installed = installation()
    if installed is None:
        raise ModuleNotFoundError("vLLM is not installed")
    known = catalogue(features)
    process = Process(known, installed, is_first(os.environ))
    _make_known(variables(known))
    process.start()
    return process


def _make_known(names: Iterable[str], getter: Callable[[str], Any] = os.environ.get) -> None:
    """Register variables with vLLM, which warns about or refuses names it doesn't know."""
    registered = getattr(sys.modules.get("vllm.envs"), "environment_variables", {})
    for name in names:
        registered.setdefault(name, functools.partial(getter, name))


def _kept_out(name: str) -> str | None:
    """Read a variable, except for vLLM's compile key, which then stays stock's.

    vLLM leaves a variable that can't be read out of the key; no function of vLLM is touched.
    """
    if sys._getframe(1).f_code.co_name == "compile_factors":
        raise LookupError(f"{DISABLE}=1 keeps {name} out of the compile key")
    return os.environ.get(name)


def _is_vllm_command() -> bool:
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    module = main.name if main else ""
    return PurePath(sys.argv[0]).name == "vllm" or module.startswith("vllm.")
