"""Effect counters and verdicts of a server on its /metrics, read from the same pages as status."""

from __future__ import annotations

import logging
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from vllm_ext.core.report import reports
from vllm_ext.core.status import verdict
from vllm_ext.names import SERVER_ID

logger = logging.getLogger("vllm.vllm_ext")
_known: weakref.WeakSet[Any] = weakref.WeakSet()


class EffectCollector:
    """A Prometheus collector over all processes of this server on this host.

    ``vllm_ext_effects_total{feature,part}`` and ``vllm_ext_feature_info{feature,part,verdict,...}``
    with the verdicts of the process that answers, and what can't be honoured in any other.
    """

    def collect(self) -> Iterator[Any]:
        """Metric families; none if something is wrong with the reports: /metrics must answer."""
        try:
            yield from self._families()
        except Exception:
            logger.debug("vllm-ext has nothing for /metrics", exc_info=True)

    def _families(self) -> list[Any]:
        from prometheus_client.core import CounterMetricFamily, InfoMetricFamily

        effects = CounterMetricFamily(
            "vllm_ext_effects", "What parts of vllm-ext changed", labels=["feature", "part"]
        )
        info = InfoMetricFamily(
            "vllm_ext_feature", "Verdicts of vllm-ext", labels=["feature", "part"]
        )
        total: Counter[str] = Counter()
        told: set[tuple[str, str, str, str]] = set()
        for report in reports(os.environ.get(SERVER_ID, "none")):
            total.update(report.effects)
            own = report.pid == os.getpid() and report.here
            for part_id, (word, _) in report.parts.items() if own or report.live else ():
                if own or not verdict(word).honoured:
                    total.setdefault(part_id, 0)
                    told.add((part_id, word, report.vllm, report.plugin))
        for part_id, word, vllm, plugin in sorted(told):
            info.add_metric(part_id.split("."), {"verdict": word, "vllm": vllm, "plugin": plugin})
        for part_id, count in sorted(total.items()):
            effects.add_metric(part_id.split("."), count)
        return [effects, info] if total else []


def registry(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """vLLM's registry, single-process or multi-process, with our collector in it once."""
    found = original(*args, **kwargs)
    if found not in _known:
        _known.add(found)
        found.register(EffectCollector())
    return found
