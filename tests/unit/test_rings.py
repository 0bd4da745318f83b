"""The three-ring checker, against small package trees that break one rule each.

Properties:
- a tree that keeps every rule has no violation, in both passes;
- each broken rule is reported once, with the file, the line, why it matters and the fix;
- imports inside functions and `import_module("...")` count; `if TYPE_CHECKING:` counts only for the
  arrows between the packages;
- a listed module without a file is a violation, and a new file is glue;
- the runtime pass sees what comes along through another module, and names the statement.
"""

from pathlib import Path

import pytest

from scripts.check_rings import PROTOCOL, PURE, Rings, check_runtime, check_static

RINGS = Rings()
# Stand-ins, so that the runtime pass costs no framework import.
STAND_INS = ("torch", "vllm", "trl", "transformers", "accelerate")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Both packages with every listed module, empty, and a few glue modules."""
    for name in STAND_INS:
        (tmp_path / f"{name}.py").write_text("nn = None\n")
    packages = {"vllm_parity_plugin", "vllm_parity_plugin.weights", "trl_callbacks"}
    for name in packages:
        folder = tmp_path / name.replace(".", "/")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").write_text("")
    for name in (PURE | PROTOCOL) - packages:
        write(tmp_path, name, "")
    write(tmp_path, "vllm_parity_plugin.lm_head", "import torch\nimport vllm\n")
    write(tmp_path, "vllm_parity_plugin.paths", "import safetensors\n")
    write(tmp_path, "trl_callbacks.trainer", "import trl\nimport transformers\nimport accelerate\n")
    return tmp_path


def write(root: Path, module: str, text: str) -> None:
    """Give a module of the tree this source."""
    path = root / module.replace(".", "/")
    (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).write_text(text)


def test_a_tree_in_order_has_no_violation(tree: Path) -> None:
    write(tree, "trl_callbacks.score_centering", "import math\nfrom torch import nn\n")
    write(tree, "trl_callbacks.callback", "from vllm_parity_plugin import mismatch, wire\n")
    assert check_static(tree, RINGS) == []
    assert check_runtime(tree, RINGS) == []


# module, source, line, part of what was found
BROKEN = {
    "pure imports a third-party package": (
        "trl_callbacks.score_centering",
        "import torch\nimport numpy as np\n",
        2,
        "imports numpy",
    ),
    "pure imports a framework inside a function": (
        "vllm_parity_plugin.mismatch",
        "def f():\n    from transformers import AutoModel\n",
        2,
        "imports transformers.AutoModel",
    ),
    "pure imports a protocol module": (
        "vllm_parity_plugin.mismatch",
        "from .wire import Frame, Header\n",
        1,
        "imports vllm_parity_plugin.wire.Frame",
    ),
    "protocol imports torch": (
        "vllm_parity_plugin.wire",
        "import json\n\nimport torch\n",
        3,
        "imports torch",
    ),
    "protocol imports vllm inside a function": (
        "vllm_parity_plugin.settings",
        "def f():\n    import vllm.config\n",
        2,
        "imports vllm.config",
    ),
    "protocol imports transformers by name": (
        "vllm_parity_plugin.rules",
        "from importlib import import_module\nm = import_module('transformers')\n",
        2,
        "imports transformers",
    ),
    "plugin imports trl": (
        "vllm_parity_plugin.lm_head",
        "def f():\n    from trl import GRPOTrainer\n",
        2,
        "imports trl.GRPOTrainer",
    ),
    "plugin imports the trainer package for typing": (
        "vllm_parity_plugin.new_file",
        "import typing\nif typing.TYPE_CHECKING:\n    import trl_callbacks.config\n",
        3,
        "imports trl_callbacks.config",
    ),
    "plugin imports transformers' trainer": (
        "vllm_parity_plugin.new_file",
        "from transformers import TrainerCallback\n",
        1,
        "imports transformers.TrainerCallback",
    ),
    "plugin imports transformers' trainer module": (
        "vllm_parity_plugin.new_file",
        "import transformers.trainer_utils\n",
        1,
        "imports transformers.trainer_utils",
    ),
    "trainer imports vllm at module level": (
        "trl_callbacks.trainer",
        "try:\n    import vllm\nexcept ImportError:\n    vllm = None\n",
        2,
        "imports vllm",
    ),
    "trainer imports a plugin module that needs vllm": (
        "trl_callbacks.trainer",
        "def f():\n    from vllm_parity_plugin.lm_head import cast\n",
        2,
        "imports vllm_parity_plugin.lm_head.cast",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_each_broken_rule_is_reported_where_it_stands(tree: Path, case: str) -> None:
    module, source, line, found = BROKEN[case]
    write(tree, module, source)
    (violation,) = check_static(tree, RINGS)
    assert violation.path == Path(module.replace(".", "/") + ".py")
    assert violation.line == line
    assert found in violation.found
    assert violation.why and violation.fix
    assert str(violation).startswith(f"{violation.path}:{line}: {module} imports")


ALLOWED = {
    "glue of the plugin": ("vllm_parity_plugin.new_file", "from vllm import LLM\nimport torch\n"),
    "transformers' models in the plugin": (
        "vllm_parity_plugin.new_file",
        "from transformers import AutoConfig\n",
    ),
    "vllm inside a function of the trainer": (
        "trl_callbacks.trainer",
        "def f():\n    from vllm import LLM\n",
    ),
    "vllm-free glue of the plugin in the trainer": (
        "trl_callbacks.trainer",
        "from vllm_parity_plugin.paths import staging_folder\n",
    ),
    "a framework's type in a protocol module": (
        "vllm_parity_plugin.rules",
        "import typing\nif typing.TYPE_CHECKING:\n    from vllm.config import VllmConfig\n",
    ),
    "one pure module in another": (
        "trl_callbacks.score_centering",
        "from trl_callbacks.token_logprobs import head\n",
    ),
}


@pytest.mark.parametrize("case", ALLOWED)
def test_what_the_rule_allows_is_not_reported(tree: Path, case: str) -> None:
    write(tree, *ALLOWED[case])
    assert check_static(tree, RINGS) == []


def test_the_way_to_vllm_is_shown(tree: Path) -> None:
    write(tree, "vllm_parity_plugin.paths", "from vllm_parity_plugin import lm_head\n")
    write(tree, "trl_callbacks.trainer", "import vllm_parity_plugin.paths\n")
    (violation,) = check_static(tree, RINGS)
    assert "vllm_parity_plugin.paths -> vllm_parity_plugin.lm_head -> vllm" in violation.why


def test_a_listed_module_without_a_file_is_a_violation(tree: Path) -> None:
    (tree / "vllm_parity_plugin/wire.py").unlink()
    (violation,) = check_static(tree, RINGS)
    assert violation.path == Path("vllm_parity_plugin/wire.py")
    assert "no file" in violation.found


@pytest.mark.parametrize(
    ("module", "framework"),
    [
        ("trl_callbacks.token_logprobs", "transformers"),
        ("vllm_parity_plugin.settings", "torch"),
        ("trl_callbacks", "trl"),
    ],
)
def test_what_comes_along_at_run_time_is_found(tree: Path, module: str, framework: str) -> None:
    """The module itself imports only a helper, whose import the static pass allows."""
    write(tree, "trl_callbacks.helper", f"import json\nimport {framework}\n")
    write(
        tree, module, "from importlib import import_module as load\nload('trl_callbacks.helper')\n"
    )
    assert check_static(tree, RINGS) == []
    found = check_runtime(tree, RINGS)
    ours = [violation for violation in found if f"importing {module} " in violation.found]
    assert [(v.path, v.line) for v in ours] == [(Path("trl_callbacks/helper.py"), 2)]
    assert f"loads {framework}" in ours[0].found


def test_asking_whether_a_package_exists_is_no_import(tree: Path) -> None:
    source = "from importlib.util import find_spec\nHAS_VLLM = find_spec('vllm') is not None\n"
    write(tree, "vllm_parity_plugin.compat", source)
    assert check_runtime(tree, RINGS) == []


def test_a_module_that_cannot_be_imported_is_a_violation(tree: Path) -> None:
    write(tree, "vllm_parity_plugin.wire", "raise RuntimeError('boom')\n")
    (violation,) = check_runtime(tree, RINGS)
    assert "boom" in violation.found
