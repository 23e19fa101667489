"""``vllm-ext verify``: does the plugin do on this machine what it says?"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from vllm_ext import __version__
from vllm_ext import features as package
from vllm_ext.checks.change import count
from vllm_ext.cli.ending import cannot_look
from vllm_ext.cli.listing import find_feature
from vllm_ext.cli.wheel import holder
from vllm_ext.core.feature import Feature, Verdict
from vllm_ext.core.plan import catalogue
from vllm_ext.core.release import installation
from vllm_ext.names import DISABLE, PREFIX, SERVER_ID

if TYPE_CHECKING:
    from vllm_ext.checks.behaviour import Checks
    from vllm_ext.checks.engine import Engine, EngineError


@dataclass(frozen=True)
class Outcome:
    """What was found: the checks, the engine (None: not started), and why it didn't work.

    ``others``: the parts that weren't asked for.
    """

    checks: Checks
    engine: Engine | None
    failure: EngineError | None = None
    others: frozenset[str] = frozenset()

    @property
    def problems(self) -> list[str]:
        """One sentence per reason why parts or processes aren't as they should be."""
        why: dict[str, list[str]] = {}
        for part_id, checked in self.checks.parts.items():
            if checked.wrong:
                why.setdefault(checked.wrong, []).append(part_id)
        wrong = [f"{', '.join(parts)}: {reason}" for reason, parts in why.items()]
        failure = [f"the tiny engine failed: {self.failure}"] if self.failure else []
        told = self.engine.problems if self.engine else []
        return [*wrong, *failure, *(s for s in told if not any(part in s for part in self.others))]

    def seen(self, part_id: str) -> str:
        """What became of a part in the engine's processes."""
        if self.engine is None:
            return ""
        active = self.engine.roles(part_id, Verdict.ACTIVE)
        armed = self.engine.roles(part_id, Verdict.ARMED)
        effects = self.engine.effects[part_id]
        told = [f"active in {', '.join(active)}"] if active else []
        told += ["this engine has no use for it"] if armed and not active else []
        told += [count(effects, "effect")] if effects else []
        return "; ".join(told)


@click.command()
@click.option("--feature", "name", metavar="F", help="Only this feature.")
@click.option("--no-engine", is_flag=True, help="Only the checks, no engine.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the block.")
@click.option(
    "--vllm",
    "folder",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Use the unpacked vLLM in this folder instead of the installed one.",
)
def verify(name: str | None, no_engine: bool, as_json: bool, folder: Path | None) -> None:
    """Check every active part on this machine and start a tiny engine with the plugin.

    Prints a block to paste into a bug report. Exit status: 0 all is as it should be, 1 something
    isn't, 2 it can't be looked at.
    """
    features = [find_feature(name)] if name else catalogue(package)
    outcome = _look(features, holder(folder) if folder else None, no_engine)
    if as_json:
        click.echo(json.dumps(_as_data(outcome), indent=2))
    else:
        click.echo("\n".join(_block(outcome)))
    raise SystemExit(1 if outcome.problems else 0)


def _look(features: Sequence[Feature], folder: Path | None, no_engine: bool) -> Outcome:
    from vllm_ext.checks.behaviour import CheckError, check
    from vllm_ext.checks.engine import EngineError, try_engine
    from vllm_ext.checks.server import signals_interrupt

    version = _version(folder)
    try:
        with signals_interrupt(), _step(f"checking behaviour on vLLM {version}"):
            checks = check(features, folder)
        if no_engine:
            return Outcome(checks, None)
        known = {f.part_id(part) for f in catalogue(package) for part in f.parts}
        others = frozenset(known - checks.parts.keys())
        try:
            with signals_interrupt(), _step(f"a tiny engine of vLLM {version}"):
                device = checks.facts["device"].partition(" ")[0]
                return Outcome(checks, try_engine(device, folder), others=others)
        except EngineError as error:
            return Outcome(checks, None, error)
    except CheckError as error:
        cannot_look(str(error))
    except KeyboardInterrupt:
        click.echo("Stopped; no process is left.", err=True)
        raise SystemExit(130) from None


