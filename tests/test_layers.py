"""The shape of the code: layers, sizes, and who may do what."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "offload"
SOURCES = sorted(PACKAGE.rglob("*.py"))
NATIVE = sorted(p for p in (ROOT / "cpp").rglob("*") if p.suffix in (".cpp", ".h", ".inl"))

# A layer may import itself and those before it. Names are modules or packages of `offload`; the longest match counts.
LAYERS = [
    ("errors",),
    ("config",),
    ("memory", "ops", "_core"),
    ("transfer",),
    ("planner",),
    ("dist",),
    ("engine",),
    ("optim", "checkpoint", "observe"),
    ("api",),
    ("train",),
    ("cli", "__main__"),
]
RANK = {name: i for i, names in enumerate(LAYERS) for name in names}
CALLS_WITHOUT_EFFECTS = {
    *("isinstance", "issubclass", "len", "all", "any", "hasattr", "callable", "get", "keys", "values", "items"),
    *("numel", "is_contiguous", "data_ptr", "element_size", "dim"),
}


def _name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def _trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in SOURCES:
        yield path, ast.parse(path.read_text(), str(path))


def _at_module_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run on import: not those of functions, nor under TYPE_CHECKING."""
    for node in body:
        yield node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _at_module_level(node.orelse)
            continue
        for field in ("body", "orelse", "finalbody"):
            yield from _at_module_level(getattr(node, field, []))
        for handler in getattr(node, "handlers", []):
            yield from _at_module_level(handler.body)


def _imported(nodes: Iterator[ast.AST] | list[ast.AST], path: Path) -> Iterator[str]:
    """Absolute names that are imported; `from offload import x` counts as offload.x."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                package = _name(path).split(".")[: -node.level]
                module = ".".join([*package, *([node.module] if node.module else [])])
            else:
                module = node.module or ""
            yield from (f"offload.{alias.name}" for alias in node.names) if module == "offload" else (module,)


def _layer(module: str) -> int | None:
    parts = module.split(".")
    return RANK.get(parts[1]) if parts[0] == "offload" and len(parts) > 1 else None


def test_every_module_has_a_layer() -> None:
    unknown = [_name(p) for p in SOURCES if p.parent == PACKAGE and p.stem != "__init__" and p.stem not in RANK]
    unknown += [d.name for d in PACKAGE.iterdir() if d.is_dir() and (d / "__init__.py").exists() and d.name not in RANK]
    assert not unknown


def test_layers_import_only_those_before_them() -> None:
    wrong = []
    for path, tree in _trees():
        here = _layer(_name(path))
        if here is None:  # offload/__init__.py resolves names lazily
            continue
        for module in _imported(_at_module_level(tree.body), path):
            there = _layer(module)
            if there is not None and there > here:
                wrong.append(f"{_name(path)} imports {module}")
    assert not wrong


def test_package_itself_imports_little() -> None:
    """`import offload` and `offload --help` start without torch."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    assert {m for m in _imported(_at_module_level(tree.body), PACKAGE / "__init__.py") if m.startswith("offload")} <= {
        "offload.config",
        "offload.errors",
    }
    heavy = []
    for path in [PACKAGE / "errors.py", PACKAGE / "config.py", PACKAGE / "__main__.py", *sorted((PACKAGE / "cli").glob("*.py"))]:
        modules = set(_imported(_at_module_level(ast.parse(path.read_text()).body), path))
        heavy += [f"{_name(path)} imports {m}" for m in modules if m.split(".")[0] in ("torch", "transformers", "numpy")]
        if "cli" in path.parts:
            heavy += [f"{_name(path)} imports {m}" for m in modules if (_layer(m) or 0) > RANK["config"] and _layer(m) != RANK["cli"]]
    assert not heavy


def test_policy_is_pure() -> None:
    """The planner knows no tensors."""
    wrong = [p for p in SOURCES if "planner" in p.parts for m in _imported(list(ast.walk(ast.parse(p.read_text()))), p) if m.split(".")[0] == "torch"]
    assert not wrong


def test_files_are_short() -> None:
    assert not [f"{p.relative_to(ROOT)}: {n}" for p in SOURCES + NATIVE if (n := len(p.read_text().splitlines())) >= 600]


def test_functions_and_classes_are_short() -> None:
    wrong = []
    for path, tree in _trees():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno and node.end_lineno - node.lineno + 1 >= 70:
                wrong.append(f"{_name(path)}.{node.name} has {node.end_lineno - node.lineno + 1} lines")
            if isinstance(node, ast.ClassDef):
                public = {m.name for m in node.body if isinstance(m, (ast.FunctionDef, ast.AsyncFunctionDef)) and not m.name.startswith("_")}
                if len(public) > 20:
                    wrong.append(f"{_name(path)}.{node.name} has {len(public)} public methods")
    assert not wrong


