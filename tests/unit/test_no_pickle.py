"""Nothing in the packages runs what it was sent (X1).

Properties:
- no source loads pickles, evaluates text, or names vLLM's switch that would;
- the scanner finds each of these, however imported, and ignores comments and docstrings.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    path
    for package in ("vllm_parity_plugin", "trl_callbacks")
    for path in (ROOT / package).rglob("*.py")
)

MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
CALLS = {"eval", "exec", "torch.load", "numpy.load", "np.load", "compile"}
SWITCH = "VLLM_ALLOW_INSECURE_SERIALIZATION"


def forbidden(source: str) -> list[str]:
    """What a source does that could run data as code: ``line: name``, in no order."""
    tree = ast.parse(source)
    docs = {id(text) for text in _bare_strings(tree)}
    found = []
    for node in ast.walk(tree):
        names = _names(node)
        if isinstance(node, ast.Constant) and id(node) not in docs and SWITCH in str(node.value):
            names = [SWITCH]
        found += [f"{getattr(node, 'lineno', 0)}: {name}" for name in names]
    return found


def _names(node: ast.AST) -> list[str]:
    """The forbidden names that one node uses."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name.split(".")[0] in MODULES]
    if isinstance(node, ast.ImportFrom):
        qualified = [f"{node.module}.{alias.name}" for alias in node.names]
        return [n for n in qualified if n.split(".")[0] in MODULES or n in CALLS]
    if isinstance(node, ast.Call):
        called = ast.unparse(node.func).removeprefix("builtins.")
        literal = [a.value for a in node.args if isinstance(a, ast.Constant)]
        dynamic = called.endswith(("import_module", "__import__")) and MODULES & set(
            map(str, literal)
        )
        return [called] if called in CALLS or dynamic else []
    if isinstance(node, ast.keyword) and node.arg in {"allow_pickle", "weights_only"}:
        return [f"{node.arg}={ast.unparse(node.value)}"]
    return []


def _bare_strings(tree: ast.AST) -> list[ast.Constant]:
    """Docstrings: string constants that stand as a statement."""
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_x1_no_source_runs_data(path: Path) -> None:
    """X1: weights and rollouts travel as safetensors and JSON, never as code."""
    assert forbidden(path.read_text(encoding="utf-8")) == []


def test_x1_both_packages_are_read() -> None:
    """A scan of nothing always passes."""
    names = {str(path.relative_to(ROOT)) for path in SOURCES}
    assert {"vllm_parity_plugin/worker.py", "vllm_parity_plugin/server/routes.py"} <= names
    assert "trl_callbacks/weight_sync.py" in names


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as p",
        "import os, cloudpickle",
        "from pickle import loads",
        "from cloudpickle import loads as safe_loads",
        "from torch import load",
        "def f():\n    import dill",
        "importlib.import_module('pickle')",
        "__import__('pickle').loads(data)",
        "torch.load(path)",
        "torch.load(path, weights_only=True)",
        "np.load(path, allow_pickle=True)",
        "eval(text)",
        "builtins.exec(text)",
        "compile(text, '', 'exec')",
        "os.environ['VLLM_ALLOW_INSECURE_SERIALIZATION'] = '1'",
        "env = {'VLLM_ALLOW_INSECURE_SERIALIZATION': '1'}",
    ],
)
def test_x1_the_scanner_finds(source: str) -> None:
    """Control: each way to run data is found."""
    assert forbidden(source)


@pytest.mark.parametrize(
    "source",
    [
        "# pickle.loads(data)",
        '"""Never pickle.loads, eval( or VLLM_ALLOW_INSECURE_SERIALIZATION."""',
        "model.eval()",
        "re.compile('x')",
        "safetensors.torch.load(data)",
        "from safetensors.numpy import load as load_arrays",
        "json.loads(data)",
        "message = 'torch.load(path) is refused'",
    ],
)
def test_x1_the_scanner_ignores(source: str) -> None:
    """Control: comments, docstrings and harmless namesakes are not reported."""
    assert forbidden(source) == []
