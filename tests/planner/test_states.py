"""States: the ideals of a graph, what leaves them, and which lies in which."""

from hypothesis import given

from echelon.planner import Node, Profile, chain, make_profile
from echelon.planner.states import find_states, stage_of_layers
from tests.planner.brute_force import ideals, profiles


def node(name: str, output: float = 1.0) -> Node:
    return Node(name, 1.0, 2.0, output, 10.0, output)


DIAMOND = make_profile(
    [node("a", 1.0), node("b", 2.0), node("c", 4.0), node("d", 8.0)],
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
    free = {place for place, node in enumerate(profile.nodes) if node.is_free}
    state_sets = {
        frozenset(place for place in range(len(profile.nodes)) if mask >> place & 1)
        for mask in find_states(profile, 1000).masks
    }
    assert {ideal - free for ideal in state_sets} == {ideal - free for ideal in ideals(profile)}


def test_a_chain_has_one_more_than_layers_beyond_any_limit() -> None:
    states = find_states(chain([node(str(place)) for place in range(50)]), 10)
    assert len(states.masks) == 51
    assert states.exact


def test_too_wide_a_graph_is_cut_along_one_order() -> None:
    wide = make_profile([node(str(place)) for place in range(30)], [])
    states = find_states(wide, 100)
    assert len(states.masks) == 31
    assert not states.exact


def test_layers_by_stage() -> None:
    assert stage_of_layers(DIAMOND, [0b11, 0b1111]) == [0, 0, 1, 1]
