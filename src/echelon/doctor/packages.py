"""Findings about software: the versions of required packages, and what a missing package costs."""

import platform
import re
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import echelon
from echelon.doctor.report import Finding, Section, section

_OLDEST_TORCH, _NEWEST_TORCH = (2, 11), (2, 13, 0)
_OLDEST_PYTHON = (3, 11)


class Extra(NamedTuple):
    """An optional package: what is lost without it, and how to install it."""

    name: str
    cost: str
    install: str


EXTRAS = (
    Extra("pydantic", "job files (JOB.toml) and --set cannot be read", "pydantic"),
    Extra("typer", "the command line does not start; the library works", "typer"),
    Extra("rich", "no tables and no live progress in the terminal", "rich"),
    Extra("transformers", "models of transformers cannot be trained as they are", '"echelon[hf]"'),
    Extra("tokenizers", "text is read as bytes, not with a model's tokenizer", '"echelon[hf]"'),
    Extra("tensorboard", "no logs for TensorBoard", '"echelon[tensorboard]"'),
    Extra("wandb", "no logs to Weights & Biases", "wandb"),
)


def examine_versions() -> Section:
    return section(
        "Versions",
        {
            "echelon": lambda: [Finding("echelon", echelon.__version__)],
            "python": lambda: [judge_python(platform.python_version())],
            "torch": lambda: [judge_torch(installed("torch"))],
            "numpy": lambda: [judge_needed("numpy", installed("numpy"))],
            "safetensors": lambda: [judge_needed("safetensors", installed("safetensors"))],
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
    if installed_version is None or _OLDEST_TORCH <= _numbers(installed_version) <= _NEWEST_TORCH:
        return judge_needed("torch", installed_version)
    remark = 'echelon is tested with torch 2.11 to 2.13.0: pip install "torch>=2.11,<=2.13.0"'
    return Finding("torch", installed_version, "warn", remark)


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
