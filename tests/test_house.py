"""Import rules between packages, and the origin of `parallel`."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench import architecture

ROOT = Path(__file__).parents[1]
ROOMS = ("parallel", "optim", "checkpointing")
COMPOSERS = ("megacpp/cli", "megacpp/lessons")
FILES = sorted(
    path
    for room in ("megacpp", *ROOMS)
    for path in (ROOT / room).rglob("*.py")
    if "__pycache__" not in path.parts
)
# Optional packages: imported inside functions, never at the top of a module.
OPTIONAL = {
    "mamba_ssm", "tilelang", "torchao", "transformer_engine", "triton",
    "pyarrow", "zstandard", "transformers", "matplotlib", "tensorboard", "wandb",
    "lm_eval", "datasets", "fsspec", "huggingface_hub", "s3fs", "gcsfs", "yaml",
}  # fmt: skip
# Modules that training imports where it needs them.
NOT_AT_START = (
    "megacpp.interop",
    "megacpp.memory.planner",
    "megacpp.memory.fixes",
    "megacpp.launch.auto_fit",
    "megacpp.launch.trial",
    "megacpp.run.oom",
)
NO_TORCH = (
    "config/schema.py",
    "config/settings.py",
    "config/model.py",
    "config/policy.py",
    "kernels/selection.py",
    "kernels/host.py",
    "kernels/support.py",
    "kernels/mamba3/support.py",
    "kernels/attention/support.py",
    "kernels/m2rnn/support.py",
    "kernels/gated_delta_rule/support.py",
    "blocks/gated_deltanet/config.py",
    "errors.py",
    "versions.py",
    "config/presets.py",
    "config/checks/every.py",
    "config/checks/model.py",
    "config/checks/mesh.py",
    "config/recompute_flags.py",
    "config/checks/recompute.py",
    "config/checks/fp8.py",
    "model/sizes.py",
    "model/stages.py",
    "model/regions.py",
    "config/batch_schedule.py",
    "memory/forms/accumulation.py",
    "memory/estimate.py",
    "memory/forms/detail.py",
    "memory/device.py",
    "memory/forms/parameters.py",
    "memory/forms/units.py",
    "memory/forms/simulation.py",
    "memory/forms/step.py",
    "memory/forms/parts.py",
    "memory/forms/layers.py",
    "memory/forms/pipeline.py",
    "memory/forms/batch.py",
    "memory/forms/optimizer_step.py",
    "memory/budget.py",
    "memory/planner.py",
    "memory/plan_space.py",
    "memory/replayed.py",
    "speed/hardware.py",
    "speed/operators.py",
    "speed/collectives.py",
    "speed/streams.py",
    "model/stage_actions.py",
    "speed/pipeline.py",
    "speed/step.py",
    "speed/traced.py",
    "speed/ours.py",
    "cli/speed.py",
    "cli/plan_order.py",
    "memory/traffic.py",
    "memory/calibration.py",
    "memory/fixes.py",
    "memory/forms/activations.py",
    "memory/forms/local_shapes.py",
    "blocks/experts/rows.py",
    "memory/forms/traced.py",
    "memory/block_trace.py",
    "memory/trace_cache.py",
    "memory/forms/peak_point.py",
    "memory/forms/muon.py",
    "memory/compose.py",
    "memory/caching.py",
    "memory/allocator.py",
    "memory/timeline.py",
    "memory/snapshot.py",
    "config/saved.py",
    "interop/classes.py",
    "interop/hf_config.py",
    "interop/places.py",
    "interop/table.py",
    "cli/export.py",
    "run/goodput.py",
    "run/sinks.py",
    "report/charts.py",
    "report/compare.py",
    "report/data.py",
    "report/files.py",
    "report/html.py",
    "report/page.py",
    "report/style.py",
    "home.py",
    "outcome.py",
    "state/files.py",
    "state/manifest.py",
    "state/published.py",
    "launch/schema.py",
    "launch/command.py",
    "launch/agent.py",
    "cli/train.py",
    "cli/memory_diff.py",
    "cli/report.py",
    "config/arguments.py",
    "config/environment.py",
    "model/primes.py",
    "cli/main.py",
    "memory/forms/weights.py",
    "blocks/experts/checks.py",
    "blocks/mtp/checks.py",
    "blocks/attention/sparse_checks.py",
    "blocks/engram/checks.py",
    "launch/features.py",
    "model/pattern.py",
    "model/flops.py",
    "blocks/experts/choices.py",
    "blocks/mtp/plan.py",
    "blocks/engram/sizes.py",
    "model/primes.py",
    "blocks/hyper_connections/groups.py",
)


def imported(tree: ast.AST) -> set[str]:
    """Full dotted names of absolute imports anywhere in a module."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return names


