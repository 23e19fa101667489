"""Types as the tables write them: text that can be taken apart."""

from __future__ import annotations

from collections.abc import Iterable


def union(parts: Iterable[str]) -> str:
    """Types joined by |, flat, without repetition, None last."""
    flat = list(dict.fromkeys(item for part in parts for item in alternatives(part)))
    flat.sort(key=lambda item: item == "None")
    return " | ".join(flat)


def alternatives(text: str) -> list[str]:
    """The members of a union, split at its own level; a plain type is its only member."""
    return _split(text, "|")


def generic(text: str) -> tuple[str, list[str]]:
    """A type's name and its parameters: dict[str, int] is ("dict", ["str", "int"])."""
    name, bracket, rest = text.partition("[")
    return name, _split(rest.removesuffix("]"), ",") if bracket else []


def _split(text: str, separator: str) -> list[str]:
    found, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        else:
            depth += (character in "[(") - (character in ")]")
            if character == separator and depth == 0:
                found.append("")
                continue
        found[-1] += character
    return [item.strip() for item in found]
