"""Profiles as data: an order in which layers can run, and every error at once."""

import math

import pytest
from hypothesis import given

from echelon.errors import UserError
from echelon.planner import Node, Profile, chain, make_profile
from echelon.planner.graph import AMOUNTS, find_states, stage_of_layers
from tests.planner.brute_force import ideals, is_chain, profiles


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
    assert not is_chain(profile)
    assert is_chain(chain([node("a"), node("b")]))


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


def layer(name: str, output: float = 1.0) -> Node:
    return Node(name, 1.0, 2.0, output, 10.0, output)


DIAMOND = make_profile(
    [layer("a", 1.0), layer("b", 2.0), layer("c", 4.0), layer("d", 8.0)],
    [("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")],
)


def test_the_states_of_a_diamond() -> None:
    states = find_states(DIAMOND, 100)
    assert states.masks == (0b0, 0b1, 0b11, 0b101, 0b111, 0b1111)
    # {a,b}: a is still wanted by c, b by d; {a,b,c}: a by nobody any more; an output taken twice counts once.
    assert states.crossing.tolist() == [0, 1, 3, 5, 6, 0]
    assert states.seconds.tolist() == [0, 3, 6, 6, 9, 12]
    assert not states.nested[2, 3]
    assert states.nested[1, 4]
    assert not states.nested[4, 4]
    assert states.exact


@given(profiles())
def test_they_are_all_ideals_there_are(profile: Profile) -> None:
    costs = [[getattr(node, amount) for amount in AMOUNTS] for node in profile.nodes]
    free = {place for place, amounts in enumerate(costs) if not any(amounts)}
    state_sets = {
        frozenset(place for place in range(len(profile.nodes)) if mask >> place & 1)
        for mask in find_states(profile, 1000).masks
    }
    assert {ideal - free for ideal in state_sets} == {ideal - free for ideal in ideals(profile)}


def test_a_chain_has_one_more_than_layers_beyond_any_limit() -> None:
    states = find_states(chain([layer(str(place)) for place in range(50)]), 10)
    assert len(states.masks) == 51
    assert states.exact


def test_too_wide_a_graph_is_cut_along_one_order() -> None:
    wide = make_profile([layer(str(place)) for place in range(30)], [])
    states = find_states(wide, 100)
    assert len(states.masks) == 31
    assert not states.exact


def test_layers_by_stage() -> None:
    assert stage_of_layers(DIAMOND, [0b11, 0b1111]) == [0, 0, 1, 1]
