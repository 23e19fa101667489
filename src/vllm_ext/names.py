"""Environment variables of the plugin as a whole."""

from __future__ import annotations

PREFIX = "VLLM_EXT_"
DISABLE = PREFIX + "DISABLE"
STRICT = PREFIX + "STRICT"
SERVER_ID = PREFIX + "SERVER_ID"
