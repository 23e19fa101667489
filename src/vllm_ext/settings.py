"""Toggles and options, read from the environment and validated."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_ext.core.feature import Feature, Option
from vllm_ext.names import DISABLE, PREFIX, SERVER_ID, STRICT

AUTO, ON, OFF = "auto", "1", "0"


class SettingsError(ValueError):
    """A variable with a value it can't have; the message names it and the values it takes."""


@dataclass(frozen=True)
class Settings:
    """What the operator asked for. ``unknown`` holds one sentence per misspelt variable."""

    disable: bool = False
    strict: bool = False
    toggles: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()

    def toggle(self, feature: Feature) -> str:
        """``auto``, ``1`` or ``0``."""
        return self.toggles.get(feature.toggle, AUTO)

    def option(self, feature: Feature, name: str) -> Any:
        """Value of one of the feature's options."""
        defaults = {option.name: option.default for option in feature.options}
        return self.options.get(feature.variable(name), defaults[name])


def variables(features: Iterable[Feature]) -> list[str]:
    """Every environment variable the plugin knows."""
    names = [DISABLE, STRICT, SERVER_ID]
    for feature in features:
        names += [feature.toggle, *(feature.variable(option) for option in feature.options)]
    return names


def read(environ: Mapping[str, str], features: Iterable[Feature]) -> Settings:
    """Read the settings; an empty variable counts as unset.

    Raises SettingsError with one sentence per variable that can't be honoured.
    """
    features = list(features)
    given = {k: v.strip() for k, v in environ.items() if k.startswith(PREFIX) and v.strip()}
    known = variables(features)
    errors: list[str] = []
    toggles = {}
    options = {}
    for feature in features:
        value = given.get(feature.toggle)
        if value in (AUTO, ON, OFF):
            toggles[feature.toggle] = value
        elif value is not None:
            errors.append(
                f"{feature.toggle} is {value!r}, but it takes auto (on where it applies, the "
                "default), 1 (on, or the start is refused) or 0 (off)."
            )
        for option in feature.options:
            name = feature.variable(option)
            if name in given:
                options[name] = _option(name, given[name], option, errors)
    switches = {name: _switch(name, given.get(name), errors) for name in (DISABLE, STRICT)}
    if errors:
        raise SettingsError(" ".join(errors))
    return Settings(
        disable=switches[DISABLE],
        strict=switches[STRICT],
        toggles=toggles,
        options=options,
        unknown=tuple(_misspelt(name, known) for name in sorted(given) if name not in known),
    )


def _switch(name: str, value: str | None, errors: list[str]) -> bool:
    if value not in (None, ON, OFF):
        errors.append(f"{name} is {value!r}, but it takes 1 or 0.")
    return value == ON


def _option(name: str, value: str, option: Option, errors: list[str]) -> Any:
    from pydantic import TypeAdapter, ValidationError  # only paid for when an option is set

    try:
        read = TypeAdapter(option.type).validate_python(value)
    except ValidationError as error:
        what = error.errors()[0]["msg"].removeprefix("Input should be ")
        errors.append(f"{name} is {value!r}, but it takes {what} (default {option.default}).")
        return option.default
    if option.at_least is not None and read < option.at_least:
        errors.append(
            f"{name} is {value!r}, but it takes an {option.takes} (default {option.default})."
        )
        return option.default
    return read


def _misspelt(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"{name} is not a variable of vllm-ext" + (
        f"; did you mean {close[0]}?" if close else ""
    )
