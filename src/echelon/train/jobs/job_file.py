"""Reads job files (TOML) and `--set key=value` into a Job. Reports every error at once.

pydantic does the reading. Only this module imports it, so that the embedded default runs without it.
"""

import copy
import dataclasses
import tomllib
from collections.abc import Iterable, Sequence
from functools import reduce
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

from echelon.errors import UserError, did_you_mean, raise_errors
from echelon.plan import FIELDS
from echelon.program.build import read_text_file
from echelon.state.checkpoint.folder import RUN_FILE
from echelon.train.jobs.job import Job
from echelon.train.jobs.job_rules import job_errors

_SETTINGS = "the settings"


def read_job(path: Path | None = None, settings: Iterable[str] = (), plan: str | None = None) -> Job:
    """The job of a TOML file (or the embedded default), changed by `key=value` settings and the plan.

    If something cannot be read, the error also lists the errors of everything else. A job that can be read
    may still be invalid; `check` raises that.
    """
    subject = _SETTINGS if path is None else f"job file {path}"
    return read_values({} if path is None else _load(path), settings, plan, subject)


def read_values(values: dict[str, Any], settings: Iterable[str], plan: str | None, subject: str) -> Job:
    """The job of `values`, as a file has them, changed likewise; errors say that they are in `subject`."""
    values, settings = copy.deepcopy(values), list(settings)
    errors = _apply(values, settings)
    if plan is not None:
        errors += [
            f"--plan '{plan}' and --set {setting}: the plan is given twice; leave one of them out"
            for setting in settings
            if setting.startswith("plan=")
        ]
        values["plan"] = plan
    job, unread = _validate(values) if values or errors else (Job(), {})
    if errors or unread:
        invalid = job_errors(job, unread)
        by_settings = {setting.partition("=")[0] for setting in settings}
        has_other_errors = bool(invalid) or not unread.keys() <= by_settings
        if errors or not unread.keys().isdisjoint(by_settings):
            has_file = has_other_errors and subject != _SETTINGS
            subject = f"{subject} and {_SETTINGS}" if has_file else _SETTINGS
        raise_errors(subject, [*errors, *unread.values(), *invalid])
    return job


