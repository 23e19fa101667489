"""A KV connector whose hits, ways of loading and hand-offs a test sets by hand, request by request.

vLLM's factory takes it by this module's name; a test reaches it as ``scheduler.connector``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)


@dataclass
class Wish:
    """What the connector says of a request.

    ``stored``: tokens that can be loaded. ``asynchronous``: the load takes its time. ``undecided``:
    lookups answered with "not known yet". ``sent``: its blocks are kept after it has finished,
    until they were sent.
    """

    stored: int = 0
    asynchronous: bool = False
    undecided: int = 0
    sent: bool = False


class PlayedConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """``loads``: what was asked for since the last step; ``sending``: requests to be sent."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.wishes: dict[str, Wish] = {}
        self.loads: list[tuple[str, tuple[list[int], ...], int, int]] = []
        self.sending: list[str] = []
        self._local: dict[str, int] = {}

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        wish = self.wishes[request.request_id]
        if wish.undecided:
            wish.undecided -= 1
            return None, False
        self._local[request.request_id] = num_computed_tokens
        found = max(wish.stored - num_computed_tokens, 0)
        return found, bool(found) and wish.asynchronous

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            name = request.request_id
            tables = tuple(list(table) for table in blocks.get_block_ids())
            self.loads.append((name, tables, self._local[name], num_external_tokens))

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        ended = request.status.name in ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")
        kept = ended and self.wishes[request.request_id].sent
        if kept:
            self.sending.append(request.request_id)
        return kept, None

    request_finished = request_finished_all_groups

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, *args: Any, **kwargs: Any) -> None: ...

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...
