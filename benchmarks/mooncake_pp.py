"""Mooncake P/D transfers: when P frees a request's blocks, and what the pulls for it cost.

Each case runs on real workers, one process each, over Mooncake's engine and TCP on loopback, with
and without the plugin in one run. P gives up what nobody pulls after 12 s here (vLLM's default is
480 s). Seconds are counted from the moment when every decode worker has its result.

    python -m benchmarks.mooncake_pp [--release X ...]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.beds.layout import RELEASES
from tests.beds.mooncake_workers import TARGET, Imported, Instance

P, D = "kv_producer", "kv_consumer"
TIMEOUT = 12
WARM = 3


@dataclass
class Row:
    """One case: what the decode workers got, and what it cost."""

    served: str
    seconds: float
    expired: int
    pulls: int
    size: int

    def cells(self) -> list[str]:
        """The row's figures as text."""
        freed = f"{self.seconds:.2f}" if self.seconds >= 0 else "too early"
        return [self.served, freed, *map(str, (self.expired, self.pulls, self.size))]


def _row(p: Instance, d: Instance, number: int, before: tuple[int, int]) -> Row:
    """Wait until P frees a request whose pulls are all over."""
    over = time.time()
    told = [worker.ask("sent", f"p{number}") for worker in p.workers]
    freed = max(one["sent_at"][f"p{number}"] for one in told) - over
    # Served is who has all bytes and knows it.
    served = [all(both) for both in zip(d.filled(), d.finished(number), strict=True)]
    return Row(
        f"{served.count(True)} of {len(served)}",
        max(freed, 0.0),
        p.total("expired"),
        p.total("pulls") - before[0],
        p.total("bytes") - before[1],
    )


def _plain(vllm: Imported, producer: list[list[int]], consumer: list[list[int]]) -> Row:
    """The request after ``WARM`` others."""
    with vllm.instance(P, producer, timeout=TIMEOUT) as p, vllm.instance(D, consumer) as d:
        for number in range(WARM + 1):
            before = p.total("pulls"), p.total("bytes")
            p.prefill(number)
            d.load(p, number)
        return _row(p, d, WARM, before)


def one_to_two(vllm: Imported) -> Row:
    """P-PP1, D-PP2."""
    return _plain(vllm, [[0, 1, 2, 3]], [[0, 1], [2, 3]])


def four_to_two(vllm: Imported) -> Row:
    """P-PP4, D-PP2."""
    return _plain(vllm, [[0], [1], [2], [3]], [[0, 1], [2, 3]])


def other_partition(vllm: Imported) -> Row:
    """P-PP2 and D-PP2, layers 3 + 1 and 2 + 2."""
    return _plain(vllm, [[0, 1, 2], [3]], [[0, 1], [2, 3]])


def one_fails(vllm: Imported) -> Row:
    """One of two D workers (TP2) is refused, the other gets its KV."""
    with vllm.instance(P, [[0, 1]], timeout=TIMEOUT) as p, vllm.instance(D, [[0, 1]], tp=2) as d:
        p.prefill(0)
        d.workers[0].load(p, 0, blocks=[*TARGET, 10])
        d.workers[0].settle()
        d.workers[1].load(p, 0)
        d.workers[1].settle()
        return _row(p, d, 0, (0, 0))


def one_twice(vllm: Imported) -> Row:
    """One of two D workers (TP2) pulls twice, the other afterwards."""
    with vllm.instance(P, [[0, 1]], timeout=TIMEOUT) as p, vllm.instance(D, [[0, 1]], tp=2) as d:
        p.prefill(0)
        for name in ("d", "again"):
            d.workers[0].load(p, 0, name=name)
            d.workers[0].settle()
        early = any(p.freed(0))
        if not early:
            d.workers[1].load(p, 0)
            d.workers[1].settle()
        row = _row(p, d, 0, (0, 0))
        row.seconds = -1.0 if early else row.seconds
        return row


CASES: dict[str, Callable[[Imported], Row]] = {
    "P-PP1/D-PP2": one_to_two,
    "P-PP4/D-PP2": four_to_two,
    "P-PP2/D-PP2, other partition": other_partition,
    "one D worker fails": one_fails,
    "one D worker pulls twice": one_twice,
}


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--release", nargs="+", default=["0.29.0", "0.33.0"], choices=RELEASES)
    releases = parser.parse_args().release
    print(
        "| case | vLLM | plugin | D workers served | seconds until P frees | expired | pulls |",
        end="",
    )
    print(" bytes of pulls |\n|" + "---|" * 8)
    for release in releases:
        with Imported(release, "without") as stock, Imported(release, "with") as ours:
            for case, run in CASES.items():
                for side in (stock, ours):
                    cells = [case, release, side.plugin, *run(side).cells()]
                    print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
