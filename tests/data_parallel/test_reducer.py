"""Groups of gradients are reduced when they are complete, and always in one order."""

import pytest
import torch
from torch import nn

from echelon.collectives import RecordingGroup
from echelon.data_parallel.reducer import Reducer
from echelon.errors import UserError


class Watched:
    """Four parameters in three groups, with a record of what the reducer does."""

    def __init__(self) -> None:
        self.a, self.b, self.c, self.d = self.parameters = [nn.Parameter(torch.ones(2)) for _ in range(4)]
        self.accumulated: list[nn.Parameter] = []
        self.reduced: list[int] = []
        self.reducer = Reducer(self.parameters, self.accumulated.append, self.reduced.append)
        self.reducer.regroup([[self.a], [self.b, self.c], [self.d]])

    def backward(self, *parameters: nn.Parameter) -> None:
        for parameter in parameters:
            parameter.sum().backward()


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_a_complete_group_waits_for_those_before_it(watched: Watched) -> None:
    watched.reducer.start_step()
    watched.reducer.start_backward(reducing=True)
    watched.backward(watched.d, watched.c, watched.b)
    assert watched.reduced == []
    watched.backward(watched.a)
    assert watched.reduced == [0, 1, 2], "all that are complete, at once"
    assert watched.reducer.all_reduced
    assert watched.accumulated == [watched.d, watched.c, watched.b, watched.a]


def test_a_group_waits_for_all_of_its_gradients(watched: Watched) -> None:
    watched.reducer.start_step()
    watched.reducer.start_backward(reducing=True)
    watched.backward(watched.a, watched.b)
    assert watched.reduced == [0]
    watched.reducer.flush()
    assert watched.reduced == [0, 1, 2], "what the backward pass did not reach is reduced too"
    assert watched.reducer.used == {watched.a, watched.b}


def test_microbatches_before_the_last_reduce_nothing(watched: Watched) -> None:
    watched.reducer.start_step()
    watched.reducer.start_backward(reducing=False)
    watched.backward(*watched.parameters)
    watched.reducer.flush()
    assert watched.reduced == []
    assert not watched.reducer.all_reduced


def test_matrices_may_add_in_place_until_the_last_backward_pass_of_a_step(watched: Watched) -> None:
    reducer = watched.reducer
    assert not reducer.accumulation.is_open
    reducer.start_step()
    reducer.start_backward(reducing=False)
    assert reducer.accumulation.is_open
    reducer.start_backward(reducing=True)
    assert not reducer.accumulation.is_open, "this gradient is waited for"
    reducer.start_backward(reducing=False)
    reducer.finish_step()
    assert not reducer.accumulation.is_open


def test_a_gradient_after_its_reduction_is_refused(watched: Watched) -> None:
    watched.reducer.start_step()
    watched.reducer.start_backward(reducing=True)
    watched.backward(watched.a, watched.b, watched.b)  # its group is not complete yet
    assert watched.reduced == [0]
    with pytest.raises(UserError, match=r"got a gradient again after it was reduced"):
        watched.backward(watched.a)


def test_gradients_outside_of_a_step_or_after_the_end_are_not_its_own(watched: Watched) -> None:
    watched.backward(watched.a)
    watched.reducer.start_step()
    watched.reducer.finish_step()
    watched.backward(watched.b)
    watched.reducer.start_step()
    watched.reducer.close()
    watched.backward(watched.c)
    assert (watched.accumulated, watched.reduced, watched.reducer.used) == ([], [], set())


def test_the_agreed_order_is_that_of_arrival_and_then_the_reverse_of_the_model(watched: Watched) -> None:
    watched.reducer.start_step()
    watched.reducer.start_backward(reducing=False)
    watched.backward(watched.c, watched.b, watched.c)
    order = watched.reducer.agreed_order(RecordingGroup("data", 0, 2))
    numbers = {parameter: number for number, parameter in enumerate(watched.parameters)}
    assert [numbers[parameter] for parameter in order] == [2, 1, 3, 0]
