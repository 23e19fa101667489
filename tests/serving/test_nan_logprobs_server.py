"""NAN_LOGPROBS on real servers: the whole matrix of requests, and what else is in their batch."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.beds.corrupt import CorruptLlama, corrupt_llama
from tests.beds.logprob_requests import FLOOR, TOKENS, Answer, ask, cases, floors, words_of
from tests.beds.serving import serve
from vllm_ext.checks.server import Server

pytestmark = [pytest.mark.engine, pytest.mark.ci("0.29.0", "0.33.0")]

LONG = 24
NOT_COMPLIANT = "Out of range float values are not JSON compliant"


@dataclass
class Served:
    """A running server, its model, and what it answered.

    ``alone``: mates (clean prompts) one after another; ``together``: the same, all at once with
    ``corrupt`` prompts; ``matrix``: by kind of words and name of the case.
    """

    server: Server
    model: CorruptLlama
    alone: dict[str, Any] = field(default_factory=dict)
    together: dict[str, Any] = field(default_factory=dict)
    matrix: dict[tuple[str, str], Answer] = field(default_factory=dict)

    @property
    def mates(self) -> list[str]:
        words = self.model.clean_words
        return [" ".join(words[:3]), " ".join(words[10:50]), " ".join(words[60:64])]

    @property
    def corrupt(self) -> list[str]:
        return [f"{self.mates[0]} {self.model.nan_word}", f"{self.mates[1]} {self.model.inf_word}"]

    def text(self, *prompts: str) -> dict[str, Any]:
        """One /v1/completions request for these prompts; each one's choice, or what went wrong."""
        body = {"model": str(self.model.path), "temperature": 0, "ignore_eos": True, "logprobs": 2}
        reply = self.server.post(
            "/v1/completions", {**body, "max_tokens": LONG, "prompt": list(prompts)}
        )
        if reply.status_code != 200:
            return dict.fromkeys(prompts, f"HTTP {reply.status_code}: {reply.text}")
        choices = sorted(reply.json()["choices"], key=lambda choice: choice["index"])
        return dict(zip(prompts, map(_bits, choices), strict=True))

    def ask_all(self, kind: str) -> None:
        """Every request of the matrix with words of one kind."""
        words = words_of(self.model)[kind]
        for case in cases():
            self.matrix[kind, case.name] = ask(self.server, self.model, case, words)


def scale_out(release: str) -> list[str]:
    """What switches /inference/v1/generate on; 0.29.0 has it without."""
    return [] if release == "0.29.0" else ["--enable-scale-out"]


