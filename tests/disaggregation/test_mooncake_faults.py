"""What one peer's failure or repetition does to the others, over Mooncake's engine and TCP."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.beds.mooncake_workers import TARGET, Imported, Instance

P, D = "kv_producer", "kv_consumer"
Get = Callable[[str, str], Imported]

# One block more than the producer has: it refuses that pull.
TOO_MANY = [*TARGET, 10]


def _frees(p: Instance, number: int = 0) -> None:
    assert all(p.freed(number)), "P still holds the blocks, though every D worker has its result"
    assert p.total("expired") == 0


@pytest.mark.ci("0.29.0", "0.33.0")
@pytest.mark.behaviour("MOONCAKE_HETERO_PP.peers", wrong=r"P frees blocks that rank 1 has not pul")
def test_a_duplicate_pull_frees_nothing(release: str, plugin: str, imported: Get) -> None:
    vllm = imported(release, plugin)
    with vllm.instance(P, [[0, 1]]) as p, vllm.instance(D, [[0, 1]], tp=2) as d:
        first, second = d.workers
        p.prefill(0)
        first.load(p, 0)
        first.settle()
        first.load(p, 0, name="again")
        first.settle()
        assert p.freed(0) == [False], "P frees blocks that rank 1 has not pulled"
        second.load(p, 0)
        second.settle()
        assert all(d.filled()) and all(d.finished(0))
        _frees(p)


@pytest.mark.full
@pytest.mark.behaviour("MOONCAKE_HETERO_PP.peers", wrong=r"P frees blocks that stage 1|D lacks KV")
def test_a_duplicate_pull_by_another_instance(release: str, plugin: str, imported: Get) -> None:
    """A proxy tries a request again elsewhere after one stage has pulled."""
    vllm = imported(release, plugin)
    two = [[0, 1], [2, 3]]
    with (
        vllm.instance(P, [[0, 1, 2, 3]]) as p,
        vllm.instance(D, two) as d,
        vllm.instance(D, two) as other,
    ):
        p.prefill(0)
        for instance in (d, other):
            instance[0].load(p, 0)
            instance.settle()
        assert not any(p.freed(0)), "P frees blocks that stage 1 has not pulled"
        other[1].load(p, 0)
        other.settle()
        assert all(other.filled()), "D lacks KV"
        _frees(p)


@pytest.mark.ci("0.29.0", "0.33.0")
@pytest.mark.behaviour("MOONCAKE_HETERO_PP.peers", wrong=r"P still holds the blocks")
def test_a_peer_whose_transfer_failed_holds_no_blocks(
    release: str, plugin: str, imported: Get
) -> None:
    vllm = imported(release, plugin)
    with vllm.instance(P, [[0, 1]]) as p, vllm.instance(D, [[0, 1]], tp=2) as d:
        p.prefill(0)
        d.workers[0].load(p, 0, blocks=TOO_MANY)
        d.workers[0].settle()
        assert p.freed(0) == [False]
        d.workers[1].load(p, 0)
        d.workers[1].settle()
        assert d.filled()[1] and d.finished(0)[1]
        _frees(p)
        assert d.failed(0) == [True, False]


@pytest.mark.full
@pytest.mark.behaviour("MOONCAKE_HETERO_PP.peers", wrong=r"P still holds the blocks")
def test_all_peers_fail_before_the_prefill_ends(release: str, plugin: str, imported: Get) -> None:
    """Layers that don't fit are refused at once; the request is computed afterwards."""
    vllm = imported(release, plugin)
    with vllm.instance(P, [[0, 1]]) as p, vllm.instance(D, [[0]]) as d:
        # Without its introduction it is a stock worker to P, which refuses it.
        d.everyone("forget_introduction")
        p.everyone("prefilled", "p0", "t0", [])
        d.load(p, 0)
        p.prefill(0)
        _frees(p)


@pytest.mark.full
@pytest.mark.parametrize("consumer", [{"tp": 2}, {"pp": 2}], ids=["TP2", "PP2"])
@pytest.mark.behaviour("MOONCAKE_HETERO_PP.peers", wrong=r"P still holds the blocks|not get its KV")
def test_a_peer_that_is_killed_holds_no_blocks(
    release: str, plugin: str, imported: Get, consumer: dict[str, int]
) -> None:
    """It dies while its pull waits for the prefill: the transfer to it fails."""
    vllm = imported(release, plugin)
    partition = [[0], [1]] if "pp" in consumer else [[0, 1]]
    with (
        vllm.instance(P, [[0, 1]]) as p,
        vllm.instance(D, partition, tp=consumer.get("tp", 1)) as d,
    ):
        doomed, other = d.workers
        p.everyone("prefilled", "p0", "t0", [])
        for worker in d.workers:
            worker.load(p, 0)
        assert p.everyone("asked", 2) == [2]
        doomed.kill()
        d.workers.remove(doomed)
        p.prefill(0)
        assert p.everyone("ended", 2) == [2]
        other.settle()
        assert d.filled() == [True], "the other worker does not get its KV"
        assert d.finished(0) == [True]
        _frees(p)


