"""Measures of two outputs, and a skeleton that has weights for a while."""

import torch
from torch import nn

from echelon.audit.own_forward import find_difference, measure_output, with_tensors
from echelon.audit.skeleton import make_skeleton


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 3, batch_first=True)
        self.first, self.last = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.again = nn.Linear(3, 3)
        self.again.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.last(self.again(self.first(self.lstm(x)[0][:, -1])))
        return output


def test_a_skeleton_with_whole_weights_computes_what_the_model_does() -> None:
    model = Tied().eval()
    skeleton = make_skeleton(model)
    assert isinstance(skeleton, nn.Module)
    assert all(parameter.is_meta for parameter in skeleton.parameters())
    assert skeleton.get_parameter("again.weight") is skeleton.get_parameter("first.weight")
    with torch.no_grad():
        model.last.running_mean.add_(1)  # type: ignore[union-attr]
        x = torch.randn(2, 4, 3)
        with with_tensors(skeleton, dict(model.state_dict())):
            assert torch.equal(skeleton(x), model(x))
    assert all(parameter.is_meta for parameter in skeleton.parameters())


def test_a_model_that_cannot_be_copied_says_why() -> None:
    model = nn.Linear(2, 2)
    model.kept = model.weight * 2  # type: ignore[assignment]  # has a history, which torch does not copy
    assert "Linear cannot be copied: RuntimeError" in str(make_skeleton(model))


def test_outputs_differ_by_size_by_place_and_by_shape() -> None:
    output = torch.randn(2, 5)
    same = measure_output({"a": output})
    assert find_difference(same, measure_output({"a": output + 1e-6})) == ""
    assert "norm of" in find_difference(same, measure_output({"a": output * 1.1}))
    assert "other places" in find_difference(same, measure_output({"a": output.flip(1)}))
    assert "the shape [2, 5] by layers and [2, 4]" in find_difference(
        same, measure_output({"a": output[:, :4]})
    )


def test_the_only_tensor_of_a_shape_is_compared_where_structures_differ() -> None:
    output, more = torch.randn(2, 5), torch.randn(3)
    assert find_difference(measure_output(output), measure_output((output, more))) == ""
    assert find_difference(measure_output(output), measure_output((output * 2, more)))