def _version(folder: Path | None) -> str:
    if os.environ.get(DISABLE, "").strip() == "1":
        cannot_look(f"{DISABLE}=1 switches everything off; unset it to verify something.")
    try:
        installed = installation(folder)
    except ValueError as error:
        cannot_look(f"{error}.")
    if installed is None:
        cannot_look(
            f"There is no vLLM {f'in {folder}' if folder else 'in this Python environment'}."
        )
    return installed.version


@contextmanager
def _step(text: str) -> Iterator[None]:
    """A spinner with the time, on stderr: stdout is for the answer."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        bar.add_task(text, total=None)
        yield


def _settings() -> dict[str, str]:
    """The operator's variables, as they are."""
    names = sorted(n for n in os.environ if n.startswith(PREFIX) and n != SERVER_ID)
    plugins = ["VLLM_PLUGINS"] if "VLLM_PLUGINS" in os.environ else []
    return {name: os.environ[name] for name in (*names, *plugins)}


def _mark(outcome: Outcome, part_id: str) -> str:
    checked = outcome.checks.parts[part_id]
    return "WRONG" if checked.wrong else "right" if checked.check else "-"


def _block(outcome: Outcome) -> list[str]:
    """Plain text, fenced, so that it survives a bug report."""
    facts = {"vllm-ext": __version__, **outcome.checks.facts, **_settings()}
    now = datetime.datetime.now(datetime.UTC)
    lines = ["```", f"vllm-ext verify, {now:%Y-%m-%d %H:%M} UTC"]
    lines += [f"{name + ':':<10} {value}" for name, value in facts.items()]
    lines += ["", *_aligned(outcome), ""]
    if engine := outcome.engine:
        lines.append(f"engine: ready after {engine.ready:.0f} s, answered {engine.text.strip()!r}")
        for process in engine.processes:
            active = sum(word == Verdict.ACTIVE for word, _ in process.parts.values())
            armed = sum(word == Verdict.ARMED for word, _ in process.parts.values())
            lines.append(f"  {process.role}: {count(active, 'part')} active, {armed} armed")
    elif outcome.failure:
        lines += ["engine: failed", *(f"  {line}" for line in outcome.failure.tail.splitlines())]
    else:
        lines.append("engine: not started (--no-engine)")
    problems = outcome.problems
    lines += [f"PROBLEM {sentence}" for sentence in problems]
    right = sum(_mark(outcome, part_id) == "right" for part_id in outcome.checks.parts)
    lines.append(f"{count(right, 'part')} checked and right, {count(len(problems), 'problem')}")
    return [*lines, "```"]


def _aligned(outcome: Outcome) -> Iterator[str]:
    width = max(map(len, outcome.checks.parts), default=0)
    for part_id, checked in outcome.checks.parts.items():
        verdict = checked.judgement.verdict
        shown = "see below" if checked.wrong else (checked.check or checked.judgement).reason
        seen = outcome.seen(part_id)
        told = f"{shown} [{seen}]" if seen else shown
        yield f"{_mark(outcome, part_id):<5} {part_id:<{width}} {verdict:<11} {told}"


def _as_data(outcome: Outcome) -> dict[str, Any]:
    engine = outcome.engine
    return {
        "plugin": __version__,
        "facts": dict(outcome.checks.facts),
        "settings": _settings(),
        "parts": {
            part_id: {
                "verdict": checked.judgement.verdict.value,
                "reason": checked.judgement.reason,
                "check": checked.check and checked.check.reason,
                "right": checked.wrong is None if checked.check else None,
                "wrong": checked.wrong,
                "engine": engine
                and {
                    "active": engine.roles(part_id, Verdict.ACTIVE),
                    "armed": engine.roles(part_id, Verdict.ARMED),
                    "effects": engine.effects[part_id],
                },
            }
            for part_id, checked in outcome.checks.parts.items()
        },
        "engine": engine
        and {
            "ready_s": round(engine.ready, 1),
            "text": engine.text,
            "processes": [
                {"pid": process.pid, "role": process.role, "state": process.state}
                for process in engine.processes
            ],
        },
        "problems": outcome.problems,
    }
