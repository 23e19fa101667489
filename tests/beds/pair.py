"""Several servers that belong together, such as one that prefills and one that decodes.

They start at the same time, are polled until all are healthy, and end together: whatever happens,
no process of any of them is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from vllm_ext.checks.server import Server


@contextmanager
def together(*servers: Server) -> Iterator[tuple[Server, ...]]:
    """Start all servers, yield them when all are healthy, stop all.

    Raises what ``Server`` raises: ``ServerDied`` with the reason, or ``TimeoutError``.
    """
    with ExitStack() as ending:
        for server in servers:
            ending.callback(server.stop)
            server.start()
        for server in servers:
            server.wait_ready()
        yield servers
