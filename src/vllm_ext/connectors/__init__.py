"""KV connectors selectable with --kv-transfer-config, as data; nothing of vLLM is imported."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

# In the ready-to-paste configurations: 4 GiB of host memory.
_BYTES = 4 * 1024**3
HOST_SPEC = "HostOffloadingSpec"
HOST_SPEC_MODULE = "vllm_ext.connectors.host_spec"


@dataclass(frozen=True)
class Connector:
    """A KV connector as an operator selects it.

    ``connector`` is vLLM's name of the class, ``part`` (``FEATURE.part``) is what makes this
    configuration work, ``extra`` goes into ``kv_connector_extra_config``.
    """

    name: str
    summary: str
    connector: str
    part: str
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> str:
        """The value of ``--kv-transfer-config``, JSON in one line."""
        return json.dumps(
            {
                "kv_connector": self.connector,
                "kv_role": "kv_both",
                "kv_connector_extra_config": self.extra,
            },
            separators=(",", ":"),
        )


CONNECTORS = (
    Connector(
        name=HOST_SPEC,
        summary="OffloadingConnector over the host copy engine, by a name of its own.",
        connector="OffloadingConnector",
        part="HOST_OFFLOAD.spec",
        extra={"spec_name": HOST_SPEC, "cpu_bytes_to_use": _BYTES},
    ),
    Connector(
        name="CPUOffloadingSpec",
        summary="OffloadingConnector as --kv-offloading-size sets it up, which then starts on CPU.",
        connector="OffloadingConnector",
        part="HOST_OFFLOAD.default_spec",
        extra={"cpu_bytes_to_use": _BYTES},
    ),
    Connector(
        name="SimpleCPUOffload",
        summary="SimpleCPUOffloadConnector, whose worker copies on the host where there is no GPU.",
        connector="SimpleCPUOffloadConnector",
        part="HOST_OFFLOAD.simple_worker",
        extra={"cpu_bytes_to_use": _BYTES},
    ),
)
