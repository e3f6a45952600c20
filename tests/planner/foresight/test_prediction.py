"""What a prediction says of itself."""

from dataclasses import replace

from echelon.planner.cluster.read import read_cluster
from echelon.planner.foresight.predict import predict
from echelon.planner.shape.presets import preset_shape

PREDICTION = predict(preset_shape("gpt-1.3b"), "data=8 zero=3 precision=bf16", read_cluster("a100-80:8"), 8)


def test_peak_is_the_sum_of_the_categories() -> None:
    memory = PREDICTION.memory[0]
    assert memory.states == memory.parameters + memory.gradients + memory.optimizer
    assert (
        memory.peak
        == memory.states + memory.activations + memory.buffers + memory.gathered + memory.temporary
    )
    assert PREDICTION.peak == memory.peak


def test_a_plan_fits_with_room_for_contexts_and_on_its_host() -> None:
    assert PREDICTION.fits
    assert not replace(PREDICTION, capacity=PREDICTION.peak).fits
    on_host = tuple(memory._replace(host=1e12) for memory in PREDICTION.memory)
    assert not replace(PREDICTION, memory=on_host, host_capacity=1e12).fits
    assert replace(PREDICTION, memory=on_host, host_capacity=0.0).fits


def test_json_has_every_part() -> None:
    plain = PREDICTION.to_dict()
    assert plain["seconds"]["compute"] == PREDICTION.seconds.compute
    assert plain["memory"][0]["stage"] == 0
    assert plain["peak_bytes"] == PREDICTION.peak
