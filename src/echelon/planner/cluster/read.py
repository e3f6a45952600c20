"""Clusters by name (`h100:1024`, or `cpu:2` for this machine), or from a TOML file like `calibration/*.toml`.

A file has all figures of a device and its links, and may start from one that is here:

    like = "h100"           # what this file leaves out
    count = 64
    per_node = 8
    [between]               # of one device, over the network
    bandwidth = 25e9
    latency = 10e-6
"""

import re
import tomllib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from echelon.errors import UserError, did_you_mean, raise_errors
from echelon.planner.cluster.cluster import Cluster, Device, Link, is_positive

_FOLDER = Path(__file__).resolve().parent.parent / "calibration"
_KERNELS = ("matrix", "matrix_knee", "fp8", "fp4", "attention", "stream", "launch", "host_pace")
_DEVICE = ("memory", "bandwidth", "cores", *_KERNELS)
_NODE = ("per_node", "host_memory", "host_bandwidth", "stragglers", "price")
_A100_40 = re.compile(r"a100.*40 ?gb")
CPU = "cpu"  # of this machine, measured
_LINKS = ("inside", "between", "host")
_MOST_DEVICES = 10**6


def device_names() -> tuple[str, ...]:
    """The devices that have a calibration file."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


def read_cluster(text: str) -> Cluster:
    """Return a cluster by name and number of devices, or from a file: read_cluster("h100:1024")."""
    if text.endswith(".toml"):
        return _from_file(Path(text))
    name, _, digits = text.partition(":")
    errors = []
    if name not in (*device_names(), CPU):
        errors.append(f"'{name}' is not a device{did_you_mean(name, (*device_names(), CPU))}")
    count = digits or "1"
    if not (count.isascii() and count.isdecimal() and 1 <= int(count[:9]) <= _MOST_DEVICES):
        errors.append(f"'{digits}' devices: must be an integer from 1 to {_MOST_DEVICES:,}, like h100:64")
    raise_errors(f"cluster '{text}'", errors)
    if name == CPU:
        from echelon.planner.cluster.here import processor_cluster  # a second of torch

        return processor_cluster(int(count))
    return make_cluster(calibration(name), int(count))


def device_of(name: str) -> str:
    """The calibration for a device as a table spells it: 'DGX-GB200' → 'gb200', 'a100_80gb' → 'a100-80'."""
    key = name.lower()
    if "a100" in key:
        return "a100-40" if _A100_40.search(key) else "a100-80"
    found = [device for device in device_names() if device.removesuffix("x") in key]
    if not found:
        raise UserError(f"gpu={name!r}: has no calibration; there is one for {', '.join(device_names())}")
    return max(found, key=len)


@lru_cache(maxsize=64)
def _calibration(name: str) -> Mapping[str, Any]:
    table = tomllib.loads((_FOLDER / f"{name}.toml").read_text("utf-8"))
    return _merged(table)


def calibration(name: str) -> Mapping[str, Any]:
    """The figures of a device and its links, those of `like` included."""
    return {"name": name, **_calibration(name)}


def _merged(table: Mapping[str, Any]) -> dict[str, Any]:
    base = dict(_calibration(table["like"])) if "like" in table else {}
    for key, value in table.items():
        base[key] = {**base.get(key, {}), **value} if isinstance(value, dict) else value
    base.pop("like", None)
    return base


def make_cluster(table: Mapping[str, Any], count: int) -> Cluster:
    """A cluster of `count` devices with the figures of a table."""
    figures = {key: table[key] for key in _DEVICE if key in table}
    device = Device(table["name"], flops=dict(table["flops"]), **figures)
    inside, between, host = (
        Link(float(table[key]["bandwidth"]), float(table[key]["latency"])) for key in _LINKS
    )
    node = {key: table[key] for key in _NODE if key in table}
    return Cluster(device, count, inside=inside, between=between, host=host, **node)


def _from_file(path: Path) -> Cluster:
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"cluster '{path}' cannot be read: {error}") from error
    errors = []
    if "like" in table and table["like"] not in device_names():
        errors.append(
            f"like='{table['like']}': is not a device{did_you_mean(str(table['like']), device_names())}"
        )
    raise_errors(f"cluster '{path}'", errors)
    merged = {"name": path.stem, **_merged(table)}
    raise_errors(f"cluster '{path}'", _table_errors(merged))
    return make_cluster(merged, int(merged.get("count", 1)))


def _table_errors(table: Mapping[str, Any]) -> list[str]:
    errors = [
        f'{key}: is missing; set it, or start from a device with like="h100"'
        for key in ("memory", "bandwidth", "cores", "per_node", "flops", *_LINKS)
        if key not in table
    ]
    known = {"name", "count", "flops", *_DEVICE, *_NODE, *_LINKS}
    errors += [
        f"{key}: is not a figure of a cluster{did_you_mean(key, known)}" for key in table if key not in known
    ]
    numbers = {key: table[key] for key in (*_DEVICE, *_NODE, "count") if key in table}
    numbers |= {f"flops.{key}": value for key, value in _group(table, "flops").items()}
    for link in _LINKS:
        group = _group(table, link)
        if link in table:
            numbers |= {f"{link}.{key}": group.get(key) for key in ("bandwidth", "latency")}
    zero = ("stragglers", "price", "host_memory")
    errors += [
        f"{key}={value!r}: must be a number above 0"
        for key, value in numbers.items()
        if not (is_positive(value) or (key in zero and value == 0))
    ]
    return errors


def _group(table: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = table.get(key, {})
    return value if isinstance(value, dict) else {}
