"""The contenders of the bench `tensor`, as they run in a rank: blocks of a transformer, split over ranks.

Each step does: forward, sum of squares of the output, backward, sums of partial gradients over ranks, AdamW;
no clipping. There is neither embedding nor head, so that both contenders do the same work: hidden states go
in and come out, whole on every rank, or each rank's part of the sequence. An engine begins with an embedding
and ends with the loss of whole sequences, so echelon's contender is what an engine does between them:
`split_over` with the table of the models, and the engine's way to sum gradients.

torch is set up as its documentation says for a transformer block. The input of a module with several matrices
(query, key, value) is prepared once, as in torchtitan, so that its gradients are also summed once.
"""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.collectives import RecordingGroup
from echelon.collectives.mesh import Mesh
from echelon.models import ModelConfig
from echelon.nn.wrapping import Wrapping
from echelon.parallel.data.gradients import sum_within_stage
from echelon.parallel.data.parameter_set import ParameterSet, SharedGradient, named_subset
from echelon.parallel.data.sharing import Sharing, SingleReplica
from echelon.parallel.tensor.split import Sharded, split_over
from echelon.parallel.tensor.styles import TABLES
from echelon.plan import Plan
from echelon.sequence import View, assign
from echelon.train.rehearsal import make_model

Gradients = dict[str, Tensor]  # by the parameter's name, summed where each rank has a part

# The lines of the models' table about blocks: by names in a list of blocks, and in one block.
_TABLE = {name[7:]: style for name, style in TABLES["GPT"].items() if name.startswith("blocks.")}
_STYLES = {name.removeprefix("*."): style for name, style in _TABLE.items()}


class Stack(NamedTuple):
    """`step` trains on hidden states and returns the loss of this rank's output."""

    step: Callable[[Tensor], float]
    gradients: Callable[[], Gradients]  # of the last step, of this rank's parameters


def make_hidden(config: ModelConfig, samples: int, *, sequence: bool) -> Tensor:
    """Random hidden states, the same in every rank; with `sequence`, this rank's part of them."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(samples, config.sequence, config.width, generator=generator)
    return hidden.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous() if sequence else hidden


def echelon_stack(config: ModelConfig, mesh: Mesh) -> Stack:
    """Split as `parallelize` splits the blocks of a model."""
    plan, blocks = mesh.plan, _blocks(config)
    wrapping = Wrapping()
    sharded = split_over(
        blocks,
        mesh.group("tensor"),
        _table(blocks),
        wrapping,
        sequence=plan.sequence,
        whole_sequence=(),
        join_logits=False,
    )
    sharded.region.overlaps = True  # as in an engine
    view = View()
    view.stretch = plan.tensor if plan.sequence else 1
    assign(blocks, view, wrapping)
    sharing = _sharing(blocks, sharded)
    optimizer = _adamw([list(blocks.parameters())])

    def step(hidden: Tensor) -> float:
        mesh.ledger.start_step()
        sharing.start_step()
        loss = _loss(blocks(hidden))
        loss.backward()
        sum_within_stage([sharing])
        optimizer.step()
        return loss.item()

    return Stack(step, lambda: {name: _gradient(p) for name, p in blocks.named_parameters()})


def torch_stack(config: ModelConfig, plan: Plan) -> Stack:
    """Split by `parallelize_module` of torch.distributed.tensor: parameters are DTensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import parallelize_module

    blocks = _blocks(config)
    mesh = init_device_mesh(_kind(blocks), (plan.tensor,))
    for block in blocks:
        parallelize_module(block, mesh, _styles(block, sequence=plan.sequence))
    parameters = list(blocks.parameters())
    # A fused optimizer cannot update DTensors and plain tensors in one call.
    sharded, replicated = (
        [p for p in parameters if isinstance(p, DTensor) is kind] for kind in (True, False)
    )
    optimizer = _adamw([group for group in (sharded, replicated) if group])

    def step(hidden: Tensor) -> float:
        optimizer.zero_grad()
        loss = _loss(blocks(hidden))
        loss.backward()
        optimizer.step()  # also sums partial gradients
        return loss.item()

    return Stack(step, lambda: {name: _of_dtensor(_gradient(p)) for name, p in blocks.named_parameters()})


def _of_dtensor(tensor: Tensor) -> Tensor:
    """This rank's shard, or the sum where each rank has a part."""
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(tensor, DTensor):
        return tensor
    (placement,) = tensor.placements
    summed = tensor.redistribute(placements=[Replicate()]) if placement.is_partial() else tensor
    return summed.to_local()


def _styles(block: nn.Module, *, sequence: bool) -> dict[str, Any]:
    """The plan of one block for `parallelize_module`."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    stream = Shard(1) if sequence else Replicate()
    makers: dict[str, Callable[[], Any]] = {
        "column": ColwiseParallel,
        "row": partial(RowwiseParallel, output_layouts=stream),
    }
    inside = partial(PrepareModuleInput, input_layouts=stream, desired_input_layouts=Replicate())
    norms = ("attention_norm", "mlp_norm") if sequence else ()
    names = {name for name, _ in block.named_modules()}
    return {
        **{name: SequenceParallel() for name in norms},
        **{name: inside() for name in ("attention", "mlp")},
        **{name: makers[style]() for name, style in _STYLES.items() if style in makers and name in names},
    }


def _blocks(config: ModelConfig) -> nn.Sequential:
    return nn.Sequential(*make_model(config).blocks)


def _table(blocks: nn.Module) -> dict[str, str]:
    """Of `_TABLE`, the lines of modules that are there: one of the user's own has no others."""
    names = [name for name, _ in blocks.named_modules()]
    return {
        pattern: style
        for pattern, style in _TABLE.items()
        if any(fnmatchcase(name, pattern) for name in names)
    }


def _sharing(blocks: nn.Module, sharded: Sharded) -> Sharing:
    """The part of an engine that sums gradients of which ranks have parts."""
    group = sharded.region.group
    shared = [SharedGradient(parameter, group) for parameter in sharded.partial]
    alone = RecordingGroup("data", ledger=group.ledger)
    return SingleReplica(ParameterSet("dense", named_subset(blocks), alone, shared_gradients=shared))


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _loss(output: Tensor) -> Tensor:
    return output.square().sum()


def _kind(module: nn.Module) -> str:
    return next(module.parameters()).device.type


def _adamw(groups: Sequence[list[nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": group} for group in groups], lr=3e-4, fused=True)
