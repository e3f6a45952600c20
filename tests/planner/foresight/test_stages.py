"""Layers of stages."""

from echelon.planner.foresight.stages import StageKind, layer_counts, stage_kinds
from echelon.planner.shape.presets import preset_shape


def test_layers_divide_evenly_or_with_embedding_and_head() -> None:
    assert layer_counts(8, 4) == (2, 2, 2, 2)
    assert layer_counts(126, 8, 8) == (15, 16, 16, 16, 16, 16, 16, 15)
    assert layer_counts(15, 4) == (4, 4, 4, 3)
    assert layer_counts(10, 4) == (2, 3, 3, 2)
    assert layer_counts(9, 4) == (3, 2, 2, 2)
    assert layer_counts(5, 1) == (5,)


def test_stages_that_are_alike_are_one_kind() -> None:
    shape = preset_shape("llama3-8b")
    assert stage_kinds(shape, 4) == (
        StageKind(0, 1, 8, 0, True, False),
        StageKind(1, 2, 8, 0, False, False),
        StageKind(3, 1, 8, 0, False, True),
    )
    assert stage_kinds(shape, 1) == (StageKind(0, 1, 32, 0, True, True),)


def test_the_first_layers_of_a_mixture_may_be_dense() -> None:
    kinds = stage_kinds(preset_shape("deepseek-v3"), 61)
    assert [kind.dense for kind in kinds[:3]] == [1, 1, 0]
    assert sum(kind.number * kind.dense for kind in kinds) == 3
    assert kinds[0].layers == 1
