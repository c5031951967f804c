"""A module is complete when its constructor returns: no later pass over modules changes them."""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "megalith"

WALKS = ("modules", "named_modules", "children", "named_children")

ALLOWED = {
    "models/decoder.py": "allocate gives parameters of the meta device their memory",
    "verify/faults": "planted faults change a correct model",
    "testing": "tests inject faults",
}
"""Files that may assign to attributes of modules of a built model, and why."""


def assignments_to_visited_modules(tree: ast.AST) -> Iterator[int]:
    """Lines that assign to an attribute of the variable of a loop over modules."""
    for loop in ast.walk(tree):
        if not isinstance(loop, ast.For) or not any(
            isinstance(node, ast.Attribute) and node.attr in WALKS for node in ast.walk(loop.iter)
        ):
            continue
        names = {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
        for node in (inner for statement in loop.body for inner in ast.walk(statement)):
            targets: list[ast.expr] = []
            if isinstance(node, ast.Assign):
                targets = [t.value for t in node.targets if isinstance(t, ast.Attribute)]
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr":
                targets = node.args[:1]
            if any(isinstance(each, ast.Name) and each.id in names for each in targets):
                yield node.lineno


def test_no_pass_over_modules_assigns_to_their_attributes() -> None:
    results = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if not str(path.relative_to(PACKAGE)).startswith(tuple(ALLOWED))
        for line in assignments_to_visited_modules(ast.parse(path.read_text()))
    ]
    assert results == [], "pass what the module needs to its constructor (BuildContext)"


def test_attribute_assignments_are_detected() -> None:
    code = "for name, layer in model.named_modules():\n    layer.scale = 2\n"
    assert list(assignments_to_visited_modules(ast.parse(code))) == [2]
    code = "for layer in list(model.modules()):\n    setattr(layer, 'scale', 2)\n"
    assert list(assignments_to_visited_modules(ast.parse(code))) == [2]
    assert not list(assignments_to_visited_modules(ast.parse("for x in y:\n    x.z = 2\n")))
