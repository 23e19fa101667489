"""Probes of MOONCAKE_HETERO_PP: real workers of both sides, over a played engine and network."""

from __future__ import annotations

import logging
from typing import Any

from vllm_ext.core.feature import Judgement, Verdict
from vllm_ext.features.disaggregation.mooncake_play import Play, mooncake

_P, _D = "kv_producer", "kv_consumer"


def hetero_pp() -> Judgement:
    """A producer of one stage, a consumer of two."""
    with mooncake() as play:
        producer = play.worker(_P, [0, 1])
        stages = [play.worker(_D, [at], pp=(at, 2)) for at in range(2)]
        play.prefilled(producer, "p0", "t", [1, 2])
        for stage in stages:
            play.load(stage, "d0", "t", [3, 4])
            play.settle(stage)
        good = [play.received(stage) == ({"d0"}, set()) for stage in stages]
        freed = play.sent(producer) == {"p0"}
    if all(good) and freed:
        return Judgement(Verdict.NATIVE, "both stages of a D pull from a P with one stage")
    return Judgement(
        Verdict.ACTIVE, f"{good.count(True)} of 2 stages of a D get KV from a P with one stage"
    )


def _two_peers(play: Play) -> tuple[Any, list[Any]]:
    """A producer of one rank, a consumer of two, all on one stage."""
    producer = play.worker(_P, [0])
    consumers = [play.worker(_D, [0], tp=(rank, 2)) for rank in range(2)]
    play.prefilled(producer, "p0", "t", [1, 2])
    return producer, consumers


def peers() -> Judgement:
    """One of two peers pulls twice; one of two fails."""
    with mooncake() as play:
        producer, (first, second) = _two_peers(play)
        for request in ("d0", "again"):
            play.load(first, request, "t", [3, 4])
            play.settle(first)
        if play.sent(producer):
            return Judgement(
                Verdict.ACTIVE, "P frees blocks when one of two D workers has pulled twice"
            )
        play.load(second, "d0", "t", [3, 4])
        play.settle(second)
        if not play.sent(producer):
            return Judgement(Verdict.ACTIVE, "P holds blocks after both D workers have pulled")
    with mooncake() as play:
        producer, (first, second) = _two_peers(play)
        producer.engine.status = -1
        play.load(first, "d0", "t", [3, 4])
        play.settle(first)
        producer.engine.status = 0
        play.load(second, "d0", "t", [3, 4])
        play.settle(second)
        if play.sent(producer):
            return Judgement(Verdict.NATIVE, "P counts D workers, those that failed too")
    return Judgement(
        Verdict.ACTIVE, "P holds blocks until they expire if the transfer to a D worker failed"
    )


def failed_pulls() -> Judgement:
    """Pulls that the producer refuses, one by one and as a whole."""
    with mooncake() as play:
        producer, consumer = play.worker(_P, [0]), play.worker(_D, [0])
        play.prefilled(producer, "p0", "t", [1])
        play.load(consumer, "d0", "t", [3, 4])
        play.settle(consumer)
        one = play.received(consumer)
    with mooncake() as play:
        producer, consumer = play.worker(_P, [0]), play.worker(_D, [1])
        play.prefilled(producer, "p0", "t", [1])
        play.load(consumer, "d0", "t", [3])
        play.settle(consumer)
        whole = play.received(consumer)
    if one == ({"d0"}, {3, 4}) and whole == ({"d0"}, {3}):
        return Judgement(Verdict.NATIVE, "a D worker reports a pull that P refused")
    return Judgement(Verdict.ACTIVE, "a D worker never reports a pull that P refused")


def unreported() -> Judgement:
    """A request that expires on the producer while a pull of it is being served."""
    with mooncake() as play:
        producer, consumer = play.worker(_P, [0]), play.worker(_D, [0])
        if not hasattr(consumer, "_handle_failed_recv"):
            return Judgement(
                Verdict.IDLE, "this release reports no failed pull; failed_pulls brings all of it"
            )
        play.load(consumer, "d0", "t", [3])

        def expire() -> bool:
            if "t" not in producer.reqs_need_send:
                return False
            producer.reqs_need_send.pop("t").ready.set()
            return True

        while not play.on_loop(producer, expire):
            pass
        play.settle(consumer)
        if play.received(consumer) == ({"d0"}, {3}):
            return Judgement(Verdict.NATIVE, "a pull that P ends without a result has failed")
    return Judgement(
        Verdict.ACTIVE, "a D worker waits for ever if P ends a pull without a result for a request"
    )


def coverage() -> Judgement:
    """A consumer with more layers than the producer."""
    with mooncake() as play:
        producer, consumer = play.worker(_P, [0]), play.worker(_D, [0, 1])
        play.prefilled(producer, "p0", "t", [1])
        pull = play.load(consumer, "d0", "t", [3])
        play.settle(consumer)
        # On 0.29.0 failed_pulls reports it to the scheduler.
        if not vars(pull).get("failed"):
            return Judgement(
                Verdict.ACTIVE, "a D with layers 0 and 1 goes on with layer 0 alone from P"
            )
    return Judgement(Verdict.NATIVE, "a D counts its layers")


def stages() -> Judgement:
    """The same, and stages that share no layer; those need the parts before this one as well."""
    counted = coverage()
    if counted.verdict is not Verdict.NATIVE:
        return counted
    with mooncake() as play:
        producers = [play.worker(_P, [at], pp=(at, 4)) for at in range(4)]
        consumers = [play.worker(_D, [2 * at, 2 * at + 1], pp=(at, 2)) for at in range(2)]
        counts = []
        for number in range(3):
            before = play.pulls
            for producer in producers:
                play.prefilled(producer, f"p{number}", f"t{number}", [1])
            for consumer in consumers:
                play.load(consumer, f"d{number}", f"t{number}", [3])
                play.settle(consumer)
            counts.append(play.pulls - before)
            if not all(play.sent(producer) for producer in producers):
                return Judgement(Verdict.ACTIVE, "P holds blocks that all stages have pulled")
        if counts[2] == 4:
            return Judgement(Verdict.NATIVE, "a D counts its layers; 4 P and 2 D stages: 4 pulls")
    return Judgement(Verdict.ACTIVE, f"4 P stages and 2 D stages need {counts[2]} pulls a request")


def old_peer() -> Judgement:
    """A pull without a pipeline size, by a worker that holds a part of the layers."""
    from msgspec import msgpack

    lines: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    with mooncake() as play:
        producer, consumer = play.worker(_P, [0, 1]), play.worker(_D, [0])
        consumer._encoder = msgpack.Encoder()
        logger = logging.getLogger(type(producer).__module__)
        logger.addHandler(listener)
        # Whatever this process wants to be told.
        level = logger.level
        logger.setLevel(logging.WARNING)
        try:
            for number in range(2):
                play.load(consumer, f"d{number}", f"t{number}", [3])
                play.settle(consumer)
        finally:
            logger.setLevel(level)
            logger.removeHandler(listener)
    named = [line for line in lines if "without telling its pipeline size" in line]
    if len(named) == 1:
        return Judgement(Verdict.NATIVE, "a D that doesn't tell its pipeline size is named once")
    return Judgement(
        Verdict.ACTIVE, "nothing in P's log names a D that doesn't tell its pipeline size"
    )
