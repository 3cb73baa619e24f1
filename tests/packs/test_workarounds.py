"""Upstream defects that our code works around: each is still there in the torch that is installed.

A test here reproduces a defect by itself. When it fails, the workaround that its row names can go,
with the row. All of this was seen in releases `FIRST_SEEN` to `LAST_SEEN`: a newer torch fails at
once, so that somebody runs the rest and looks at what was deprecated; an older one is skipped.

Not here, because their tests need more of our code: shards that are uneven twice
(optim/shard_layout.py, megacpp/state/catalogue.py; tests/optim/test_ownership.py), the bytes of a
mesh in a compiled graph (checkpointing/compile.py; tests/checkpointing/test_compile_meshes.py),
rows of a CPU product that round by place (megacpp/kernels/experts/grouped_mm.py;
tests/model/test_moe.py).
"""

from __future__ import annotations

import functools
import importlib
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # FSDP2 imports it: once here instead of once in every forked rank
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.tensor.placement_types import _StridedShard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]
FIRST_SEEN, LAST_SEEN = (2, 13), (2, 15)
INSTALLED = tuple(int(n) for n in torch.__version__.split("+")[0].split(".")[:2])
pytestmark = pytest.mark.skipif(INSTALLED < FIRST_SEEN, reason=f"torch {INSTALLED}: seen in 2.13")


# ---- FSDP2 --------------------------------------------------------------------------------------


