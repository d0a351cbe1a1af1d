"""No step waits for a device but where its tokens are read: by a walk over the source of every module on its path.

What looks like waiting is allowed by name, with the reason: it is the one place that reads, it works on arrays of the host, or
it is not on the path of every step. What the walk cannot see, `torch.cuda.set_sync_debug_mode` does in bench/gpu.py.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = (
    *(f"engine/{name}.py" for name in ("core", "batch", "staging", "graphs", "model_runner", "attention", "fusion")),
    *(f"engine/{name}.py" for name in ("sampler", "logit_changes", "kv_cache", "host_pool", "events")),
    *(f"kernels/{name}.py" for name in ("dispatch", "layers", "sampling", "blocks")),
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "kernels" / "triton").glob("*.py") if path.stem != "compile"),
)
READ_BACK = "engine/staging.py: Reading.wait"
HOST = {
    "engine/batch.py: _block_tables": "numpy",
    "engine/sampler.py: Pending.read": "numpy, once the read has been waited for",
    "engine/sampler.py: _unpack": "numpy, once the read has been waited for",
    "engine/staging.py: _Buffer.__init__": "page-locked memory, as numpy writes it",
    "engine/staging.py: _Buffer.open": "page-locked memory; the wait is for the copy of two steps ago, which has ended",
    "engine/staging.py: Staging.add": "one memory",
    "engine/staging.py: _torch_dtype": "an empty array, once for each dtype",
    "engine/logit_changes.py: _mask": "a matcher fills host memory",
    "kernels/triton/plan.py: Plan._has_decodes": "numpy",
    "kernels/triton/plan.py: Plan._num_prefill_tiles": "numpy",
}
COLD = {
    "engine/attention.py: _error": "the probe at start",
    "engine/attention.py: _run_eager": "the probe at start",
    "engine/model_runner.py: ModelRunner._free_bytes": "memory is planned at start",
    "engine/host_pool.py: StreamedHostPool._finish": "measured at start",
    "kernels/sampling.py: draw_truncated": "top-p and top-k of rows that the first ranking did not decide, ranked again",
    "kernels/sampling.py: _kept": "top-p sums what it has not ranked",
}
WAITING_METHODS = {"item", "cpu", "tolist", "numpy", "nonzero", "synchronize", "masked_select", "unique", "argwhere"}
WAITING_FUNCTIONS = {"masked_select", "nonzero", "argwhere", "unique", "bincount"}
TRUTHS = {"any", "all", "equal", "allclose", "is_nonzero"}
NUMBERS = {"bool", "int", "float"}
REDUCTIONS = TRUTHS | {"max", "min", "sum", "amax", "amin", "argmax"}
MASKS = ("is_", "has_", "mask", "keep", "kept", "written", "undecided")
Found = tuple[str, int, str]
"""Where, line, what."""


class Walk(ast.NodeVisitor):
    """Collects what waits, or copies on its own, with the function that it stands in."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._names: list[str] = []
        self.found: list[Found] = []

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        self._names.append(node.name)
        self.generic_visit(node)
        self._names.pop()

    visit_ClassDef = visit_FunctionDef

    def visit_Call(self, node: ast.Call) -> None:
        what = _waits(node)
        if what:
            self.found.append((f"{self._module}: {'.'.join(self._names)}", node.lineno, what))
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        index = node.slice.operand if isinstance(node.slice, ast.UnaryOp) else node.slice
        name = index.id if isinstance(index, ast.Name) else ""
        if isinstance(index, ast.Compare) or name.startswith(MASKS):
            self.found.append((f"{self._module}: {'.'.join(self._names)}", node.lineno, "indexes by a mask"))
        self.generic_visit(node)

    def visit_If(self, node: ast.If | ast.While | ast.IfExp | ast.Assert) -> None:
        test = node.test.operand if isinstance(node.test, ast.UnaryOp) else node.test
        if isinstance(test, ast.Call) and isinstance(test.func, ast.Attribute) and test.func.attr in TRUTHS:
            self.found.append((f"{self._module}: {'.'.join(self._names)}", node.lineno, f"branches on .{test.func.attr}()"))
        self.generic_visit(node)

    visit_While = visit_IfExp = visit_Assert = visit_If


