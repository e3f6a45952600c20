"""Job files: TOML, and `--set key=value`, into a Job; every fault of the whole at once.

pydantic does the reading. It is imported here alone, so that the embedded default runs without it.
"""

import dataclasses
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from echelon.errors import UserError, did_you_mean, raise_faults
from echelon.train.job import Job, check


def read_job(path: Path | None = None, settings: Iterable[str] = (), plan: str | None = None) -> Job:
    """The job of a TOML file (or the embedded default), changed by `key=value` settings and the plan."""
    what = "the settings" if path is None else f"job file {path}"
    values = {} if path is None else _load(path)
    faults = _apply(values, settings)
    if plan is not None:
        values["plan"] = plan
    job = _validate(values, faults) if values or faults else Job()
    raise_faults(what, faults)
    check(job)
    return job


def _load(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        near = sorted(other.name for other in path.parent.glob("*.toml")) if path.parent.is_dir() else []
        hint = did_you_mean(path.name, near) if near else "; without a file, the embedded default trains"
        raise UserError(f"job file {path} does not exist{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"job file {path} cannot be read: {reason}") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"job file {path} is not TOML: {error}") from None


def _apply(values: dict[str, Any], settings: Iterable[str]) -> list[str]:
    """Put each `a.b=value` into `values`; returns the faults of those that cannot be."""
    faults = []
    for setting in settings:
        key, equals, text = setting.partition("=")
        *tables, last = key.split(".")
        if not equals or not last:
            faults.append(f"--set {setting}: must be written key=value, like model.layers=12")
            continue
        table = values
        for name in tables:
            table = table.setdefault(name, {}) if isinstance(table, dict) else None
        if isinstance(table, dict):
            table[last] = _value(text)
        else:
            faults.append(f"--set {setting}: '{'.'.join(tables)}' is a value, not a table")
    return faults


def _value(text: str) -> Any:
    """A TOML value where it is one, else the text itself: data=2 is a plan, not an error."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _validate(values: Mapping[str, Any], faults: list[str]) -> Job:
    """The Job of `values`; faults are added, and the default Job returned where there are any."""
    try:
        from pydantic import TypeAdapter, ValidationError
    except ImportError:
        raise UserError(
            "reading a job file or --set needs pydantic, which is not installed: pip install pydantic"
        ) from None
    try:
        return TypeAdapter(Job).validate_python(values)
    except ValidationError as error:
        faults.extend(_explain(fault) for fault in error.errors(include_url=False))
        return Job()


def _explain(fault: Any) -> str:
    path = [str(part) for part in fault["loc"]]
    key = ".".join(path)
    if fault["type"] == "extra_forbidden" or fault["type"] == "unexpected_keyword_argument":
        return f"{key}: there is no such key{did_you_mean(path[-1], _keys_at(path[:-1]))}"
    rule = fault["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return f"{key}={fault['input']!r}: must be {rule}"


def _keys_at(path: list[str]) -> list[str]:
    """The keys that a job knows under `path`."""
    kind: Any = Job()
    for name in path:
        kind = getattr(kind, name)
    return [its.name for its in dataclasses.fields(kind)]
