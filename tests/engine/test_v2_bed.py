"""Model Runner V2 on a CPU: two ranks of prefill context parallelism answer as one does."""

from __future__ import annotations

from typing import Any, NamedTuple

import psutil
import pytest
import torch
import transformers

from tests.beds.checkpoints.checkpoint import Checkpoint
from tests.beds.checkpoints.mla import mla
from tests.beds.v2.engine import Answer, Batch, EngineFailed, Job, distance, run, said

pytestmark = [pytest.mark.engine, pytest.mark.area("beds")]

# float32; the ranks add up in another order. Seen: 1e-6.
TOLERANCE = 1e-5
# A step computes at most so many tokens, so the longest prompt takes three.
CHUNK = 64
# One token is shorter than the ranks are many; three are fewer than the parts two ranks make.
LENGTHS = (1, 2, 3, 37, 150, 9)
WATCH = "tests.beds.v2.worker:watch"
LOSE = "tests.beds.v2.worker:lose_rows"
MEND = "tests.beds.v2.worker:mend"
# Without the plugin; all later releases draft with several ranks.
REFUSES_DRAFTS = "0.29.0"
DRAFTS = 2
ATTENTION = 0.15


class Answers(NamedTuple):
    """What one engine said: to all prompts at once, and to the one-token prompt alone."""

    mixed: Answer
    alone: Answer
    # With two ranks: all prompts again while rank 1's KV is lost, and after that was mended.
    broken: Answer | None = None
    mended: Answer | None = None


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    # Enough attention that all tokens count, and little enough that about half of the drafts hold.
    return mla(tmp_path_factory.mktemp("v2") / "mla", draft=True, attention=ATTENTION)


def prompts(checkpoint: Checkpoint) -> list[list[int]]:
    return [checkpoint.prompt(length, seed) for seed, length in enumerate(LENGTHS)]


def batches(checkpoint: Checkpoint, *before: str) -> list[Batch]:
    """All prompts together, then the first alone."""
    asked = prompts(checkpoint)
    return [
        Batch(asked, prompt_logprobs=True, before=(*before, WATCH)),
        Batch(asked[:1], before=(WATCH,)),
    ]


def lives(worker: dict[str, Any]) -> bool:
    """Whether the very process of a worker still runs."""
    try:
        process = psutil.Process(worker["process"])
        same = process.create_time() == worker["started"]
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="session")
def one_rank(
    release: str, checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> Answers:
    job = Job(checkpoint.path, batches(checkpoint), chunk=CHUNK, args=checkpoint.engine)
    return Answers(*run(release, job, tmp_path_factory.mktemp("one-rank")))


@pytest.fixture(scope="session")
def two_ranks(
    release: str, checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> Answers:
    (broken, _), (mended, _) = batches(checkpoint, LOSE), batches(checkpoint, MEND)
    asked = [*batches(checkpoint), broken, mended]
    job = Job(checkpoint.path, asked, pcp=2, chunk=CHUNK, args=checkpoint.engine)
    return Answers(*run(release, job, tmp_path_factory.mktemp("two-ranks")))


def test_two_ranks_answer_as_one(one_rank: Answers, two_ranks: Answers) -> None:
    assert said(two_ranks.mixed) == said(one_rank.mixed)
    assert distance(two_ranks.mixed, one_rank.mixed) < TOLERANCE
    assert [len(o.prompt_logprobs) for o in two_ranks.mixed.outputs] == [n - 1 for n in LENGTHS]
    assert {len(at) for o in two_ranks.mixed.outputs for at in o.logprobs} == {128}


def test_a_prompt_shorter_than_the_ranks_are_many(one_rank: Answers, two_ranks: Answers) -> None:
    assert said(two_ranks.alone) == said(one_rank.alone)
    assert distance(two_ranks.alone, one_rank.alone) < TOLERANCE
    assert [worker["steps"][0] for worker in two_ranks.alone.workers] == [[1, 1], [1, 0]]


def test_rows_of_a_rank_that_get_lost_show(one_rank: Answers, two_ranks: Answers) -> None:
    """The negative control: the comparison sees a broken partition, and that it was mended."""
    assert two_ranks.broken and two_ranks.mended
    assert said(two_ranks.broken) != said(one_rank.mixed)
    assert distance(two_ranks.broken, one_rank.mixed) > 1e4 * TOLERANCE
    assert distance(two_ranks.mended, one_rank.mixed) < TOLERANCE


def test_one_rank_says_what_transformers_says(checkpoint: Checkpoint, one_rank: Answers) -> None:
    """An implementation that shares nothing with vLLM, all tokens in one pass, no cache."""
    model = transformers.DeepseekV3ForCausalLM.from_pretrained(checkpoint.path, dtype=torch.float32)
    worst = 0.0
    for prompt, output in zip(prompts(checkpoint), one_rank.mixed.outputs, strict=True):
        tokens = torch.tensor(prompt + output.tokens)
        with torch.no_grad():
            logprobs = model(tokens[None, :-1]).logits[0].log_softmax(-1)
        own = logprobs.gather(1, tokens[1:, None])[:, 0]
        sampled = [at[token] for at, token in zip(output.logprobs, output.tokens, strict=True)]
        told = torch.tensor(output.prompt_logprobs + sampled)
        worst = max(worst, float((own - told).abs().max()))
    assert worst < 10 * TOLERANCE


def test_what_runs_is_what_the_bed_says(one_rank: Answers, two_ranks: Answers) -> None:
    for answers, ranks in ((one_rank, 1), (two_ranks, 2)):
        workers = answers.mixed.workers
        assert [worker["rank"] for worker in workers] == list(range(ranks))
        for worker in workers:
            assert worker["runner_v2"] and worker["triton"] and worker["interpreted"]
            assert worker["attention"] == ["CPU_MLA"] and worker["pcp"] == ranks
            assert not lives(worker), "a worker outlived its engine"
    assert len({worker["process"] for worker in two_ranks.mixed.workers}) == 2


def test_each_rank_computes_its_half_of_a_chunk(two_ranks: Answers) -> None:
    first, second = (worker["steps"] for worker in two_ranks.mixed.workers)
    assert [whole for whole, _ in first[:3]] == [CHUNK] * 3, "the longest prompt isn't chunked"
    (whole, one), (_, other) = first[0], second[0]
    assert one + other == whole and abs(one - other) <= len(LENGTHS)


@pytest.mark.full
def test_drafts_hold_as_often_with_two_ranks(
    release: str, checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Tokens can't tell, since each draft is verified; how many are accepted does."""
    folder = tmp_path_factory.mktemp("drafts")
    asked, _ = batches(checkpoint)
    how = {"mtp": DRAFTS, "chunk": CHUNK, "args": checkpoint.engine}
    (alone,) = run(release, Job(checkpoint.path, [asked], **how), folder / "one")
    assert 0 < alone.accepted_at[1] < alone.accepted_at[0] < alone.drafts
    assert sum(alone.accepted_at) == alone.accepted and alone.drafted == DRAFTS * alone.drafts
    two = Job(checkpoint.path, [asked], pcp=2, **how)
    if release == REFUSES_DRAFTS:
        with pytest.raises(EngineFailed, match="PCP does not support speculative decoding"):
            run(release, two, folder / "two")
        return
    (both,) = run(release, two, folder / "two")
    assert said(both) == said(alone)
    assert distance(both, alone) < TOLERANCE
    assert (both.drafts, both.accepted_at) == (alone.drafts, alone.accepted_at)
