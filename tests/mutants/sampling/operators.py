"""Which changes a source file allows. A change replaces one expression or statement by another.

    comparison    a < b    a <= b         condition    if a:        if not (a):
    arithmetic    a + b    a - b          branches     a if c else b    b if c else a
    boolean       a and b  a or b         statement    call(…), x.y = …, raise, yield: nothing instead
    negation      not a    a              returned     return a     return None
    constant      n        n + 1, and True for False; numbers of defaults too

Left alone: annotations, decorators, docstrings and other texts, what a `raise` says (not whether it raises),
`print` and `warn`, `__repr__` and `__str__`, defaults of abstract methods, which no call takes, what stands
under TYPE_CHECKING, and the keywords `strict` of zip and `non_blocking`: the first is an assertion of what
always holds, the second changes when a copy is made, never what it holds.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
_TALKING = ("print", "warn", "warning", "info", "debug")
_TEXT_METHODS = ("__repr__", "__str__")
_WITHOUT_EFFECT = ("strict", "non_blocking")


@dataclass(frozen=True)
class Change:
    """`start` and `end`: places in the UTF-8 text of the file. `function`: its qualified name, "" outside."""

    kind: str
    line: int
    start: int
    end: int
    new: str
    function: str

    def made_in(self, source: str) -> str:
        text = source.encode()
        return (text[: self.start] + self.new.encode() + text[self.end :]).decode()


def changes(source: str) -> list[Change]:
    """All changes that a source file allows, in their order there."""
    finder = _Finder(source)
    finder.visit(ast.parse(source))
    return sorted(set(finder.changes), key=lambda change: (change.start, change.end, change.kind, change.new))


class _Finder(ast.NodeVisitor):
    def __init__(self, source: str) -> None:
        self.changes: list[Change] = []
        self._functions: list[str] = []
        self._begins = [0]
        for line in source.encode().splitlines(keepends=True):
            self._begins.append(self._begins[-1] + len(line))

    def _add(self, kind: str, node: ast.expr | ast.stmt, new: ast.expr | str) -> None:
        text = new if isinstance(new, str) else f"({ast.unparse(new)})"
        start, end = (self._begins[line - 1] + column for line, column in _place(node))
        self.changes.append(Change(kind, node.lineno, start, end, text, ".".join(self._functions)))

    # What holds other code.

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.name in _TEXT_METHODS:
            return
        self._functions.append(node.name)
        defaults = [*node.args.defaults, *(each for each in node.args.kw_defaults if each is not None)]
        is_abstract = any("abstractmethod" in ast.unparse(each) for each in node.decorator_list)
        for part in (*([] if is_abstract else defaults), *node.body):
            self.visit(part)
        self._functions.pop()

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._functions.append(node.name)
        for part in node.body:
            self.visit(part)
        self._functions.pop()

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._drop_assignment(node, [node.target])
        if node.value is not None:
            self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" not in ast.unparse(node.test):
            self._negate(node.test)
            self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._add("statement", node, "pass")

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name not in _TALKING and not name.endswith("Error"):
            self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg not in _WITHOUT_EFFECT:
            self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """A text."""

    # Statements.

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call | ast.Yield | ast.YieldFrom):
            self._add("statement", node, "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        self._drop_assignment(node, node.targets)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add("statement", node, "pass")
        if (other := _OPERATORS.get(type(node.op))) is not None:
            self._add("arithmetic", node, ast.unparse(ast.AugAssign(node.target, other(), node.value)))
        self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        self._drop_assignment(node, node.targets)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None:
            # None instead of False is the same to those who ask; False has a change of its own.
            if not (isinstance(node.value, ast.Constant) and node.value.value in (None, False, True)):
                self._add("returned", node, "return None")
            self.visit(node.value)

    def _drop_assignment(self, node: ast.stmt, targets: list[ast.expr]) -> None:
        """A name that is assigned nowhere would only be an error of Python; objects live on."""
        if self._functions and all(isinstance(target, ast.Attribute | ast.Subscript) for target in targets):
            self._add("statement", node, "pass")

    # Expressions.

    def visit_Compare(self, node: ast.Compare) -> None:
        for place, op in enumerate(node.ops):
            ops = [*node.ops[:place], _COMPARISONS[type(op)](), *node.ops[place + 1 :]]
            self._add("comparison", node, ast.Compare(node.left, ops, node.comparators))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        other = _OPERATORS.get(type(node.op))
        if other is not None and not (_is_text(node.left) or _is_text(node.right)):
            self._add("arithmetic", node, ast.BinOp(node.left, other(), node.right))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self._add("boolean", node, ast.BoolOp(other, node.values))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._add("negation", node, node.operand)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._add("branches", node, ast.IfExp(node.test, node.orelse, node.body))
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for condition in node.ifs:
            self._negate(condition)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add("constant", node, str(not node.value))
        elif isinstance(node.value, int | float):
            self._add("constant", node, repr(node.value + 1))

    def _negate(self, test: ast.expr) -> None:
        if not isinstance(test, ast.UnaryOp | ast.Compare):  # of which other changes do the same
            self._add("condition", test, ast.UnaryOp(ast.Not(), test))


def _place(node: ast.expr | ast.stmt) -> Iterator[tuple[int, int]]:
    """Where it begins and ends: lines from 1, columns in bytes."""
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    yield node.lineno, node.col_offset
    yield node.end_lineno, node.end_col_offset


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