def test_configuration_is_small() -> None:
    from pydantic import BaseModel

    from offload.config import RunConfig

    def keys(model: type[BaseModel]) -> int:
        total = 0
        for field in model.model_fields.values():
            inner = [a for a in (field.annotation, *getattr(field.annotation, "__args__", ())) if isinstance(a, type) and issubclass(a, BaseModel)]
            total += sum(keys(a) for a in inner) if inner else 1
        return total

    assert 10 < keys(RunConfig) < 40


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _defined(node: ast.AST) -> str:
    """The name that a class, a function or an assignment makes, of a module or of an object by itself; or ""."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return node.name
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self" else ""


def test_no_module_reaches_into_another() -> None:
    """What begins with an underscore is its module's own. Names that torch has too are left out."""
    trees = [(path, tree, {_defined(node) for node in ast.walk(tree)}) for path, tree in _trees()]
    known = set().union(*(own for _, _, own in trees)) - {"_parameters", "_spec", "_core"}
    wrong = []
    for path, tree, own in trees:
        for node in ast.walk(tree):
            names = [node.attr] if isinstance(node, ast.Attribute) else []
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("offload"):
                names = [alias.name for alias in node.names]
            wrong += [f"{_name(path)}: {ast.unparse(node)}" for name in names if _private(name) and name in known - own]
    assert not wrong


def _calls(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


HOOK = re.compile(r"register_(module_|full_)?(forward_|backward_|post_accumulate_grad_|load_state_dict_|state_dict_)?(pre_|post_)?hook")


@pytest.mark.parametrize(
    ("allowed", "what"),
    [("offload.engine.streamer", HOOK), ("offload.transfer.cuda", re.compile("Stream")), ("offload.transfer.queue", re.compile("sleep"))],
)
def test_only_one_module_does(allowed: str, what: re.Pattern[str]) -> None:
    """Registers hooks, creates streams, sleeps."""
    wrong = [
        f"{_name(p)}: {call}"
        for p, tree in _trees()
        for call in _calls(tree)
        if not call.startswith("self.register_") and what.fullmatch(call.split(".")[-1]) and _name(p) != allowed
    ]
    assert not wrong


def test_only_pace_sleeps() -> None:
    tree = ast.parse((PACKAGE / "transfer" / "queue.py").read_text())
    pace = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Pace")
    everywhere = [c for c in _calls(tree) if c.endswith("sleep")]
    assert everywhere == [c for c in _calls(pace) if c.endswith("sleep")]


def test_only_dist_imports_torch_distributed() -> None:
    wrong = []
    for path, tree in _trees():
        if "dist" in path.relative_to(PACKAGE).parts[:1]:
            continue
        wrong += [f"{_name(path)}: {m}" for m in _imported(list(ast.walk(tree)), path) if m.startswith("torch.distributed")]
        wrong += [
            f"{_name(path)}: {ast.unparse(n)}" for n in ast.walk(tree) if isinstance(n, ast.Attribute) and ast.unparse(n) == "torch.distributed"
        ]
    assert not wrong


def test_asserts_have_no_effects() -> None:
    """They vanish under python -O: none may call what does something."""
    wrong = []
    for path, tree in _trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Assert):
                wrong += [f"{_name(path)}:{node.lineno}: {c}" for c in _calls(node.test) if c.split(".")[-1] not in CALLS_WITHOUT_EFFECTS]
                wrong += [f"{_name(path)}:{node.lineno}: :=" for n in ast.walk(node.test) if isinstance(n, (ast.NamedExpr, ast.Await, ast.Yield))]
    assert not wrong


def test_native_code_knows_neither_torch_nor_cuda() -> None:
    """And Python only in bind/."""
    wrong = []
    for path in NATIVE:
        for line in path.read_text().splitlines():
            if line.startswith("#include"):
                name = line.split()[1].strip('<>"')
                if name.startswith(("torch/", "ATen/", "c10/", "cuda")) or (
                    name.startswith(("pybind11/", "Python.h")) and "bind" not in path.relative_to(ROOT).parts
                ):
                    wrong.append(f"{path.relative_to(ROOT)}: {name}")
    assert not wrong


def test_nothing_is_hung_on_the_users_objects() -> None:
    """No attribute of ours on tensors or modules: where these are handled, setattr is not used."""
    wrong = [f"{_name(p)}: {ast.unparse(n)}" for p, tree in _trees() if not {"train", "cli"} & set(p.parts) for n in ast.walk(tree)
             if isinstance(n, ast.Call) and ast.unparse(n.func) == "setattr" and n.args and ast.unparse(n.args[0]) != "self"]  # fmt: skip
    assert not wrong
