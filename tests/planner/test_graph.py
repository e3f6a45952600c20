"""Profiles as data: an order in which layers can run, and every error at once."""

import math

import pytest

from echelon.errors import UserError
from echelon.planner import Node, chain, make_profile


def node(name: str, seconds: float = 1.0) -> Node:
    return Node(name, seconds, 0.0, 0.0, 0.0, 0.0)


def test_layers_are_put_in_an_order_in_which_they_can_run() -> None:
    profile = make_profile([node(name) for name in "dcba"], [("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")])
    assert [listed.name for listed in profile.nodes] == [
        "a",
        "c",
        "b",
        "d",
    ]  # among those ready, as in the file
    assert profile.edges == ((0, 1), (0, 2), (1, 3), (2, 3))
    assert not profile.is_chain
    assert chain([node("a"), node("b")]).is_chain


def test_an_edge_given_twice_is_one() -> None:
    assert make_profile([node("a"), node("b")], [("a", "b"), ("a", "b")]).edges == ((0, 1),)


def test_every_error_at_once() -> None:
    nodes = [node("a"), node("a"), node("b", -1.0), node("c", math.nan)]
    with pytest.raises(UserError) as caught:
        make_profile(nodes, [("a", "x"), ("b", "b")], [("y", "a")])
    text = str(caught.value)
    assert len(caught.value.errors) == 6
    for word in (
        "duplicate layer name 'a'",
        "forward_seconds=-1.0",
        "=nan",
        "no layer x",
        "own output",
        "no layer y",
    ):
        assert word in text


def test_a_cycle_names_its_layers() -> None:
    with pytest.raises(UserError, match="b, c form a cycle"):
        make_profile([node("a"), node("b"), node("c")], [("a", "b"), ("b", "c"), ("c", "b")])


@pytest.mark.parametrize(("nodes", "error"), [([], "no layer"), ([node("a", 0.0)], "takes any time")])
def test_a_profile_of_nothing(nodes: list[Node], error: str) -> None:
    with pytest.raises(UserError, match=error):
        chain(nodes)
