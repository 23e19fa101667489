"""What MAX_LOAD_TOKENS adds to a lookup of a KV connector, which is once per waiting request.

One process, vLLM's own OffloadingConnector scheduler with a full CPU tier, one request of 480
tokens. Blocks of lookups alternate between the bare class and the patched one, so that a busy
machine moves both sides. ``uncapped`` is every request that names no cap, which is what must cost
nothing; ``half`` and ``nothing`` (cap 0) replace a lookup by a shorter one, so the ratio is what
they save.

    python -m benchmarks.load_cap [--release 0.29.0] [--rounds 40] [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
import time
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.measure import Spread, describe, machine, measured, save
from benchmarks.patches import active_wraps, patched
from vllm_ext.core.seams import Wrap
from vllm_ext.features.kv.max_load_tokens import FEATURE
from vllm_ext.features.kv.offload_probe import Offload

LENGTH, LOOKUPS = 480, 200
CAPS: dict[str, dict[str, int]] = {
    "uncapped": {},
    "half": {"max_load_tokens": 240},
    "nothing": {"max_load_tokens": 0},
}
TARGET = 2.0


def seams(release: str, connector: str) -> list[Wrap]:
    """The wrappers round the lookups of a connector that are active without any option."""
    name = "simple_kv_offload" if connector.startswith("Simple") else "v1.offloading"
    return [
        wrap
        for part, wrap in active_wraps(release, FEATURE)
        if not part.option and name in wrap.target
    ]


def microseconds(bed: Offload, request: Any) -> float:
    """Median CPU time of a lookup over a block of them."""
    spent = []
    for _ in range(LOOKUPS):
        start = time.process_time_ns()
        bed.ask(request, 0)
        spent.append((time.process_time_ns() - start) / 1000)
    return median(spent)


def lookups(release: str, connector: str, rounds: int, console: Console) -> dict[str, Any]:
    """Microseconds a lookup for each kind of request, bare and with the plugin, one a round."""
    wraps = seams(release, connector)
    bed = Offload(["full"], connector=connector, batched_tokens=512)
    tokens = list(range(1, LENGTH + 1))
    bed.scheduler.add_request(bed.request("storing", tokens, answer=4))
    bed.run()
    bed.forget_local()
    requests = {kind: bed.request(kind, tokens, **cap) for kind, cap in CAPS.items()}
    for request in requests.values():
        bed.lookup(request, 0)
    figures: dict[str, Any] = {kind: {"bare": [], "with": []} for kind in CAPS}
    for number in track(range(-1, rounds), description=connector, console=console):
        for kind, request in requests.items():
            for name in ("bare", "with") if number % 2 else ("with", "bare"):
                with patched(wraps if name == "with" else []):
                    spent = microseconds(bed, request)
                if number >= 0:
                    figures[kind][name].append(spent)
    return figures


def main() -> None:
    """Measure and print; ends with status 1 if a lookup costs more than the target."""
    description = __doc__.partition("\n")[0]
    options = measured(description, __spec__.name, "rounds", 40)
    sys.exit(_measure(options))


def _measure(options: argparse.Namespace) -> int:
    import vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler
    import vllm.v1.simple_kv_offload.manager  # noqa: F401

    console = Console()
    where = machine()
    console.print(describe(where))
    rows = {
        connector: lookups(options.release, connector, options.rounds, console)
        for connector in ("OffloadingConnector", "SimpleCPUOffloadConnector")
    }
    table = Table(
        title=f"MAX_LOAD_TOKENS on vLLM {options.release}: lookups of {LENGTH} stored tokens",
        caption="µs of CPU time, median and interval over the rounds; target: a lookup takes at "
        f"most {TARGET:.0f} µs more",
    )
    table.add_column("connector")
    table.add_column("request")
    for heading in ("lookup", "with plugin", "ratio", "more"):
        table.add_column(heading, justify="right")
    worst = 0.0
    for connector, kinds in rows.items():
        for kind, figures in kinds.items():
            pairs = list(zip(figures["with"], figures["bare"], strict=True))
            more = Spread.of([a - b for a, b in pairs])
            worst = max(worst, more.median)
            table.add_row(
                connector,
                kind,
                Spread.of(figures["bare"]).text(1),
                Spread.of(figures["with"]).text(1),
                Spread.of([a / b for a, b in pairs]).text(3),
                more.text(2),
            )
    console.print(table)
    if options.json:
        save(options.json, {"machine": where, "release": options.release, "rows": rows})
    return int(worst > TARGET)


if __name__ == "__main__":
    main()
