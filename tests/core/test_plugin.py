"""register() in a process that has imported a real vLLM."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.beds.snapshot import differences, snapshot
from tests.beds.variables import every_variable
from tests.conftest import FEATURES
from vllm_ext import plugin
from vllm_ext.core import caches, process, release
from vllm_ext.core.effects import PAGE
from vllm_ext.core.feature import Verdict, effect
from vllm_ext.core.process import StartRefused
from vllm_ext.core.report import reports

TARGET = "vllm.entrypoints.pooling.scoring.serving"


@pytest.fixture(autouse=True)
def fresh(installed_release: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process in which register() hasn't run; vLLM is left as it was."""
    from vllm import envs

    for name in [n for n in os.environ if n.startswith("VLLM_EXT_")]:
        monkeypatch.delenv(name)
    # monkeypatch restores it, so that a later test is again in a first process
    monkeypatch.setenv("VLLM_EXT_SERVER_ID", "")
    monkeypatch.delenv("VLLM_EXT_SERVER_ID")
    monkeypatch.setattr(plugin, "_process", None)
    monkeypatch.setattr(envs, "environment_variables", dict(envs.environment_variables))
    before = snapshot()
    yield
    if plugin._process is not None:
        plugin._process.stop()
    changed = differences(before, snapshot())
    assert [name for name in changed if name in before] == []


