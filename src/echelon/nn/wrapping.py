"""Wrapping: the only code that changes how a module is called, by an ordered and named stack.

    module(x) ─ hooks ─ recompute ─ compile ─ accumulate ─ tensor ─ float8 ─ expert ─ dropout ─ own forward

Each entry of the stack is a `Wrapper`, which takes the place of `module.forward` and may call the next one
inward. Strategies wrap in any order: an entry finds its place by its name. `Wrapping` remembers what one
engine has put around the modules of a model, so that it can be listed and undone.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from types import MethodType
from typing import Any, ClassVar, TypeVar

from torch import nn
from torch.utils.hooks import RemovableHandle

# Every entry, innermost first. Hooks lie outside of all that replaces the forward; they are called in the
# order in which they were set.
STACK = (
    *("float64", "batch norm", "dropout", "expert", "float8", "tensor", "accumulate", "compress"),
    *("compile", "head", "recompute", "offload", "sequence", "gather", "stage"),
)
GUARD = "guard"  # hooks for calls between steps, which change nothing in a step and are not listed


class Wrapper:
    """One entry in the stack of one module: called instead of its forward.

    A class and not a closure, so that a model can be copied and pickled; and `module.forward` is a bound
    method, because torch.compile shares the code of methods among layers.
    """

    entry: ClassVar[str]  # its name in the stack

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._next: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    @property
    def inner(self) -> Callable[..., Any]:
        """The next entry inward, or the module's own forward."""
        return self._next or MethodType(type(self.module).forward, self.module)


W = TypeVar("W", bound=Wrapper)


class Wrapping:
    """The wrappers, hooks and attributes that an engine has put on a model; `remove` takes them away."""

    def __init__(self) -> None:
        self._wrappers: list[Wrapper] = []
        self._hooks: list[tuple[str, nn.Module, RemovableHandle]] = []
        self._attributes: list[tuple[Any, str, object]] = []  # each with the value that it had

    def __enter__(self) -> "Wrapping":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def wrap(self, wrapper: Wrapper) -> None:
        """Put an entry around its module, inside of those that come later in the stack. An entry of the same
        name, of an engine that was not closed or of a copied model, makes way."""
        module, place = wrapper.module, STACK.index(wrapper.entry)
        for earlier in list(stack_of(module)):
            if earlier.entry == wrapper.entry:
                unwrap(earlier)
        outer: Wrapper | None = None
        following: Callable[..., Any] | None = vars(module).get("forward")
        while (current := _wrapper_of(following)) is not None and STACK.index(current.entry) > place:
            outer, following = current, current._next
        wrapper._next = following
        _link(module, outer, wrapper.__call__)
        self._wrappers.append(wrapper)

    def before(self, entry: str, module: nn.Module, hook: Callable[..., Any], **options: Any) -> None:
        """Call `hook` before the module is called, as `register_forward_pre_hook` does."""
        self.hold(entry, module, module.register_forward_pre_hook(hook, **options))

    def after(self, entry: str, module: nn.Module, hook: Callable[..., Any], **options: Any) -> None:
        """Call `hook` after the module was called, as `register_forward_hook` does."""
        self.hold(entry, module, module.register_forward_hook(hook, **options))

    def hold(self, entry: str, module: nn.Module, handle: RemovableHandle) -> None:
        """Keep the handle of another kind of hook, until this is removed."""
        assert entry in (*STACK, GUARD), entry
        self._hooks.append((entry, module, handle))

    def assign(self, owner: Any, attribute: str, value: object) -> None:
        """Give an attribute of a module (or of a config) another value, until this is removed."""
        self._attributes.append((owner, attribute, getattr(owner, attribute)))
        setattr(owner, attribute, value)

    def assigned(self) -> list[tuple[Any, str, object]]:
        """Return the attributes that have another value now: their owner, name, and the value before."""
        return list(self._attributes)

    def remove(self) -> None:
        """Take all of it away: modules are called as they were before."""
        for owner, attribute, value in reversed(self._attributes):
            setattr(owner, attribute, value)
        for wrapper in self._wrappers:
            unwrap(wrapper)
        for _, _, handle in self._hooks:
            handle.remove()
        self._wrappers, self._hooks, self._attributes = [], [], []

    def entries(self, modules: Iterable[nn.Module]) -> dict[str, int]:
        """Count the `modules` that have each entry of the stack, innermost first."""
        inside = set(modules)
        wrapped = {(wrapper.entry, wrapper.module) for wrapper in self._wrappers}
        hooked = {(entry, module) for entry, module, _ in self._hooks}
        counts = Counter(entry for entry, module in wrapped | hooked if module in inside)
        return {entry: counts[entry] for entry in STACK if counts[entry]}


def find_wrapper(module: nn.Module, kind: type[W]) -> W | None:
    """Return the entry of this kind in the stack of a module."""
    return next((wrapper for wrapper in stack_of(module) if isinstance(wrapper, kind)), None)


def has_entry(module: nn.Module, entry: str) -> bool:
    """Return True if the stack of a module has an entry of this name."""
    return any(wrapper.entry == entry for wrapper in stack_of(module))


def is_wrapped(module: nn.Module) -> bool:
    """Return True if a wrapper is in place of the module's forward."""
    return any(True for _ in stack_of(module))


def replaced_forward(module: nn.Module) -> Callable[..., Any] | None:
    """Return the forward that the user has given to this very module; None where its class's is in force."""
    forward: Callable[..., Any] | None = vars(module).get("forward")
    for wrapper in stack_of(module):
        forward = wrapper._next
    return forward


def stack_of(module: nn.Module) -> Iterator[Wrapper]:
    """Return the entries around a module, outermost first."""
    current = _wrapper_of(vars(module).get("forward"))
    while current is not None:
        yield current
        current = _wrapper_of(current._next)


def _wrapper_of(forward: Callable[..., Any] | None) -> Wrapper | None:
    owner = getattr(forward, "__self__", None)
    return owner if isinstance(owner, Wrapper) else None


def _link(module: nn.Module, outer: Wrapper | None, forward: Callable[..., Any] | None) -> None:
    """Let `outer`, or the module itself, call `forward`."""
    if outer is not None:
        outer._next = forward
    elif forward is not None:
        module.forward = forward
    else:
        del module.forward


def unwrap(wrapper: Wrapper) -> None:
    """Take one entry out of the stack of its module, if it is still in it."""
    outer: Wrapper | None = None
    for current in stack_of(wrapper.module):
        if current is wrapper:
            _link(wrapper.module, outer, wrapper._next)
            return
        outer = current
