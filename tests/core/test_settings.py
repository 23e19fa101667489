"""Toggles and options: what is read, and the sentence an operator gets for a wrong value."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from tests.conftest import FEATURES
from vllm_ext.core.feature import Option
from vllm_ext.settings import SettingsError, read, variables

ALL = list(FEATURES.values())
USAGE = FEATURES["SCORE_USAGE"]


def test_nothing_set_means_auto_and_defaults() -> None:
    settings = read({}, ALL)
    assert not settings.disable and not settings.strict
    for feature in ALL:
        assert settings.toggle(feature) == "auto"
        for option in feature.options:
            assert settings.option(feature, option.name) == option.default


@pytest.mark.parametrize("value", ["auto", "1", "0"])
def test_the_three_values_of_a_toggle(value: str) -> None:
    assert read({USAGE.toggle: value}, ALL).toggle(USAGE) == value


def test_a_wrong_value_gets_one_sentence_with_the_name_and_the_three_values() -> None:
    with pytest.raises(SettingsError) as raised:
        read({"VLLM_EXT_SCORE_USAGE": "maybe"}, ALL)
    sentence = str(raised.value)
    assert sentence.startswith("VLLM_EXT_SCORE_USAGE is 'maybe'")
    assert all(value in sentence for value in ("auto", "1 (", "0 ("))
    assert sentence.count(". ") == 0 and sentence.endswith(".")


def test_every_wrong_value_is_named() -> None:
    wrong = {
        "VLLM_EXT_SCORE_USAGE": "yes",
        "VLLM_EXT_STRICT": "2",
        "VLLM_EXT_SCORE_USAGE_CACHED_TOKENS": "often",
    }
    with pytest.raises(SettingsError) as raised:
        read(wrong, ALL)
    assert all(name in str(raised.value) for name in wrong)


@pytest.mark.parametrize(("text", "value"), [("1", True), ("true", True), ("0", False)])
def test_an_option_is_validated_by_its_type(text: str, value: bool) -> None:
    settings = read({"VLLM_EXT_SCORE_USAGE_CACHED_TOKENS": text}, ALL)
    assert settings.option(USAGE, "CACHED_TOKENS") is value


def test_an_option_takes_no_number_below_its_smallest() -> None:
    capped = FEATURES["MAX_LOAD_TOKENS"]
    with pytest.raises(SettingsError, match=r"is '-1', but it takes an int of at least 0 \("):
        read({"VLLM_EXT_MAX_LOAD_TOKENS_DEFAULT": "-1"}, ALL)
    assert read({"VLLM_EXT_MAX_LOAD_TOKENS_DEFAULT": "0"}, ALL).option(capped, "DEFAULT") == 0


def test_an_empty_variable_counts_as_unset() -> None:
    assert read({USAGE.toggle: " "}, ALL) == read({}, ALL)


def test_a_misspelt_name_is_told_with_the_one_that_was_meant() -> None:
    (sentence,) = read({"VLLM_EXT_SCORE_USAG": "1"}, ALL).unknown
    assert "VLLM_EXT_SCORE_USAG " in sentence and "did you mean VLLM_EXT_SCORE_USAGE?" in sentence


def test_every_variable_is_known_once() -> None:
    names = variables(ALL)
    assert len(names) == len(set(names))
    assert all(name.startswith("VLLM_EXT_") for name in names)
    assert read(dict.fromkeys(names, ""), ALL).unknown == ()


def test_a_behaviour_reads_its_option_anew_when_the_variable_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    variable = USAGE.variable("CACHED_TOKENS")
    monkeypatch.delenv(variable, raising=False)
    assert USAGE.setting("CACHED_TOKENS") is False
    monkeypatch.setenv(variable, "1")
    assert USAGE.setting("CACHED_TOKENS") is True
    monkeypatch.setenv(variable, "often")
    with pytest.raises(SettingsError, match=variable):
        USAGE.setting("CACHED_TOKENS")
    monkeypatch.delenv(variable)
    with pytest.raises(KeyError):
        USAGE.setting("NO_SUCH_OPTION")


@pytest.mark.parametrize(
    ("kind", "takes"), [(int, "int"), (bool, "bool"), (Literal["clamp", "error"], "clamp or error")]
)
def test_an_option_says_what_it_takes(kind: object, takes: str) -> None:
    assert Option("NAME", kind, None, "What it does.").takes == takes


def test_a_choice_is_validated_and_its_values_are_named() -> None:
    policy = Option("POLICY", Literal["clamp", "error"], "clamp", "What happens.")
    feature = replace(USAGE, options=(policy,))
    assert read({feature.variable(policy): "error"}, [feature]).option(feature, "POLICY") == "error"
    with pytest.raises(SettingsError, match="takes 'clamp' or 'error'"):
        read({feature.variable(policy): "drop"}, [feature])
