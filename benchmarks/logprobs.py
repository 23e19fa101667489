"""What NAN_LOGPROBS adds to an answer: our pass over its logprobs, and vLLM's own clamping of them.

One process, vLLM's own classes, an answer of 256 tokens with 20 candidates each. vLLM calls the
builtin ``max`` for every value; we add all values up once more, and change none as long as the sum
is finite. Rounds alternate, so that a busy machine moves both sides. ``vLLM's method`` is all that
vLLM does to make the answer's logprobs (of chat, for all others), ``more`` our pass on top of it.

    python -m benchmarks.logprobs [--release 0.29.0] [--rounds 200] [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.measure import Spread, describe, machine, measured, save
from vllm_ext.features.serving import nan_logprobs

TOKENS, CANDIDATES = 256, 20
TARGET = 0.5
Run = Callable[[], Any]


def engine_logprobs() -> list[dict[int, Any]]:
    """Of every token: itself and 20 candidates, as the engine tells them."""
    from vllm.logprobs import Logprob

    row = range(CANDIDATES + 1)
    return [
        {at: Logprob(-0.37 * (at + 1) - step / TOKENS, at + 1, f"t{at}") for at in row}
        for step in range(TOKENS)
    ]


def builtin(steps: list[dict[int, Any]]) -> Run:
    """The builtin ``max`` over every value, and nothing else of what vLLM does with it."""

    def run() -> Any:
        for step in steps:
            [max(each.logprob, -9999.0) for each in step.values()]

    return run


def answers(steps: list[dict[int, Any]]) -> dict[str, tuple[Run, Run]]:
    """By endpoint: vLLM's method, and the pass over what it returned."""
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion

    texts, chat = object.__new__(OpenAIServingCompletion), object.__new__(OpenAIServingChat)
    texts.return_tokens_as_token_ids = chat.return_tokens_as_token_ids = False
    ids = [0] * TOKENS

    def completion() -> Any:
        return texts._create_completion_logprobs(ids, steps, CANDIDATES, None)

    def chats() -> Any:
        return chat._create_chat_logprobs(ids, steps, None, CANDIDATES)

    made, prompt = completion(), [None, *steps]
    return {
        "/v1/completions": (completion, lambda: nan_logprobs.clean_completion(made)),
        "all others": (chats, lambda: nan_logprobs.all_finite(steps)),
        "prompt_logprobs": (_clamp(prompt), lambda: nan_logprobs.all_finite(prompt)),
    }


def _clamp(prompt: list[Any]) -> Run:
    from vllm.entrypoints.generate.base.serving import clamp_prompt_logprobs

    return lambda: clamp_prompt_logprobs(prompt)


def microseconds(run: Run) -> float:
    """CPU time of one call."""
    start = time.process_time_ns()
    run()
    return (time.process_time_ns() - start) / 1000


def main() -> None:
    """Measure and print; ends with status 1 if a pass takes more than half of the builtin max."""
    description = __doc__.partition("\n")[0]
    options = measured(description, __spec__.name, "rounds", 200)
    sys.exit(_measure(options))


def _measure(options: argparse.Namespace) -> int:
    console = Console()
    where = machine()
    console.print(describe(where))
    steps = engine_logprobs()
    clamp = builtin(steps)
    rows: dict[str, dict[str, list[float]]] = {}
    for name, (method, ours) in answers(steps).items():
        runs = {"builtin": clamp, "ours": ours, "answer": method}
        rows[name] = {kind: [] for kind in runs}
        for number in track(range(-1, options.rounds), description=name, console=console):
            for kind in runs if number % 2 else reversed(runs):
                spent = microseconds(runs[kind])
                if number >= 0:
                    rows[name][kind].append(spent)
    table = Table(
        title=f"NAN_LOGPROBS on vLLM {options.release}: {TOKENS} tokens of {CANDIDATES + 1} values",
        caption="µs of CPU time, median and interval over the rounds; target: ours at most "
        f"{TARGET} of the builtin max",
    )
    table.add_column("answer of")
    for heading in ("builtin max", "our pass", "ratio", "vLLM's method", "more"):
        table.add_column(heading, justify="right")
    worst = 0.0
    for name, figures in rows.items():
        ratio = Spread.of([a / b for a, b in zip(figures["ours"], figures["builtin"], strict=True)])
        more = [a / b for a, b in zip(figures["ours"], figures["answer"], strict=True)]
        worst = max(worst, ratio.median)
        table.add_row(
            name,
            Spread.of(figures["builtin"]).text(0),
            Spread.of(figures["ours"]).text(0),
            ratio.text(2),
            Spread.of(figures["answer"]).text(0),
            f"{Spread.of([100 * value for value in more]).text(1)} %",
        )
    console.print(table)
    if options.json:
        save(options.json, {"machine": where, "release": options.release, "rows": rows})
    return int(worst > TARGET)


if __name__ == "__main__":
    main()
