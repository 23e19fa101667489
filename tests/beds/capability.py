"""A plugin that gives vLLM's Llama a capability flag, with and without our remedy for the cache.

``VLLM_PLUGINS`` selects one of the two entry points, in every process including the one in which
vLLM inspects model classes: ``bare_flag`` sets the attribute as plugins do; ``kept_flag`` does it
through a part of ours that says it changes what is inspected.
"""

from __future__ import annotations

import dataclasses
import os

import pytest

from vllm_ext.core import plan
from vllm_ext.core.feature import Feature, Judgement, Part, Verdict
from vllm_ext.core.process import Process
from vllm_ext.core.release import Record, installation
from vllm_ext.core.seams import Add
from vllm_ext.features.caches.cache_keys import FEATURE as CACHE_KEYS

TARGET = "vllm.model_executor.models.llama:LlamaForCausalLM.has_noops"
LACKS = Judgement(Verdict.ACTIVE, "test")
PART = Part("flag", "", (Add(TARGET, lambda owner: True),), lambda: LACKS, inspected=True)
FLAG = Feature("TEST_FLAG", "test", "", "", (), (PART,))


def bare_flag() -> None:
    """Entry point: the flag, set the way plugins do it."""
    from vllm.model_executor.models.llama import LlamaForCausalLM

    LlamaForCausalLM.has_noops = True


def kept_flag() -> Process:
    """Entry point: the flag as a part, next to CACHE_KEYS; returns what took it in."""
    os.environ.setdefault("VLLM_EXT_SERVER_ID", "capability-test")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "record", _with_flag)
        installed = installation()
        assert installed is not None
        process = Process([CACHE_KEYS, FLAG], installed, first=False)
        process.start()
    return process


def _with_flag(release: str) -> Record | None:
    """The shipped record, which also knows the test's part: its fingerprint is not the point."""
    from vllm_ext.core.release import record

    known = record(release)
    assert known is not None
    return _Trusting(**{**vars(known), "parts": {**known.parts, FLAG.part_id(PART): LACKS}})


@dataclasses.dataclass(frozen=True)
class _Trusting(Record):
    def drift(self, root: object, targets: tuple[str, ...]) -> None:
        """Takes every source as recorded."""
