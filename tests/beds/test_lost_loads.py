"""The fault ``lose``: a load that is never reported, between a real scheduler and the connector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.beds.kv_store import Fault, arm, armed_faults, transfer_config
from vllm_ext.features.played_scheduler import make_request, make_scheduler, output_of

pytestmark = pytest.mark.area("beds")

BLOCKS = 20
STEPS = 60


class Lossy:
    """A scheduler with ``kv_folder``, and the connector's worker side over a cache of its own."""

    def __init__(self, store: Path) -> None:
        import torch
        from vllm.config import KVTransferConfig
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        from tests.beds.kv_folder import KVFolder

        transfer = KVTransferConfig(**transfer_config(store, asynchronous=True))
        self.scheduler = make_scheduler(("full",), BLOCKS, transfer=transfer)
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.worker = KVFolder(
            self.scheduler.vllm_config, KVConnectorRole.WORKER, self.scheduler.kv_cache_config
        )
        self.worker.register_kv_caches({"full": torch.zeros(BLOCKS + 1, 16)})
        # The request of every unit that was loaded.
        self.loaded: list[str] = []

    def step(self) -> Any:
        """Plan a step, have the worker carry out its transfers, and take its report."""
        from vllm.v1.outputs import KVConnectorOutput

        planned = self.scheduler.schedule()
        self.loaded += [load.request for load in planned.kv_connector_metadata.loads]
        self.worker.bind_connector_metadata(planned.kv_connector_metadata)
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        _, arrived = self.worker.get_finished(set())
        report = KVConnectorOutput(finished_recving=arrived)
        made = output_of(self.scheduler, planned, kv_connector_output=report)
        self.scheduler.update_from_output(planned, made)
        return planned

    def run(self, *names: str) -> int:
        """Steps until these requests have left the scheduler, at most ``STEPS``."""
        for taken in range(STEPS):
            if not set(names) & self.scheduler.requests.keys():
                return taken
            self.step()
        return STEPS


def test_a_lost_load_is_waited_for_and_holds_its_blocks(
    installed_release: str, tmp_path: Path
) -> None:
    """vLLM has no time limit for a load: others go on, and even an abort frees nothing."""
    from vllm.v1.request import RequestStatus

    bed = Lossy(tmp_path)
    prompt = list(range(1, 41))
    bed.scheduler.add_request(make_request("storing", prompt))
    assert bed.run("storing") < STEPS
    assert bed.scheduler.reset_prefix_cache()
    arm(tmp_path, Fault("lose"))
    lost = make_request("lost", prompt)
    bed.scheduler.add_request(lost)
    bed.scheduler.add_request(make_request("other", range(100, 140)))
    assert bed.run("other") < STEPS
    assert bed.run("lost") == STEPS
    assert lost.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    with armed_faults(tmp_path) as armed:
        assert not armed
    held = BLOCKS - bed.pool.get_num_free_blocks()
    assert held >= 2 and bed.loaded == ["lost"] * 2
    # The worker may still write to them, as far as vLLM knows.
    bed.scheduler.finish_requests("lost", RequestStatus.FINISHED_ABORTED)
    assert bed.run("lost") == STEPS
    assert BLOCKS - bed.pool.get_num_free_blocks() == held
    bed.worker.arrived("lost")
    assert bed.run("lost") < STEPS
    assert bed.pool.get_num_free_blocks() == BLOCKS


def test_a_load_that_is_not_lost_is_reported_after_its_step(
    installed_release: str, tmp_path: Path
) -> None:
    """The same without the fault: loaded, computed further, and its blocks are free."""
    bed = Lossy(tmp_path)
    prompt = list(range(1, 41))
    for name in ("storing", "loading"):
        bed.scheduler.reset_prefix_cache()
        bed.scheduler.add_request(make_request(name, prompt))
        assert bed.run(name) < STEPS
    assert bed.loaded == ["loading"] * 2
    assert bed.pool.get_num_free_blocks() == BLOCKS
