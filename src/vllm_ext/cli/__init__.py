"""The command ``vllm-ext``. Exit status: 0 fine, 1 can't be honoured, 2 cannot look."""

from __future__ import annotations

import click

from vllm_ext import __version__
from vllm_ext.cli.diff import diff
from vllm_ext.cli.doctor import doctor
from vllm_ext.cli.listing import explain, list_features
from vllm_ext.cli.pages import pages
from vllm_ext.cli.recording import record
from vllm_ext.cli.status import status
from vllm_ext.cli.verify import verify
from vllm_ext.cli.wire import wire


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="vllm-ext")
def main() -> None:
    """Fixes and features for the vLLM release you have pinned."""


@main.command()
def demo() -> None:
    """Serve a real model and show what SCORE_USAGE changes."""
    from rich.console import Console

    from vllm_ext.cli.demo import run

    raise SystemExit(run(Console()))


main.add_command(list_features)
main.add_command(explain)
main.add_command(doctor)
main.add_command(diff)
main.add_command(record)
main.add_command(status)
main.add_command(verify)
main.add_command(pages)
main.add_command(wire)
