"""All of the plugin's variables at once, each with a value it can have."""

from __future__ import annotations

from typing import get_args

from vllm_ext import features as package
from vllm_ext.core.plan import catalogue
from vllm_ext.settings import variables


def every_variable(value: str) -> dict[str, str]:
    """Every name the plugin knows, set to ``value``; an option of choices to its default."""
    features = catalogue(package)
    values = dict.fromkeys(variables(features), value)
    for feature in features:
        for option in feature.options:
            if get_args(option.type):
                values[feature.variable(option)] = str(option.default)
    return values