class Linear(nn.Module):
    """Two parameters, of which a forward notes the dtypes that it reads."""

    def __init__(self, view: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.bias = nn.Parameter(torch.ones(4))
        self.view, self.read = view, set[torch.dtype]()

    def forward(self, x: Tensor) -> Tensor:
        self.read = {self.weight.dtype, self.bias.dtype}
        y = x @ self.weight.to(x.dtype) + self.bias.to(x.dtype)
        return y.view(-1, 2) if self.view else y


@functools.cache
def fsdp() -> dict[str, Any]:
    """What one rank of FSDP2 shows of several defects; a process group is made once for all."""
    return run_ranks(_fsdp, 1)[0]


def _fsdp(rank: int, world: int) -> dict[str, Any]:
    mesh, x = init_device_mesh("cpu", (world,)), torch.ones(2, 4)
    bf16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    one = Linear()
    fully_shard(one, mesh=mesh, mp_policy=bf16)
    one(x)
    mixed = Linear()
    mixed.weight.data = mixed.weight.data.bfloat16()
    fully_shard(mixed, mesh=mesh, mp_policy=bf16)
    try:
        refused = str(mixed(x))
    except AssertionError as error:
        refused = str(error)
    view = Linear(view=True)
    fully_shard(view, mesh=mesh)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        view(x)
    calls: list[int] = []

    class Counted(DefaultReduceScatter):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return super().__call__(*args, **kwargs)

    reduced = Linear()
    fully_shard(reduced, mesh=mesh)
    reduced.set_custom_reduce_scatter(Counted())  # type: ignore[operator]
    reduced(x).sum().backward()
    texts = [str(w.message) for w in heard]
    return {"read": one.read, "refused": refused, "heard": texts, "calls": len(calls)}


def one_dtype_per_unit() -> bool:
    """bf16 for one parameter is bf16 for all of its unit, and stored dtypes mustn't differ."""
    uniform = "uniform original parameter dtype" in fsdp()["refused"]
    return fsdp()["read"] == {torch.bfloat16} and uniform


def a_view_is_warned_of() -> bool:
    """A unit that returns a view is warned of, whether or not anybody writes to it."""
    return any("returned a view tensor" in text for text in fsdp()["heard"])


def one_shard_reduces_nothing() -> bool:
    """A reduction of one's own isn't called where a mesh has one shard."""
    return fsdp()["calls"] == 0


def strided_shards_are_no_shards() -> bool:
    """The placement that FSDP2 gives a tensor that tp has cut isn't a shard when asked."""
    return not _StridedShard(0, split_factor=2).is_shard()


# ---- autograd and pipelines ---------------------------------------------------------------------


def zero_bubble_recomputes_twice() -> bool:
    """A recomputed block runs again in both halves of a backward: more than forward and once."""
    calls: list[int] = []
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    block = nn.Sequential(first, nn.Tanh(), second)

    def counted(x: Tensor) -> Tensor:
        calls.append(1)
        return block(x)

    x = torch.ones(2, 4, requires_grad=True)
    y = checkpoint(counted, x, use_reentrant=False)
    assert isinstance(y, Tensor)
    _, groups = stage_backward_input([y], [torch.ones_like(y)], [x], block.parameters())
    stage_backward_weight(block.parameters(), groups)
    assert first.weight.grad is not None
    return len(calls) > 2


def sends_live_until_the_end() -> bool:
    """Keep all that a rank has sent alive behind the last action of its schedule."""

    def alive(rank: int, _world: int) -> int:
        x, t = torch.ones(2, 2, requires_grad=True), torch.zeros(4, 2)
        sent: list[StorageWeakRef] = []

        class Watched(PipelineStage):
            def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
                ops = super().get_fwd_send_ops(fwd_chunk_id)
                sent.extend(StorageWeakRef(op.tensor.untyped_storage()) for op in ops)
                return ops

            def perform_reduce_grad(self, grad_scale_factor: int) -> None:
                found[0] = sum(not storage.expired() for storage in sent)

        found, cpu = [0], torch.device("cpu")
        stages = [
            Watched(nn.Linear(2, 2), n, 4, cpu, input_args=x, output_args=x)
            for n in (rank, rank + 2)
        ]
        schedule = ScheduleInterleaved1F1B(stages, 2, lambda y, t: (y - t).sum())  # type: ignore[arg-type]
        schedule.step(*([t] if rank == 0 else []), target=t)
        return found[0]

    return min(run_ranks(alive, 2)) > 1


def needs_input_grad_is_of_the_forward() -> bool:
    """A backward for one input is told that both need gradients."""
    seen: list[tuple[bool, ...]] = []

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
            ctx.save_for_backward(a, b)
            return a * b

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
            seen.append(ctx.needs_input_grad)
            a, b = ctx.saved_tensors
            return grads[0] * b, grads[0] * a

    a, b = (torch.ones(2, requires_grad=True) for _ in range(2))
    out = Product.apply(a * 1, b * 1)
    assert isinstance(out, Tensor)
    torch.autograd.grad(out.sum(), a)
    return seen == [(True, True)]


# ---- modules and optimizers ---------------------------------------------------------------------


def leaving_meta_unties() -> bool:
    """One parameter of two modules becomes two when the model leaves the meta device."""
    pair = nn.ModuleList(nn.Linear(2, 2, bias=False, device="meta") for _ in range(2))
    pair[1].weight = pair[0].weight
    pair.to_empty(device="cpu")
    return pair[0].weight is not pair[1].weight


def an_embedding_on_meta_imports_dynamo() -> bool:
    """nn.Embedding's own init imports it where nothing is filled; a given weight does not."""
    code = (
        "import sys, torch\n"
        "for given in ({'_weight': torch.empty(4, 2, device='meta')}, {}):\n"
        "    with torch.device('meta'): torch.nn.Embedding(4, 2, **given)\n"
        "    print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split() == ["False", "True"]


def fused_adamw_wants_one_dtype() -> bool:
    """Narrow weights with wide moments, or the other way round, are refused."""
    rest = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
    for weights, moments in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        weight, grad = (torch.ones(4, dtype=weights) for _ in range(2))
        first, second = (torch.zeros(4, dtype=moments) for _ in range(2))
        try:
            torch._fused_adamw_(
                [weight], [grad], [first], [second], [], [torch.tensor(1.0)],
                amsgrad=False, maximize=False, **rest,
            )  # fmt: skip
        except RuntimeError:
            continue
        return False
    return True


def loading_casts_moments() -> bool:
    """`load_state_dict` puts fp32 moments of a bf16 parameter into bf16."""
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    saved, loaded = torch.optim.Adam([weight]), torch.optim.Adam([weight])
    saved.state[weight] = {"exp_avg": torch.full((2,), 1.001), "step": torch.tensor(1.0)}
    loaded.load_state_dict(saved.state_dict())
    return loaded.state[weight]["exp_avg"].dtype == torch.bfloat16


def packed_moments_change_when_packed_again() -> bool:
    """torchao: 8-bit values that were unpacked aren't found again by packing them."""
    subclass = pytest.importorskip("torchao.optim.subclass_8bit")
    packed = subclass.OptimState8bit.zeros((256,), True, 256)
    packed.copy_(torch.linspace(-1, 0.5, 256))  # the table ends at -0.993: so does what is unpacked
    values = packed.dequantize().clone()
    packed.copy_(values)
    return not torch.equal(values, packed.dequantize())


# ---- compiler and checkpoints -------------------------------------------------------------------


def graphs_are_counted_by_code() -> bool:
    """Two compilations of one function share the number of graphs that they may have."""

    def function(x: Tensor) -> Tensor:
        return x + 1

    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    # Without `fullgraph`: a compilation that raises leaves Dynamo's hook on frames of this process.
    compiled = [torch.compile(function, backend=count, dynamic=False) for _ in range(2)]
    with torch._dynamo.config.patch(recompile_limit=2):  # type: ignore[attr-defined]
        for size, one in enumerate((compiled[0], compiled[0], compiled[1]), 1):
            one(torch.ones(size))
    torch._dynamo.reset()
    return len(graphs) == 2


def dynamo_stays_after_an_error() -> bool:
    """An argument lives until the call returns, whatever is deleted, once a compilation failed."""
    code = (
        "import torch, weakref\n"
        "def gone(x):\n    seen = weakref.ref(x)\n    del x\n    return seen() is None\n"
        "def fails(graph, inputs):\n    raise ValueError\n"
        "print(gone(torch.ones(2)))\n"
        "try: torch.compile(torch.sin, backend=fails)(torch.ones(2))\n"
        "except Exception: print(gone(torch.ones(2)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split() == ["True", "False"]


def dcp_warns_of_what_it_is_told() -> bool:
    """`no_dist=True` and still a warning that there is no process group."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        dcp.save({"a": torch.ones(2)}, checkpoint_id=folder, no_dist=True)
    return any("torch.distributed is disabled" in str(w.message) for w in heard)


# ---- the list -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Workaround:
    """`file` works around `still_there`; `thread` would end it, and `file` says so."""

    file: str
    thread: str  # repository#number, or that there is none
    still_there: Callable[[], bool]


NONE = "no thread known"
WORKAROUNDS = [
    Workaround("parallel/fsdp.py", "pytorch#156784", one_dtype_per_unit),
    Workaround("megacpp/blocks/mtp/module.py", "pytorch#181850", a_view_is_warned_of),
    Workaround("megacpp/kernels/experts/grouped_mm.py", "pytorch#181850", a_view_is_warned_of),
    Workaround("parallel/watched_units.py", NONE, one_shard_reduces_nothing),
    Workaround("optim/clip.py", NONE, strided_shards_are_no_shards),
    Workaround("parallel/pipeline.py", "pytorch#136766", zero_bubble_recomputes_twice),
    Workaround("parallel/sends.py", "pytorch#194120", sends_live_until_the_end),
    Workaround("megacpp/torch_extras.py", "pytorch#56500", needs_input_grad_is_of_the_forward),
    Workaround("megacpp/model/hybrid.py", "pytorch/torchtitan#2252", leaving_meta_unties),
    Workaround("megacpp/model/hybrid.py", NONE, an_embedding_on_meta_imports_dynamo),
    Workaround("optim/adamw.py", "pytorch#147653", fused_adamw_wants_one_dtype),
    Workaround("optim/saved_state.py", "pytorch#43706", loading_casts_moments),
    Workaround("optim/low_bit.py", NONE, packed_moments_change_when_packed_again),
    Workaround("checkpointing/compile.py", "pytorch#177355", graphs_are_counted_by_code),
    Workaround("checkpointing/compile.py", NONE, dynamo_stays_after_an_error),
    Workaround("megacpp/state/checkpoint.py", NONE, dcp_warns_of_what_it_is_told),
]
# Tested elsewhere (see above); the file names its thread all the same.
ELSEWHERE = {
    "optim/shard_layout.py": "pytorch#161368",
    "megacpp/state/catalogue.py": "pytorch#161368",
    "checkpointing/compile.py": "pytorch#186008",
}
# Older releases that are supported need these; the one named here, no longer.
FOR_OLDER = [
    ("checkpointing/compile.py", (2, 13), "isolate_recompiles=True"),
    ("checkpointing/compile.py", (2, 12), "pytorch#180642"),
    ("megacpp/model/head.py", (2, 13), "as\n# torch 2.13 does by itself"),
    ("checkpointing/tracing/watch.py", (2, 12), "torch before 2.12"),
    ("parallel/simulate/fake.py", (2, 13), "pytorch#184945"),
    ("tests/memory/test_activations.py", (2, 13), "pytorch#185539"),
    ("parallel/pipeline.py", (2, 13), "pytorch#166577"),
    ("parallel/sends.py", (2, 12), "pytorch#160210"),
]
# Names without a promise that our code imports or calls, and who does.
PRIVATE = {
    "torch._C:_will_engine_execute_node": "megacpp/torch_extras.py",
    "torch._C:_current_graph_task_id": "megacpp/model/recompute.py",
    "torch._C:_accelerator_setAllocatorSettings": "megacpp/launch/gate.py",
    "torch.distributed.fsdp._fully_shard._fsdp_collectives:DefaultReduceScatter": (
        "parallel/step_sums.py"
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup": (
        "checkpointing/tracing/recorder.py"
    ),
    "torch.distributed.tensor._sharding_prop:ShardingPropagator": (
        "checkpointing/tracing/recorder.py"
    ),
    "torch.distributed.tensor._utils:compute_local_shape_and_global_offset": "parallel/fsdp.py",
    "torch.distributed.tensor.debug:_clear_sharding_prop_cache": "parallel/simulate/fake.py",
    "torch.distributed.pipelining.stage:InferenceMode": "parallel/pipeline.py",
    "torch._functorch.config:unsafe_treat_script_objects_as_zero_size": "checkpointing/compile.py",
    "torch._functorch.config:donated_buffer": "checkpointing/compile.py",
    "torch.utils._python_dispatch:_disable_current_modes": "optim/low_bit.py",
}


def test_this_torch_was_looked_at() -> None:
    assert INSTALLED <= LAST_SEEN, (
        f"torch {torch.__version__}: run this file, take out the workarounds whose tests fail, "
        "and set LAST_SEEN"
    )


@pytest.mark.parametrize("row", WORKAROUNDS, ids=lambda r: f"{r.file}-{r.still_there.__name__}")
def test_still_needed(row: Workaround) -> None:
    assert row.still_there(), (
        f"torch {torch.__version__} no longer has it ({row.still_there.__doc__}): "
        f"remove the workaround in {row.file} ({row.thread})"
    )


@pytest.mark.parametrize("file", sorted({row.file for row in WORKAROUNDS} | ELSEWHERE.keys()))
def test_the_code_names_the_thread(file: str) -> None:
    text = " ".join((ROOT / file).read_text().split())
    threads = {row.thread for row in WORKAROUNDS if row.file == file}
    for thread in threads | ({ELSEWHERE[file]} if file in ELSEWHERE else set()):
        assert thread in text, f"{file} doesn't say {thread!r}"


@pytest.mark.parametrize(("file", "release", "words"), FOR_OLDER)
def test_still_supports_a_torch_that_needs_it(
    file: str, release: tuple[int, int], words: str
) -> None:
    found = re.search(r'"torch>=(\d+)\.(\d+)', (ROOT / "pyproject.toml").read_text())
    assert found is not None
    oldest = int(found[1]), int(found[2])
    assert words in (ROOT / file).read_text()
    assert oldest < release, f"torch {oldest} is the oldest: remove the workaround in {file}"


def test_newer_torch_does_without() -> None:
    """What `FOR_OLDER` says of torch 2.13, seen."""
    from torch.distributed.fsdp._common_utils import collect_grad_tensors  # new with it

    @dataclass
    class Output:
        y: Tensor

    assert len(collect_grad_tensors(Output(torch.ones(1, requires_grad=True)))) == 1

    def function(x: Tensor) -> Tensor:
        return x + 1

    apart = {"fullgraph": True, "dynamic": False, "isolate_recompiles": True}
    first, second = (torch.compile(function, backend="eager", **apart) for _ in range(2))
    with torch._dynamo.config.patch(recompile_limit=2):  # type: ignore[attr-defined]
        for size, compiled in enumerate((first, first, second, second), 1):
            assert compiled(torch.ones(size)).sum() == 2 * size
    torch._dynamo.reset()


@pytest.mark.parametrize("name", PRIVATE, ids=lambda n: n.split(":")[1])
def test_private_names_are_there_and_used(name: str) -> None:
    """A name that is gone is found here before it is missed in a run."""
    module, attribute = name.split(":")
    assert hasattr(importlib.import_module(module), attribute), f"{PRIVATE[name]} uses {name}"
    assert attribute in (ROOT / PRIVATE[name]).read_text()
