"""How a command ends that can't look: one sentence on stderr, and status 2."""

from __future__ import annotations

from typing import NoReturn

import click


def cannot_look(sentence: str) -> NoReturn:
    """End with status 2."""
    click.echo(sentence, err=True)
    raise SystemExit(2)
