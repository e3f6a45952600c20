"""The example of a server that takes new weights, run as the page says."""

import pytest
import torch

from examples import weight_receiver as example


@pytest.mark.parametrize(
    ("plan", "ranks"), [("data=2 zero=3", 2), pytest.param("pipeline=2", 2, marks=pytest.mark.slow)]
)
def test_a_server_computes_what_the_trained_model_does(plan: str, ranks: int) -> None:
    assert example.main(plan, ranks)


def test_an_update_is_whole_or_an_error() -> None:
    receiver = example.Receiver(example.build())
    with pytest.raises(AssertionError, match="start_weight_update comes first"):
        receiver.update_weights("0.bias", torch.zeros(16))
    receiver.start_weight_update()
    receiver.update_weights("0.bias", torch.zeros(16))
    with pytest.raises(AssertionError, match=r"no values came for .*0\.weight"):
        receiver.finish_weight_update()
