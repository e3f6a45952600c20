"""Steps that are not finite on a GPU: left out without a look at the device, and told with the layer."""

from typing import Any

import pytest
import torch

from echelon.update.nonfinite import NonfiniteError
from tests.engine.poisoned_training import (
    STEPS,
    Poison,
    full_state,
    poisoned_engine,
    train_plain,
    training_of,
)
from tests.gpu.waiting import waiting_raises

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


WARM_UP = 4  # steps that make state and measure memory


@pytest.mark.parametrize("kind", ["input", "gradient"])
def test_a_poisoned_batch_is_left_out_and_no_step_waits(kind: str) -> None:
    poison = Poison(kind, (WARM_UP,))
    training = training_of("data=1", poison)
    with poisoned_engine("data=1", training, check_every=0) as engine:
        batches = [training.batch(step, poison) for step in range(STEPS)]
        metrics = [engine.step(batch) for batch in batches[:WARM_UP]]
        torch.cuda.synchronize()
        with waiting_raises():
            metrics.append(engine.step(batches[WARM_UP]))
        metrics += [engine.step(batch) for batch in batches[WARM_UP + 1 :]]
        assert [each.skipped for each in metrics] == [step in poison.steps for step in range(STEPS)]
        found, expected = full_state(engine), train_plain("data=1", poison)
    for name, value in expected.items():
        torch.testing.assert_close(found[name].cpu(), value, rtol=0, atol=1e-9, msg=name)


@pytest.mark.parametrize("most_skipped", [1, 2, 4])
def test_the_layer_is_named(most_skipped: int) -> None:
    poison = Poison("input", range(2, 2 + most_skipped))
    training = training_of("data=1", poison)
    options: Any = {"most_skipped": most_skipped}
    engine = poisoned_engine("data=1", training, **options)

    def train() -> None:
        for step in range(2 + most_skipped + 2):
            engine.step(training.batch(step, poison))

    with pytest.raises(NonfiniteError, match=r"that of layer '0.linear' \(Linear\): NaN") as caught:
        train()
    assert caught.value.step == 1 + most_skipped
    engine.close()