def _lines(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [
        r.getMessage() for r in caplog.records if r.levelno == level and "vllm-ext" in r.message
    ]


def _validate_environ() -> None:
    """What --fail-on-environ-validation does; it moved to the platform in 0.31.0."""
    from vllm import envs
    from vllm.platforms import current_platform

    owner = envs if hasattr(envs, "validate_environ") else current_platform
    owner.validate_environ(hard_fail=True)


@pytest.fixture
def log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    """vLLM's logger doesn't propagate to the root, where caplog listens."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.DEBUG, "vllm")
    return caplog


def test_one_info_line_and_no_import(log: pytest.LogCaptureFixture, installed_release: str) -> None:
    loaded = {name for name in sys.modules if name.partition(".")[0] in ("vllm", "torch")}
    for _ in range(3):
        plugin.register()
    assert loaded == {n for n in sys.modules if n.partition(".")[0] in ("vllm", "torch")}
    (line,) = _lines(log, logging.INFO)
    assert f"on vLLM {installed_release}" in line
    assert all(name in line for name in FEATURES)


def test_a_part_is_applied_when_its_module_arrives() -> None:
    waiting = {name: sys.modules.pop(name) for name in list(sys.modules) if name == TARGET}
    plugin.register()
    entries = plugin._process.ledger.entries
    parts = [n for n in entries if n.startswith("SCORE_USAGE") and entries[n].waiting]
    assert parts and all(entries[n].judgement.verdict is Verdict.ARMED for n in parts)
    fresh_module = importlib.import_module(TARGET)
    assert all(entries[n].judgement.verdict is Verdict.ACTIVE for n in parts)
    assert fresh_module.ServingScores._build_response.__wrapped__
    plugin._process.stop()
    plugin._process = None
    if waiting:
        sys.modules.update(waiting)
        package, _, name = TARGET.rpartition(".")
        setattr(sys.modules[package], name, waiting[TARGET])


def test_disable_touches_nothing_and_registers_only_what_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm import envs

    stock = envs.compile_factors()
    before = snapshot()
    monkeypatch.setenv("VLLM_EXT_DISABLE", "1")
    plugin.register()
    assert differences(before, snapshot()) == []
    _validate_environ()
    assert envs.compile_factors() == stock
    # vLLM reads every variable once when a server has started.
    envs.enable_envs_cache()
    assert envs.VLLM_EXT_DISABLE == "1"
    envs.disable_envs_cache()


def test_every_name_is_known_to_vllm_and_the_compile_key_is_stock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm import envs
    from vllm.config.utils import hash_factors

    stock = envs.compile_factors()
    for name, value in every_variable("0").items():
        monkeypatch.setenv(name, value)
    plugin.register()
    _validate_environ()
    assert os.environ["VLLM_EXT_SCORE_USAGE"] == envs.VLLM_EXT_SCORE_USAGE == "0"
    plugin._process.stop()
    monkeypatch.setattr(plugin, "_process", None)
    monkeypatch.delenv("VLLM_EXT_CACHE_KEYS")
    plugin.register()
    assert hash_factors(envs.compile_factors()) == hash_factors(stock)
    caches.note("TEST.traced")
    try:
        assert envs.compile_factors().keys() - stock.keys() == {"VLLM_EXT_FINGERPRINT"}
    finally:
        caches.forget("TEST.traced")
    assert envs.compile_factors() == stock


@pytest.mark.parametrize("state", ["CACHE_KEYS=0", "unsupported"])
def test_the_compile_key_is_stock_also_where_cache_keys_is_not_in_force(
    state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's id, which differs at every start, must not recompile the model each time."""
    from vllm import envs

    stock = envs.compile_factors()
    monkeypatch.setenv("VLLM_EXT_SCORE_USAGE", "auto")
    if state == "unsupported":
        monkeypatch.setattr("vllm_ext.core.plan.record", lambda name: None)
    else:
        monkeypatch.setenv("VLLM_EXT_CACHE_KEYS", "0")
    plugin.register()
    assert "VLLM_EXT_SERVER_ID" in os.environ
    _validate_environ()
    assert envs.compile_factors() == stock


def test_no_exception_gets_out_in_auto_mode(
    log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise OSError("disk gone")

    monkeypatch.setattr(release, "record", fail)
    monkeypatch.setattr("vllm_ext.core.plan.record", fail)
    before = snapshot()
    plugin.register()
    assert differences(before, snapshot()) == []
    assert any("vLLM runs without it" in line for line in _lines(log, logging.ERROR))


def test_a_damaged_installation_does_not_stop_vllm(
    log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm_ext.core.process", None)
    plugin.register()
    assert any("is damaged" in line for line in _lines(log, logging.ERROR))


def test_the_first_process_refuses_a_wrong_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_EXT_SCORE_USAGE", "maybe")
    with pytest.raises(StartRefused, match="VLLM_EXT_SCORE_USAGE is 'maybe'"):
        plugin.register()
    monkeypatch.setattr(sys, "argv", ["/usr/bin/vllm", "serve", "model"])
    with pytest.raises(SystemExit) as stopped:
        plugin.register()
    assert str(stopped.value).startswith("vllm-ext: VLLM_EXT_SCORE_USAGE is 'maybe'")


def test_a_child_never_raises(
    log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_EXT_SERVER_ID", "parent")
    monkeypatch.setenv("VLLM_EXT_SCORE_USAGE", "maybe")
    plugin.register()
    assert any("VLLM_EXT_SCORE_USAGE is 'maybe'" in line for line in _lines(log, logging.ERROR))
    assert {e.judgement.verdict for e in plugin._process.ledger.entries.values()} == {Verdict.OFF}


def test_an_error_of_ours_stops_the_start_only_where_something_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: object) -> None:
        raise OSError("disk gone")

    monkeypatch.setattr(process.Process, "_tell_all", fail)
    before = snapshot()
    plugin.register()
    assert plugin._process is None and differences(before, snapshot()) == []
    monkeypatch.delenv("VLLM_EXT_SERVER_ID")
    monkeypatch.setenv("VLLM_EXT_STRICT", "1")
    for _ in range(2):  # a second attempt is refused as well
        with pytest.raises(StartRefused, match=r"VLLM_EXT_STRICT=1 can't .*OSError: disk gone"):
            plugin.register()
    assert differences(before, snapshot()) == []


@pytest.mark.parametrize("inherited", ["", "  ", "not an id!", "x" * 65])
def test_an_id_that_is_none_does_not_make_a_child(
    inherited: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_EXT_SERVER_ID", inherited)
    monkeypatch.setenv("VLLM_EXT_SCORE_USAGE", "maybe")
    with pytest.raises(StartRefused):
        plugin.register()


def test_a_server_started_from_a_process_of_another_is_the_first_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/vllm", "serve", "model"])
    monkeypatch.setenv("VLLM_EXT_SERVER_ID", "1234-5678")
    monkeypatch.setenv("VLLM_EXT_SCORE_USAGE", "maybe")
    with pytest.raises(SystemExit):
        plugin.register()


def test_an_import_that_passed_the_finder_by_is_caught_up_with() -> None:
    importlib.import_module(TARGET)
    plugin.register()
    ledger = plugin._process.ledger
    name = "CACHE_KEYS.compile_key"
    ledger.undo(name)
    ledger.entries[name].waiting = {"vllm.envs"}
    plugin.register()
    assert ledger.entries[name].judgement.verdict is Verdict.ACTIVE


def test_a_report_that_cannot_be_written_does_not_matter(
    log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_ext.core.report._write", lambda *args: 1 / 0)
    plugin.register()
    plugin._process._publish()
    told = [line for line in _lines(log, logging.WARNING) if "won't see" in line]
    assert len(told) == 1 and "division" in told[0]
    assert plugin._process.ledger.entries["CACHE_KEYS.compile_key"].applied


def test_one_warning_for_all_that_is_unsupported(
    log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_ext.core.plan.record", lambda name: None)
    plugin.register()
    (line,) = _lines(log, logging.WARNING)
    assert "SCORE_USAGE.prompt_tokens" in line and "are unsupported" in line


@pytest.mark.parametrize("asked", ["VLLM_EXT_STRICT", "VLLM_EXT_SCORE_USAGE"])
def test_what_cannot_be_honoured_stops_the_first_process_only(
    asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_ext.core.plan.record", lambda name: None)
    before = snapshot()
    plugin.register()
    plugin._process.stop()
    monkeypatch.setattr(plugin, "_process", None)
    monkeypatch.delenv("VLLM_EXT_SERVER_ID")
    monkeypatch.setenv(asked, "1")
    with pytest.raises(StartRefused, match=f"{asked}=1 can't be honoured, .*unsupported"):
        plugin.register()
    assert differences(before, snapshot()) == []
    monkeypatch.setenv("VLLM_EXT_SERVER_ID", "parent")
    plugin.register()


def test_a_patch_after_us_is_found_at_the_next_full_collection(
    log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import envs

    plugin.register()
    ours = envs.compile_factors
    envs.compile_factors = lambda: {"replaced": "by a stranger"}
    gc.collect()
    (line,) = [line for line in _lines(log, logging.WARNING) if "CACHE_KEYS" in line]
    assert "CACHE_KEYS.compile_key is conflict" in line and "test_plugin" in line
    envs.compile_factors = ours
    entry = plugin._process.ledger.entries["CACHE_KEYS.compile_key"]
    assert entry.judgement.verdict is Verdict.CONFLICT
    gc.collect()
    assert entry.judgement.verdict is Verdict.ACTIVE, "the stranger is gone"


def test_a_misspelt_variable_is_told_once(
    log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_EXT_SCORE_USAG", "1")
    plugin.register()
    plugin.register()
    warnings = [r.getMessage() for r in log.records if "did you mean" in r.getMessage()]
    assert len(warnings) == 1


def test_the_logger_is_a_child_of_vllms() -> None:
    assert process.logger.name.startswith("vllm.")


def test_a_forked_child_reports_when_it_looks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the EngineCore of a forking LLM() does: it inherits the patches, not the report."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    plugin.register()
    effect("TEST.part", 3)
    told, tell = os.pipe()
    ended, end = os.pipe()
    child = os.fork()
    if child == 0:
        gc.collect()
        effect("TEST.part", 1)
        os.write(tell, b".")
        os.read(ended, 1)
        os._exit(0)
    assert os.read(told, 1) == b"."
    found = {report.pid: report for report in reports()}
    os.write(end, b".")
    os.waitpid(child, 0)
    PAGE.restart()
    assert found[child].effects["TEST.part"] == 1
    assert found[os.getpid()].effects["TEST.part"] == 3
    assert found[child].parts == found[os.getpid()].parts
    for descriptor in (told, tell, ended, end):
        os.close(descriptor)
