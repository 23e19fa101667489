"""Time of load_format=dummy, stock beside ours, on a Llama of 64 layers in one thread.

One process of the chosen release builds vLLM's own model once (hidden size 512, bfloat16 unless
said otherwise) and loads it in turn without and with the plugin; ratios are taken inside a pair, so
a busy machine moves both sides. The SHA-256 of the whole state must be the same each time. CPU time
counts; wall time is in the JSON. Two kinds of memory: weights whose memory is in use ("touched",
the loader's own work; each load starts from the same garbage), and weights just allocated ("fresh",
as in a server's start), where the system's first touch of every page counts on both sides.

    python -m benchmarks.dummy_load [--release 0.29.0] [--pairs 7] [--layers 64] [--json FILE]
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measure import Spread, describe, machine, save
from tests.beds.children import environment
from tests.beds.layout import RELEASES
from tests.beds.llama import llama, load_dummy
from tests.beds.registered import registered

KINDS = ("bfloat16", "float16", "float32", "float8_e4m3fn")
MEMORIES = ("touched", "fresh")
TARGETS = {"0.29.0": 100.0, "0.31.0": 15.0}


class ChildFailed(RuntimeError):
    """The measured process failed; the message holds the end of its output."""


def timed_load(model: Any, memory: str) -> tuple[dict[str, float], str]:
    """CPU and wall seconds of one load, and the SHA-256 of the state it leaves."""
    import torch

    if memory == "fresh":
        for parameter in model.parameters():
            parameter.data = torch.empty_like(parameter.data)
    state = model.state_dict()
    if memory == "touched":
        for tensor in state.values():
            tensor.view(-1).view(torch.uint8).fill_(0x5A)
    cpu, wall = time.process_time(), time.perf_counter()
    load_dummy(model)
    spent = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
    digest = hashlib.sha256()
    for name, tensor in state.items():
        digest.update(name.encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy())
    return spent, digest.hexdigest()


def child(pairs: int, layers: int, kind: str, answer: Path) -> None:
    """Measure the vLLM of this process; the first pair warms up and is not counted."""
    import torch

    torch.set_num_threads(1)
    loads: dict[str, dict[str, list[dict[str, float]]]]
    loads = {memory: {"stock": [], "ours": []} for memory in MEMORIES}
    digests = set()
    with tempfile.TemporaryDirectory() as folder, llama(Path(folder), layers, 512) as model:
        for parameter in model.parameters():
            if parameter.dim() == 2 or getattr(torch, kind).itemsize > 1:
                parameter.data = parameter.data.to(getattr(torch, kind))
        elements = sum(tensor.numel() for tensor in model.state_dict().values())
        for memory, number in itertools.product(MEMORIES, range(pairs + 1)):
            for side in ("stock", "ours"):
                with registered(side == "ours"):
                    spent, digest = timed_load(model, memory)
                digests.add(digest)
                if number:
                    loads[memory][side].append(spent)
    told = {"loads": loads, "digests": sorted(digests), "elements": elements}
    answer.write_text(json.dumps(told))


def run_child(release: str, options: argparse.Namespace, kind: str) -> dict[str, Any]:
    """Measure one release and type in a process of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        answer = Path(scratch) / "answer.json"
        command = [sys.executable, "-m", "benchmarks.dummy_load", "--child", str(answer)]
        command += ["--pairs", str(options.pairs), "--layers", str(options.layers), "--kind", kind]
        quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_PLUGINS": ""}
        # Large blocks go back to the system when freed, so that the next ones are fresh.
        quiet["MALLOC_MMAP_THRESHOLD_"] = "65536"
        done = subprocess.run(
            command, env=environment(release) | quiet, capture_output=True, text=True
        )
        if done.returncode or not answer.is_file():
            raise ChildFailed((done.stderr or done.stdout)[-2000:])
        told: dict[str, Any] = json.loads(answer.read_text())
        return told


def main() -> int:
    """Measure and print; status 1 if a load left other bytes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--release", choices=RELEASES, action="append", help="default: all")
    parser.add_argument("--kind", choices=KINDS, action="append", help="default: bfloat16")
    parser.add_argument("--pairs", type=int, default=7, help="loads of each side, default 7")
    parser.add_argument("--layers", type=int, default=64, help="default 64")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.pairs < 1 or options.layers < 1:
        parser.error("--pairs and --layers take numbers of at least 1")
    kinds = options.kind or ["bfloat16"]
    if options.child:
        child(options.pairs, options.layers, kinds[0], options.child)
        return 0
    console = Console()
    where = machine()
    console.print(describe(where))
    table = Table(
        title=f"Dummy load of {options.layers} layers, one thread",
        caption=f"median [interval] of {options.pairs} pairs, CPU time",
    )
    for heading in ("vLLM", "type", "Mvalues", "memory"):
        table.add_column(heading)
    for heading in ("stock, ms", "ours, ms", "times faster", "target", "state"):
        table.add_column(heading, justify="right")
    results: dict[str, Any] = {}
    different = False
    for release in options.release or RELEASES:
        for kind in kinds:
            with console.status(f"vLLM {release}, {kind}"):
                told = run_child(release, options, kind)
            same = len(told["digests"]) == 1
            different |= not same
            for memory in MEMORIES:
                loads = told["loads"][memory]
                stock, ours = ([load["cpu"] for load in loads[s]] for s in ("stock", "ours"))
                ratio = Spread.of([a / b for a, b in zip(stock, ours, strict=True)])
                told["ratio " + memory] = vars(ratio)
                first = memory == MEMORIES[0]
                target = TARGETS.get(release) if first and kind == KINDS[0] else None
                table.add_row(
                    release if first else "",
                    kind if first else "",
                    f"{told['elements'] / 1e6:.1f}" if first else "",
                    memory,
                    Spread.of([1000 * value for value in stock]).text(0),
                    Spread.of([1000 * value for value in ours]).text(),
                    ratio.text(),
                    f"{target:.0f}" if target else "",
                    told["digests"][0][:8] if same else "DIFFERENT",
                )
            results[f"{release} {kind}"] = told
    console.print(table)
    if options.json:
        save(options.json, {"machine": where, "results": results})
    return int(different)


if __name__ == "__main__":
    sys.exit(main())
