"""Initial values: a pure function of (seed, name, global index), with the promised distribution.

Statistical bounds are five standard errors of the estimate, or a Kolmogorov-Smirnov distance of
2 / sqrt(n) (a true sample exceeds it once in 1500); seeds are fixed, so a test passes or fails
for good.
"""

from __future__ import annotations

import dataclasses
import math
from itertools import product

import pytest
import torch
import torch._dynamo  # FSDP2 imports it: once here instead of once in every forked rank
from torch import Tensor, nn

from megacpp.config.presets import PRESETS
from megacpp.config.schema import Config, MeshConfig, ModelConfig, PrecisionConfig, RunConfig
from megacpp.model.count import meta_model
from megacpp.model.init import (
    Constant,
    Identity,
    LogUniform,
    Normal,
    Rule,
    Slice,
    TimeStepBias,
    Uniform,
    _fill,
    initialise,
    tensor_key,
    uniform,
    whole,
)
from parallel.build import build_model
from parallel.fsdp import shard_slice
from parallel.mesh import World
from parallel.start import join
from tests.model.small import shrunk, small, variants
from tests.ranks import run_ranks

CPU = torch.device("cpu")
N = 200_000
RULES: dict[str, Rule] = {
    "constant": Constant(0.7),
    "uniform": Uniform(-2.0, 3.0),
    "normal": Normal(0.02),
    "log_uniform": LogUniform(1.0, 16.0),
    "time_step": TimeStepBias(1e-3, 0.1, 1e-4),
    "identity": Identity(),
}
MODELS: dict[str, ModelConfig] = {**variants(), **{f"{n}_shrunk": shrunk(n) for n in PRESETS}}


def draw(rule: Rule, n: int = N, seed: int = 0, name: str = "x") -> Tensor:
    return rule(torch.arange(n), (n,), tensor_key(seed, name))


# ---- the generator ----------------------------------------------------------------------------


def splitmix64(state: int) -> int:
    """The published algorithm, on Python integers."""
    full = (1 << 64) - 1
    z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & full
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & full
    return z ^ (z >> 31)