@pytest.fixture(scope="session")
def served(release: str, plugin: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server per release and plugin setting, in the batch-invariant setting of the CPU build.

    NaN comes last: vLLM leaves it in KV blocks that it uses again, where it spoils clean requests.
    """
    folder = tmp_path_factory.mktemp(f"nan-{release}-{plugin}")
    model = corrupt_llama(folder / "model", dtype="bfloat16")
    env = {"VLLM_CPU_ATTN_SPLIT_KV": "0"}
    args = scale_out(release)
    with serve(model, release, folder / "log", plugin=plugin, args=args, env=env) as server:
        made = Served(server, model)
        for prompt in made.mates:
            made.alone |= made.text(prompt)
        made.ask_all("clean")
        made.ask_all("+inf")
        *several, single = made.mates
        with ThreadPoolExecutor(2) as pool:
            both = [pool.submit(made.text, *made.corrupt, *several), pool.submit(made.text, single)]
        for answered in both:
            made.together |= answered.result()
        made.ask_all("NaN")
        yield made


def _bits(choice: dict[str, Any]) -> tuple[Any, ...]:
    """What must not change by a bit; JSON keeps every bit of a float."""
    return choice["text"], choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]


@pytest.mark.behaviour("NAN_LOGPROBS.completions", wrong=f"HTTP 400: .*{NOT_COMPLIANT}")
def test_the_rest_of_the_batch_equals_its_run_alone(served: Served) -> None:
    """Bit for bit: choices of the same request, and another request at the same time."""
    for prompt in served.mates:
        assert served.together[prompt] == served.alone[prompt], served.together[prompt]
    for prompt in served.corrupt:
        _, logprobs, _ = served.together[prompt]
        assert logprobs == [FLOOR] * LONG


def _check(served: Served, part: str) -> None:
    """Every request of the matrix that a part is for, clean and corrupt.

    What is wrong is told as: how many corrupt requests are, how many of them by HTTP 400, how many
    by null, and of how many; and likewise how many clean ones.
    """
    chosen = [case for case in cases() if case.part == part]
    assert chosen
    wrong: dict[str, str] = {}
    clean: dict[str, str] = {}
    asked = 0
    for case in chosen:
        answer = served.matrix["clean", case.name]
        if answer.problem or FLOOR in (*answer.sampled, *answer.others):
            clean[case.name] = answer.problem or f"{FLOOR} in {answer.sampled}"
        for kind in ("+inf", "NaN"):
            asked += 1
            answer = served.matrix[kind, case.name]
            if problem := answer.problem or floors(answer, case, kind):
                wrong[f"{case.name} with {kind}"] = problem
    refused = [told for told in wrong.values() if told == f"HTTP 400 {NOT_COMPLIANT}"]
    nulls = [told for told in wrong.values() if told.startswith("null for")]
    assert not wrong and not clean, (
        f"{len(refused)} refused + {len(nulls)} null = {len(refused) + len(nulls)} "
        f"of {asked} corrupt, {len(clean)} clean wrong: {wrong} {clean}"
    )


# Without the plugin every corrupt request is answered with HTTP 400 or, streamed, with null.
def _all_wrong(refused: int, nulls: int) -> str:
    return rf"^{refused} refused \+ {nulls} null = (\d+) of \1 corrupt, 0 clean wrong"


@pytest.mark.behaviour("NAN_LOGPROBS.completions", wrong=_all_wrong(10, 8))
def test_completions(served: Served) -> None:
    _check(served, "completions")


@pytest.mark.behaviour("NAN_LOGPROBS.chat", wrong=_all_wrong(10, 6))
def test_chat(served: Served) -> None:
    _check(served, "chat")


@pytest.mark.behaviour("NAN_LOGPROBS.responses", wrong=_all_wrong(2, 2))
def test_responses(served: Served) -> None:
    _check(served, "responses")


@pytest.mark.behaviour("NAN_LOGPROBS.prompt_logprobs", wrong=_all_wrong(6, 0))
def test_prompt_logprobs(served: Served) -> None:
    _check(served, "prompt_logprobs")


@pytest.mark.behaviour("NAN_LOGPROBS.token_in", wrong=_all_wrong(2, 2))
def test_token_in(served: Served) -> None:
    _check(served, "token_in")


@pytest.mark.behaviour("NAN_LOGPROBS.completions", wrong=f"HTTP 400: .*{NOT_COMPLIANT}")
def test_a_prompt_that_is_cached_is_answered_the_same(served: Served) -> None:
    """Its second run finds the blocks before the NaN by prefix."""
    words = served.model.clean_words
    prompt = " ".join((*words[20:180], served.model.nan_word, *words[:20]))
    answers = []
    for _ in range(2):
        hits = served.server.metric("vllm:prefix_cache_hits_total")
        answer = served.text(prompt)[prompt]
        assert answer[1] == [FLOOR] * LONG, answer
        answers.append(answer)
    assert served.server.metric("vllm:prefix_cache_hits_total") > hits
    assert answers[0] == answers[1]


@pytest.mark.full
@pytest.mark.behaviour(
    "NAN_LOGPROBS.token_in_inf",
    wrong=rf"^\['HTTP 400 {NOT_COMPLIANT}', 'null for 8 of \d+ logprobs'\]",
)
def test_token_in_with_raw_logits(release: str, plugin: str, tmp_path: Path) -> None:
    """The +inf of one logit is one value of its row then; all others stay what they are."""
    model = corrupt_llama(tmp_path / "model", dtype="bfloat16")
    args = ["--logprobs-mode", "raw_logits", *scale_out(release)]
    chosen = [case for case in cases() if case.part == "token_in"]
    words = words_of(model)["+inf"]
    with serve(model, release, tmp_path / "log", plugin=plugin, args=args) as server:
        answers = [ask(server, model, case, words) for case in chosen]
    problems = [answer.problem for answer in answers]
    assert not any(problems), problems
    for answer in answers:
        # The token with that logit is sampled every time; as a candidate it is told once more.
        assert answer.sampled.count(FLOOR) == 2 * TOKENS
        assert len(set(answer.sampled)) > TOKENS