def without_types(tree: ast.Module) -> ast.Module:
    """The module without what only annotations import (`if TYPE_CHECKING`)."""

    def types(node: ast.stmt) -> bool:
        test = node.test if isinstance(node, ast.If) else None
        return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"

    return ast.Module([node for node in tree.body if not types(node)], [])


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_inward(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    tops = {name.split(".")[0] for name in imported(ast.parse(path.read_text()))}
    if any(str(path.relative_to(ROOT)).startswith(c) for c in COMPOSERS):
        return
    allowed = set() if room == "megacpp" else {room}
    assert not tops & (set(ROOMS) - allowed), f"{path} reaches sideways"
    assert "train" not in tops


@pytest.mark.parametrize(
    "path",
    [p for room in ("model", "blocks") for p in sorted((ROOT / "megacpp" / room).rglob("*.py"))],
    ids=lambda p: str(p.relative_to(ROOT / "megacpp")),
)
def test_the_model_knows_nothing_of_ranks(path: Path) -> None:
    names = imported(without_types(ast.parse(path.read_text())))
    assert not [n for n in names if n.startswith("torch.distributed")]
    inner = ("config", "errors", "model", "blocks", "kernels", "torch_extras")
    assert not [n for n in names if n.startswith("megacpp.") and n.split(".")[1] not in inner]


@pytest.mark.parametrize(
    "path", sorted((ROOT / "megacpp/interop").glob("*.py")), ids=lambda p: p.name
)
def test_other_formats_know_saved_models_and_no_run(path: Path) -> None:
    rooms = {
        name.split(".")[1]
        for name in imported(without_types(ast.parse(path.read_text())))
        if name.startswith("megacpp.")
    }
    inner = {"config", "errors", "model", "blocks", "data", "state", "report", "terminal"}
    assert rooms <= inner | {"interop"}


@pytest.mark.parametrize(
    "path", sorted((ROOT / "megacpp/speed").glob("*.py")), ids=lambda p: p.name
)
def test_the_time_model_knows_configurations_and_no_run(path: Path) -> None:
    names = imported(without_types(ast.parse(path.read_text())))
    inner = ("config", "errors", "model", "blocks", "memory", "speed")
    assert not [n for n in names if n.startswith("megacpp.") and n.split(".")[1] not in inner]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_optional_packages_are_imported_inside_functions(path: Path) -> None:
    top = ast.Module([n for n in ast.parse(path.read_text()).body], [])
    top.body = [n for n in top.body if isinstance(n, ast.Import | ast.ImportFrom)]
    # A backend's file is named after its package, and itself imported inside functions only.
    own = {path.stem.partition("_")[0]} if "kernels" in path.parts else set()
    # Code of exported folders is text to this package; transformers imports it.
    own |= {"transformers"} if path.parent.name == "code" else set()
    assert not {name.split(".")[0] for name in imported(top)} & (OPTIONAL - own)


def test_help_does_not_import_torch() -> None:
    modules = ", ".join(f"megacpp.{name[:-3].replace('/', '.')}" for name in NO_TORCH)
    code = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_training_imports_torch_and_our_own_files() -> None:
    """Nothing of torch that `import torch` leaves out: Dynamo alone doubles the time to start.

    FSDP2, DTensor, pipelines, DCP, TensorBoard, Triton, compilers: imported by what uses them.
    """
    code = "import torch, sys; a = set(sys.modules); import train; print(*set(sys.modules) - a)"
    loaded = printed(code).split()
    tops = {name.partition(".")[0] for name in loaded}
    # Of features that few runs have: maps of others' names, the planner, reports of a failure.
    assert not [name for name in loaded if name.startswith(NOT_AT_START)]
    ours = {"train", "megacpp", *ROOMS}
    assert ours <= tops
    assert tops - ours - sys.stdlib_module_names <= {"numpy", "tokenizers", "safetensors"}


def test_imports_of_training_are_not_collected() -> None:
    """Collections during the imports, which find nothing, take a sixth of their time."""
    code = "import train, gc; print(gc.isenabled(), gc.get_freeze_count() > 100_000)"
    assert printed(code) == "True True\n"
    code = "import gc; n = []; gc.callbacks.append(lambda *a: n.append(a)); import torch; "
    assert printed(f"{code}n.clear(); import train; print(len(n))") == "0\n"


def printed(code: str) -> str:
    """Return what a fresh Python prints."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout


@pytest.mark.parametrize("room", ROOMS)
def test_generic_names_are_ours(room: str) -> None:
    module = importlib.import_module(room)
    assert module.__file__ is not None and Path(module.__file__).parent == ROOT / room


def test_another_projects_parallel_is_not_taken(tmp_path: Path) -> None:
    """From its folder, which comes first on the path; and once it is imported, by name."""
    (tmp_path / "parallel").mkdir()
    (tmp_path / "parallel/__init__.py").write_text("")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    for first, ends in (("", 0), ("import parallel; ", 1)):
        code = f"{first}import train, parallel.start; assert train.start is parallel.start.start"
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == ends, done.stderr
    assert "import=parallel: " in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("path", sorted((ROOT / "bench").rglob("*.py")), ids=lambda p: p.stem)
def test_a_benchmark_finds_what_it_names(path: Path) -> None:
    """They are run by hand, where a name that has moved is met last."""
    importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


def test_a_file_is_one_sitting() -> None:
    long = {
        str(p.relative_to(ROOT)): n for p in FILES if (n := len(p.read_text().splitlines())) > 420
    }
    assert not long


def test_the_page_of_the_architecture_shows_todays_imports() -> None:
    page = architecture.PAGE.read_text()
    assert page == architecture.drawn(page), "python -m bench.architecture --write"


def test_the_room_of_a_file_reaches_no_composer() -> None:
    reach = architecture.reached(architecture.imports())
    composers = {"train.py", "megacpp/cli"}
    reach.pop("megacpp/lessons")  # composes, as they do
    assert not {room for room, below in reach.items() if below & composers}


def test_every_folder_says_what_it_may_import_and_where_to_start() -> None:
    found = [path for room in ("megacpp", *ROOMS) for path in (ROOT / room).rglob("__init__.py")]
    assert len(found) > 40
    for path in found:
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        assert "\nMay import: " in text, path
        start = text.partition("\nStart reading: ")[2]
        files = re.findall(r"[\w./]+\.(?:py|md)", start)
        assert files, path
        for name in files:
            assert (path.parent / name).exists() or (ROOT / name).exists(), f"{path}: {name}"
