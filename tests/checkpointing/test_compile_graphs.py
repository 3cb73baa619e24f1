"""How large compiled graphs are, and how many: neither grows with tokens, documents or layers.

One process, Dynamo alone (`eager` as its backend: graphs are recorded and run as they are).

Legend: B rows, T tokens, D model.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention

from checkpointing.compile import FEWER_LAUNCHES, Compiler, compile_blocks
from megacpp.blocks.hyper_connections.config import HyperConnectionConfig
from megacpp.config.schema import Config, PrecisionConfig
from megacpp.kernels.backend import Kernels, set_kernels
from megacpp.model.documents import Documents
from megacpp.model.hybrid import HybridLM
from parallel.build import build_model
from parallel.mesh import World
from tests.model.small import small, variants
from tests.synthetic import ragged_batch

pytestmark = pytest.mark.usefixtures("no_graphs_of_others")
ONE = World(0, 1, torch.device("cpu"))
B = 2


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Nodes of every graph, those of autograd functions inside among them."""
    found: list[int] = []
    call = Compiler.__call__

    def counted(self: Compiler, graph: torch.fx.GraphModule, inputs: list[object]) -> object:
        parts = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
        found.append(sum(len(part.graph.nodes) for part in parts))
        return call(self, graph, inputs)

    monkeypatch.setattr(Compiler, "__call__", counted)
    return found


# ---- as many nodes for long rows as for short ones ----------------------------------------------


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
def test_a_graph_of_a_scan_does_not_grow_with_the_row(
    rank: int, packed: bool, sizes: list[int]
) -> None:
    """8, 16 and 17 chunks, the last of them not full."""
    mamba3 = replace(small().mamba3, mimo_rank=rank, conv_kernel=4)
    config = Config(model=small("MF", mamba3=mamba3), precision=PrecisionConfig("fp32"))
    model = build_model(config, ONE, lambda m: compile_blocks(m, "eager", 1.0))
    for tokens in (32, 64, 66):
        docs = Documents.rows(B, tokens)
        if packed:
            docs = Documents.from_ids((torch.arange(tokens) * 3 // tokens).expand(B, tokens))
        x_BTD = torch.randn(B, tokens, config.model.dim, requires_grad=True)
        model.blocks["0"](x_BTD, docs).sum().backward()
    assert sizes[0] == sizes[1] and sizes[2] - sizes[1] < 10


# ---- as many graphs for many batches as for one -------------------------------------------------


def num_graphs() -> int:
    return counters["stats"]["unique_graphs"]


DEEP = {
    "all letters": small("AMEF" * 3),
    "streams": small("AFM" * 3, mhc=HyperConnectionConfig(streams=2)),
    "latents": replace(variants()["mla_low_rank_queries_yarn"], pattern="AF", depth=6),
}


@pytest.mark.parametrize("name", DEEP)
def test_layers_and_documents_make_no_further_graphs(name: str) -> None:
    """Count one graph per kind of layer, and one more for the last layer's budget if it saves all.

    Under autocast, where queries are narrower than the stream; other documents in each batch.
    """
    config = Config(model=DEEP[name], precision=PrecisionConfig("fp32"))
    model = build_model(config, ONE, lambda m: compile_blocks(m, "eager", 0.5))
    found = []
    for step in range(3):
        batch = ragged_batch(range(step * B, (step + 1) * B), 12)
        with torch.autocast("cpu", torch.bfloat16):
            model(batch.ids_BT, batch.labels_BT, batch.docs).loss_sum.backward()
        found.append(num_graphs())
    assert found == [len(set(config.model.pattern)) + 1] * 3


@pytest.mark.parametrize("backend", ["varlen_padded", "flex"])
def test_a_number_of_documents_is_no_reason_for_a_graph(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that are told where documents start: as many numbers as there are documents.

    On the meta device, as on a GPU. There may be 8 graphs of a block; more end the run.
    """
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    with torch.device("meta"):
        model = HybridLM(small("AFA")).to(torch.bfloat16)
    set_kernels(model, Kernels(attention=backend))
    compile_blocks(model, "aot_eager" if backend == "varlen_padded" else "eager", 1.0)
    lengths = set()
    for step in range(10):
        docs = ragged_batch(range(step * B, (step + 1) * B), 12).docs.to("meta")
        lengths.add(len(docs.cu_seqlens))
        x_BTD = torch.randn(B, 12, 16, device="meta", dtype=torch.bfloat16, requires_grad=True)
        y_BTD: Tensor = x_BTD
        for block in model.blocks.values():
            y_BTD = block(y_BTD, docs)
        y_BTD.sum().backward()
        assert num_graphs() == 2, "attention and feed-forward"
    assert len(lengths) > 3


def test_only_graphs_of_a_gpu_combine_kernels() -> None:
    """Inductor takes the settings by these names, and others compile as before."""
    from torch._inductor import config

    if not all(hasattr(config, name) for name in FEWER_LAUNCHES):
        pytest.skip("a version of torch without these settings")
    with FakeTensorMode():
        on_gpu = torch.empty(2, device="cuda")
    asked = Compiler("inductor", 1.0).options([on_gpu])
    assert asked == {"config_patches": FEWER_LAUNCHES}
    with config.patch(FEWER_LAUNCHES):
        assert all(getattr(config, name) for name in FEWER_LAUNCHES)
    assert Compiler("inductor", 1.0).options([torch.empty(2)]) == {}
    assert Compiler("aot_eager", 1.0).options([on_gpu]) == {}
