"""What people write by habit in a loop of plain torch. Each habit is one function, which runs with an engine
and with plain torch: its result and the training that follows are equal, or the engine refuses it."""

import copy
import io
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from echelon.engine import parallelize
from echelon.errors import UserError

WORDS, SAMPLES, LENGTH = 12, 4, 3
Batch = tuple[Tensor, Tensor]


class ByMode(nn.Module):
    """An activation that is another one in evaluation."""

    def forward(self, values: Tensor) -> Tensor:
        return values.tanh() if self.training else values.relu()


class Words(nn.Sequential):
    """A small language model."""

    @torch.no_grad()
    def generate(self, tokens: Tensor, count: int) -> Tensor:
        for _ in range(count):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], dim=1)
        return tokens


def words() -> Words:
    torch.manual_seed(0)
    layers = nn.Embedding(WORDS, 8), nn.Linear(8, 16), ByMode(), nn.Linear(16, 8), nn.Linear(8, WORDS)
    return Words(*layers).double()


TABLE = {"0": "vocabulary", "1": "column", "3": "row", "4": "vocabulary"}


def batch_of(step: int) -> Batch:
    generator = torch.Generator().manual_seed(300 + step)
    tokens = torch.randint(WORDS, (SAMPLES, LENGTH), generator=generator)
    return tokens, torch.randint(WORDS, (SAMPLES, LENGTH), generator=generator)


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1)


class Plain:
    """One device, in plain torch, with the calls of an engine that habits make."""

    replica, replicas = 0, 1

    def __init__(self, model: nn.Module) -> None:
        self.module, self.optimizer, self._is_open = model.train(), adamw(model.parameters()), False

    def local(self, batch: Batch) -> Batch:
        return batch

    def step(self, batch: Batch) -> None:
        self.backward(loss_of(self(batch[0]), batch[1]))
        self.update()

    def __call__(self, tokens: Tensor) -> Tensor:
        if not self._is_open:  # gradients of the last update are there until now
            self.zero_grad()
            self._is_open = True
        return self.module(tokens)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def update(self) -> None:
        self.optimizer.step()
        self._is_open = False

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        self._is_open = False


Habit = Callable[[Any, Any, Batch], Any]  # (engine, its model, a batch)


class Outcome(NamedTuple):
    """What a habit has returned, and the weights after one more step; or why it was refused: then the weights
    are those after a step that follows, if that was not refused."""

    value: Any
    state: dict[str, Tensor] | None
    refusal: str | None = None


def run_plain(habit: Habit | None) -> Outcome:
    """On one device; None: without any habit."""
    engine = Plain(words())
    engine.step(batch_of(0))
    value = None if habit is None else habit(engine, engine.module, batch_of(1))
    engine.step(batch_of(2))
    return Outcome(value, {name: each.detach() for name, each in engine.module.state_dict().items()})


def run_habit(name: str, plan: str) -> Outcome:
    """In each rank."""
    model, value, refusal, state = words(), None, None, None
    options: Any = {"tensor_table": TABLE} if "tensor" in plan else {}
    engine = parallelize(model, f"{plan} precision=fp64", optimizer=adamw, loss=loss_of, **options)
    try:
        engine.step(engine.local(batch_of(0)))
        try:
            value = HABITS[name].act(engine, model, batch_of(1))
            engine.step(engine.local(batch_of(2)))
            state = engine.full_state_dict()
        except UserError as error:
            value, refusal = None, str(error)
            try:
                engine.step(engine.local(batch_of(2)))
                state = engine.full_state_dict()
            except UserError:
                pass
        return Outcome(value, state, refusal)
    finally:
        engine._release(failed=False)  # without a word to ranks that may wait for something else


def run_habits(names: list[str], plan: str) -> list[Outcome | str]:
    """All of them, each with a model of its own; of an error that is none for users, its text."""
    outcomes: list[Outcome | str] = []
    for name in names:
        try:
            outcomes.append(run_habit(name, plan))
        except Exception as error:
            outcomes.append(f"{type(error).__name__}: {error}")
    return outcomes


