"""The plugin in one vLLM process: plan at the start, apply as modules arrive, look again later."""

from __future__ import annotations

import gc
import logging
import os
import re
import sys
import time
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from multiprocessing import parent_process
from pathlib import PurePath

from vllm_ext import __version__
from vllm_ext.core import caches
from vllm_ext.core.feature import Feature, Judgement, Verdict, worst
from vllm_ext.core.imports import PostImportFinder
from vllm_ext.core.ledger import Conflict, Ledger
from vllm_ext.core.plan import by_feature, plan, refusals
from vllm_ext.core.release import Installation
from vllm_ext.core.report import Reporter, prune, title
from vllm_ext.names import SERVER_ID
from vllm_ext.settings import Settings, SettingsError, read

# A child of vLLM's logger: its handlers and levels are the operator's.
logger = logging.getLogger("vllm.vllm_ext")
_SERVER_ID = re.compile(r"[\w.-]{1,64}")


class StartRefused(RuntimeError):
    """The operator asked for something that can't be honoured; one sentence says what."""


class Process:
    """All that the plugin does in this process. ``first``: the server's first process."""

    def __init__(self, features: Sequence[Feature], installed: Installation, first: bool) -> None:
        self.installed = installed
        self.first = first
        self.stopped = False
        self._unpublished = self._pruned = False
        self.settings = self._settings(features)
        self.planned = plan(features, self.settings, installed)
        self.ledger = Ledger(self.planned, installed.root)
        self.finder = PostImportFinder((), self._module_loaded)
        self.report = Reporter(os.environ.get(SERVER_ID, "none"), installed.version)

    def _settings(self, features: Sequence[Feature]) -> Settings:
        try:
            return read(os.environ, features)
        except SettingsError as error:
            if self.first:
                raise StartRefused(str(error)) from None
            logger.error("vllm-ext is off in process %d: %s", os.getpid(), error)
            return Settings(disable=True)

    def start(self) -> None:
        """Apply what can be applied now, arm the rest, say in one line what is in force.

        Raises StartRefused, in the first process only and before anything is touched.
        """
        for sentence in self.settings.unknown:
            logger.warning("%s", sentence)
        self._refuse()
        waiting: set[str] = set()
        for part_id, entry in self.ledger.entries.items():
            if entry.judgement.verdict is Verdict.ARMED:
                entry.waiting = {m for m in entry.planned.modules if not _has_run(m)}
                waiting |= entry.waiting
                if entry.planned.part.inspected:
                    caches.note_inspected(part_id, entry.planned.files(self.installed.root))
                if not entry.waiting:
                    self.ledger.apply(part_id)
        self._refuse()
        self.finder.names |= waiting
        self.finder.install()
        gc.callbacks.append(self._collected)
        os.register_at_fork(after_in_child=self._forked)
        self._tell_all()
        self._publish()

    def stop(self) -> None:
        """Take everything back: finder, callback, report and, newest first, all parts."""
        self.finder.remove()
        self.stopped = True
        self.report.remove()
        if self._collected in gc.callbacks:
            gc.callbacks.remove(self._collected)
        for part_id, entry in reversed(self.ledger.entries.items()):
            if entry.applied:
                try:
                    self.ledger.undo(part_id)
                except Conflict as conflict:
                    logger.warning("vllm-ext: %s stays: %s", part_id, conflict)

    def look_again(self) -> None:
        """``reread`` for callers that must not see an error of ours."""
        with _contained("again"):
            self.reread()

    def reread(self) -> None:
        """Look whether our patches still stand, name who changed them, apply what passed us by."""
        for part_id, entry in self.ledger.entries.items():
            # Another finder can answer before ours, and an import can have been under way.
            if entry.waiting and all(map(_has_run, entry.planned.modules)):
                entry.waiting.clear()
                self._apply(part_id)
        changed = self.ledger.reread()
        for entry in changed:
            _tell(logging.WARNING, [entry.planned.id], entry.judgement)
        if changed or self.report.pid != os.getpid() or self.report.role != title(os.getpid()):
            self._publish()

    def _publish(self) -> None:
        try:
            self.report.publish(self.ledger.planned())
            self._unpublished = False
        except Exception as error:  # whatever goes wrong with a report, vLLM must go on
            # Told once: a full disk must not fill the log as well.
            level = logging.DEBUG if self._unpublished else logging.WARNING
            self._unpublished = True
            logger.log(level, "vllm-ext status won't see process %d: %s", os.getpid(), error)

    def _forked(self) -> None:
        # Published by the next look: a child that executes another program leaves no report.
        if not self.stopped:
            self.report.restart()

    def _refuse(self) -> None:
        sentences = refusals(self.ledger.planned(), self.settings)
        if self.first and sentences:
            self.stop()
            raise StartRefused(" ".join(sentences))

    def _module_loaded(self, name: str) -> None:
        with _contained("after the import of " + name):
            for part_id, entry in self.ledger.entries.items():
                if name in entry.waiting:
                    entry.waiting.discard(name)
                    if not entry.waiting:
                        self._apply(part_id)
            try:
                self.reread()
            finally:
                self._publish()

    def _apply(self, part_id: str) -> None:
        judgement = self.ledger.apply(part_id)
        _tell(
            logging.DEBUG if judgement.verdict.honoured else logging.WARNING, [part_id], judgement
        )

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        # vLLM collects fully when an engine or server has started, and now and then afterwards.
        if phase == "stop" and info.get("generation") == 2:
            self.look_again()
            if self.first and not self._pruned:
                self._pruned = True
                with _contained("through old reports"):
                    prune()

    def _tell_all(self) -> None:
        groups: dict[Verdict, list[str]] = {}
        trouble: dict[Judgement, list[str]] = {}
        for name, parts in by_feature(self.ledger.planned()).items():
            groups.setdefault(worst(part.judgement for part in parts).verdict, []).append(name)
            for part in parts:
                if not part.judgement.verdict.honoured:
                    trouble.setdefault(part.judgement, []).append(part.id)
        for judgement, part_ids in trouble.items():
            _tell(logging.WARNING, part_ids, judgement)
        told = "; ".join(f"{v}: {', '.join(groups[v])}" for v in Verdict if v in groups)
        logger.info("vllm-ext %s on vLLM %s: %s", __version__, self.installed.version, told)