@pytest.mark.ci("0.29.0", "0.33.0")
@pytest.mark.behaviour("MOONCAKE_HETERO_PP.failed_pulls", wrong=r"D waits for ever")
def test_a_refused_pull_is_reported(release: str, plugin: str, imported: Get) -> None:
    vllm = imported(release, plugin)
    with vllm.instance(P, [[0, 1]]) as p, vllm.instance(D, [[0, 1]]) as d:
        p.prefill(0)
        d.load(p, 0, blocks=TOO_MANY)
        assert d.failed(0) == [True], "D waits for ever: no pull is under way and none has failed"
        assert d.everyone("step")[0]["failed_blocks"] == sorted(TOO_MANY)
        p.prefill(1)
        d.load(p, 1)
        assert d.filled() == [True]


@pytest.mark.full
@pytest.mark.behaviour("MOONCAKE_HETERO_PP.failed_pulls", wrong=r"D waits for ever")
def test_a_producer_that_is_unknown_is_reported(release: str, plugin: str, imported: Get) -> None:
    vllm = imported(release, plugin)
    with vllm.instance(P, [[0, 1]]) as p, vllm.instance(D, [[0, 1]]) as d:
        p.engine = "another"
        d.load(p, 0)
        assert d.failed(0) == [True], "D waits for ever: no pull is under way and none has failed"


@pytest.mark.full
@pytest.mark.behaviour("MOONCAKE_HETERO_PP.failed_pulls", wrong=r"D waits for ever")
def test_a_late_pull_is_a_failed_one(release: str, plugin: str, imported: Get) -> None:
    """P has freed the request, so the pull waits for a prefill that never comes (here: 1 s)."""
    vllm = imported(release, plugin)
    with vllm.instance(P, [[0, 1]], timeout=1) as p, vllm.instance(D, [[0, 1]]) as d:
        p.prefill(0)
        d.load(p, 0)
        assert all(p.freed(0)) and all(d.filled())
        d.load(p, 0, name="late", blocks=[1, 2, 3])
        assert d.failed(0, "late") == [True], "D waits for ever: no pull is under way"
        # Not a byte of it was written.
        assert d.filled() == [True]


@pytest.mark.full
@pytest.mark.behaviour("MOONCAKE_HETERO_PP.failed_pulls", wrong=r"D waits for ever")
def test_an_older_producer_is_an_error_and_no_hang(
    release: str, plugin: str, imported: Get
) -> None:
    stock = imported("0.29.0", "without")
    with stock.instance(P, [[0, 1]]) as p, imported(release, plugin).instance(D, [[0], [1]]) as d:
        p.prefill(0)
        d.load(p, 0)
        assert d.failed(0) == [True, True], "D waits for ever: no pull is under way"


@pytest.mark.full
@pytest.mark.behaviour("MOONCAKE_HETERO_PP.old_peer", wrong=r"P's log has 0 lines")
def test_an_older_consumer_is_named_in_one_line(release: str, plugin: str, imported: Get) -> None:
    stock = imported("0.29.0", "without")
    with imported(release, plugin).instance(P, [[0, 1]]) as p, stock.instance(D, [[0], [1]]) as d:
        for number in range(2):
            p.prefill(number)
            d.load(p, number)
        lines = p.log().count("pulls without telling its pipeline size")
        assert lines == 2, f"P's log has {lines} lines for two workers that don't tell"
        _frees(p)


@pytest.mark.full
@pytest.mark.behaviour("MOONCAKE_HETERO_PP.unreported", wrong=r"D waits for ever")
def test_a_request_that_expires_under_a_pull_is_reported(
    release: str, plugin: str, imported: Get
) -> None:
    vllm = imported(release, plugin)
    with vllm.instance(P, [[0, 1]]) as p, vllm.instance(D, [[0, 1]]) as d:
        d[0].load(p, 0)
        assert p.everyone("waiting", "t0") == [True]
        p.everyone("expire", "t0")
        d.settle()
        assert d.failed(0) == [True], "D waits for ever: no pull is under way and none has failed"
