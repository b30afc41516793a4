"""Mutants of a source: each differs from it in one operator, number, name, bound, condition or statement."""

import ast
from collections.abc import Iterator
from copy import copy
from typing import Any, NamedTuple

SWAPPED = {"min": "max", "minimum": "maximum", "any": "all", "floor": "ceil", "argmin": "argmax"}
SWAPPED |= {new: old for old, new in SWAPPED.items()}
_PAIRS: list[tuple[type[ast.AST], type[ast.AST]]] = [
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.In, ast.NotIn), (ast.Is, ast.IsNot)),
    *((ast.And, ast.Or), (ast.BitAnd, ast.BitOr), (ast.LShift, ast.RShift), (ast.Add, ast.Sub)),
    (ast.Mult, ast.FloorDiv),
]
OPERATORS = dict(pair for one, other in _PAIRS for pair in ((one, other), (other, one)))
OPERATORS |= {ast.Div: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult}
# Annotations, decorators, keywords of classes and texts of errors stay as they are. So do assertions, which say what
# always holds, and with them those of zip and those for what is never called.
LEFT = {"annotation", "returns", "decorator_list", "type_params"}
WHOLE = ast.Assert | ast.JoinedStr | ast.Raise


class Mutant(NamedTuple):
    """One change: the characters of a file from `begin` to `end` are `new` instead."""

    file: str
    function: str
    line: int
    lines: range  # of its statement
    begin: int
    end: int
    new: str

    def apply(self, source: str) -> str:
        """Make the mutated source."""
        return source[: self.begin] + self.new + source[self.end :]

    def change(self, source: str) -> tuple[str, str]:
        """Give the changed lines, before and after, each as one line without its indentation."""
        low = source.rfind("\n", 0, self.begin) + 1
        high = (source + "\n").index("\n", self.end)
        before, after = source[low:high], source[low : self.begin] + self.new + source[self.end : high]
        return " ".join(before.split()), " ".join(after.split())


def mutants(file: str, source: str) -> list[Mutant]:
    """Make all mutants of a source, in its order."""
    return list(_Walk(file, source).visit(ast.parse(source), "", range(0)))


class _Walk:
    def __init__(self, file: str, source: str) -> None:
        self.file, self.lines = file, source.splitlines(keepends=True)
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))

    def visit(self, node: ast.AST, function: str, lines: range) -> Iterator[Mutant]:
        """Mutate a node and all that is inside it."""
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            function = f"{function}.{node.name}".lstrip(".")
        if isinstance(node, ast.stmt):
            lines = _lines(node)
        if (isinstance(node, ast.keyword) and node.arg == "strict") or "AssertionError" in _raised(node):
            return
        yield from (self.at(place, function, lines, new) for place, new in changes(node))
        if isinstance(node, WHOLE) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            return
        left = LEFT | {"keywords"} if isinstance(node, ast.ClassDef) else LEFT
        for name, value in ast.iter_fields(node):
            for child in (value if isinstance(value, list) else [value]) if name not in left else ():
                if isinstance(child, ast.AST):
                    yield from self.visit(child, function, lines)

    def at(self, node: Any, function: str, lines: range, new: str) -> Mutant:
        """Put a text in the place of a node."""
        begin, end = self.offset(node.lineno, node.col_offset), self.offset(node.end_lineno, node.end_col_offset)
        return Mutant(self.file, function, node.lineno, lines, begin, end, new)

    def offset(self, line: int, column: int) -> int:
        """Count the characters before a column, which ast counts in bytes."""
        return self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())


def _lines(node: Any) -> range:
    """Give the lines of a statement: of a function all of them, of a condition or loop those before its body."""
    inside = [] if isinstance(node, ast.FunctionDef) else getattr(node, "body", [])
    return range(node.lineno, max(inside[0].lineno, node.lineno + 1) if inside else node.end_lineno + 1)


def _raised(node: ast.AST) -> str:
    return ast.unparse(node.exc) if isinstance(node, ast.Raise) and node.exc else ""


def changes(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Give each change of a node that leaves the nodes inside it alone: what is replaced, and by which text."""
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        yield node.test, f"(not ({ast.unparse(node.test)}))"
    elif isinstance(node, ast.Slice):
        yield from ((node, text) for text in _bounds(node))
    elif isinstance(node, ast.expr):
        yield from ((node, f"({ast.unparse(new)})") for new in _expressions(node))
    elif isinstance(node, ast.stmt):
        yield from ((node, ast.unparse(new)) for new in _statements(node))


def _expressions(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.Compare):
        for k, one in enumerate(node.ops):
            yield _with(node, ops=[*node.ops[:k], OPERATORS[type(one)](), *node.ops[k + 1 :]])
    elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in OPERATORS:
        yield _with(node, op=OPERATORS[type(node.op)]())
    elif isinstance(node, ast.UnaryOp):
        yield node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        yield ast.Constant(not node.value if isinstance(node.value, bool) else node.value + 1)
    elif isinstance(node, ast.Name) and node.id in SWAPPED:
        yield ast.Name(SWAPPED[node.id])
    elif isinstance(node, ast.Attribute) and node.attr in SWAPPED:
        yield _with(node, attr=SWAPPED[node.attr])


def _statements(node: ast.stmt) -> Iterator[ast.stmt]:
    targets = node.targets if isinstance(node, ast.Assign) else []
    documents = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    deleted = isinstance(node, ast.AugAssign | ast.Expr | ast.Raise | ast.Continue) and not documents
    if deleted or any(isinstance(target, ast.Subscript | ast.Attribute) for target in targets):
        yield ast.Pass()
    if isinstance(node, ast.AugAssign) and type(node.op) in OPERATORS:
        yield _with(node, op=OPERATORS[type(node.op)]())
    if isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) != "None":
        yield ast.Return(ast.Constant(None))


def _bounds(node: ast.Slice) -> Iterator[str]:
    low, high, step = (ast.unparse(one) if one else "" for one in (node.lower, node.upper, node.step))
    for present, without in ((low, f":{high}"), (high, f"{low}:")):
        if present:
            yield without + (f":{step}" if step else "")


def _with(node: Any, **fields: Any) -> Any:
    changed = copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed
