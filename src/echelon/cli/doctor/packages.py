"""Findings about software: the versions of required packages, and what a missing package costs."""

import platform
import re
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import echelon
from echelon.cli.doctor.report import Finding, Section, section

_OLDEST_TORCH, _NEWEST_TORCH = (2, 11), (2, 13)  # that echelon is tested with
_TESTED = "tested with: 2.11 to 2.13"
_TORCH_ADVICE = f'required: pip install "torch>=2.11" ({_TESTED})'
_OLDEST_PYTHON = (3, 11)

# What echelon depends on, in the order of pyproject.toml, without torch, whose version is judged too.
REQUIRED = ("numpy", "safetensors", "typer", "rich", "pydantic", "pillow", "xxhash")


class Extra(NamedTuple):
    """An optional package: what is lost without it, and how to install it."""

    name: str
    cost: str
    install: str


EXTRAS = (
    Extra("transformers", "models of transformers cannot be trained as they are", '"echelon[hf]"'),
    Extra("tensorboard", "no logs for TensorBoard", '"echelon[tensorboard]"'),
)


def examine_versions() -> Section:
    return section(
        "Versions",
        {
            "echelon": lambda: [Finding("echelon", echelon.__version__)],
            "python": lambda: [judge_python(platform.python_version())],
            "torch": lambda: [judge_torch(installed("torch"))],
            "packages": lambda: [judge_needed(name, installed(name)) for name in REQUIRED],
        },
    )


def examine_extras() -> Section:
    return section(
        "Optional packages",
        {extra.name: partial(_extra, extra) for extra in EXTRAS},
    )


def _extra(extra: Extra) -> list[Finding]:
    return [judge_extra(extra, installed(extra.name))]


def installed(name: str) -> str | None:
    """The version of a package, without importing it; None if it is missing."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def judge_python(installed_version: str) -> Finding:
    if _numbers(installed_version) >= _OLDEST_PYTHON:
        return Finding("Python", installed_version)
    return Finding("Python", installed_version, "warn", "echelon needs Python 3.11 or later")


def judge_torch(installed_version: str | None) -> Finding:
    if installed_version is None or _numbers(installed_version) < _OLDEST_TORCH:
        return Finding("torch", installed_version or "missing", "warn", _TORCH_ADVICE)
    if _numbers(installed_version)[:2] <= _NEWEST_TORCH:
        return Finding("torch", installed_version)
    return Finding("torch", installed_version, "note", f"newer than echelon was {_TESTED}")


def judge_needed(name: str, installed_version: str | None) -> Finding:
    if installed_version is not None:
        return Finding(name, installed_version)
    return Finding(name, "missing", "warn", f"required: pip install {name}")


def judge_extra(extra: Extra, installed_version: str | None) -> Finding:
    if installed_version is not None:
        return Finding(extra.name, installed_version)
    return Finding(extra.name, "missing", "note", f"{extra.cost}: pip install {extra.install}")


def _numbers(installed_version: str) -> tuple[int, ...]:
    """(2, 13, 0) of '2.13.0+cpu' and of '2.13.0rc1'."""
    leading = re.match(r"\d+(\.\d+)*", installed_version)
    return tuple(int(part) for part in leading.group().split(".")) if leading else ()
