"""NAN_LOGPROBS without an engine: vLLM's own presentation of engine-side logprobs, and frames."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from math import inf, nan
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.beds.registered import registered
from tests.conftest import recorded
from vllm_ext.core.effects import PAGE
from vllm_ext.core.feature import Verdict
from vllm_ext.features.serving import nan_logprobs
from vllm_ext.features.serving import nan_logprobs_probes as probes

FLOOR = -9999.0
Answer = Callable[[tuple[float, ...]], Any]
# What the engine may have for a sampled token and a candidate, and what an answer may say.
TOLD: dict[tuple[float, float], list[float]] = {
    (nan, nan): [FLOOR, FLOOR],
    (inf, -1.5): [FLOOR, -1.5],
    (-1.5, nan): [-1.5, FLOOR],
    (-inf, -1.5): [FLOOR, -1.5],
    (-1.5, -2.25): [-1.5, -2.25],
    # With --logprobs-mode raw_logits: any float32 is a value, however large.
    (3.0e38, 2.5): [3.0e38, 2.5],
}
# What is wrong stands first in the message: (what the engine had) told as [the answer].
WRONG = r"^\(nan, nan\) told as \[nan, nan\]; \(inf, -1\.5\) told as \[inf, -1\.5\]"


@pytest.fixture
def patched(installed_release: str, plugin: str) -> Iterator[None]:
    """The process with the plugin registered and the modules loaded, or as it came."""
    import vllm.entrypoints.openai.chat_completion.serving
    import vllm.entrypoints.openai.completion.serving
    import vllm.entrypoints.openai.responses.serving
    import vllm.entrypoints.scale_out.token_in_token_out.serving
    import vllm.entrypoints.speech_to_text.base.serving
    import vllm.v1.core.sched.scheduler  # noqa: F401

    nan_logprobs.rust_frontend_in_use.cache_clear()
    with registered(plugin == "with"):
        yield
    nan_logprobs.rust_frontend_in_use.cache_clear()


def _check(*answers: Answer) -> None:
    """Both values of each of two tokens are told as they should be."""
    wrong = []
    for answer in answers:
        for had, expected in TOLD.items():
            values = probes.values_of(answer(had))
            told = [values[0], values[-1]]
            if told != expected:
                wrong.append(f"{had} told as {told}")
    assert not wrong, "; ".join(wrong)


@pytest.mark.behaviour("NAN_LOGPROBS.completions", wrong=WRONG)
def test_completions(patched: None) -> None:
    _check(probes.completion_answer)


@pytest.mark.behaviour("NAN_LOGPROBS.chat", wrong=WRONG)
def test_chat(patched: None) -> None:
    _check(probes.chat_answer)


@pytest.mark.behaviour("NAN_LOGPROBS.responses", wrong=WRONG)
def test_responses(patched: None) -> None:
    _check(probes.response_answer)


@pytest.mark.behaviour("NAN_LOGPROBS.prompt_logprobs", wrong=WRONG)
def test_prompt_logprobs(patched: None) -> None:
    _check(probes.prompt_answer)


@pytest.mark.behaviour("NAN_LOGPROBS.token_in", wrong=r"^nan told as \['nan'\]")
def test_token_in(patched: None) -> None:
    for answer in probes.token_answers((nan, nan)):
        told = {str(value) for value in probes.values_of(answer)}
        assert told == {str(FLOOR)}, f"nan told as {sorted(told)}"


@pytest.mark.behaviour("NAN_LOGPROBS.token_in_inf", wrong=r"^inf told as \['-1\.5', 'inf'\]")
def test_token_in_with_raw_logits(patched: None) -> None:
    """In both forms that answers have from 0.32.0 on; before that, token_in does it."""
    for answer in probes.token_answers((inf, -1.5)):
        told = {str(value) for value in probes.values_of(answer)}
        assert told == {"-1.5", str(FLOOR)}, f"inf told as {sorted(told)}"


@pytest.mark.behaviour("NAN_LOGPROBS.transcription", wrong=r"^\['nan', 'inf', '-inf', '-1.0'\]")
def test_segments_of_a_transcription(patched: None) -> None:
    segments = [probes.segments((value,)) for value in (nan, inf, -inf, -2.0)]
    told = [segment.avg_logprob for (segment,) in segments]
    assert told == [FLOOR, FLOOR, FLOOR, -1.0], list(map(str, told))


@pytest.mark.behaviour("NAN_LOGPROBS.completions", wrong=r"^0 effects for 1 answer with NaN")
def test_one_effect_for_each_answer_that_changed(patched: None) -> None:
    name = "NAN_LOGPROBS.completions"
    before = PAGE.read().get(name, 0)
    probes.completion_answer((nan, nan))
    probes.completion_answer((-1.0, -2.0))
    counted = PAGE.read().get(name, 0) - before
    assert counted == 1, f"{counted} effects for 1 answer with NaN"


def test_what_the_engine_made_stays_raw(
    installed_release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Presentation converts: NaN and rank 0 are still there for whoever reads engine outputs."""
    kept: list[Any] = []
    make = probes.steps
    monkeypatch.setattr(probes, "steps", lambda *values: kept.append(make(*values)) or kept[-1])
    with registered(True):
        for answer in (probes.completion_answer, probes.chat_answer, probes.response_answer):
            assert probes.values_of(answer((nan, nan)))[0] == FLOOR
        probes.token_answers((nan, nan))
    assert len(kept) == 4
    for step in (step for steps in kept for step in steps):
        assert {str(each.logprob) for each in step.values()} == {"nan"}
        assert [each.rank for each in step.values()] == [0, 1]


