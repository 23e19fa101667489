"""Prefill and decode instances with different pipelines, over Mooncake's engine and TCP."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tests.beds.mooncake_workers import Imported

P, D = "kv_producer", "kv_consumer"
Partition = Sequence[Sequence[int]]
Get = Callable[[str, str], Imported]

ONE: Partition = [[0, 1, 2, 3]]
TWO: Partition = [[0, 1], [2, 3]]
FOUR: Partition = [[0], [1], [2], [3]]
UNEVEN: Partition = [[0, 1, 2], [3]]


def _transfer(vllm: Imported, producer: Partition, consumer: Partition, tp: int = 1) -> None:
    """One stage pulls after another; P frees nothing before the last has what it needs."""
    with (
        vllm.instance(P, producer, tp=tp) as p,
        vllm.instance(D, consumer, tp=tp) as d,
    ):
        p.prefill(0)
        *early, last = [worker.pp_rank for worker in d.workers if worker.tp_rank == 0]
        for stage in early:
            for worker in d.workers:
                if worker.pp_rank == stage:
                    worker.load(p, 0)
            d.settle()
        # What all stages share can't be free while one has yet to come.
        shared = [at for at, layers in enumerate(producer) if set(layers) & set(consumer[last])]
        held = [w.pp_rank for w, freed in zip(p.workers, p.freed(0), strict=True) if not freed]
        assert set(shared) <= set(held), f"P freed stages before stage {last} of D pulled"
        for worker in d.workers:
            if worker.pp_rank == last:
                worker.load(p, 0)
        d.settle()
        filled = d.filled()
        assert all(filled), f"{filled.count(True)} of {len(filled)} D workers have all their KV"
        over = d.finished(0)
        assert all(over), f"{over.count(True)} of {len(over)} D workers go on"
        assert all(p.freed(0)), "P holds blocks that all of D has pulled"
        assert p.total("expired") == 0


@pytest.mark.ci("0.29.0", "0.33.0")
@pytest.mark.behaviour("MOONCAKE_HETERO_PP.hetero_pp", wrong=r"0 of 2 D workers have all their KV")
def test_p_with_one_stage_serves_d_with_two(release: str, plugin: str, imported: Get) -> None:
    _transfer(imported(release, plugin), ONE, TWO)


@pytest.mark.full
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("producer", [ONE, FOUR], ids=["P1", "P4"])
@pytest.mark.behaviour("MOONCAKE_HETERO_PP.hetero_pp", wrong=r"0 of [24] D workers (have|go)")
def test_d_with_two_stages_gets_all_its_layers(
    release: str, plugin: str, imported: Get, producer: Partition, tp: int
) -> None:
    _transfer(imported(release, plugin), producer, TWO, tp)


@pytest.mark.full
@pytest.mark.area("disaggregation")
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("shape", [(TWO, ONE), (TWO, TWO), (ONE, ONE)], ids=["P2/D1", "P2/D2", "1"])
@pytest.mark.parametrize("sides", ["with/with", "with/without", "without/with", "without/without"])
def test_what_works_without_the_plugin_works_with_it_on_either_side(
    release: str, imported: Get, shape: tuple[Partition, Partition], tp: int, sides: str
) -> None:
    ours, theirs = sides.split("/")
    producer, consumer = shape
    with (
        imported(release, ours).instance(P, producer, tp=tp) as p,
        imported(release, theirs).instance(D, consumer, tp=tp) as d,
    ):
        for number in range(2):
            p.prefill(number)
            d.load(p, number)
            assert all(d.filled()) and all(d.finished(number)) and all(p.freed(number))
        assert p.total("pulls") == 2 * tp * max(len(producer), len(consumer))
        assert p.total("expired") == 0


@pytest.mark.full
@pytest.mark.area("disaggregation")
@pytest.mark.parametrize("other", ["0.29.0", "0.33.0"])
@pytest.mark.parametrize("plugin", ["with", "without"])
@pytest.mark.parametrize("newer_side", [P, D])
def test_pipelines_differ_between_releases(
    release: str, imported: Get, other: str, plugin: str, newer_side: str
) -> None:
    """The other side is stock where it speaks of its pipeline by itself, else ours."""
    mine = imported(release, "with")
    theirs = imported(other, "with" if other == "0.29.0" else plugin)
    first, second = (mine, theirs) if newer_side == P else (theirs, mine)
    with first.instance(P, ONE) as p, second.instance(D, TWO) as d:
        p.prefill(0)
        d.load(p, 0)
        assert all(d.filled()) and all(d.finished(0)) and all(p.freed(0))
        assert p.total("expired") == 0


@pytest.mark.ci("0.29.0", "0.33.0")
@pytest.mark.behaviour("MOONCAKE_HETERO_PP.stages", wrong=r"stages of D lack layers")
def test_same_number_of_stages_with_another_partition(
    release: str, plugin: str, imported: Get
) -> None:
    vllm = imported(release, plugin)
    with vllm.instance(P, UNEVEN) as p, vllm.instance(D, TWO) as d:
        for number in range(2):
            p.prefill(number)
            d.load(p, number)
            filled = d.filled()
            assert all(filled), f"{filled.count(False)} stages of D lack layers"
            assert all(d.finished(number)) and all(p.freed(number))
        # Decode workers that drop a request say so to everyone they would have pulled from.
        p.prefill(2)
        d.load(p, 2, blocks=[])
        assert all(p.freed(2))
        # So do those whose pull from their own stage fails: that stage has three blocks.
        p.prefill(3)
        d[1].load(p, 3, blocks=[7, 9, 8, 10])
        d[0].load(p, 3)
        d.settle()
        assert d.failed(3) == [False, True]
        assert all(p.freed(3))
        assert p.total("expired") == 0


@pytest.mark.full
@pytest.mark.behaviour("MOONCAKE_HETERO_PP.stages", wrong=r"goes on without layer 4")
def test_a_layer_that_no_prefill_stage_has_fails_the_load(
    release: str, plugin: str, imported: Get
) -> None:
    vllm = imported(release, plugin)
    with vllm.instance(P, TWO) as p, vllm.instance(D, [[0, 1, 2, 3, 4]]) as d:
        p.prefill(0)
        d.load(p, 0)
        assert d.finished(0) == [False], "D goes on without layer 4"
        assert d.failed(0) == [True]
        assert "no prefill worker holds model.layers.4" in d.log()
        assert all(p.freed(0))


@pytest.mark.full
@pytest.mark.behaviour("MOONCAKE_HETERO_PP.stages", wrong=r"no line names the draft layer")
def test_a_draft_layer_that_p_lacks_costs_a_line_and_no_request(
    release: str, plugin: str, imported: Get
) -> None:
    vllm = imported(release, plugin)
    with (
        vllm.instance(P, TWO) as p,
        vllm.instance(D, [[0, 1, 2, 3, 4]], model_layers=4, draft=True) as d,
    ):
        p.prefill(0)
        d.load(p, 0)
        assert d.finished(0) == [True]
        assert "draft layers ['model.layers.4" in d.log(), "no line names the draft layer"
        assert all(p.freed(0))


@pytest.mark.full
@pytest.mark.behaviour("MOONCAKE_HETERO_PP.stages", wrong=r"8 pulls for the last request")
def test_stages_that_share_no_layer_stop_pulling(release: str, plugin: str, imported: Get) -> None:
    vllm = imported(release, plugin)
    with vllm.instance(P, FOUR) as p, vllm.instance(D, TWO) as d:
        counts = []
        for number in range(4):
            before = p.total("pulls")
            p.prefill(number)
            d.load(p, number)
            counts.append(p.total("pulls") - before)
        assert counts[0] == 8
        assert counts[-1] == 4, f"{counts[-1]} pulls for the last request"
        assert all(d.filled()) and all(p.freed(number)) and all(d.finished(number))
        assert p.total("expired") == 0
    with vllm.instance(P, FOUR) as p, vllm.instance(D, TWO, engine="fixed") as d:
        for number in range(3):
            p.prefill(number)
            d.load(p, number)
        # Started anew under the same name, it knows nothing of what it was excused from.
        with vllm.instance(D, TWO, engine="fixed") as again:
            p.prefill(3)
            again[0].load(p, 3)
            again.settle()
            assert not any(p.freed(3))
            again[1].load(p, 3)
            again.settle()
            assert all(again.filled()) and all(p.freed(3))
