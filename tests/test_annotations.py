"""How many parameters of the package are annotated with `Any`."""

import ast
from pathlib import Path

import pax_export

#: Of all annotated parameters.
MOST = 0.12

ROOT = Path(pax_export.__file__).parent


def annotations(source):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            a = node.args
            for each in (*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg):
                if each is not None and each.annotation is not None:
                    yield f"{node.name}({each.arg})", each.annotation


def is_any(annotation):
    if isinstance(annotation, ast.BinOp):  # Any | None
        return is_any(annotation.left) or is_any(annotation.right)
    return isinstance(annotation, ast.Name) and annotation.id == "Any"


def test_share_of_any():
    found = [
        (f"{path.relative_to(ROOT)}: {name}", is_any(annotation))
        for path in sorted(ROOT.rglob("*.py"))
        for name, annotation in annotations(path.read_text())
    ]
    without_type = [place for place, is_without in found if is_without]
    assert len(without_type) <= MOST * len(found), without_type
