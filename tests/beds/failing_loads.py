"""Real engines whose KV loads fail: what becomes of the requests, and of those that come next.

``load_failures`` has the same without an engine. Connector and faults are those of ``kv_folder``,
the pool is so small that it holds one request, but not what it reserved for a load beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.beds.answers import TOLERANCE, Answer, ask, outcomes
from tests.beds.checkpoints.checkpoint import Checkpoint
from tests.beds.ending import died_of
from tests.beds.kv_store import Fault, arm, armed_faults, transfer_config
from tests.beds.offload_engine import engine
from tests.beds.overlap import asynchronous_scheduling

FAULTS = (1, 3, 20)
PROMPTS = range(3)
LENGTH, SHORT, ANSWER = 140, 40, 4
LOADED = 128
# With the null block: enough for a prompt of LENGTH and one of SHORT, and their answers.
BLOCKS = {"llama": 8, "gemma3": 16, "lfm2": 8}
GROUPS = {"llama": 1, "gemma3": 2, "lfm2": 2}
# An answer takes less than ten steps, with everything that may be recomputed for it.
STEPS = 400
# Least difference of a log-probability that KV of the wrong values must make.
SPOILT = 0.05


@dataclass(frozen=True)
class Setup:
    """An engine: its model, how it loads, and what it does when a load fails."""

    model: str
    asynchronous: bool = False
    policy: str = "recompute"
    caching: bool = True
    overlapped: bool = False

    @property
    def loads_right(self) -> bool:
        """vLLM copies a state before it starts synchronous loads, so those come too late."""
        return self.model != "lfm2" or self.asynchronous

    def __str__(self) -> str:
        return " ".join(
            (
                self.model,
                "async" if self.asynchronous else "sync",
                self.policy,
                "cached" if self.caching else "uncached",
                "two batches" if self.overlapped else "one batch",
            )
        )


class Lost(Exception):
    """The engine is dead or hangs; the message says which."""


class FailingEngine:
    """An engine that has answered all prompts, and whose store has all of them."""

    def __init__(self, llm: Any, checkpoint: Checkpoint, store: Path, setup: Setup) -> None:
        self._llm, self._store, self._setup = llm, store, setup
        self.prompts = [checkpoint.prompt(LENGTH, seed) for seed in PROMPTS]
        self._short = checkpoint.prompt(SHORT, len(PROMPTS))
        self.clean = [ask(llm, prompt, ANSWER) for prompt in self.prompts]
        self._companion = ask(llm, self._short, ANSWER)

    def meet(self, faults: int) -> list[str]:
        """As many loads fail, one request after another: what is wrong with the answers.

        Raises ``Lost`` where the engine doesn't survive.
        """
        groups = GROUPS[self._setup.model]
        # The first block of the first group, the last one of the last group, and so on.
        self.arm(*(Fault("fail", at % groups, -(at // groups % 2)) for at in range(faults)))
        found = []
        for number in range(faults):
            if not self.armed:
                break
            at, before = number % len(self.prompts), self.armed
            self.forget()
            told = self.ask(self.prompts[at])
            found += self.wrong(told, at)
            if before - self.armed != 1:
                found.append(f"a request met {before - self.armed} faults")
            # With policy fail nothing is kept, and the next load may fail as well.
            if (self._setup.policy == "recompute" and self._setup.caching) or (
                not self.armed and self._setup.loads_right
            ):
                left = self.armed
                again = self.ask(self.prompts[at])
                found += [f"asked again, {wrong}" for wrong in self._different(again, at)]
                if self.armed != left:
                    found.append("asked again, what was recomputed is not in the prefix cache")
        return list(dict.fromkeys(found))

    def meet_alongside(self) -> list[str]:
        """A load fails while another request is computed: what is wrong with either."""
        self.forget()
        self.arm(Fault("fail", GROUPS[self._setup.model] - 1))
        told, companion = self._outcomes([self.prompts[0], self._short])
        # Of another batch than the clean one.
        found = self.wrong(told, 0, TOLERANCE)
        if isinstance(companion, str):
            return [*found, f"the other request ended with {companion}"]
        if (difference := companion.difference(self._companion)) > TOLERANCE:
            found.append(f"the other request's logprobs differ by {difference:.3f}")
        return found

    def control(self) -> list[str]:
        """What is wrong with loads that succeed, and whether wrong KV shows at all."""
        found = []
        self.forget()
        loaded = self.ask(self.prompts[0])
        if self._setup.loads_right:
            found += [f"loaded, {wrong}" for wrong in self._different(loaded, 0)]
            if not isinstance(loaded, str) and loaded.cached_tokens != LOADED:
                found.append(f"{loaded.cached_tokens} tokens were loaded, not {LOADED}")
        self.forget()
        self.arm(Fault("corrupt"))
        corrupt = self.ask(self.prompts[0])
        if isinstance(corrupt, str) or corrupt.difference(self.clean[0]) < SPOILT:
            found.append("corrupted KV doesn't show")
        return found

    def arm(self, *faults: Fault) -> None:
        """Have the next loads meet these faults, and no others."""
        with armed_faults(self._store) as armed:
            armed.clear()
        arm(self._store, *faults)

    @property
    def armed(self) -> int:
        """Faults that no load has met yet."""
        with armed_faults(self._store) as armed:
            return len(armed)

    def forget(self) -> None:
        """Empty the engine's own prefix cache."""
        assert self._llm.reset_prefix_cache()

    def ask(self, prompt: list[int]) -> Answer | str:
        """The answer, or the reason why there is none. Raises ``Lost``."""
        (told,) = self._outcomes([prompt])
        return told

    def _outcomes(self, prompts: list[list[int]]) -> list[Answer | str]:
        try:
            return outcomes(self._llm, prompts, ANSWER, steps=STEPS)
        except TimeoutError as error:
            raise Lost(f"never finished: {error}") from None
        except Exception as error:
            raise Lost(died_of(error)) from error

    def wrong(self, told: Answer | str, at: int, allowed: float = 0.0) -> list[str]:
        """What is wrong with the outcome of a request whose load has failed."""
        if self._setup.policy == "recompute":
            return self._different(told, at, allowed)
        return [] if told == "error" else ["a failed load doesn't end its request"]

    def _different(self, told: Answer | str, at: int, allowed: float = 0.0) -> list[str]:
        if isinstance(told, str):
            return [f"it ended with {told}"]
        difference = told.difference(self.clean[at])
        if difference > allowed:
            return [f"logprobs differ by {difference:.3f}"]
        return [] if told.tokens == self.clean[at].tokens else ["tokens differ"]


