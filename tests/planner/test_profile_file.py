"""Profiles as files: what is written is read again; every error of a file at once."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given

from echelon.errors import UserError
from echelon.planner import Node, Profile, chain, profile_of, read_profile, to_dict, write_profile
from echelon.planner.graph import AMOUNTS
from tests.planner.brute_force import profiles


@given(profiles())
def test_what_is_written_is_read_again(profile: Profile) -> None:
    assert profile_of(json.loads(json.dumps(to_dict(profile)))) == profile


def test_through_a_file(tmp_path: Path) -> None:
    nodes = [Node(name, 0.1, 0.2, 3.0, 4.0, 5.0, "Linear") for name in "ab"]
    profile = chain(nodes, [("a", "b")])
    write_profile(profile, tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == profile


def test_without_edges_a_chain_and_without_stash_the_output() -> None:
    node = {"forward_seconds": 1, "backward_seconds": 2, "output_bytes": 3, "parameter_bytes": 4}
    value = {
        "format": "echelon-profile",
        "version": 1,
        "nodes": [{"name": "a", **node}, {"name": "b", **node}],
    }
    profile = profile_of(value)
    assert profile.is_chain
    assert profile.nodes[0].stash_bytes == 3.0


def test_every_error_of_a_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    nodes = [{"name": "a", "forward_second": 1, "backward_seconds": "x", "output_bytes": True}, 7]
    path.write_text(
        json.dumps({"version": 2, "nodes": nodes, "edges": [["a"]], "extra": 1}), encoding="utf-8"
    )
    with pytest.raises(UserError) as caught:
        read_profile(path)
    text = str(caught.value)
    assert str(path) in text
    for words in (
        "'extra' is not a key",
        '"format": "echelon-profile"',
        "did you mean 'forward_seconds'?",
        "parameter_bytes is missing",
        'backward_seconds="x"',
        "output_bytes=true",
        "node 1 must be an object",
        '["a"] must be two names',
    ):
        assert words in text


@pytest.mark.parametrize(
    "content", [b"\xff\xfe\x00", b'{"nodes": ', b"", b"{}", b'{"nodes": 3, "edges": {}}']
)
def test_what_is_no_profile_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "profile"
    path.write_bytes(content)
    with pytest.raises(UserError, match="profile"):
        read_profile(path)


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nosuch"):
        with pytest.raises(UserError, match="cannot be read"):
            read_profile(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a": ' * 5000, "is not JSON"),
        ('{"version": ' + "9" * 5000 + "}", "is not JSON"),
    ],
)
def test_odd_json_is_no_traceback(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=says):
        read_profile(path)


def test_files_that_cannot_be_read_say_so_in_words(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="binary is not UTF-8 text"):
        read_profile(tmp_path / "binary")
    with pytest.raises(UserError, match=r"cannot be read: Is a directory$"):
        read_profile(tmp_path)


def test_an_integer_of_hundreds_of_digits_is_refused() -> None:
    """It was an OverflowError."""
    node = dict.fromkeys(AMOUNTS, 1) | {"name": "0", "forward_seconds": 10**400}
    with pytest.raises(UserError, match="forward_seconds=inf must be a finite number"):
        profile_of({"format": "echelon-profile", "version": 1, "nodes": [node]})


def test_nan_is_named_as_nan() -> None:
    node = {"name": "a", "forward_seconds": math.nan, "backward_seconds": math.inf}
    value = {
        "format": "echelon-profile",
        "version": 1,
        "nodes": [node | {"output_bytes": 1, "parameter_bytes": 1}],
    }
    with pytest.raises(UserError) as caught:
        profile_of(value)
    assert caught.value.errors[:2] == (
        "layer a: forward_seconds=nan must be a finite number, at least 0",
        "layer a: backward_seconds=inf must be a finite number, at least 0",
    )
