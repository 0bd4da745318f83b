"""Check the three-ring rule: pure math, protocol, framework glue.

    PURE      imports torch and the standard library, nothing else.
    PROTOCOL  imports none of torch, vLLM, TRL, Transformers and their like.
    GLUE      everything else. Under vllm_parity_plugin it never reaches for trainer code
              (trl, accelerate, transformers' trainer, trl_callbacks); under trl_callbacks it
              imports vLLM inside functions only, and of vllm_parity_plugin only the modules
              that can be imported without vLLM.

Two passes. The static pass reads every import statement of every module, those inside functions
too; imports under `if TYPE_CHECKING:` never run, so they count only for the arrows between the
packages. The runtime pass imports each PURE and PROTOCOL module in a fresh interpreter and sees
what came along through other modules. A new file is GLUE until it is listed below.

Exit status: 0 when the rule holds, 1 with one paragraph per violation when it does not.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts.import_tree import (
    PACKAGES,
    PLUGIN,
    Import,
    Module,
    Tree,
    is_within,
    module_of,
    read_tree,
)

PURE = frozenset(
    {
        "trl_callbacks.centering_gap",
        "trl_callbacks.centering_inputs",
        "trl_callbacks.centering_metrics",
        "trl_callbacks.head_tiles",
        "trl_callbacks.importance_weights",
        "trl_callbacks.loss_types",
        "trl_callbacks.policy_ratio",
        "trl_callbacks.score_centering",
        "trl_callbacks.token_logprobs",
        "vllm_parity_plugin.mismatch",
    }
)
PROTOCOL = frozenset(
    {
        "trl_callbacks",
        "vllm_parity_plugin",
        "vllm_parity_plugin.compat",
        "vllm_parity_plugin.errors",
        "vllm_parity_plugin.rollout_wire",
        "vllm_parity_plugin.rules",
        "vllm_parity_plugin.settings",
        "vllm_parity_plugin.weights.errors",
        "vllm_parity_plugin.weights.manifest",
        "vllm_parity_plugin.weights.messages",
        "vllm_parity_plugin.weights.stack",
        "vllm_parity_plugin.weights.staging",
        "vllm_parity_plugin.wire",
    }
)

FRAMEWORKS = ("vllm", "trl", "transformers", "accelerate", "peft", "datasets")
TRAINER_CODE = ("trl", "accelerate", "transformers.trainer", "trl_callbacks")
# Names that `from transformers import ...` takes from its trainer module.
TRANSFORMERS_TRAINER_NAMES = ("Trainer", "Seq2SeqTrainer", "TrainingArguments")
# What a PURE module must not bring along at run time; torch itself loads numpy and a few others.
IMPURE = (*FRAMEWORKS, "pydantic", "safetensors", "httpx", "rich", "typer")


@dataclass(frozen=True)
class Rings:
    """Which modules are in the two inner rings; every other module is glue."""

    pure: frozenset[str] = PURE
    protocol: frozenset[str] = PROTOCOL

    @property
    def inner(self) -> frozenset[str]:
        """The modules of both inner rings."""
        return self.pure | self.protocol


@dataclass(frozen=True)
class Violation:
    """One broken rule: where, what was found, why it matters, how to fix it."""

    path: Path
    line: int
    found: str
    why: str
    fix: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.found}\n    why: {self.why}\n    fix: {self.fix}"


# --- the static pass ----------------------------------------------------------------------------


def check_static(root: Path, rings: Rings | None = None) -> list[Violation]:
    """Check every import statement of every module against the rings."""
    rings, tree = rings or Rings(), read_tree(root)
    found = list(absent_modules(tree, rings))
    for module in tree.values():
        for item in module.imports:
            violation = check_import(tree, rings, module, item)
            if violation is not None:
                found.append(violation)
    # `from m import a, b` is one statement to repair, so it is told once.
    return list({(v.path, v.line, v.why): v for v in reversed(found)}.values())[::-1]


def absent_modules(tree: Tree, rings: Rings) -> Iterator[Violation]:
    """Yield a violation for each listed module without a file: checking nothing always passes."""
    for name in sorted(rings.inner - tree.keys()):
        yield Violation(
            Path(name.replace(".", "/") + ".py"),
            1,
            f"{name} is listed in a ring but has no file",
            "a renamed or deleted module silently leaves its ring, and nothing checks it any more",
            "list the module under its new name in PURE or PROTOCOL of scripts/check_rings.py",
        )


def check_import(tree: Tree, rings: Rings, module: Module, item: Import) -> Violation | None:
    """Return the violation that one import is, if it is one."""
    plugin = is_within(module.name, [PLUGIN])
    broken = check_plugin_arrow(item) if plugin else check_trainer_arrow(tree, rings, item)
    if broken is None and not item.typing_only:
        if module.name in rings.pure:
            broken = check_pure(tree, rings, item)
        elif module.name in rings.protocol:
            broken = check_protocol(item)
    if broken is None:
        return None
    why, fix = broken
    return Violation(module.path, item.line, f"{module.name} imports {item.target}", why, fix)


Broken = tuple[str, str] | None  # why it matters, how to fix it


def check_plugin_arrow(item: Import) -> Broken:
    """The plugin never reaches for trainer code."""
    if not is_trainer_code(item.target):
        return None
    return (
        "the plugin runs inside vLLM's processes, where no trainer is installed",
        "move what both sides need into a protocol or pure module of vllm_parity_plugin",
    )


def is_trainer_code(target: str) -> bool:
    """Tell trainer code, also `transformers.Trainer` and `transformers.trainer_utils`."""
    package, _, name = target.partition(".")
    if package == "transformers" and name:
        head = name.split(".")[0]
        return head.lower().startswith("trainer") or head in TRANSFORMERS_TRAINER_NAMES
    return is_within(target, TRAINER_CODE)


def check_trainer_arrow(tree: Tree, rings: Rings, item: Import) -> Broken:
    """The trainer's side loads without vLLM, and so does all it takes from the plugin."""
    if is_within(item.target, ["vllm"]) and not item.deferred and not item.typing_only:
        return (
            "a trainer process that talks to a remote server has no vLLM installed",
            "import it inside the function that needs it",
        )
    if not is_within(item.target, [PLUGIN]):
        return None
    name = module_of(tree, item.target)
    chain = None if name is None or name in rings.inner else vllm_chain(tree, name)
    if chain is None:
        return None
    return (
        f"it needs vLLM ({' -> '.join(chain)}), which a trainer process may lack",
        "import from vllm_parity_plugin's vLLM-free modules only: wire, weights.manifest, mismatch",
    )


