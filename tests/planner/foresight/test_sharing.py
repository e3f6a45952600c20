"""The end of a step: gradients, the update, copies."""

from dataclasses import replace

import pytest

from echelon.planner.cluster.read import read_cluster
from echelon.planner.foresight.memory import stage_parameters
from echelon.planner.foresight.practice import ECHELON, ECHELON_CPU
from echelon.planner.foresight.settings import Settings
from echelon.planner.foresight.sharing import StepEnd, step_end
from echelon.planner.foresight.stages import stage_kinds
from echelon.planner.shape.presets import preset_shape

SHAPE = preset_shape("llama2-7b")
CLUSTER = read_cluster("h100:64")


def end(settings: Settings) -> StepEnd:
    stages = stage_kinds(SHAPE, settings.pipeline)
    return step_end(CLUSTER, ECHELON, settings, [stage_parameters(SHAPE, settings, each) for each in stages])


def test_one_rank_exchanges_nothing() -> None:
    assert end(Settings()).exchange == 0
    assert end(Settings(frozen=True)) == StepEnd(0, 0, 0)


def test_sharding_moves_weights_instead_of_gradients() -> None:
    all_reduce, zero = end(Settings(data=64)), end(Settings(data=64, zero=1))
    assert zero.exchange == pytest.approx(all_reduce.exchange * 6 / 8, rel=0.05)  # 4 + 2 bytes, not 4 + 4
    assert zero.update < all_reduce.update / 30
    assert end(Settings(data=64, zero=3)).exchange == 0  # in each microbatch


def test_hybrid_shards_cross_the_network_with_their_part() -> None:
    whole, hybrid = end(Settings(data=64, zero=1)), end(Settings(data=64, zero=1, shard=8))
    assert 0 < hybrid.exchange < 2.5 * whole.exchange


def test_an_offloaded_update_is_the_hosts() -> None:
    offloaded = end(Settings(data=8, zero=1, offload=frozenset({"optimizer"})))
    assert offloaded.update == 0 < offloaded.copies
    assert end(Settings(offload=frozenset({"optimizer"}), delay=1)).copies == 0


def test_a_server_takes_and_sends_all() -> None:
    assert end(Settings(data=64, sync="parameter-server")).exchange > 20 * end(Settings(data=64)).exchange


def test_on_a_processor_each_message_starts_by_itself() -> None:
    slow = replace(CLUSTER, between=CLUSTER.between._replace(latency=1.0))
    counts = [stage_parameters(SHAPE, Settings(), stage) for stage in stage_kinds(SHAPE, 1)]
    starts = {
        (practice.name, zero): step_end(slow, practice, Settings(data=64, zero=zero), counts, 32).exchange
        for practice in (ECHELON, ECHELON_CPU)
        for zero in (0, 1)
    }
    assert starts[ECHELON_CPU.name, 1] == pytest.approx(32 * starts[ECHELON.name, 1], rel=0.05)
    assert starts[ECHELON_CPU.name, 0] > 1000 * starts[ECHELON.name, 0]  # 27 GB of gradients, by 25 MiB
