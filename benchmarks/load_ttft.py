"""What a cap on loaded tokens is worth: bytes loaded, tokens computed again, time to first token.

One process, one engine with OffloadingConnector on the CPU and a prompt whose whole blocks are in
host memory, the local prefix cache emptied before each request. Requests without a cap, with one of
half the prompt and with a cap of 0 take turns, the order turning from round to round; the ratio to
no cap is taken inside a round. The model is a Llama of 8 layers with a hidden size of 512 and
random weights: how loading compares with computing depends on model and machine.

    python -m benchmarks.load_ttft [--release 0.29.0] [--rounds 10] [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.measure import Spread, describe, machine, measured, save

PROMPT, BLOCK = 1024, 32
STORED = (PROMPT - 1) // BLOCK * BLOCK
CAPS: dict[str, int | None] = {"none": None, "half": PROMPT // 2, "0": 0}
SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}
# Two tensors of float32 a layer.
BYTES_PER_TOKEN = 2 * 4 * SHAPE["num_hidden_layers"] * SHAPE["hidden_size"]


@dataclass(frozen=True)
class Reply:
    """Tokens loaded and computed, and the seconds until the first token."""

    loaded: int
    computed: int
    seconds: float


def ask(llm: Any, prompt: list[int], cap: int | None) -> Reply:
    """One request for one token; nothing of it is in the local prefix cache."""
    from vllm import SamplingParams

    llm.reset_prefix_cache()
    extra = {} if cap is None else {"extra_args": {"kv_transfer_params": {"max_load_tokens": cap}}}
    params = SamplingParams(max_tokens=1, temperature=0.0, **extra)
    start = time.perf_counter()
    (reply,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    spent = time.perf_counter() - start
    cached = reply.num_cached_tokens or 0
    # The last token of a prompt is always computed.
    return Reply(cached, max(len(prompt) - cached, 1), spent)


def rounds_of(count: int, folder: Path, console: Console) -> dict[str, list[Reply]]:
    """Replies by kind of request, one a round."""
    from tests.beds.offload_engine import engine, transfer_config

    config = transfer_config(
        "OffloadingConnector", spec_name="HostOffloadingSpec", cpu_bytes_to_use=1 << 28
    )
    arguments = {
        "kv_transfer_config": config,
        "hf_overrides": SHAPE,
        "load_format": "dummy",
        "max_model_len": PROMPT + BLOCK,
        "num_gpu_blocks_override": 2 * PROMPT // BLOCK,
        "max_num_batched_tokens": PROMPT,
    }
    replies: dict[str, list[Reply]] = {kind: [] for kind in CAPS}
    with engine(folder, "llama", **arguments) as (llm, checkpoint):
        prompt = checkpoint.prompt(PROMPT)
        while ask(llm, prompt, None).loaded < STORED:
            pass
        kinds = list(CAPS)
        for number in track(range(-1, count), description="requests", console=console):
            turn = number % len(kinds)
            for kind in kinds[turn:] + kinds[:turn]:
                reply = ask(llm, prompt, CAPS[kind])
                if number >= 0:
                    replies[kind].append(reply)
    return replies


def main() -> None:
    """Measure and print."""
    description = __doc__.partition("\n")[0]
    options = measured(description, __spec__.name, "rounds", 10)
    sys.exit(_measure(options))


def _measure(options: argparse.Namespace) -> int:
    from tests.beds.registered import registered

    console = Console()
    where = machine()
    console.print(describe(where))
    with registered(True), tempfile.TemporaryDirectory() as folder:
        replies = rounds_of(options.rounds, Path(folder), console)
    table = Table(
        title=f"Caps on vLLM {options.release}: a prompt of {PROMPT} tokens in host memory",
        caption="time to first token: median and interval over the rounds, wall time",
    )
    for heading in ("cap", "MiB loaded", "tokens computed", "ms to first token", "of no cap's"):
        table.add_column(heading, justify="right")
    for kind, made in replies.items():
        loaded = {reply.loaded for reply in made}
        pairs = zip(made, replies["none"], strict=True)
        table.add_row(
            kind,
            " or ".join(f"{tokens * BYTES_PER_TOKEN / 1024**2:.1f}" for tokens in sorted(loaded)),
            " or ".join(map(str, sorted({reply.computed for reply in made}))),
            Spread.of([1000 * reply.seconds for reply in made]).text(1),
            Spread.of([mine.seconds / bare.seconds for mine, bare in pairs]).text(2),
        )
    console.print(table)
    if options.json:
        rows = {kind: [vars(reply) for reply in made] for kind, made in replies.items()}
        save(options.json, {"machine": where, "release": options.release, "rows": rows})
    return 0


if __name__ == "__main__":
    main()