def _tell(level: int, part_ids: list[str], judgement: Judgement) -> None:
    verb = "is" if len(part_ids) == 1 else "are"
    names = ", ".join(part_ids)
    logger.log(level, "vllm-ext: %s %s %s: %s", names, verb, judgement.verdict, judgement.reason)


@contextmanager
def _contained(when: str) -> Iterator[None]:
    """Keep an error of ours from getting into vLLM's imports and the garbage collector."""
    try:
        yield
    except Exception:
        logger.exception("vllm-ext could not look %s; vLLM is not affected", when)


def _has_run(name: str) -> bool:
    """Whether a module's code has run; one that is being imported right now hasn't."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    return module is not None and not getattr(spec, "_initializing", False)


def claim_server(environ: MutableMapping[str, str]) -> bool:
    """Whether this is a server's first process, which then marks the environment for its children.

    A ``vllm serve`` that was started from a process of another server is the first of its own.
    """
    inherited = _SERVER_ID.fullmatch(environ.get(SERVER_ID, "").strip())
    if inherited and not (is_server_command() and parent_process() is None):
        return False
    environ[SERVER_ID] = f"{os.getpid()}-{time.time_ns() // 1_000_000_000}"
    return True


def is_server_command() -> bool:
    """Whether this process was started as ``vllm serve`` or as the API server's module."""
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    module = main.name if main else ""
    command = PurePath(sys.argv[0]).name == "vllm" or module == "vllm.entrypoints.cli.main"
    return (command and "serve" in sys.argv) or module == "vllm.entrypoints.openai.api_server"