# Which plans refuse a habit, by words of the refusal. All others do what one device does.

PLANS = (
    "data=1",
    "data=2",
    "data=2 zero=1",
    "data=2 zero=2",
    "data=2 zero=3",
    "tensor=2",
    "pipeline=2 microbatches=2",
)
ONE, DATA, ZERO_1, ZERO_2, ZERO_3, TENSOR, PIPELINE = ((plan,) for plan in PLANS)
REPLICAS, RANKS, PARTS = PLANS[1:5], PLANS[1:], PLANS[2:]
ZERO, SPLIT = PLANS[2:5], PLANS[5:]

BARE = "loss.backward() of a model that an engine trains"
BY_STAGES = "the model is called outside of a step"
LOOP_BY_STAGES = "call engine.forward_backward(batch, loss) and engine.update()"
OPTIMIZER = "write engine.backward(loss) and engine.update()"
WAITS = "ranks have parts of it until engine.update()"
COPY = "in place of a weight: engine.update() brings it there"
PART = "its values are used outside of a module's forward"
BY_HAND = "gradients that wait for engine.update() were changed by hand"
# Those whose cure is on docs/loops.md.
PAGE = {BARE, BY_STAGES, LOOP_BY_STAGES, OPTIMIZER, WAITS, COPY, PART, BY_HAND}
NO_UPDATE = "engine.update(): no gradients wait for it"
LOST = "no rank has it whole after a step"
FREED = "has no values on this rank"
FORM = "give it that form"
STATE = "engine.full_state_dict() returns all of it"
LOAD = "let engine.load read a checkpoint"
ABSENT = "is called on a rank that does not hold it"
OTHER_MODEL = "make another engine with parallelize"
AUDIT = "would not train as on one device"

Refusals = Mapping[tuple[str, ...], str]


class Known(NamedTuple):
    act: Habit
    refusals: Mapping[str, str]  # by plan


HABITS: dict[str, Known] = {}


def habit(refusals: Refusals | None = None) -> Callable[[Habit], Habit]:
    """Of two that name a plan, the last one holds."""

    def add(act: Habit) -> Habit:
        by_plan = {plan: text for plans, text in (refusals or {}).items() for plan in plans}
        HABITS[act.__name__.replace("_", " ")] = Known(act, by_plan)
        return act

    return add


# Passes and updates.


@habit({REPLICAS: BARE, TENSOR: OPTIMIZER, PIPELINE: BY_STAGES})
def bare_backward(engine: Any, model: Any, batch: Batch) -> Any:
    engine.optimizer.zero_grad()
    tokens, targets = engine.local(batch)
    loss_of(model(tokens), targets).backward()
    engine.optimizer.step()


@habit({ONE: NO_UPDATE, REPLICAS: BARE, TENSOR: NO_UPDATE, PIPELINE: LOOP_BY_STAGES})
def bare_backward_of_the_engines_output(engine: Any, model: Any, batch: Batch) -> Any:
    tokens, targets = engine.local(batch)
    loss_of(engine(tokens), targets).backward()
    engine.update()


@habit({REPLICAS: BARE, TENSOR: BY_HAND, PIPELINE: LOOP_BY_STAGES})
def bare_backward_before_an_update(engine: Any, model: Any, batch: Batch) -> Any:
    tokens, targets = engine.local(batch)
    loss = loss_of(engine(tokens), targets)
    engine.backward(loss)
    loss_of(model(tokens), targets).backward()
    engine.update()


@habit({RANKS: OPTIMIZER, PIPELINE: LOOP_BY_STAGES})
def optimizer_step(engine: Any, model: Any, batch: Batch) -> Any:
    tokens, targets = engine.local(batch)
    loss = loss_of(engine(tokens), targets)
    engine.backward(loss)
    engine.optimizer.step()
    engine.zero_grad()


