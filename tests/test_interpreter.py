"""Triton's interpreter runs kernels on CPU tensors; its casts are wrong, the bed's are right."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.beds.children import environment
from tests.beds.v2.engine import interpreter_environment
from tests.conftest import CI_RELEASE


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What casts.py finds in a process with the interpreter; this process's Triton has none."""
    env = interpreter_environment(tmp_path_factory.mktemp("casts"), environment(CI_RELEASE))
    command = [sys.executable, "-m", "tests.beds.v2.casts"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_kernel_runs_on_cpu_tensors(facts: dict[str, Any]) -> None:
    assert facts["interpreted"]
    assert facts["values"] > 200_000 and facts["float16"] == 0, "casts to float16 are torch's"


def test_the_interpreters_own_casts_are_wrong(facts: dict[str, Any]) -> None:
    """The negative control of the next test: bfloat16 is cut off, float8 loses carries."""
    named = dict(
        zip((1.005859375, 31.7, 17.0, 464.0, 1e-3), facts["chosen"]["bfloat16"], strict=True)
    )
    assert named[1.005859375] == "1.0", "nearest is 1.0078125"
    assert named[31.7] == "31.625", "nearest is 31.75"
    # Nearest: 1.0, 32, 16 (a tie, to even), 448 (saturated), 2**-9 (the smallest).
    assert facts["chosen"]["float8_e4m3fn"] == ["1.0", "16.0", "18.0", "nan", "0.0"]
    wrong = {name: count / facts["values"] for name, count in facts["narrow"]["triton"].items()}
    assert wrong == pytest.approx({"bfloat16": 0.376, "float8_e4m3fn": 0.324}, abs=0.01)
    # Subnormal numbers of bfloat16, and the two NaN of float8_e4m3fn, which come out as 480.
    assert facts["widen"]["triton"] == {"bfloat16": 254, "float8_e4m3fn": 2}


def test_the_software_casts_are_torchs(facts: dict[str, Any]) -> None:
    right = {"bfloat16": 0, "float8_e4m3fn": 0}
    assert facts["narrow"]["software"] == right
    assert facts["widen"]["software"] == right
    assert facts["nan"] == right


def test_a_dot_product_is_right_in_float16_and_garbage_in_bfloat16(facts: dict[str, Any]) -> None:
    error = facts["dot_error"]
    assert error["float32"] < 1e-6 and error["float16"] < 1e-3
    assert error["bfloat16"] > 1e6
