"""What ``vllm-ext demo`` shows of /score: the counts, the tables and what they say."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from rich.text import Text

QUERY = "What is the capital of France?"
DOCUMENTS = ("Paris is the capital of France.", "Bananas are yellow.")

# Float noise between two runs of one model; a wrong score would be off by far more.
SCORE_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Scored:
    """What one server said about the one /score request of the demo.

    ``billed`` is the usage of its reply in tokens, ``processed`` the rise of its Prometheus
    counter ``vllm:prompt_tokens_total``, ``scores`` one similarity per document.
    """

    vllm: str
    billed: int
    processed: int
    scores: tuple[float, ...]


@dataclass(frozen=True)
class Counts:
    """The tokenizer's own counts, in tokens: of the query and of each document."""

    query: int
    documents: tuple[int, ...]

    @property
    def total(self) -> int:
        return self.query + sum(self.documents)

    @property
    def repeated(self) -> int:
        """The query once per document, and one separator for each pair."""
        return sum(self.documents) + len(self.documents) * (self.query + 1)


def count(model: Path) -> Counts:
    """Count the request's texts with the tokenizer in the model's folder, specials included."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    # The file asks for a fixed length, which a server doesn't honour.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    query, *documents = (len(tokenizer.encode(text).ids) for text in (QUERY, *DOCUMENTS))
    return Counts(query, tuple(documents))


def verdict(counts: Counts, stock: Scored, ours: Scored) -> tuple[str, bool]:
    """What the numbers say, in a sentence or two, and whether they are as they should be."""
    if ours.billed != counts.total:
        return (
            f"WRONG: with vllm-ext the request is billed {ours.billed} tokens, the tokenizer "
            f"counts {counts.total}. `vllm-ext doctor` says which part is not at work.",
            False,
        )
    if ours.processed != ours.billed:
        return f"WRONG: {ours.billed} tokens billed, {ours.processed} processed.", False
    if not all(map(_close, stock.scores, ours.scores)):
        return f"WRONG: the scores differ, {stock.scores} and {ours.scores}.", False
    if stock.billed == counts.total:
        return f"vLLM {stock.vllm} bills this request right by itself; nothing to repair.", True
    extra = stock.billed - counts.total
    why = ""
    if stock.billed == counts.repeated:
        why = (
            f" It bills the {counts.query}-token query once per document, and a separator per "
            "pair that the engine never saw."
        )
    return (
        f"Stock vLLM {stock.vllm} bills {extra} tokens too many ({extra / counts.total:+.0%}).{why}"
        " With vllm-ext the bill is what the engine processed; the scores are the same.",
        True,
    )


def texts_table(counts: Counts) -> Table:
    """Each text of the request with its tokens."""
    table = Table("text", title="the request, as the model's tokenizer counts it")
    table.add_column("tokens", justify="right")
    table.add_row(f"query     {QUERY}", str(counts.query))
    for text, tokens in zip(DOCUMENTS, counts.documents, strict=True):
        table.add_row(f"document  {text}", str(tokens))
    table.add_section()
    table.add_row("[bold]sum[/]", f"[bold]{counts.total}[/]")
    return table


def usage_table(counts: Counts, stock: Scored, ours: Scored) -> Table:
    """What each server billed, beside what the tokenizer and the engine counted."""
    table = Table("vLLM", title="one /score request, answered twice")
    for name in ("billed", "tokenizer", "engine", "off by", "scores"):
        table.add_column(name, justify="right", no_wrap=True)
    for label, run in ((f"{stock.vllm} stock", stock), (f"{ours.vllm} with vllm-ext", ours)):
        right = run.billed == counts.total
        table.add_row(
            label,
            Text(str(run.billed), style="bold green" if right else "bold red"),
            str(counts.total),
            str(run.processed),
            "[green]0[/]" if right else f"[red]{run.billed - counts.total:+d}[/]",
            "  ".join(f"{score:.4f}" for score in run.scores),
        )
    return table


def _close(first: float, second: float) -> bool:
    return math.isclose(first, second, abs_tol=SCORE_TOLERANCE)