@habit({RANKS: OPTIMIZER})
def optimizer_step_again(engine: Any, model: Any, batch: Batch) -> Any:
    engine.optimizer.step()


@habit()
def optimizer_zero_grad(engine: Any, model: Any, batch: Batch) -> Any:
    engine.optimizer.zero_grad()
    engine.step(engine.local(batch))
    engine.optimizer.zero_grad()


@habit({RANKS: WAITS, ZERO: COPY, PIPELINE: LOOP_BY_STAGES})
def optimizer_zero_grad_before_an_update(engine: Any, model: Any, batch: Batch) -> Any:
    tokens, targets = engine.local(batch)
    engine.backward(3 * loss_of(engine(tokens), targets))
    engine.optimizer.zero_grad()
    engine.backward(loss_of(engine(tokens), targets.flip(0)))
    engine.update()


@habit()
def model_zero_grad(engine: Any, model: Any, batch: Batch) -> Any:
    model.zero_grad()
    engine.step(engine.local(batch))
    model.zero_grad(set_to_none=False)


@habit({RANKS: WAITS, PIPELINE: LOOP_BY_STAGES})
def model_zero_grad_before_an_update(engine: Any, model: Any, batch: Batch) -> Any:
    tokens, targets = engine.local(batch)
    engine.backward(3 * loss_of(engine(tokens), targets))
    model.zero_grad()
    engine.backward(loss_of(engine(tokens), targets.flip(0)))
    engine.update()


@habit({RANKS: WAITS, PIPELINE: LOOP_BY_STAGES})
def clip_grad_norm(engine: Any, model: Any, batch: Batch) -> Any:
    tokens, targets = engine.local(batch)
    engine.backward(loss_of(engine(tokens), targets))
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    engine.update()
    return norm


@habit({RANKS: WAITS, ZERO: COPY, PIPELINE: LOOP_BY_STAGES})
def clip_grad_norm_of_the_optimizers_groups(engine: Any, model: Any, batch: Batch) -> Any:
    tokens, targets = engine.local(batch)
    engine.backward(loss_of(engine(tokens), targets))
    norm = nn.utils.clip_grad_norm_(engine.optimizer.param_groups[0]["params"], 0.1)
    engine.update()
    return norm


@habit({PARTS: LOST})
def clip_grad_norm_after_a_step(engine: Any, model: Any, batch: Batch) -> Any:
    engine.step(engine.local(batch))
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1)


@habit({RANKS: WAITS, PIPELINE: LOOP_BY_STAGES})
def clip_grad_value(engine: Any, model: Any, batch: Batch) -> Any:
    tokens, targets = engine.local(batch)
    engine.backward(loss_of(engine(tokens), targets))
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    engine.update()


@habit({PARTS: LOST})
def read_gradients(engine: Any, model: Any, batch: Batch) -> Any:
    engine.step(engine.local(batch))
    return [p.grad.norm() for p in model.parameters() if p.grad is not None]


@habit({RANKS: WAITS, PIPELINE: LOOP_BY_STAGES})
def scale_gradients(engine: Any, model: Any, batch: Batch) -> Any:
    tokens, targets = engine.local(batch)
    engine.backward(loss_of(engine(tokens), targets))
    for p in model.parameters():
        if p.grad is not None:
            p.grad *= 0.5
    engine.update()


@habit({RANKS: WAITS, PIPELINE: LOOP_BY_STAGES})
def replace_gradients(engine: Any, model: Any, batch: Batch) -> Any:
    tokens, targets = engine.local(batch)
    engine.backward(loss_of(engine(tokens), targets))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    engine.update()


@habit({RANKS: WAITS, PIPELINE: LOOP_BY_STAGES})
def all_reduce_gradients(engine: Any, model: Any, batch: Batch) -> Any:
    tokens, targets = engine.local(batch)
    engine.backward(loss_of(engine(tokens), targets))
    for p in model.parameters():
        if dist.is_initialized():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
    engine.update()


