"""What hosts take: by layers, experts, microbatches and chunks, on hosts of different pace."""

from dataclasses import replace

import pytest

from echelon.planner.cluster.read import read_cluster
from echelon.planner.foresight.host import stage_kernels, step_waiting_seconds, waiting_seconds
from echelon.planner.foresight.practice import ECHELON, MEGATRON_TESTS
from echelon.planner.foresight.settings import Settings
from echelon.planner.foresight.stages import StageKind
from echelon.planner.shape.presets import preset_shape

A100, H100 = (read_cluster(f"{name}:8").device for name in ("a100-80", "h100"))
SHAPE = preset_shape("mixtral-8x7b")
PROGRAM = replace(MEGATRON_TESTS, host_sparse=1.0, host_expert=0.25, host_context=0.5)


def kernels(settings: Settings, dense: float = 0.0, sparse: float = 0.0) -> float:
    return stage_kernels(SHAPE, PROGRAM, settings, StageKind(0, 1, dense, sparse, False, False))


def test_each_expert_of_a_rank_has_kernels_of_its_own() -> None:
    assert kernels(Settings(), dense=4) == 4
    assert kernels(Settings(), sparse=4) == 4 * (1 + 0.25 * 8)
    assert kernels(Settings(expert=4), dense=1, sparse=1) == 1 + (1 + 0.25 * 2)
    assert kernels(Settings(context=2), dense=2) == 2 * 1.5


def test_layers_that_turn_queries_have_more_kernels_unless_compiled() -> None:
    layers = StageKind(0, 1, 4, 0.0, False, False)
    llama, gpt = preset_shape("llama3-8b"), preset_shape("gpt-small")
    assert stage_kernels(llama, ECHELON, Settings(), layers) == 4 * ECHELON.host_turn
    assert stage_kernels(llama, ECHELON, Settings(compiled=True), layers) == 4
    assert stage_kernels(gpt, ECHELON, Settings(), layers) == 4


def test_a_replayed_graph_waits_for_no_kernels() -> None:
    layers, graphs = StageKind(0, 1, 4, 0.0, False, False), Settings(graphs=True)
    gpt = preset_shape("gpt-small")
    assert stage_kernels(gpt, ECHELON, graphs, layers) == 0
    for settings in (
        graphs._replace(data=2),
        graphs._replace(recompute="full"),
        graphs._replace(offload=frozenset({"optimizer"})),
        graphs._replace(update="backward"),
        graphs._replace(precision="fp8"),
    ):
        assert stage_kernels(gpt, ECHELON, settings, layers) == 4
    assert stage_kernels(preset_shape("mixtral-8x7b"), ECHELON, graphs, layers) > 0


def test_a_device_waits_for_what_its_host_takes_longer() -> None:
    issued = 8 * PROGRAM.host_layer
    assert waiting_seconds(PROGRAM, A100, 8, 0.0) == pytest.approx(issued)
    assert waiting_seconds(PROGRAM, A100, 8, 0.75 * issued) == pytest.approx(0.25 * issued)
    assert waiting_seconds(PROGRAM, A100, 8, 2 * issued) == 0
    assert waiting_seconds(PROGRAM, H100, 8, 0.0) == pytest.approx(H100.host_pace * issued)
    assert H100.host_pace < A100.host_pace == 1


def test_each_chunk_of_each_microbatch_waits() -> None:
    once, each = PROGRAM.host_step, PROGRAM.host_chunk
    assert step_waiting_seconds(PROGRAM, A100, Settings()) == pytest.approx(once + each)
    many = Settings(microbatches=4, chunks=3)
    assert step_waiting_seconds(PROGRAM, A100, many) == pytest.approx(once + 12 * each)