def test_uniform_is_splitmix64() -> None:
    """Against its published first outputs for the seed 1234567, and against Python integers."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    expected = [((z >> 12) + 0.5) * 2.0**-52 for z in published]
    assert uniform(torch.tensor([1, 2, 3]), 1234567).tolist() == expected
    key = tensor_key(42, "embed.weight")
    index = torch.tensor([0, 1, 5, 2**31, 2**40 + 3])
    states = [(i * 0x9E3779B97F4A7C15 + key) % (1 << 64) for i in index.tolist()]
    assert uniform(index, key).tolist() == [
        ((splitmix64(s) >> 12) + 0.5) * 2.0**-52 for s in states
    ]


def state_that_gives(output: int) -> int:
    """splitmix64 backwards: each of its steps is a bijection."""
    full = (1 << 64) - 1

    def unshift(z: int, bits: int) -> int:
        x = z
        for _ in range(64 // bits):
            x = z ^ (x >> bits)
        return x

    z = unshift(output, 31)
    z = unshift(z * pow(0x94D049BB133111EB, -1, 1 << 64) & full, 27)
    return unshift(z * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & full, 30)


@pytest.mark.parametrize("output", [0, 1, (1 << 64) - 1, 1 << 63, (1 << 63) - 1])
def test_no_draw_is_0_or_1_so_no_normal_is_infinite(output: int) -> None:
    state = state_that_gives(output)
    assert splitmix64(state) == output
    key = state - (1 << 64) if state >> 63 else state  # as a signed integer
    zero = torch.zeros(1, dtype=torch.int64)
    assert 0 < uniform(zero, key).item() < 1
    assert abs(Normal(1.0)(zero, (1,), key).item()) < 8.5
    assert Uniform(-2.0, 3.0)(zero, (1,), key).item() < 3.0


def test_keys_differ_by_seed_and_name() -> None:
    keys = {tensor_key(s, n) for s, n in product(range(50), ("a", "b", "blocks.1.x", "locks.1.x"))}
    assert len(keys) == 200 and all(-(1 << 63) <= k < 1 << 63 for k in keys)
    assert tensor_key(1, "2/x") != tensor_key(1, "/2/x") != tensor_key(12, "x")


# ---- any slice is a slice -----------------------------------------------------------------------


def filled(rule: Rule, shape: tuple[int, ...], start: tuple[int, ...], whole_shape, most) -> Tensor:
    out = torch.full(shape, torch.nan, dtype=torch.float32)
    _fill(Slice(out, whole_shape, start), rule, tensor_key(3, "w"), most)
    return out


SHAPES = [(), (1,), (13,), (7, 5), (3, 4, 4), (2, 3, 4, 5)]


@pytest.mark.parametrize(
    ("name", "shape"),
    [(n, s) for n in RULES for s in SHAPES if n != "identity" or len(s) > 1],
)
def test_any_box_of_any_pass_size_is_that_box_of_the_whole(
    name: str, shape: tuple[int, ...]
) -> None:
    rule, generator = RULES[name], torch.Generator().manual_seed(0)
    everything = filled(rule, shape, (0,) * len(shape), shape, 1 << 22)
    assert everything.isfinite().all()
    for most in (1, 3, 17, 1 << 22):
        again = filled(rule, shape, (0,) * len(shape), shape, most)
        assert torch.equal(again, everything)
        for _ in range(5):
            cuts = [torch.randint(n + 1, (2,), generator=generator).sort().values for n in shape]
            start, stop = (tuple(int(c[i]) for c in cuts) for i in (0, 1))
            size = tuple(b - a for a, b in zip(start, stop, strict=True))
            box = everything[tuple(slice(a, b) for a, b in zip(start, stop, strict=True))]
            assert torch.equal(filled(rule, size, start, shape, most), box)


def test_every_dtype_rounds_the_same_fp64_value() -> None:
    wide = torch.empty(999, dtype=torch.float64)
    _fill(whole(wide), Normal(0.02), 7)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        narrow = torch.empty(999, dtype=dtype)
        _fill(whole(narrow), Normal(0.02), 7)
        assert torch.equal(narrow, wide.to(dtype))


def test_layers_do_not_depend_on_each_other() -> None:
    """A deeper or cut model has the same weights in the layers that both have."""
    models = [build_model(Config(model=small(p)), World(0, 1, CPU)) for p in ("AME", "AMERF")]
    few, many = (dict(m.named_parameters()) for m in models)
    same = [n for n in few if n in many and torch.equal(few[n], many[n])]
    writers = [n for n in few if n.endswith(("wo.weight", "w2.weight", "w2", "out_proj.weight"))]
    assert sorted(few) == sorted(same + writers), "only std / sqrt(2 depth) depends on depth"


# ---- distributions ------------------------------------------------------------------------------


def ks_distance(cdf_values: Tensor) -> float:
    """Largest distance between the empirical distribution of `cdf_values` and the uniform one."""
    u, n = cdf_values.sort().values, len(cdf_values)
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    return torch.cat([u - steps[:-1], u - steps[1:]]).abs().max().item()


def normal_cdf(z: Tensor) -> Tensor:
    return 0.5 * torch.erfc(-z / math.sqrt(2.0))


CDFS = {
    "uniform": lambda x: (x + 2.0) / 5.0,
    "normal": lambda x: normal_cdf(x / 0.02),
    "log_uniform": lambda x: (x.exp() - 1.0) / 15.0,
    "time_step": lambda x: (nn.functional.softplus(x).log() - math.log(1e-3)) / math.log(100.0),
}


@pytest.mark.parametrize("name", CDFS)
@pytest.mark.parametrize("seed", [0, 1])
def test_kolmogorov_smirnov(name: str, seed: int) -> None:
    u = CDFS[name](draw(RULES[name], seed=seed))
    assert ks_distance(u) < 2 / math.sqrt(N)
    assert ks_distance((u + 2 / math.sqrt(N)).clamp(max=1)) > 2 / math.sqrt(N), "a shift shows"


def test_moments() -> None:
    """Five standard errors: of a mean sd/sqrt(n), of a sd about sd/sqrt(2n) (normal)."""
    x = draw(Normal(0.02))
    assert abs(x.mean().item()) < 5 * 0.02 / math.sqrt(N)
    assert abs(x.std().item() / 0.02 - 1) < 5 / math.sqrt(2 * N)
    assert abs((x / 0.02).pow(4).mean().item() - 3) < 5 * math.sqrt(96 / N)
    u = draw(Uniform(-2.0, 3.0))
    assert u.min() >= -2 and u.max() < 3
    assert abs(u.mean().item() - 0.5) < 5 * 5 / math.sqrt(12 * N)
    assert abs(u.var().item() - 25 / 12) < 5 * 25 * math.sqrt(1 / 180 / N)


@pytest.mark.parametrize("lag", [1, 2, 64, 192, 1024])
def test_neighbours_are_independent(lag: int) -> None:
    """Also neighbours in a column (lag = width): correlation of n pairs has error 1/sqrt(n)."""
    z = draw(Normal(1.0))
    assert abs((z[lag:] * z[:-lag]).mean().item()) < 5 / math.sqrt(N - lag)
    assert abs((z[lag:] ** 2 * z[:-lag] ** 2).mean().item() - 1) < 5 * math.sqrt(8 / (N - lag))


@pytest.mark.parametrize(("seed", "name"), [(1, "x"), (0, "y"), (0, "x.")])
def test_other_names_and_seeds_are_independent(seed: int, name: str) -> None:
    a, b = draw(Normal(1.0)), draw(Normal(1.0), seed=seed, name=name)
    assert abs((a * b).mean().item()) < 5 / math.sqrt(N)


def test_time_steps_respect_their_floor() -> None:
    floored = nn.functional.softplus(draw(TimeStepBias(1e-4, 0.1, 1e-2)))
    at_floor = (floored - 1e-2).abs() < 1e-12
    assert floored.min().item() >= 1e-2 * (1 - 1e-12)
    share = 2 / 3  # of log(0.1 / 1e-4), below 1e-2
    assert abs(at_floor.double().mean().item() - share) < 5 * math.sqrt(share * (1 - share) / N)


def test_identity_and_constant() -> None:
    out = filled(Identity(), (3, 4, 4), (0, 0, 0), (3, 4, 4), 1 << 22)
    assert torch.equal(out, torch.eye(4).expand(3, 4, 4))
    assert filled(Constant(0.5), (2, 2), (0, 0), (2, 2), 1).tolist() == [[0.5, 0.5], [0.5, 0.5]]


# ---- whole models -------------------------------------------------------------------------------


def poison(model: nn.Module) -> None:
    """NaN, or the smallest integer, in every parameter and buffer."""
    with torch.no_grad():
        for t in (*model.parameters(), *model.buffers()):
            t.fill_(torch.nan if t.is_floating_point() else torch.iinfo(t.dtype).min)


def poisoned(model: nn.Module) -> list[str]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return [
        n
        for n, t in tensors.items()
        if not (t.isfinite().all() if t.is_floating_point() else (t >= 0).all())
    ]


@pytest.mark.parametrize("name", MODELS)
def test_no_poison_survives(name: str) -> None:
    model = meta_model(MODELS[name]).to_empty(device="cpu")
    poison(model)
    everything = {n for n, _ in (*model.named_parameters(), *model.named_buffers())}
    assert set(poisoned(model)) == everything
    initialise(model, model.init_rules(), seed=0)
    assert not poisoned(model)


def test_a_tensor_without_a_rule_and_a_rule_without_a_tensor_fail() -> None:
    model = meta_model(small()).to_empty(device="cpu")
    rules = model.init_rules()
    for name in ("embed.weight", "blocks.1.mixer.dt_bias", "blocks.2.mixer.router.expert_bias"):
        with pytest.raises(AssertionError, match=name):
            initialise(model, {k: r for k, r in rules.items() if k != name}, 0)
    with pytest.raises(AssertionError, match=r"no tensor for \['blocks.9.x'\]"):
        initialise(model, {**rules, "blocks.9.x": Constant(0.0)}, 0)
    model.norm.register_buffer("late", torch.zeros(1), persistent=False)
    with pytest.raises(AssertionError, match=r"norm\.late"):
        initialise(model, rules, 0)


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_a_model_has_the_values_of_its_seed(seed: int) -> None:
    config = Config(model=small(), run=RunConfig(seed=seed))
    model = build_model(config, World(0, 1, CPU))
    other = meta_model(config.model).to_empty(device=CPU)
    initialise(other, other.init_rules(), seed)
    assert all(a.equal(b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_weights_follow_their_rules() -> None:
    """What a rule promises arrives under the right name: scales of matrices, ones, identities."""
    config = dataclasses.replace(small(), dim=64, depth=10, init_std=0.05)
    model = build_model(Config(model=config), World(0, 1, CPU))
    p = dict(model.named_parameters())
    for name, std in {
        "embed.weight": 0.05,
        "head.weight": 0.05,
        "blocks.0.mixer.wq.weight": 0.05,
        "blocks.0.mixer.wo.weight": 0.05 / math.sqrt(20),
        "blocks.1.mixer.in_x.weight": 0.05,
        "blocks.1.mixer.in_B.weight": 0.05,
        "blocks.3.mixer.in_gate.weight": 0.05,
        "blocks.1.mixer.out_proj.weight": 0.05 / math.sqrt(20),
        "blocks.2.mixer.experts.w1": 0.05,
        "blocks.2.mixer.experts.w2": 0.05 / math.sqrt(20),
        "blocks.9.mixer.w2.weight": 0.05 / math.sqrt(20),
    }.items():
        assert abs(p[name].std().item() / std - 1) < 5 / math.sqrt(2 * p[name].numel()), name
        assert abs(p[name].mean().item()) < 5 * std / math.sqrt(p[name].numel()), name
    assert all((t == 1).all() for n, t in p.items() if n.endswith("norm.weight"))
    assert torch.equal(p["blocks.3.mixer.state_weight"][0], torch.eye(4))
    assert not torch.equal(p["blocks.0.mixer.wq.weight"], p["blocks.5.mixer.wq.weight"])


def local_slices(rank: int, world: int, config: Config, mesh: MeshConfig) -> dict[str, Slice]:
    """What a rank holds of each parameter and buffer."""
    model = build_model(config, join(mesh, CPU))
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: shard_slice(t.detach()) for name, t in tensors.items()}


@pytest.mark.parametrize(
    ("name", "mesh", "world"),
    [
        ("plain", MeshConfig(dp_shard=2), 2),
        ("tied", MeshConfig(dp_shard=3), 3),
        ("plain", MeshConfig(dp_replicate=3, dp_shard=1), 3),
        ("mamba_mimo_norm_conv", MeshConfig(dp_replicate=2, dp_shard=2), 4),
    ],
    ids=["2 shards", "3 shards", "3 replicas", "2x2"],
)
def test_shards_are_the_slices_of_the_one_process_model(
    name: str, mesh: MeshConfig, world: int
) -> None:
    """Bit for bit, whatever the mesh; with 3 shards nothing divides evenly, some are empty."""
    config = Config(model=variants()[name], precision=PrecisionConfig("fp64"))
    model = build_model(config, World(0, 1, CPU))
    expected = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    empty = 0
    held = dict.fromkeys(expected, 0)
    for slices in run_ranks(local_slices, world, config, mesh):
        assert slices.keys() == expected.keys()
        for key, part in slices.items():
            box = tuple(slice(a, a + n) for a, n in zip(part.offset, part.local.shape, strict=True))
            assert part.shape == tuple(expected[key].shape)
            assert torch.equal(part.local, expected[key].detach()[box]), key
            held[key] += part.local.numel()
            empty += part.local.numel() == 0
    parameters = {n for n, _ in model.named_parameters()}
    copies = mesh.dp_replicate if mesh.dp_shard > 1 else 1
    for key, t in expected.items():
        assert held[key] == t.numel() * (copies if key in parameters else world), key
    assert empty or world == 2