def vllm_chain(tree: Tree, name: str) -> list[str] | None:
    """Return how importing `name` leads to vLLM, shortest way first, or None when it does not."""
    queue, seen = [[name]], {name}
    for chain in queue:  # grows while it is read
        for target in loaded_by(tree, chain[-1]):
            if is_within(target, ["vllm"]):
                return [*chain, target]
            module = module_of(tree, target)
            if module is not None and module not in seen:
                seen.add(module)
                queue.append([*chain, module])
    return None


def loaded_by(tree: Tree, name: str) -> list[str]:
    """Return what importing a module loads directly: its parent package, then its own imports."""
    parent = name.rpartition(".")[0]
    own = [item.target for item in tree[name].imports if not item.deferred and not item.typing_only]
    return [parent, *own]


def check_pure(tree: Tree, rings: Rings, item: Import) -> Broken:
    """Pure math sees tensors: torch, the standard library, and other pure modules."""
    root = item.target.split(".")[0]
    if root == "torch" or root in sys.stdlib_module_names:
        return None
    if module_of(tree, item.target) in rings.pure:
        return None
    return (
        "pure math imports torch and the standard library only, so that losses see tensors and "
        "can be tested without a framework",
        "pass the value in as an argument, or move this code to a glue module; if what it imports "
        "is pure itself, list that module in PURE of scripts/check_rings.py",
    )


