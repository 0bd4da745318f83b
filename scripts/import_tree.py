"""Every import of every module of both packages, read from the source.

Those inside functions too; the context of each is kept: inside a function, under
`if TYPE_CHECKING:`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PLUGIN, TRAINER = "vllm_parity_plugin", "trl_callbacks"
PACKAGES = (PLUGIN, TRAINER)


@dataclass(frozen=True)
class Import:
    """One imported module, `target`, and where it stands.

    `typing_only` is an import under `if TYPE_CHECKING:`; `deferred` is one inside a function.
    """

    target: str
    line: int
    deferred: bool = False
    typing_only: bool = False


@dataclass(frozen=True)
class Module:
    """A module of the tree and all of its imports."""

    name: str
    path: Path
    imports: tuple[Import, ...]


Tree = dict[str, Module]


def read_tree(root: Path) -> Tree:
    """Parse every module of both packages under `root`."""
    files = (file for package in PACKAGES for file in sorted((root / package).rglob("*.py")))
    modules = (read_module(root, file) for file in files)
    return {module.name: module for module in modules}


def read_module(root: Path, file: Path) -> Module:
    """Parse one file; a relative import is made absolute."""
    relative = file.relative_to(root)
    is_package = file.name == "__init__.py"
    name = ".".join((relative.parent if is_package else relative.with_suffix("")).parts)
    package = name if is_package else name.rpartition(".")[0]
    visitor = ImportVisitor(package)
    visitor.visit(ast.parse(file.read_text(encoding="utf-8"), str(file)))
    return Module(name, relative, tuple(visitor.imports))


class ImportVisitor(ast.NodeVisitor):
    """Collect imports, also `import_module("...")` and `__import__("...")` with a literal name."""

    def __init__(self, package: str) -> None:
        self.package = package
        self.imports: list[Import] = []
        self.functions = 0
        self.typing_blocks = 0

    def add(self, target: str, line: int) -> None:
        """Record one import with the context it stands in."""
        self.imports.append(Import(target, line, self.functions > 0, self.typing_blocks > 0))

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        """Imports below here run when the function is called."""
        self.functions += 1
        self.generic_visit(node)
        self.functions -= 1

    visit_AsyncFunctionDef = visit_FunctionDef
    visit_Lambda = visit_FunctionDef

    def visit_If(self, node: ast.If) -> None:
        """Imports in the body of `if TYPE_CHECKING:` never run; those of its `else` do."""
        is_typing = is_type_checking(node.test)
        self.typing_blocks += is_typing
        for statement in node.body:
            self.visit(statement)
        self.typing_blocks -= is_typing
        for statement in node.orelse:
            self.visit(statement)

    def visit_Import(self, node: ast.Import) -> None:
        """`import a.b`."""
        for alias in node.names:
            self.add(alias.name, node.lineno)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """`from a import b`: `a.b` may be a module or a name of `a`; both readings are kept."""
        base = self.absolute(node)
        for alias in node.names:
            self.add(base if alias.name == "*" else f"{base}.{alias.name}", node.lineno)

    def absolute(self, node: ast.ImportFrom) -> str:
        """Return the module that a `from` import names, without leading dots."""
        if not node.level:
            return node.module or ""
        parts = self.package.split(".")
        parts = parts[: len(parts) - node.level + 1]
        return ".".join([*parts, node.module] if node.module else parts)

    def visit_Call(self, node: ast.Call) -> None:
        """`importlib.import_module("a.b")`."""
        function = node.func.attr if isinstance(node.func, ast.Attribute) else None
        function = node.func.id if isinstance(node.func, ast.Name) else function
        if function in ("import_module", "__import__") and node.args:
            target = node.args[0]
            if isinstance(target, ast.Constant) and isinstance(target.value, str):
                self.add(target.value, node.lineno)
        self.generic_visit(node)


def is_type_checking(test: ast.expr) -> bool:
    """Tell `TYPE_CHECKING` and `typing.TYPE_CHECKING` from other conditions."""
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", None)
    return name == "TYPE_CHECKING"


def is_within(target: str, modules: Iterable[str]) -> bool:
    """Tell whether `target` is one of the modules or lies inside one of them."""
    return any(target == module or target.startswith(f"{module}.") for module in modules)


def module_of(tree: Tree, target: str) -> str | None:
    """Return the module of this tree that an import target names, or None for another package."""
    parent = target.rpartition(".")[0]
    return next((name for name in (target, parent) if name in tree), None)
