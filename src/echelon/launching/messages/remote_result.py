"""What a rank has in place of a result that was not sent to it."""

from typing import Any, NoReturn, final

from echelon.errors import UserError


@final
class RemoteResult:
    """Takes the place of another rank's result. It has its `rank`, and can be printed and copied.

    Every other use is refused: a comparison that is false would be wrong in silence.
    """

    __slots__ = ("rank",)
    __array_ufunc__ = None  # so that numpy leaves its operators to those below

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __repr__(self) -> str:
        return f"<the result of rank {self.rank}: not on this rank>"

    def __getattr__(self, name: str) -> NoReturn:
        # An AttributeError, because hasattr and copy expect one.
        raise AttributeError(f"{self._where()} (asked for .{name})")

    def __reduce__(self) -> tuple[type["RemoteResult"], tuple[int]]:
        return RemoteResult, (self.rank,)

    def __format__(self, spec: str) -> str:
        return self._refuse() if spec else repr(self)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UserError(self._where())

    def _where(self) -> str:
        return (
            f"this rank does not have the result of rank {self.rank}, only rank 0 and rank {self.rank} "
            "have it: use it on rank 0 (if torch.distributed.get_rank() == 0)"
        )

    __bool__ = __int__ = __float__ = __complex__ = __index__ = __round__ = __array__ = _refuse
    __len__ = __iter__ = __reversed__ = __contains__ = __getitem__ = __setitem__ = __delitem__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = _refuse
    __add__ = __sub__ = __mul__ = __matmul__ = __truediv__ = __floordiv__ = __mod__ = __pow__ = _refuse
    __radd__ = __rsub__ = __rmul__ = __rmatmul__ = __rtruediv__ = __rfloordiv__ = __rmod__ = __rpow__ = (
        _refuse
    )
    __divmod__ = __rdivmod__ = __lshift__ = __rshift__ = __rlshift__ = __rrshift__ = _refuse
    __and__ = __or__ = __xor__ = __rand__ = __ror__ = __rxor__ = _refuse
    __neg__ = __pos__ = __abs__ = __invert__ = __call__ = _refuse