def _waits(node: ast.Call) -> str:
    """What a call waits for or copies; empty where it does neither."""
    function, keywords = node.func, {keyword.arg: keyword.value for keyword in node.keywords}
    if isinstance(function, ast.Name):
        (inner,) = node.args if len(node.args) == 1 else (None,)
        reduces = isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute) and inner.func.attr in REDUCTIONS
        return f"{function.id}() of a reduction" if function.id in NUMBERS and reduces else ""
    if not isinstance(function, ast.Attribute):
        return ""
    of_torch = isinstance(function.value, ast.Name) and function.value.id == "torch"
    if of_torch:
        if function.attr in WAITING_FUNCTIONS or (function.attr == "where" and len(node.args) == 1):
            return f"torch.{function.attr}"
        return f"torch.{function.attr} of host data" if function.attr in ("tensor", "as_tensor", "from_numpy") else ""
    if function.attr == "repeat_interleave" and "output_size" not in keywords:
        return ".repeat_interleave without output_size"
    if function.attr == "to":
        target = ast.unparse(keywords.get("device") or (node.args[0] if node.args else ast.Constant("")))
        return f".to({target})" if "device" in target or "cuda" in target or "cpu" in target else ""
    return f".{function.attr}()" if function.attr in WAITING_METHODS else ""


def findings(module: str, source: str) -> list[Found]:
    walk = Walk(module)
    walk.visit(ast.parse(source))
    return walk.found


def in_modules() -> Iterator[Found]:
    for module in MODULES:
        yield from findings(module, (ROOT / module).read_text())


def allowed(where: str) -> bool:
    return where in (READ_BACK, *HOST, *COLD)


def test_nothing_on_the_path_of_a_step_waits_but_the_one_place_that_reads() -> None:
    assert [found for found in in_modules() if not allowed(found[0])] == []


def test_every_module_of_the_path_is_walked_over() -> None:
    assert [module for module in MODULES if not (ROOT / module).exists()] == []


def test_what_is_allowed_is_there() -> None:
    seen = {where for where, *_ in in_modules()}

    assert [name for name in (READ_BACK, *HOST, *COLD) if name not in seen] == []


@pytest.mark.parametrize(
    "line",
    [
        "logits.max().item()",
        "tensor.cpu()",
        "token_ids.tolist()",
        "tensor.numpy()",
        "(a > 0).nonzero()",
        "torch.nonzero(a)",
        "torch.where(a)",
        "torch.cuda.synchronize()",
        "stream.synchronize()",
        "torch.tensor([1, 2], device=device)",
        "torch.tensor(rows, device=logits.device)",
        "torch.from_numpy(rows).to(device, non_blocking=True)",
        "rows.to(self._device)",
        "rows.to(device=query.device)",
        "rows.to('cuda')",
        "bool((a > 0).all())",
        "int(lengths.max())",
        "logits[a > 0]",
        "logits[is_wanted]",
        "key[~is_written]",
        "if a.any(): pass",
        "b = 1 if not a.any() else 2",
        "rows.repeat_interleave(lens)",
    ],
)
def test_the_walk_finds(line: str) -> None:
    assert [where for where, *_ in findings("m.py", f"class A:\n  def f(self):\n    {line}")]


@pytest.mark.parametrize(
    "line",
    [
        "logits.to(torch.float32)",
        "torch.where(a, b, -1)",
        "torch.arange(4, device=device)",
        "rows.repeat_interleave(lens, output_size=9)",
        "token_ids[rows]",
        "int(size)",
        "table[:used]",
        "out.copy_(logits, non_blocking=True)",
    ],
)
def test_the_walk_lets_pass(line: str) -> None:
    assert findings("m.py", line) == []
