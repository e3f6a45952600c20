"""Errors of single values of a config: counts, numbers, yes or no. They need no torch."""

import math


def count_errors(config: object, *names: str, least: int = 1) -> list[str]:
    return [
        f"{name}={value!r}: must be an integer, at least {least}"
        for name in names
        if isinstance(value := getattr(config, name), bool) or not isinstance(value, int) or value < least
    ]


def number_errors(config: object, *names: str) -> list[str]:
    return [
        f"{name}={value!r}: must be a number above 0"
        for name in names
        if not is_number(value := getattr(config, name)) or not 0 < value < math.inf
    ]


def weight_errors(config: object, *names: str) -> list[str]:
    return [
        f"{name}={value!r}: must be a number, at least 0"
        for name in names
        if not is_number(value := getattr(config, name)) or not 0 <= value < math.inf
    ]


def flag_errors(config: object, *names: str) -> list[str]:
    return [
        f"{name}={value!r}: must be true or false"
        for name in names
        if not isinstance(value := getattr(config, name), bool)
    ]


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
