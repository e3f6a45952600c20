"""Profiles as files: what is written is read again; every error of a file at once."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given

from echelon.errors import UserError
from echelon.planner import Node, Profile, chain, profile_of, read_profile, to_dict, write_profile
from echelon.planner.graph import AMOUNTS
from echelon.planner.profile_file import parse_graph_text
from tests.planner.brute_force import is_chain, profiles
from tests.planner.shared_data import PIPEDREAM, needs_pipedream


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
    assert is_chain(profile)
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


def line(name: str, about: str, forward: str = "1.500", output: str = "8.0") -> str:
    return (
        f"{name} -- {about} -- forward_compute_time={forward}, backward_compute_time=2.000, "
        f"activation_size={output}, parameter_size=64.000"
    )


TEXT = "\n".join(
    [
        line("node4", "Add -- (inplace)") + " -- stage_id=1",
        line("node1", "Input0"),
        line("node2", "LSTM(2, 1)", output="[6.0; 1.0; 1.0]"),
        line("node3", "__getitem__(1)"),
        line("node5", "__getitem__(0)"),
        "\tnode2 -- node5",
        "\tnode1 -- node2",
        "\tnode2 -- node3",
        "\tnode5 -- node4",
        "",
    ]
)


def test_what_it_says() -> None:
    profile = parse_graph_text(TEXT)
    assert [node.name for node in profile.nodes] == ["node2", "node5", "node4"]
    first = profile.nodes[0]
    assert (first.about, first.forward_seconds, first.backward_seconds) == ("LSTM(2, 1)", 0.0015, 0.002)
    assert (first.output_bytes, first.parameter_bytes, first.stash_bytes) == (8.0, 64.0, 8.0)
    assert profile.nodes[2].about == "Add -- (inplace)"
    assert is_chain(profile)


def test_every_error_with_its_line() -> None:
    text = "\n".join(
        [
            line("a", "Linear", forward="x"),
            "what is this",
            line("b", "Linear"),
            line("b", "Linear"),
            line("c", "Linear").replace("parameter_size", "size"),
            line("d", "Linear", output="[1; -9]"),
            "\tb -- nosuch",
            "\ta -- b",
            "\tb",
        ]
    )
    with pytest.raises(UserError) as caught:
        parse_graph_text(text)
    lines = sorted(error.split(":")[0] for error in caught.value.errors)
    assert lines == [f"line {number}" for number in (1, 2, 4, 5, 6, 7, 9)]


@needs_pipedream
@pytest.mark.parametrize(
    ("name", "layers"),
    [("vgg16", 40), ("alexnet", 22), ("gnmt", 37), ("resnet18", 70), ("squeezenet1_0", 67)],
)
def test_measured_profiles(name: str, layers: int) -> None:
    text = (PIPEDREAM / f"{name}.graph.txt").read_text(encoding="utf-8")
    assert len(parse_graph_text(text).nodes) == layers