@habit({RANKS: WAITS, ZERO: COPY, PIPELINE: LOOP_BY_STAGES})
def grad_scaler(engine: Any, model: Any, batch: Batch) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    tokens, targets = engine.local(batch)
    engine.backward(scaler.scale(loss_of(engine(tokens), targets)))
    scaler.step(engine.optimizer)
    scaler.update()
    engine.zero_grad()


@habit({REPLICAS: BARE, TENSOR: LOST, PIPELINE: BY_STAGES})
def grad_scaler_with_a_bare_backward(engine: Any, model: Any, batch: Batch) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    tokens, targets = engine.local(batch)
    engine.optimizer.zero_grad()
    scaler.scale(loss_of(model(tokens), targets)).backward()
    scaler.unscale_(engine.optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(engine.optimizer)
    scaler.update()
    engine.zero_grad()


@habit({PIPELINE: BY_STAGES})
def loss_item(engine: Any, model: Any, batch: Batch) -> Any:
    tokens, targets = batch
    return loss_of(model(tokens), targets).item()


# The model.


@habit({PIPELINE: BY_STAGES})
def model_call(engine: Any, model: Any, batch: Batch) -> Any:
    return model(batch[0]).detach()


@habit({PIPELINE: BY_STAGES})
def evaluation_loop(engine: Any, model: Any, batch: Batch) -> Any:
    model.eval()
    try:
        with torch.no_grad():
            return sum(loss_of(model(tokens), targets).item() for tokens, targets in [batch, batch_of(7)])
    finally:
        model.train()


@habit({PIPELINE: BY_STAGES})
def model_generate(engine: Any, model: Any, batch: Batch) -> Any:
    return model.generate(batch[0], 3)


@habit()
def model_eval(engine: Any, model: Any, batch: Batch) -> Any:
    model.eval()
    engine.step(engine.local(batch))


@habit()
def model_train(engine: Any, model: Any, batch: Batch) -> Any:
    model.eval()
    engine.step(engine.local(batch))
    model.train()


@habit({ZERO_3: FREED})
def model_to(engine: Any, model: Any, batch: Batch) -> Any:
    model.to("cpu")
    model.to(torch.float64)


@habit({ZERO_3: FREED})
def model_cpu(engine: Any, model: Any, batch: Batch) -> Any:
    model.cpu()


@habit({ZERO_3: FREED})
def model_double(engine: Any, model: Any, batch: Batch) -> Any:
    model.double()


@habit({PLANS: FORM, ZERO_3: FREED})
def model_half(engine: Any, model: Any, batch: Batch) -> Any:
    model.half()


@habit({PLANS: FORM, ZERO_3: FREED})
def model_float(engine: Any, model: Any, batch: Batch) -> Any:
    model.float()


@habit()
def freeze_a_part(engine: Any, model: Any, batch: Batch) -> Any:
    model[1].requires_grad_(False)
    engine.step(engine.local(batch))


@habit()
def freeze_a_part_for_a_while(engine: Any, model: Any, batch: Batch) -> Any:
    model[1].requires_grad_(False)
    engine.step(engine.local(batch))
    model[1].requires_grad_(True)


@habit({ZERO_3: STATE, SPLIT: STATE})
def state_dict(engine: Any, model: Any, batch: Batch) -> Any:
    return model.state_dict()


@habit({ZERO_3: LOAD, SPLIT: LOAD})
def load_state_dict(engine: Any, model: Any, batch: Batch) -> Any:
    state = words().state_dict()
    model.load_state_dict(state)


@habit({ZERO_3: STATE, SPLIT: STATE})
def save_the_state_dict(engine: Any, model: Any, batch: Batch) -> Any:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return torch.load(file)


@habit({ZERO_3: FREED, SPLIT: PART})
def save_the_model(engine: Any, model: Any, batch: Batch) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    return [loaded.state_dict(), loaded(batch[0])]


@habit({ZERO_3: FREED, SPLIT: PART})
def copy_the_model(engine: Any, model: Any, batch: Batch) -> Any:
    copied = copy.deepcopy(model)
    return [copied.state_dict(), copied(batch[0])]


@habit({ZERO_3: FREED, SPLIT: PART})
def train_a_copy(engine: Any, model: Any, batch: Batch) -> Any:
    copied = copy.deepcopy(model)
    optimizer = adamw(copied.parameters())
    loss_of(copied(batch[0]), batch[1]).backward()
    optimizer.step()
    return copied.state_dict()


@habit({PIPELINE: BY_STAGES})
def compile_the_model(engine: Any, model: Any, batch: Batch) -> Any:
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        return compiled(batch[0])


@habit()
def compile_in_place(engine: Any, model: Any, batch: Batch) -> Any:
    model.compile(backend="eager")
    engine.step(engine.local(batch))


@habit({REPLICAS: BARE, ZERO_3: FREED, TENSOR: PART, PIPELINE: "DDP expects same model across all ranks"})
def distributed_data_parallel(engine: Any, model: Any, batch: Batch) -> Any:
    is_plain = isinstance(engine, Plain) or not dist.is_initialized()
    wrapped = model if is_plain else _wrap(model)
    tokens, targets = engine.local(batch)
    engine.optimizer.zero_grad()
    loss_of(wrapped(tokens), targets).backward()
    engine.optimizer.step()


@habit({ZERO_3: FREED, TENSOR: PART, PIPELINE: "DDP expects same model across all ranks"})
def distributed_data_parallel_beside_steps(engine: Any, model: Any, batch: Batch) -> Any:
    if dist.is_initialized() and not isinstance(engine, Plain):
        _wrap(model)
    engine.step(engine.local(batch))


def _wrap(model: nn.Module) -> nn.Module:
    try:
        return DistributedDataParallel(model)
    except RuntimeError as error:  # torch itself refuses ranks that have other parameters
        raise UserError(str(error)) from error


@habit({PIPELINE: BY_STAGES})
def data_parallel(engine: Any, model: Any, batch: Batch) -> Any:
    wrapped = nn.DataParallel(model)
    return wrapped(batch[0]).detach()


@habit({SPLIT: PART})
def count_parameters(engine: Any, model: Any, batch: Batch) -> Any:
    return [sum(p.numel() for p in model.parameters()), len(list(model.named_parameters()))]


@habit({ZERO_3: FREED, SPLIT: PART})
def norm_of_weights(engine: Any, model: Any, batch: Batch) -> Any:
    return torch.stack([p.norm() for p in model.parameters()]).norm().detach()


@habit({ZERO_3: FREED, SPLIT: PART})
def norm_of_weight_data(engine: Any, model: Any, batch: Batch) -> Any:
    return torch.stack([p.data.norm() for p in model.parameters()]).norm()


@habit({ZERO_3: FREED, SPLIT: PART})
def parameters_to_vector(engine: Any, model: Any, batch: Batch) -> Any:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@habit({ZERO_3: FREED, SPLIT: PART})
def vector_to_parameters(engine: Any, model: Any, batch: Batch) -> Any:
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector.detach() * 0.9, model.parameters())


