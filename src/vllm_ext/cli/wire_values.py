"""How decoded messages look in the terminal: one row for each value, by its path."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_ext.wire.decode import Decoded, Named, Record, Tensor

# Array elements and characters of a value that are shown.
SHOWN = 8
LONGEST = 200
_PARTS = (Record, Tensor)


def print_message(console: Console, number: int, message: Decoded) -> None:
    """One message as a table. Fields that are None are left out; they are in the JSON."""
    sizes = " + ".join(map(str, message.sizes))
    title = f"{number}: {message.kind}, {message.direction.value}, {sizes} bytes"
    console.print(Text(title, "bold"), soft_wrap=True)
    table = Table()
    table.add_column("Pos", justify="right")
    table.add_column("Field", overflow="fold")
    table.add_column("Value", overflow="fold")
    if message.identity is not None:
        table.add_row("", "(engine)", message.identity.hex())
    for position, path, value in _rows(None, "", message.value):
        table.add_row("" if position is None else str(position), Text(path), value)
    if table.row_count:
        console.print(table)


def _rows(position: int | None, path: str, value: Any) -> Iterator[tuple[int | None, str, Text]]:
    if value is None:
        return
    if isinstance(value, Record):
        for name, inner in value.fields.items():
            yield from _rows(value.positions[name], f"{path}.{name}".lstrip("."), inner)
        for name, inner in value.surplus.items():
            yield from _rows(None, f"{path}.({name}, unknown)".lstrip("."), inner)
    elif isinstance(value, list) and _has_parts(value):
        for at, item in enumerate(value):
            yield from _rows(None, f"{path}[{at}]", item)
    elif isinstance(value, dict) and _has_parts(value):
        for key, item in value.items():
            yield from _rows(None, f"{path}[{key!r}]", item)
    else:
        yield position, path, _text(value)


def _has_parts(value: Any) -> bool:
    """Whether there are messages or arrays somewhere inside, which get rows of their own."""
    if isinstance(value, dict):
        return any(map(_has_parts, value.values()))
    return any(map(_has_parts, value)) if isinstance(value, list) else isinstance(value, _PARTS)


def _text(value: Any) -> Text:
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, Named):
        return Text(f"{value.name or 'unknown'} ({value.value!r})")
    told = repr(value)
    more = f"... ({len(told)} characters, all of them with --json)"
    return Text(told if len(told) <= LONGEST else told[:LONGEST] + more)


def _tensor(tensor: Tensor) -> Text:
    head = f"{tensor.dtype} {list(tensor.shape)}"
    if tensor.values is None:
        return Text(f"{head}, values not in the message or of no numpy type")
    flat = tensor.values.ravel()
    told = ", ".join(
        f"{item:.6g}" if flat.dtype.kind == "f" else str(item) for item in flat[:SHOWN]
    )
    more = f", ... ({flat.size} in all)" if flat.size > SHOWN else ""
    text = Text(f"{head}: {told}{more}")
    if flat.dtype.kind in "fc" and (wrong := int((~np.isfinite(flat)).sum())):
        text.append(f"  {wrong} not finite", style="bold red")
    return text
