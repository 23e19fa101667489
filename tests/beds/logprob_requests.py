"""Every way to ask a server for logprobs, and a strict reading of what it answers.

Strict: JSON without NaN and Infinity, bodies and stream events that the ``openai`` client's types
accept, numbers wherever a logprob stands. The one logprob that is null by contract is that of the
first token of a prompt, which nothing predicts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseContentPartDoneEvent,
    ResponseOutputItemDoneEvent,
    ResponseTextDeltaEvent,
    ResponseTextDoneEvent,
)
from pydantic import ValidationError

from tests.beds.corrupt import CorruptLlama
from vllm_ext.checks.server import Reply, Server

TOKENS = 4
FLOOR = -9999.0
# By the type that events of /v1/responses have; everything else has none.
_SCHEMAS: dict[str, tuple[Mapping[str | None, Any], Mapping[str | None, Any]]] = {
    "/v1/completions": ({None: Completion}, {None: Completion}),
    "/v1/chat/completions": ({None: ChatCompletion}, {None: ChatCompletionChunk}),
    "/v1/chat/completions/batch": ({None: ChatCompletion}, {}),
    "/v1/responses": (
        {None: Response},
        {
            "response.output_text.delta": ResponseTextDeltaEvent,
            "response.output_text.done": ResponseTextDoneEvent,
            "response.content_part.done": ResponseContentPartDoneEvent,
            "response.output_item.done": ResponseOutputItemDoneEvent,
            "response.completed": ResponseCompletedEvent,
        },
    ),
}


@dataclass(frozen=True)
class Case:
    """One request but for its words: the part that repairs it, where it goes, what it asks for.

    ``values``: how many logprobs of a corrupt request's generated tokens there are, candidates
    included; all of them must be -9999.0. 0: any number of them may be (of a prompt, and of beam
    search, which goes on with what is finite).
    """

    name: str
    part: str
    path: str
    body: Mapping[str, Any]
    values: int = 0
    stream: bool = False

    def request(self, model: CorruptLlama, words: tuple[str, ...]) -> dict[str, Any]:
        """The body of the request with these words as its prompt."""
        text = " ".join(words)
        sampling = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
        body: dict[str, Any] = {"stream": True} if self.stream else {}
        if self.path == "/inference/v1/generate":
            own = self.body["sampling_params"]
            return {**body, "token_ids": model.ids(*words), "sampling_params": {**sampling, **own}}
        body |= {"model": str(model.path), **sampling, **self.body}
        if self.path == "/v1/responses":
            del body["max_tokens"]
            return {**body, "input": text, "max_output_tokens": TOKENS}
        if self.path == "/v1/completions":
            several = [" ".join(model.clean_words[:3]), text]
            return {**body, "prompt": several if "several" in self.name else text}
        turn = [{"role": "user", "content": text}]
        return {**body, "messages": [turn] if self.path.endswith("batch") else turn}


def _both(case: Case) -> Iterator[Case]:
    yield case
    yield Case(**{**case.__dict__, "name": f"{case.name}, stream", "stream": True})


def cases() -> list[Case]:
    """The matrix: endpoint, kind of logprobs, stream or not."""
    top = 2
    texts, chat, tokens = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
    sampled = {"n": 2, "temperature": 1.0, "seed": 1}
    beams = {"use_beam_search": True, "n": 2}
    asked = {"logprobs": True, "top_logprobs": top}
    many = TOKENS * (1 + top)
    found = [
        *_both(Case("completions", "completions", texts, {"logprobs": top}, TOKENS)),
        *_both(
            Case("completions, echo", "completions", texts, {"logprobs": 1, "echo": True}, TOKENS)
        ),
        *_both(
            Case("completions, n=2", "completions", texts, {"logprobs": 1, **sampled}, 2 * TOKENS)
        ),
        *_both(Case("completions, several", "completions", texts, {"logprobs": 1}, TOKENS)),
        Case("completions, beams", "completions", texts, {"logprobs": 1, **beams}),
        *_both(Case("chat", "chat", chat, asked, many)),
        *_both(Case("chat, no top", "chat", chat, {"logprobs": True}, TOKENS)),
        *_both(Case("chat, n=2", "chat", chat, {**asked, **sampled}, 2 * many)),
        Case("chat, batch", "chat", f"{chat}/batch", asked, many),
        Case("chat, beams", "chat", chat, {**asked, **beams}),
        *_both(
            Case(
                "responses",
                "responses",
                "/v1/responses",
                {"top_logprobs": top, "include": ["message.output_text.logprobs"]},
                many,
            )
        ),
        *_both(Case("token-in", "token_in", tokens, {"sampling_params": {"logprobs": top}}, many)),
        Case("completions, prompt", "prompt_logprobs", texts, {"prompt_logprobs": 1}),
        Case("chat, prompt", "prompt_logprobs", chat, {"prompt_logprobs": 1}),
        Case(
            "token-in, prompt",
            "prompt_logprobs",
            tokens,
            {"sampling_params": {"prompt_logprobs": 1}},
        ),
    ]
    return found


def words_of(model: CorruptLlama) -> dict[str, tuple[str, ...]]:
    """A prompt of each kind; the corrupt ones have logprobs of both halves to spoil."""
    one, two, three, *_ = model.clean_words
    return {
        "clean": (one, two, three),
        "+inf": (one, model.inf_word, two, model.inf_word),
        "NaN": (one, model.nan_word, two, three),
    }


@dataclass
class Answer:
    """What came back, read strictly.

    ``sampled`` holds the logprobs of what was generated (of an echoed prompt too), ``others`` those
    of candidates in /v1/completions, of prompts, and those told again at the end of a stream; None
    where null stands though a number must. ``problem`` is empty for an answer a client can use.
    """

    status: int
    problem: str = ""
    documents: list[Any] = field(default_factory=list)
    sampled: list[float | None] = field(default_factory=list)
    others: list[float | None] = field(default_factory=list)


def floors(answer: Answer, case: Case, kind: str) -> str:
    """What is wrong with the values of a corrupt request's answer; empty if nothing is."""
    found, need, most = answer.sampled.count(FLOOR), case.values, case.values
    if kind == "+inf" and "n=2" in case.name:
        need = 2  # a token drawn from NaN isn't the one that goes on
    if kind == "NaN" or "echo" in case.name or case.part == "token_in":
        # So are others of the prompt, what shares its KV block, and a candidate more or less.
        most = len(answer.sampled)
    if need and not need <= found <= most:
        return f"{found} logprobs are {FLOOR}, expected {need} to {most}: {answer.sampled}"
    if "prompt" in case.name and FLOOR not in answer.others:
        return f"no prompt logprob is {FLOOR}: {answer.others}"
    return ""