@habit({ZERO_3: FREED, TENSOR: PART, PIPELINE: LOOP_BY_STAGES})
def weight_penalty(engine: Any, model: Any, batch: Batch) -> Any:
    tokens, targets = engine.local(batch)
    loss = loss_of(engine(tokens), targets)
    loss = loss + 0.01 * sum(p.pow(2).sum() for p in model.parameters())
    engine.backward(loss)
    engine.update()


@habit({ZERO_3: FREED, SPLIT: PART})
def clamp_weights(engine: Any, model: Any, batch: Batch) -> Any:
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.2, 0.2)


@habit({ZERO_3: FREED, SPLIT: PART})
def initialise_again(engine: Any, model: Any, batch: Batch) -> Any:
    nn.init.constant_(model[3].weight, 0.1)


@habit({RANKS: OTHER_MODEL})
def forward_hook(engine: Any, model: Any, batch: Batch) -> Any:
    handle = model[1].register_forward_hook(lambda _m, _a, output: output * 2)
    engine.step(engine.local(batch))
    handle.remove()


@habit({PIPELINE: BY_STAGES})
def forward_hook_of_a_call(engine: Any, model: Any, batch: Batch) -> Any:
    seen = []
    handle = model[3].register_forward_hook(lambda _m, _a, output: seen.append(output.detach()))
    try:
        with torch.no_grad():
            model(batch[0])
    finally:
        handle.remove()
    return seen


