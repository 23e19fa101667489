"""What KV blocks hold, in a played worker: for each slot, which tokens it was computed from.

A slot is right if it stands for the very tokens up to its position, so a block that was given to
two requests, filled twice or never, shows as soon as anybody reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vllm_ext.features.played_scheduler import BLOCK, WINDOW

GARBAGE = 999_999
WRONG = object()


class Text:
    """Tokens, and for each position a number that stands for all tokens up to it."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        self.states: list[int] = []
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens at the end."""
        for token in tokens:
            self.tokens.append(token)
            self.states.append(hash((self.states[-1] if self.states else 0, token)))

    def cut(self, length: int) -> None:
        """Forget what comes after so many tokens."""
        del self.tokens[length:], self.states[length:]

    @property
    def following(self) -> int:
        """The token that comes next if everything was computed right."""
        return self.states[-1] % 997


def answer_to(prompt: Sequence[int], length: int) -> list[int]:
    """The tokens that follow a prompt."""
    text = Text(prompt)
    for _ in range(length):
        text.extend([text.following])
    return text.tokens[len(prompt) :]


class Contents:
    """The blocks of all KV cache groups (``full``, ``window``, ``mamba``), by what they hold.

    A state-space layer keeps one state in a block: that of the last position it was left at.
    """

    def __init__(self, groups: Sequence[str]) -> None:
        self.groups = groups
        self._slots: dict[tuple[int, int, int], Any] = {}

    def load(
        self,
        tables: Sequence[Sequence[int]],
        text: Text,
        start: int,
        tokens: int,
        failing: Iterable[int] = (),
    ) -> None:
        """Fill the blocks of these positions, the failing ones with garbage; null is left alone."""
        for group, kind in enumerate(self.groups):
            last = start + tokens - 1
            for at in [last] if kind == "mamba" else range(start, last + 1):
                block = tables[group][at // BLOCK]
                if block:
                    value = WRONG if block in failing else text.states[at]
                    self._slots[group, block, self._slot(group, at)] = value

    def compute(self, tables: Sequence[Sequence[int]], text: Text, start: int, end: int) -> bool:
        """Compute these positions; whether all that was read was right."""
        good = self._readable(tables, text, start, start)
        self._write(tables, range(start, end), text if good else None)
        # What is written is read again: of positions that share a slot only one is there.
        if good and not self._readable(tables, text, start, end):
            good = False
            self._write(tables, range(start, end), None)
        return good

    def holds(self, group: int, block: int, states: Sequence[int]) -> bool:
        """Whether a block holds the positions of these states, which end with it."""
        if self.groups[group] == "mamba":
            return self._slots.get((group, block, 0)) == states[-1]
        return all(self._slots.get((group, block, at)) == s for at, s in enumerate(states))

    def take(self, group: int, block: int) -> list[Any]:
        """A copy of all slots of a block."""
        return [self._slots.get((group, block, at)) for at in range(BLOCK)]

    def put(self, group: int, block: int, slots: Sequence[Any]) -> None:
        """Overwrite all slots of a block."""
        for at, value in enumerate(slots):
            self._slots[group, block, at] = value

    def _slot(self, group: int, at: int) -> int:
        return 0 if self.groups[group] == "mamba" else at % BLOCK

    def _readable(self, tables: Sequence[Sequence[int]], text: Text, start: int, end: int) -> bool:
        return all(
            self._slots.get((group, tables[group][at // BLOCK], self._slot(group, at)))
            == text.states[at]
            for group, kind in enumerate(self.groups)
            for at in _read(kind, start, end)
        )

    def _write(self, tables: Sequence[Sequence[int]], positions: range, text: Text | None) -> None:
        for group, kind in enumerate(self.groups):
            for at in positions[-1:] if kind == "mamba" else positions:
                value = text.states[at] if text else WRONG
                self._slots[group, tables[group][at // BLOCK], self._slot(group, at)] = value


def _read(kind: str, start: int, end: int) -> Iterable[int]:
    """Positions that must be there when the tokens from ``start`` to ``end`` are computed."""
    if kind == "mamba":
        return [end - 1] if end else []
    return range(max(0, start - WINDOW + 1) if kind == "window" else 0, end)