def _load(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_text_file(path))
    except FileNotFoundError:
        near = sorted(other.name for other in path.parent.glob("*.toml")) if path.parent.is_dir() else []
        hint = did_you_mean(path.name, near) if near else "; without a file, the embedded job runs"
        raise UserError(f"job file {path} does not exist{hint}") from None
    except IsADirectoryError:
        is_run = (path / RUN_FILE).is_file()
        fix = f"the folder of a run; to go on with it: --resume {path}" if is_run else "a folder; give a file"
        raise UserError(f"job file {path} is {fix}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"job file {path} cannot be read: {reason}") from None
    except (ValueError, RecursionError) as error:  # too many digits or brackets
        raise UserError(f"job file {path} is not TOML: {error}") from None


def _apply(values: dict[str, Any], settings: Iterable[str]) -> list[str]:
    """Put each `a.b=value` into `values`; returns the errors of the settings that are not of this form."""
    errors = []
    for setting in settings:
        key, equals, text = setting.partition("=")
        *tables, last = key.split(".")
        if not equals or not all((*tables, last)):
            errors.append(f"--set {setting}: must be written key=value, like model.layers=12")
            continue
        table = values
        for name in tables:
            table = table.setdefault(name, {}) if isinstance(table, dict) else None
        if isinstance(table, dict):
            table[last] = _value(text)
        else:
            errors.append(f"--set {setting}: '{'.'.join(tables)}' is a value, not a table")
    return errors


def _value(text: str) -> Any:
    """A TOML value if `text` is one, else the text itself: data=2 is a plan, not an error."""
    try:
        read = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return read["value"] if read.keys() == {"value"} else text


def _validate(values: dict[str, Any]) -> tuple[Job, dict[str, str]]:
    """The Job from the values that can be read, and by key the error of each that cannot."""
    try:
        from pydantic import TypeAdapter, ValidationError
    except ImportError:
        raise UserError(
            "reading a job file or --set needs pydantic, which is not installed: pip install pydantic"
        ) from None
    reader = TypeAdapter(Job)
    unread = remove_lookalikes(values)
    try:
        return reader.validate_python(values), unread
    except ValidationError as refusal:
        errors = refusal.errors(include_url=False)
    for error in errors:
        if not _path(error):  # JSON can hold a key that is half a character
            raise UserError(f"the key {error['input']!a} is not Unicode text; remove it")
    unread |= {_key(error): _explain(error, values) for error in errors}
    for error in errors:
        _remove(values, _path(error))
    return reader.validate_python(values), unread


def _remove(values: dict[str, Any], place: Sequence[str]) -> None:
    """Remove the value at `place`, or the list that contains it."""
    table: Any = values
    for name in place[:-1]:
        if not isinstance(table.get(name), dict):
            table.pop(name, None)
            return
        table = table[name]
    table.pop(place[-1], None)


def _path(error: Any) -> list[str]:
    """The keys that lead to a wrong value. An error of one item of a list is an error of the list, and one
    of a kind that a value might have been is an error of the value."""
    path: list[str] = []
    for part in error["loc"]:
        if isinstance(part, str) and not is_value(path):
            path.append(part)
    return path


def _key(error: Any) -> str:
    return ".".join(_path(error))


def _explain(error: Any, values: dict[str, Any]) -> str:
    path, key, value = _path(error), _key(error), error["input"]
    if error["type"] == "dataclass_type":
        return f"{key}={value}: {key} is a table, like {key}.{keys_at([key])[0]}=…{_plan_fix(key, value)}"
    if error["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        fix = _plan_fix(key, value) or did_you_mean(path[-1], keys_at(path[:-1]))
        return f"{key}: there is no such key{fix}"
    if any(isinstance(part, int) for part in error["loc"]):
        value = reduce(lambda table, name: table[name], path, values)
        return f"{key}={value!r}: must be {rule_of(path)}"
    if error["type"] == "too_long":
        return f"{key}={value!r}: must be two numbers, got {len(value)}"
    if error["type"] == "int_parsing_size":
        return f"{key}={value!r}: must be an integer of fewer digits"
    return f"{key}={value!r}: must be {rule_of(path)}"


def _plan_fix(key: str, value: Any) -> str:
    """A hint if `key` is a field of plans: it was perhaps meant for the plan."""
    return f"; did you mean --plan {key}={value}?" if key in FIELDS else ""


# The keys of a job file, what kind of value each takes, and values that only resemble one.

_RULES: dict[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    tuple: "two numbers",
}
_OWN_RULES = {
    "track": 'a list of names, like track=["tensorboard", "wandb"]',
    "trace": "the first step and the one after the last, like 10:13",
    "keep": "an integer, or memory",
    "loss_scale": "a number above 0, or dynamic",
    "layers": "the name of a list in the model, like blocks; how many layers it has is model.layers",
}


def keys_at(path: Sequence[str]) -> list[str]:
    return [entry.name for entry in dataclasses.fields(reduce(getattr, path, Job()))]


def rule_of(path: list[str]) -> str:
    """Return the rule for the value at `path`: rule_of(["model", "layers"]) == "an integer"."""
    return _OWN_RULES.get(".".join(path)) or _RULES.get(_kind(path), "a table")


def is_value(path: list[str]) -> bool:
    """Return whether there is a key at `path` that is no table."""
    return _kind(path) is not None


def remove_lookalikes(values: dict[str, Any], path: Sequence[str] = ()) -> dict[str, str]:
    """Remove values that pydantic would read as another kind; returns by key the error of each."""
    errors: dict[str, str] = {}
    for name in (name for name in keys_at(path) if name in values):
        place, value = [*path, name], values[name]
        error = _error(place, value)
        if isinstance(value, dict) and not is_value(place):
            errors |= remove_lookalikes(value, place)
        elif error is not None:
            key, shown = ".".join(place), str(value).lower() if isinstance(value, bool) else repr(value)
            errors[key] = f"{key}={shown}: must be {error}"
            del values[name]
    return errors


def _kind(path: list[str]) -> Any:
    """bool, int, float, str or tuple; None for a table, or where there is no such key."""
    kind: Any = Job
    for name in path:
        fields = {entry.name: entry.type for entry in dataclasses.fields(kind)}
        kind = fields.get(name)
        if isinstance(kind, UnionType) or get_origin(kind) is Union:  # int | None
            kind = next(each for each in get_args(kind) if each is not type(None))
        if not dataclasses.is_dataclass(kind):
            return get_origin(kind) or kind
    return None


def _error(path: list[str], value: Any) -> str | None:
    """Return the rule for the value at `path`, if this value only resembles a valid one."""
    kind, rule = _kind(path), rule_of(path)
    if kind is bool and not isinstance(value, bool):
        return None if str(value).lower() in ("true", "false") else rule
    if kind not in (int, float, tuple):
        return None
    items = value if kind is tuple and isinstance(value, list) else [value]
    if any(isinstance(item, bool) for item in items):
        return rule
    if any(isinstance(item, str) and not item.isascii() for item in items):
        return f"{rule}, written with the digits 0 to 9"
    return None
