"""Pictures of states and loads: what Mamba-3 remembers, where tokens are routed, owners of Muon."""

from __future__ import annotations

import torch

from bench.pictures.svg import Drawing
from megacpp.blocks.experts.config import MoEConfig
from megacpp.blocks.experts.router import Router
from megacpp.config.schema import Config, MeshConfig, ModelConfig, PrecisionConfig
from megacpp.kernels.mamba3.inputs import HeadWeights, ScanInputs
from megacpp.kernels.mamba3.reference import mamba3_sequential
from megacpp.lessons.mesh_models import models
from megacpp.model.documents import Documents
from megacpp.model.init import initialise
from optim.build import build_optimizer
from optim.ownership import loads
from parallel.build import build_model
from parallel.simulate.fake import fake_world

TOKENS, RESTART = 48, 40


def remembered(dt: dict[int, float], angle: float) -> list[float]:
    """Return how much of token 0 is read at each token; a document starts at the last eight.

    Args:
        dt: step of tokens whose step isn't 0.05.
        angle: turn of the state at each token.
    """
    one, wide = torch.ones(1, TOKENS, 1, 1, 2).double(), torch.full((1, 1, TOKENS), 40.0).double()
    v = torch.zeros(1, TOKENS, 1, 1).double()
    v[:, 0] = 1.0
    steps = torch.tensor([dt.get(t, 0.05) for t in range(TOKENS)]).double().view(1, 1, -1)
    q = one / one.square().sum(-1, keepdim=True)
    angles = torch.full((1, TOKENS, 1, 1), angle).double()
    inputs = ScanInputs(q, one, v, None, -steps, steps, wide, angles)
    plain = HeadWeights(torch.zeros(1, 1, 2).double(), torch.zeros(1, 1, 2).double(),
                        torch.zeros(1).double())  # fmt: skip
    docs = Documents.from_ids(torch.tensor([[0] * RESTART + [1] * (TOKENS - RESTART)]))
    y, _ = mamba3_sequential(inputs, plain, docs, "interleaved")
    return [value / steps[0, 0, 0].item() for value in y.flatten().tolist()]


def what_a_state_remembers() -> Drawing:
    """Draw what is read of the first token later on: fading, after a large step, turning."""
    drawing = Drawing(760, "How much of the first token a Mamba-3 state still holds: it fades, a"
                      " large step drops it, and a turning state changes its sign")  # fmt: skip
    lines = [("fades: exp(A dt) at every token", {}, 0.0),
             ("token 16 has a large step dt: older tokens fade at once", {16: 2.0}, 0.0),
             ("turns: k and q by an angle", {}, 40.0)]  # fmt: skip
    left, wide, high = 60.0, 660.0, 62.0
    for i, (name, dt, angle) in enumerate(lines):
        top = 40 + i * 108.0
        zero = top + high if not angle else top + high / 2 + 10
        drawing.text(left, top - 12, name, "head")
        size = high if not angle else high / 2 + 4
        drawing.path([(left, zero), (left + wide, zero)], "line")
        drawing.text(left - 8, zero + 4, "0", "note", end=True)
        drawing.text(left - 8, zero - size + 8, "1", "note", end=True)
        for t, value in enumerate(remembered(dt, angle)):
            x, bar = left + t * wide / TOKENS, abs(value) * size
            if bar:
                y = zero - bar if value > 0 else zero
                drawing.rect(x, y, wide / TOKENS - 2, bar, int(t > 0))
        at = left + RESTART * wide / TOKENS - 1
        drawing.path([(at, top), (at, top + high + 14)], "line")
    drawing.text(left, 360, "token 0", "note")
    drawing.text(left + wide, 360, "next document: exactly 0", "note", end=True)
    return drawing


def loads_of_experts() -> Drawing:
    """Draw the load of eight experts over the updates of the bias that evens it out."""
    moe = MoEConfig(num_experts=8, top_k=2, hidden_dim=4, bias_update_rate=0.01)
    generator = torch.Generator().manual_seed(1)
    x_TD = torch.randn(256, 8, generator=generator, dtype=torch.float64) + 0.5
    router = Router(ModelConfig(dim=8, moe=moe)).double()
    weight = torch.randn(8, 8, generator=generator, dtype=torch.float64)
    initialise(router, router.init_rules(), seed=0)
    router.weight.data.copy_(weight)
    table = []
    for _ in range(60):
        router(x_TD[None])
        table.append(router.tokens_per_expert.tolist())
        router.update_bias()
    drawing = Drawing(760, "The load of eight experts: uneven as the router begins, even after"
                      " sixty small moves of its bias")  # fmt: skip
    shown = (0, 5, 15, 59)
    most, mean = max(map(max, table)), 256 * moe.top_k / moe.num_experts
    top, high = 58.0, 180.0
    for i, step in enumerate(shown):
        left = 24 + i * 184.0
        drawing.text(left, 26, f"after {step} updates", "head")
        for e, load in enumerate(table[step]):
            bar = load / most * high
            drawing.rect(left + e * 20, top + high - bar, 18, bar, int(load > mean * 1.05))
            drawing.text(left + e * 20 + 5, top + high + 16, f"{e}", "note")
        y = top + high * (1 - mean / most)
        drawing.path([(left - 4, y), (left + 162, y)], "line")
    drawing.text(24, top + high + 38, "expert", "note")
    drawing.text(84, top + high + 38, f"line: an even share of {256 * moe.top_k} rows, {mean:.0f}; "
                 "above it the bias sinks, below it rises", "note")  # fmt: skip
    return drawing


def owners_of_matrices() -> Drawing:
    """Draw which matrices each of four ranks orthogonalises, by the operations that they take."""
    mesh = MeshConfig(dp_replicate=2, dp_shard=2)
    config = Config(model=models()["plain"], mesh=mesh, precision=PrecisionConfig("fp32"))
    with fake_world(config, 4, 0) as world:
        model = build_model(config, world)
        optimizer = build_optimizer(model, config, world.holders)
        [exchange] = optimizer.plan().exchanges
        names = [k[:-9].split("mixer.")[1].removesuffix(".weight")
                 for k in optimizer.state_tensors() if k.endswith(".momentum")]  # fmt: skip
    left, top, wide, row = 74.0, 50.0, 660.0, 46.0
    load = loads(exchange.jobs, 4)
    drawing = Drawing(760, "Which matrices each rank orthogonalises, two replicas of two shards:"
                      " all four have about the same work")  # fmt: skip
    drawing.legend(left, 12, [(0, "assembled on its one owner"), (3, "whole on a rank: it stays")])
    for rank in range(4):
        x, y = left, top + rank * row
        drawing.text(14, y + 24, f"rank {rank}", "note")
        jobs = [j for j in exchange.jobs if rank in ((j.owner,) if j.moves else j.holders)]
        for job in sorted(jobs, key=lambda job: (job.moves, -job.cost)):
            size = job.cost / max(load) * wide
            name = names[job.parameter].removeprefix("experts.")
            words = name if 6.4 * len(name) < size else ""
            drawing.rect(x, y, max(1.0, size - 2), row - 8, 0 if job.moves else 3, words)
            x += size
    drawing.text(left, top + 4 * row + 14, "Width: operations of Newton-Schulz.", "note")
    return drawing