@habit({PIPELINE: ABSENT})
def part_of_the_model(engine: Any, model: Any, batch: Batch) -> Any:
    with torch.no_grad():
        return model[:4](batch[0])


@habit({ZERO_3: FREED, SPLIT: PART})
def moving_average_of_weights(engine: Any, model: Any, batch: Batch) -> Any:
    averaged = torch.optim.swa_utils.AveragedModel(model)
    engine.step(engine.local(batch))
    averaged.update_parameters(model)
    return averaged.module(batch[0]).detach()


@habit({PIPELINE: ABSENT})
def gradient_of_inputs(engine: Any, model: Any, batch: Batch) -> Any:
    hidden = model[0](batch[0]).detach().requires_grad_()
    return torch.autograd.grad(model[1:](hidden).sum(), hidden)


# The optimizer.


@habit()
def scheduler(engine: Any, model: Any, batch: Batch) -> Any:
    scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, 0.5)
    engine.step(engine.local(batch))
    scheduler.step()


@habit()
def edit_the_rate(engine: Any, model: Any, batch: Batch) -> Any:
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.01


@habit()
def optimizer_state_dict(engine: Any, model: Any, batch: Batch) -> Any:
    saved = copy.deepcopy(engine.optimizer.state_dict())
    engine.step(engine.local(batch))
    engine.optimizer.load_state_dict(saved)


@habit({ZERO: "optimizer.state of a parameter"})
def optimizer_state_of_a_weight(engine: Any, model: Any, batch: Batch) -> Any:
    for p in model.parameters():
        engine.optimizer.state[p]["exp_avg"].mul_(0.5)


@habit({RANKS: WAITS, ZERO_3: FREED, TENSOR: PART, PIPELINE: LOOP_BY_STAGES})
def optimizer_of_another(engine: Any, model: Any, batch: Batch) -> Any:
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens, targets = engine.local(batch)
    other.zero_grad()
    engine.backward(loss_of(engine(tokens), targets))
    other.step()
    engine.zero_grad()


@habit({PLANS: "the parameters of the optimizer's groups were changed"})
def add_param_group(engine: Any, model: Any, batch: Batch) -> Any:
    engine.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3).double())]})


# Data.


@habit()
def distributed_sampler(engine: Any, model: Any, batch: Batch) -> Any:
    dataset = TensorDataset(*batch)
    sampler = DistributedSampler(dataset, engine.replicas, engine.replica, shuffle=False)
    loader = DataLoader(dataset, SAMPLES // engine.replicas, sampler=sampler)
    for part in loader:
        engine.step(part)


@habit({SPLIT: AUDIT})
def distributed_sampler_of_the_world(engine: Any, model: Any, batch: Batch) -> Any:
    dataset = TensorDataset(*batch)
    sampler = None
    if not isinstance(engine, Plain) and dist.is_initialized():
        sampler = DistributedSampler(dataset, shuffle=False)
    for part in DataLoader(dataset, SAMPLES, sampler=sampler):
        engine.step(part)
