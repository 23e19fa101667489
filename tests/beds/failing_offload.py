"""OffloadingConnector without a model whose loads fail, reported by block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.beds.ending import died_of
from vllm_ext.features.kv.offload_probe import Offload
from vllm_ext.features.played_scheduler import BLOCK, output_of


class FailingOffload(Offload):
    """``Offload`` whose next ``failing`` loads fail; their last block of the last group is named.

    OffloadingConnector itself reports no blocks; a MultiConnector that it is part of may.
    ``policy`` is the kv_load_failure_policy.
    """

    def __init__(self, groups: Sequence[str], policy: str = "recompute", **how: Any) -> None:
        super().__init__(groups, **how)
        self.scheduler.recompute_kv_load_failures = policy == "recompute"
        self.failing = 0
        self._invalid: set[int] = set()

    def step(self) -> Any:
        """One step of the engine, whose loads fail as long as there is something to fail."""
        known = len(self.loads)
        planned = self.scheduler.schedule()
        self._invalid.clear()
        for name, tokens in self.loads[known:]:
            if self.failing:
                self.failing -= 1
                self._invalid.add(self._last_block(name, tokens))
        self.scheduler.update_from_output(planned, self._output(planned))
        return planned

    def _last_block(self, name: str, tokens: int) -> int:
        table = self.scheduler.kv_cache_manager.get_block_ids(name)[-1]
        return [block for block in table[: -(-tokens // BLOCK)] if block][-1]

    def _output(self, planned: Any) -> Any:
        from vllm.v1.outputs import KVConnectorOutput

        report, loaded = self._copies(planned.kv_connector_metadata)
        copies = KVConnectorOutput(
            finished_recving=loaded or None,
            kv_connector_worker_meta=report,
            invalid_block_ids=self._invalid,
        )
        return output_of(self.scheduler, planned, kv_connector_output=copies)

    @property
    def pool(self) -> Any:
        """The scheduler's block pool."""
        return self.scheduler.kv_cache_manager.block_pool

    def run_to_end(self, steps: int = 100) -> str:
        """Steps until no request is left; the exception if there is one."""
        try:
            self.run(steps)
        except Exception as error:
            return died_of(error)
        return ""
