"""JSON that is made to be slow or large is refused before it is parsed."""

import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.errors import UserError
from echelon.planner import read_profile
from echelon.state.bounded_json import DEEPEST, _measure, parse_json
from echelon.state.weight_files.weight_folder import INDEX, read_headers, read_json
from echelon.train.runs.rollbacks import SkippedBatches
from echelon.train.runs.run_folder import read_about

PLAIN = st.recursive(
    st.none() | st.integers() | st.text(alphabet='ab"\\[]{},:é', max_size=6),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text('"\\[,', max_size=3), inner, max_size=3)
    ),
    max_leaves=20,
)


def count(value: Any) -> tuple[int, int]:
    """Values and depth of parsed JSON; each list and object counts as one more."""
    if not isinstance(value, dict | list):
        return 0, 0
    inner = [count(each) for each in (value.values() if isinstance(value, dict) else value)]
    return 1 + max(0, len(inner) - 1) + sum(n for n, _ in inner), 1 + max((d for _, d in inner), default=0)


@given(PLAIN, st.booleans(), st.integers(1, 9))
def test_values_and_brackets_are_counted_outside_of_texts(value: Any, is_ascii: bool, block: int) -> None:
    data = json.dumps(value, ensure_ascii=is_ascii).encode()
    num_values, depth = count(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("echelon.state.bounded_json._BLOCK_BYTES", block)
        assert _measure(data) == (num_values + 1, depth)
    assert parse_json(data) == value


def test_too_many_bytes_values_and_brackets_are_refused() -> None:
    assert parse_json(b"[" * DEEPEST + b"]" * DEEPEST)
    with pytest.raises(ValueError, match=f"has {DEEPEST + 1} brackets inside each other; {DEEPEST} are"):
        parse_json(b"[" * (DEEPEST + 1) + b"]" * (DEEPEST + 1))
    assert len(parse_json(b"[1, 2, 3, 4]", most_values=5)) == 4
    with pytest.raises(ValueError, match="it has 6 values; 5 are allowed"):
        parse_json(b"[1, 2, 3, 4, 5]", most_values=5)
    with pytest.raises(ValueError, match="it has 3 bytes; 2 are allowed"):
        parse_json(b"[1]", most_bytes=2)
    with pytest.raises(ValueError, match="utf-8"):
        parse_json(b'["\xff"]')


def test_the_collector_is_as_it_was() -> None:
    parse_json(b"[]")
    assert gc.isenabled()
    gc.disable()
    try:
        parse_json(b"[]")
        assert not gc.isenabled()
    finally:
        gc.enable()


def _index(path: Path) -> None:
    path.rename(path.with_name(INDEX))
    headers = read_headers(path.parent)
    assert not headers.is_listed
    raise UserError(headers.errors[0])


def _about(path: Path) -> None:
    path.rename(path.with_name("run.json"))
    assert read_about(path.parent) is None
    raise UserError("values")


@pytest.mark.parametrize("read", [read_json, read_profile, SkippedBatches.read, _index, _about])
def test_no_reader_of_files_parses_what_is_made_to_be_slow(
    tmp_path: Path, read: Callable[[Path], object]
) -> None:
    """21 MB of it took two minutes and a gigabyte."""
    path = tmp_path / "given.json"
    path.write_bytes(b'{"a": [' + b"[]," * 2_000_000 + b"[]]}")
    begin = time.process_time()
    with pytest.raises(UserError, match="values"):
        read(path)
    assert time.process_time() - begin < 5