def ask(server: Server, model: CorruptLlama, case: Case, words: tuple[str, ...]) -> Answer:
    """Send one request of the matrix and read its answer."""
    return read(server.post(case.path, case.request(model, words)), case)


def read(reply: Reply, case: Case) -> Answer:
    """Read an answer; everything that is wrong with it is in ``problem``."""
    answer = Answer(reply.status_code)
    if reply.status_code != 200:
        answer.problem = f"HTTP {reply.status_code} {json.loads(reply.text)['error']['message']}"
        return answer
    texts = [reply.text]
    if case.stream:
        lines = [line for line in reply.text.splitlines() if line.startswith("data: ")]
        texts = [line.removeprefix("data: ") for line in lines]
        if case.path != "/v1/responses" and texts.pop() != "[DONE]":
            answer.problem = "the stream doesn't end with [DONE]"
            return answer
    try:
        answer.documents = [json.loads(text, parse_constant=_refuse) for text in texts]
    except ValueError as error:
        answer.problem = f"no strict JSON: {error}"
        return answer
    _collect(answer, case)
    found = [*answer.sampled, *answer.others]
    if None in found:
        answer.problem = f"null for {found.count(None)} of {len(found)} logprobs"
    elif not all(isinstance(value, float) and isfinite(value) for value in found):
        answer.problem = f"logprobs that are no finite numbers: {found}"
    else:
        answer.problem = _schema_error(answer.documents, case)
    return answer


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


def _collect(answer: Answer, case: Case) -> None:
    """The logprobs of an answer; of a responses stream, those of the deltas."""
    for document in answer.documents:
        if error := document.get("error"):
            answer.problem = f"error in the stream: {error}"
        if case.path == "/v1/responses":
            if case.stream:
                if document["type"] == "response.output_text.delta":
                    _entries(answer, document["logprobs"])
                elif document["type"] == "response.completed":
                    again = Answer(200)
                    _responses(again, document["response"])
                    answer.others += again.sampled
            else:
                _responses(answer, document)
            continue
        answer.others += _prompt(document.get("prompt_logprobs"))
        for choice in document["choices"]:
            answer.others += _prompt(choice.get("prompt_logprobs"))
            logprobs = choice.get("logprobs")
            if logprobs is None:
                continue
            if "content" in logprobs:
                _entries(answer, logprobs["content"])
            else:
                _completion(answer, logprobs, case)


def _responses(answer: Answer, document: Any) -> None:
    for item in document["output"]:
        for content in item["content"]:
            _entries(answer, content["logprobs"])


def _entries(answer: Answer, entries: Any) -> None:
    for entry in entries or ():
        answer.sampled.append(entry["logprob"])
        answer.sampled += [top["logprob"] for top in entry["top_logprobs"] or ()]


def _completion(answer: Answer, logprobs: Any, case: Case) -> None:
    values, tops = logprobs["token_logprobs"], logprobs["top_logprobs"]
    if "echo" in case.name and logprobs["text_offset"][:1] == [0]:
        assert values[0] is None and tops[0] is None
        # So that the client's types accept the rest: they know no echo.
        del values[0], tops[0], logprobs["tokens"][0], logprobs["text_offset"][0]
    answer.sampled += values
    answer.others += [value for top in tops for value in top.values()]


def _prompt(positions: Any) -> list[float | None]:
    if not positions:
        return []
    assert positions[0] is None
    return [each["logprob"] for position in positions[1:] for each in position.values()]


def _schema_error(documents: list[Any], case: Case) -> str:
    """The first logprob that the client's types refuse; what else they refuse is not the matter."""
    body, chunk = _SCHEMAS.get(case.path, ({}, {}))
    for document in documents:
        schema = (chunk if case.stream else body).get(document.get("type"))
        try:
            if schema:
                schema.model_validate(document)
        except ValidationError as refused:
            for error in refused.errors():
                if any("logprob" in str(step) for step in error["loc"]):
                    return f"the client's types refuse {error['loc']}: {error['msg']}"
    return ""
