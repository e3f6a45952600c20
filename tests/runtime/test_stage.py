"""A stage passes on what is asked of it to each of its parameter sets."""

from torch import nn

from echelon.collectives import RecordingGroup
from echelon.data_parallel import Buffers, SingleReplica, Zero
from echelon.runtime import Stage
from echelon.wrapping import Wrapping
from tests.sets import set_of


def two_sets(level: int) -> Stage:
    """The weight is sharded over two ranks, the bias is on this rank alone."""
    module = nn.Linear(3, 2)
    replicas, alone = RecordingGroup("data", 0, 2), RecordingGroup("expert_data")
    sharded = Zero(set_of(module, replicas, only={module.weight}), level, Wrapping())
    single = SingleReplica(set_of(module, alone, only={module.bias}))
    return Stage(0, module, [single, sharded], Buffers(module, replicas))


def test_one_set_whose_ranks_talk_in_every_microbatch_is_enough() -> None:
    assert not two_sets(level=1).lockstep
    assert two_sets(level=2).lockstep


def test_a_step_goes_through_all_sets() -> None:
    stage = two_sets(level=2)
    assert isinstance(stage.module, nn.Linear)
    for sharing in stage.sharings:
        sharing.start_step()
    output = stage.forward(stage.module.weight.new_ones(4, 3))
    stage.start_backward(last=True)
    output.sum().backward()
    stage.finish_backward()
    stage.reduce()
    gradients = [local.tensor.grad for sharing in stage.sharings for local in sharing.local_parameters()]
    assert [gradient.tolist() for gradient in gradients if gradient is not None] == [[4, 4], [4, 4, 4]]


def test_a_stage_describes_its_sets() -> None:
    assert two_sets(level=1).describe() == (
        "stage 0: dense 2 parameters over expert_data (1), SingleReplica; "
        "dense 6 parameters over data (2), Zero"
    )