def _frames(ranks: list[int]) -> list[Any]:
    """Ranks on the wire: of generated tokens and of a prompt, as vLLM's scheduler and encoder do.

    Decoded by position, as any frontend in another language must.
    """
    from vllm.v1.serial_utils import MsgpackEncoder

    frame, output = probes.ranked_step(ranks)
    assert output.logprobs.sampled_token_ranks.tolist() == ranks
    assert output.prompt_logprobs_dict["r0"].selected_token_ranks.tolist() == [ranks[0], 3]
    first, *buffers = MsgpackEncoder().encode(frame)
    message = msgspec.msgpack.decode(bytes(first))
    found = []
    for request in message[1]:
        for at in (2, 3):
            if len(request) > at and request[at] is not None:
                found.append((request[0], _array(request[at][2], buffers)))
    return found


def _array(wire: Any, buffers: list[Any]) -> list[int]:
    """An int64 array of the wire: dtype, shape, data; data inline or the number of a buffer."""
    import numpy as np

    dtype, shape, data = wire
    assert dtype in ("<i8", "int64")
    raw = data.data if isinstance(data, msgspec.msgpack.Ext) else buffers[data - 1]
    return np.frombuffer(raw, dtype=np.int64).reshape(shape).tolist()


@pytest.mark.behaviour("NAN_LOGPROBS.rust_ranks", wrong=r"^rank 0 on the wire: .*\[0\]")
def test_no_rank_0_on_the_wire_to_a_vllm_rs_that_stops_at_it(
    patched: None, installed_release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where vllm-rs takes rank 0, it gets it: only there does it say what the engine found."""
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    lowest = int(recorded(installed_release, "NAN_LOGPROBS.rust_ranks") is Verdict.ACTIVE)
    frames = _frames([0, 5, 0])
    expected = [("r0", [lowest]), ("r0", [lowest, 3]), ("r1", [5]), ("r2", [lowest])]
    assert frames == expected, f"rank 0 on the wire: {frames}"


def test_frames_to_pythons_frontend_are_as_they_were(
    installed_release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_USE_RUST_FRONTEND", raising=False)
    nan_logprobs.rust_frontend_in_use.cache_clear()
    with registered(True):
        assert _frames([0, 5]) == [("r0", [0]), ("r0", [0, 3]), ("r1", [5])]


def test_an_engine_that_vllm_rs_started_knows_it(tmp_path: Path) -> None:
    """``vllm-rs serve`` sets no variable; it is the engine's parent."""
    parent = tmp_path / "vllm-rs"
    parent.symlink_to(Path(sys.executable).resolve())
    ask = (
        "from vllm_ext.features.serving.nan_logprobs import rust_frontend_in_use as asked\n"
        "print(asked())"
    )
    start = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"
    environ = {k: v for k, v in os.environ.items() if k != "VLLM_USE_RUST_FRONTEND"}
    environ["VLLM_PLUGINS"] = ""
    command = [parent, "-I", "-c", start, sys.executable, "-c", ask]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.stdout.strip() == "True", done.stderr
