"""DeepSpeed trains, saves and goes on; the checkpoint is imported, and an engine goes on from it.

python deepspeed_checkpoints.py CASE…, on two ranks. Prints for each case what both came to.
"""

import json
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"
with redirect_stdout(sys.stderr):
    import deepspeed
    from deepspeed.checkpoint.ds_to_universal import main as make_universal
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
import torch
import torch.distributed as dist
from torch import Tensor, nn

import echelon
from echelon.train.import_weights import import_weights

SAVED, STEPS, CLIP = 3, 6, 0.5
FOLDER = Path(os.environ["FOLDER"])
CASES: dict[str, dict[str, Any]] = {
    "zero1": {"zero_optimization": {"stage": 1}},
    "zero2": {"zero_optimization": {"stage": 2, "round_robin_gradients": True, "parameter_alignment": True}},
    # Several rows of values: each has up to 100 of a rank.
    "zero3": {
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": 100}
    },
    "bf16": {
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
    "elastic": {"zero_optimization": {"stage": 1, "elastic_checkpoint": True}},
    "plain": {},
}


class Network(nn.Module):
    """Tied, frozen and odd-sized parameters, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.body = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 7))
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor([0.5, 1.0, 1.5, 0.5, 1.0, 1.5, 2.0]))

    def forward(self, tokens: Tensor) -> Tensor:
        scale = self.scale.to(self.frozen.weight.dtype)
        out: Tensor = self.head(self.body(self.frozen(self.embedding(tokens) * scale)))
        return out


def network() -> Network:
    torch.manual_seed(0)
    return Network()


def groups(parameters: Any) -> list[dict[str, Any]]:
    trained = [each for each in parameters if each.requires_grad]
    return [
        {"params": [each for each in trained if each.dim() > 1], "weight_decay": 0.1},
        {"params": [each for each in trained if each.dim() == 1], "lr": 3e-2},
    ]


def batch(step: int) -> tuple[Tensor, Tensor]:
    """This rank's part of a global batch."""
    torch.manual_seed(100 * step + dist.get_rank())
    return torch.randint(11, (4,)), torch.randint(11, (4,))


def train_theirs(case: str, folder: Path) -> list[float]:
    """The losses after the save."""
    model = network()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": CLIP,
        **CASES[case],
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.Adam(groups(model.parameters()), lr=1e-2), config=config
    )
    losses = []
    for step in range(STEPS):
        if step == SAVED:
            engine.save_checkpoint(str(folder))
        inputs, targets = batch(step)
        loss = nn.functional.cross_entropy(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    engine.destroy()
    return losses[SAVED:]


def universal_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-universal")


def universal(folder: Path) -> None:
    """Convert by DeepSpeed's own tool."""
    source = folder / f"global_step{SAVED}"
    make_universal(
        SimpleNamespace(
            input_folder=str(source),
            output_folder=str(universal_of(folder) / f"{source.name}_universal"),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )


def train_ours(checkpoint: Path, options: dict[str, Any]) -> list[float]:
    """An engine goes on; its optimizer is made with other `options` than those of the checkpoint."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam([{**each, **options} for each in groups(parameters)], lr=1e-2)

    loss = nn.functional.cross_entropy
    engine = echelon.parallelize(network(), "data=2 zero=1", optimizer=make, loss=loss, clip=CLIP)
    engine.load(checkpoint)
    losses = [engine.step(batch(step)).loss for step in range(SAVED, STEPS)]
    engine.close()
    return losses


def run(case: str) -> dict[str, Any]:
    folder = FOLDER / case
    with redirect_stdout(sys.stderr):
        found: dict[str, Any] = {"theirs": train_theirs(case, folder)}
        sources = {"cut": folder}
        if case.startswith("zero"):  # of the others their tool makes none
            sources["universal"] = universal_of(folder)
            if dist.get_rank() == 0:
                universal(folder)
        dist.barrier()
    for kind, source in sources.items():
        weights, checkpoint = (
            source.with_name(f"{source.name}-{each}") for each in ("weights", "checkpoint")
        )
        if dist.get_rank() == 0:
            import_weights(source, weights, unsafe_pickle=True)
            if case != "plain":
                import_weights(source, checkpoint, to="checkpoint", unsafe_pickle=True)
        dist.barrier()
        found[kind] = {"differ": differing(case, folder, weights)}
        if case != "plain":
            # Other rates show that those of the checkpoint are taken; an elastic one has none.
            others = {"lr": 1.0, "weight_decay": 0.5} if case != "elastic" else {}
            found[kind]["losses"] = train_ours(checkpoint, others)
    return found


def differing(case: str, folder: Path, weights: Path) -> list[str]:
    """The names of weights that are not what DeepSpeed's own zero_to_fp32 makes of the checkpoint."""
    from safetensors.torch import load_file

    with redirect_stdout(sys.stderr):
        if case in ("plain", "bf16"):  # their tool reads none; float32 masters round to these
            file = folder / f"global_step{SAVED}" / "mp_rank_00_model_states.pt"
            expected = torch.load(file, weights_only=False)["module"]
        else:
            expected = dict(get_fp32_state_dict_from_zero_checkpoint(str(folder)))
    # With ZeRO 1 it leaves out frozen parameters.
    for name in ("frozen.weight", "frozen.bias"):
        expected.setdefault(name, network().state_dict()[name])
    read = load_file(weights / "model.safetensors")
    names = {*expected, *read}
    return sorted(
        name
        for name in names
        if name not in read
        or name not in expected
        or not torch.equal(read[name].to(expected[name].dtype), expected[name])
    )


if __name__ == "__main__":
    dist.init_process_group("gloo")
    found = {case: run(case) for case in sys.argv[1:]}
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()