@contextmanager
def failing_engine(folder: Path, setup: Setup, **arguments: Any) -> Iterator[FailingEngine]:
    """An engine of a setup; ``arguments`` are further ones of ``vllm.LLM``."""
    from vllm.config import KVTransferConfig

    store = folder / f"{setup.model}-store"
    transfer = KVTransferConfig(
        **transfer_config(
            store, asynchronous=setup.asynchronous, kv_load_failure_policy=setup.policy
        )
    )
    with armed_faults(store) as armed:
        armed.clear()
    given = {
        "kv_transfer_config": transfer,
        "num_gpu_blocks_override": BLOCKS[setup.model],
        "enable_prefix_caching": setup.caching,
        **arguments,
    }
    with (
        asynchronous_scheduling(setup.overlapped),
        engine(folder, setup.model, **given) as (llm, checkpoint),
    ):
        yield FailingEngine(llm, checkpoint, store, setup)


def table(folder: Path, setup: Setup, faults: Sequence[int] = FAULTS) -> list[str]:
    """What goes wrong with each number of faults, and in the end; nothing, if all is right.

    One engine meets all of them, as long as it survives, and shows at its end that wrong KV shows.
    """
    found: list[str] = []
    number = 0
    with failing_engine(folder, setup) as bed:
        try:
            for number in faults:
                found += [f"{number} fault(s): {wrong}" for wrong in bed.meet(number)]
            number = 1
            found += [f"alongside, {wrong}" for wrong in bed.meet_alongside()]
            found += bed.control()
        except Lost as error:
            found.append(f"{number} fault(s): {error}")
    return [f"{setup}, {wrong}" for wrong in found]
