"""The gate of the Switch Transformer: one expert for each token."""

from typing import final

from echelon.nn.experts.gates.softmax_gate import SoftmaxRouter


@final
class SwitchGate(SoftmaxRouter):
    """Each token takes the expert of the largest probability, weighed by it. In float32 at least.

    The paper has capacity=1.25 and jitter=0.01. See `SoftmaxGate` for these and the losses.
    """

    def __init__(
        self,
        width: int,
        num_experts: int,
        *,
        balance: float = 0.01,
        z_loss: float = 0.0,
        capacity: float | None = None,
        jitter: float = 0.0,
    ) -> None:
        super().__init__(
            width,
            num_experts,
            1,
            normalize=False,
            balance=balance,
            z_loss=z_loss,
            capacity=capacity,
            jitter=jitter,
        )