def check_protocol(item: Import) -> Broken:
    """Protocol modules are shared by both sides and by the command line."""
    if not is_within(item.target, ("torch", *FRAMEWORKS)):
        return None
    return (
        "protocol modules are imported by the server, the trainer and the command line, and must "
        "load in milliseconds where no framework is installed",
        "move this code to a glue module; for an annotation, import under `if TYPE_CHECKING:`",
    )


# --- the runtime pass ---------------------------------------------------------------------------

# Runs in a fresh interpreter. A finder at the front of sys.meta_path sees the first import of each
# forbidden package, and the innermost frame inside the tree is the statement responsible.
PROBE = """
import importlib, json, os, sys, traceback

root, modules, forbidden, packages = json.loads(sys.argv[1])
sys.path.insert(0, root)
sys.dont_write_bytecode = True
ours = tuple(os.path.join(root, package) + os.sep for package in packages)
hits, current = [], None

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name in forbidden:
            frames = [f for f in traceback.extract_stack() if f.filename.startswith(ours)]
            where = [frames[-1].filename, frames[-1].lineno] if frames else [None, 1]
            hits.append([current, name, *where])
        return None

sys.meta_path.insert(0, Watch())
for current in modules:
    try:
        importlib.import_module(current)
    except Exception as error:
        hits.append([current, None, f"{type(error).__name__}: {error}", 1])
# A find_spec that only asks whether a package exists is not an import.
print(json.dumps([hit for hit in hits if hit[1] is None or hit[1] in sys.modules]))
"""


def check_runtime(root: Path, rings: Rings | None = None) -> list[Violation]:
    """Import each inner module that exists and see whether a forbidden package came along."""
    rings, tree = rings or Rings(), read_tree(root)
    found: list[Violation] = []
    for members, forbidden in ((rings.pure, IMPURE), (rings.protocol, ("torch", *FRAMEWORKS))):
        modules = sorted(members & tree.keys())
        # One interpreter for the ring; only when something is found, one each to name them all.
        if modules and probe(root, modules, forbidden):
            for module in modules:
                hits = probe(root, [module], forbidden)
                found.extend(runtime_violation(root, tree, hit) for hit in hits)
    return found


Hit = tuple[str, str | None, str | None, int]  # module, package, file (or the error), line


def probe(root: Path, modules: list[str], forbidden: Iterable[str]) -> list[Hit]:
    """Import `modules` in a fresh interpreter and return what it brought along."""
    arguments = json.dumps([str(root.resolve()), modules, list(forbidden), list(PACKAGES)])
    command = [sys.executable, "-c", PROBE, arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)
    if done.returncode != 0:
        return [(modules[0], None, (done.stderr.strip().splitlines() or ["no output"])[-1], 1)]
    return [(hit[0], hit[1], hit[2], hit[3]) for hit in json.loads(done.stdout.splitlines()[-1])]


def runtime_violation(root: Path, tree: Tree, hit: Hit) -> Violation:
    """Turn what the probe saw into a violation at the statement responsible."""
    module, package, where, line = hit
    path = tree[module].path
    if package is None:
        return Violation(
            path,
            line,
            f"{module} cannot be imported: {where}",
            "a module that does not import cannot be checked, nor used",
            "run `python -c 'import " + module + "'` and repair what it shows",
        )
    if where is not None:
        path = Path(where).relative_to(root.resolve())
    return Violation(
        path,
        line,
        f"importing {module} loads {package}",
        "inner rings load without it, also through the modules they import",
        f"import {package} inside the function that needs it, or move this line to a glue module",
    )


def main() -> int:
    """Check the repository this script lies in."""
    root = Path(__file__).resolve().parent.parent
    found = [*check_static(root), *check_runtime(root)]
    for violation in found:
        print(violation)
    if found:
        print(f"rings: {len(found)} violations")
        return 1
    tree = read_tree(root)
    glue = len(tree) - len(Rings().inner)
    print(f"rings: {len(PURE)} pure, {len(PROTOCOL)} protocol and {glue} glue modules, in order")
    return 0


if __name__ == "__main__":
    sys.exit(main())
