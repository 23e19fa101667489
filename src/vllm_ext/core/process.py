"""The plugin in one vLLM process: plan at the start, apply as modules arrive, look again later."""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
from collections.abc import MutableMapping, Sequence
from pathlib import Path

from vllm_ext import __version__
from vllm_ext.core import caches
from vllm_ext.core.feature import Feature, Judgement, Verdict, worst
from vllm_ext.core.imports import PostImportFinder
from vllm_ext.core.ledger import Ledger
from vllm_ext.core.plan import by_feature, plan, refusals
from vllm_ext.core.release import Installation
from vllm_ext.core.report import Report, ReportError, title
from vllm_ext.names import SERVER_ID
from vllm_ext.settings import Settings, SettingsError, read

# A child of vLLM's logger: its handlers and levels are the operator's.
logger = logging.getLogger("vllm.vllm_ext")


class StartRefused(RuntimeError):
    """The operator asked for something that can't be honoured; one sentence says what."""


class Process:
    """All that the plugin does in this process. ``first``: the server's first process."""

    def __init__(self, features: Sequence[Feature], installed: Installation, first: bool) -> None:
        self.installed = installed
        self.first = first
        self.stopped = False
        self._unpublished = False
        self.settings = self._settings(features)
        self.planned = plan(features, self.settings, installed)
        self.ledger = Ledger(self.planned, (installed.root / "vllm", *_decorator_homes()))
        self.finder = PostImportFinder((), self._module_loaded)
        self.report = Report(os.environ.get(SERVER_ID, "none"), installed.version)

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
            if entry.judgement.verdict is Verdict.ACTIVE:
                self.ledger.undo(part_id)

    def reread(self) -> None:
        """Look whether our patches still stand and name who changed them."""
        changed = self.ledger.reread()
        for entry in changed:
            _tell(logging.WARNING, entry.planned.id, entry.judgement)
        if changed or self.report.role != title(os.getpid()):
            self._publish()

    def _publish(self) -> None:
        try:
            self.report.publish(self.ledger.planned())
        except (ReportError, OSError) as error:
            # Told once: a full disk must not fill the log as well.
            level = logging.DEBUG if self._unpublished else logging.WARNING
            self._unpublished = True
            logger.log(level, "vllm-ext status won't see process %d: %s", os.getpid(), error)

    def _forked(self) -> None:
        if not self.stopped:
            self.report.restart()
            self._publish()

    def _refuse(self) -> None:
        sentences = refusals(self.ledger.planned(), self.settings)
        if self.first and sentences:
            self.stop()
            raise StartRefused(" ".join(sentences))

    def _module_loaded(self, name: str) -> None:
        for part_id, entry in self.ledger.entries.items():
            if name not in entry.waiting:
                continue
            entry.waiting.discard(name)
            if not entry.waiting:
                judgement = self.ledger.apply(part_id)
                level = logging.DEBUG if judgement.verdict.honoured else logging.WARNING
                _tell(level, part_id, judgement)
        self.reread()
        self._publish()

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        # vLLM collects fully when an engine or server has started, and now and then afterwards.
        if phase == "stop" and info.get("generation") == 2:
            self.reread()

    def _tell_all(self) -> None:
        groups: dict[Verdict, list[str]] = {}
        for name, parts in by_feature(self.ledger.planned()).items():
            groups.setdefault(worst(part.judgement for part in parts).verdict, []).append(name)
            for part in parts:
                if not part.judgement.verdict.honoured:
                    _tell(logging.WARNING, part.id, part.judgement)
        told = "; ".join(f"{v}: {', '.join(groups[v])}" for v in Verdict if v in groups)
        logger.info("vllm-ext %s on vLLM %s: %s", __version__, self.installed.version, told)


def _tell(level: int, part_id: str, judgement: Judgement) -> None:
    logger.log(level, "vllm-ext: %s is %s: %s", part_id, judgement.verdict, judgement.reason)


def _has_run(name: str) -> bool:
    """Whether a module's code has run; one that is being imported right now hasn't."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    return module is not None and not getattr(spec, "_initializing", False)


def _decorator_homes() -> list[Path]:
    """Files and folders besides vLLM whose wrappers are part of vLLM's own functions."""
    names = ("functools", "contextlib", "typing_extensions", "torch")
    loaded = (sys.modules.get(name) for name in names)
    files = [Path(module.__file__) for module in loaded if module and module.__file__]
    return [file.parent if file.name == "__init__.py" else file for file in files]


def is_first(environ: MutableMapping[str, str]) -> bool:
    """Whether this is the server's first process; marks the environment for its children."""
    if SERVER_ID in environ:
        return False
    environ[SERVER_ID] = f"{os.getpid()}-{time.time_ns() // 1_000_000_000}"
    return True
