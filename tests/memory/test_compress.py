"""What compression saves, against the closed form: saved tensors of real blocks, by storage."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from checkpointing.compress import compress_linears
from megacpp.cli.trace import trace_step
from megacpp.config.arguments import parse_run
from megacpp.config.presets import PER_BLOCK
from megacpp.config.schema import KEEP, CheckpointingPolicy, Config, MeshConfig, ModelConfig
from megacpp.memory.forms.step import step_bytes
from megacpp.model.hybrid import HybridLM
from megacpp.model.init import initialise
from megacpp.model.sizes import projected_width
from optim.build import build_optimizer
from parallel.simulate.fake import as_trained
from tests.memory.test_activations import agree
from tests.memory.test_activations import config_of as small_config
from tests.memory.working_cases import WIDE
from tests.model.small import variants
from tests.synthetic import ragged_batch


@dataclass(frozen=True)
class CompressedInput:
    """Input tensor and the layers that read it.

    Attributes:
        width: D.
        outputs: O of each layer, as this rank has it.
        ratio: Z / D.
    """

    width: int
    outputs: tuple[int, ...]
    ratio: float

    @property
    def projected(self) -> int:
        """Dims Z of the projection."""
        return projected_width(self.width, self.ratio)

    def kept_bytes(self, tokens: int, itemsize: int = 2) -> int:
        """Return bytes saved from forward to backward, in the dtype of compute."""
        return tokens * self.projected * itemsize

    def saved_bytes(self, tokens: int, itemsize: int = 2) -> int:
        """Return bytes of activations that the forward no longer keeps."""
        return tokens * (self.width - self.projected) * itemsize

    def state_bytes(self, parameter_itemsize: int = 4) -> int:
        """Return bytes of latents, their gradients and AdamW's two moments of them."""
        return sum(self.outputs) * self.projected * 4 * parameter_itemsize

    def state_saved_bytes(self, moment_bytes: int = 2, parameter_itemsize: int = 4) -> int:
        """Return bytes of replaced weights' gradients and moments, less `state_bytes`.

        The result may be negative.

        Args:
            moment_bytes: per weight; Muon's momentum in bf16 takes 2, AdamW's moments 8.
            parameter_itemsize: bytes of an element of parameters and gradients.
        """
        whole = sum(self.outputs) * self.width * (parameter_itemsize + moment_bytes)
        return whole - self.state_bytes(parameter_itemsize)

    def passing_bytes(self, itemsize: int = 4) -> int:
        """Return bytes of P: in a forward, and in fp32 when latents are added to weights."""
        return self.width * self.projected * itemsize

    def flops_added(self, tokens: int) -> int:
        """Return FLOPs of x P in the forward, less those that the smaller backward saves."""
        smaller = 2 * tokens * sum(self.outputs) * (self.width - self.projected)
        return 2 * tokens * self.width * self.projected - smaller


ROWS, T, RATIO = range(3), 16, 5 / 16  # 5 dims of 16: no other tensor is as wide
TOKENS = len(ROWS) * T
NAMES = ["plain", "mla", "mla_low_rank_queries_yarn", "mlp_relu2"]


def config_of(name: str) -> ModelConfig:
    """A and F, and a last layer, which is left alone."""
    return dataclasses.replace(variants()[name], pattern="AFF", depth=3)


def build(config: ModelConfig, ratio: float) -> HybridLM:
    with torch.device("meta"):
        model = HybridLM(config)
    if ratio:
        compress_linears(model, ratio, seed=3)
    model.to_empty(device="cpu")
    initialise(model, model.init_rules(), seed=1)
    return model.train()


def inputs_of(model: HybridLM) -> list[CompressedInput]:
    """By the names of what has a latent."""
    outputs: dict[str, list[int]] = {}
    for name, p in model.named_parameters():
        if name.endswith(".latent"):
            outputs.setdefault(name.rsplit(".", 2)[0], []).append(len(p))
    return [CompressedInput(model.config.dim, tuple(o), RATIO) for o in outputs.values()]


def kept(model: HybridLM) -> Counter[int]:
    """Bytes of what a forward keeps, by width, each storage once, without parameters."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in own:
            found[t.untyped_storage().data_ptr()] = t
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        batch = ragged_batch(ROWS, T, model.config.vocab_size)
        model(batch.ids_BT, batch.labels_BT, batch.docs)
    bytes_of: Counter[int] = Counter()
    for t in found.values():
        bytes_of[t.shape[-1] if t.dim() else 0] += t.untyped_storage().nbytes()
    return bytes_of


@pytest.mark.parametrize("name", NAMES)
def test_bytes_from_forward_to_backward(name: str) -> None:
    config = config_of(name)
    whole, model = kept(build(config, 0)), kept(build(config, RATIO))
    inputs = inputs_of(build(config, RATIO))
    assert len(inputs) == 2 and len({i.outputs for i in inputs}) == 2
    assert model[inputs[0].projected] == sum(i.kept_bytes(TOKENS, 4) for i in inputs)
    saved = sum(i.saved_bytes(TOKENS, 4) for i in inputs)
    assert whole.total() - model.total() == saved > 0


@pytest.mark.parametrize("optimizer", ["muon_adamw", "adamw"])
def test_bytes_of_gradients_and_moments(optimizer: str) -> None:
    """Also for a latent so wide that it costs more than Muon's momentum."""
    config = Config(model=config_of("plain"))
    config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, name=optimizer))
    found = []
    for ratio in (0.0, RATIO):
        model = build(config.model, ratio)
        state = build_optimizer(model, config).state_tensors()
        moments = sum(t.nbytes for t in state.values() if t.dim())
        trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        latents = sum(p.nbytes for n, p in model.named_parameters() if n.endswith(".latent"))
        found.append(moments + trained + latents)
    moment_bytes = 2 if optimizer == "muon_adamw" else 8
    expected = sum(i.state_saved_bytes(moment_bytes) for i in inputs_of(build(config.model, RATIO)))
    assert found[0] - found[1] == expected > 0
    assert CompressedInput(16, (40,), 0.5).state_saved_bytes(2) < 0


@pytest.mark.parametrize("name", NAMES)
def test_flops(name: str) -> None:
    totals = []
    for ratio in (0.0, RATIO):
        model = build(config_of(name), ratio)
        batch = ragged_batch(ROWS, T, model.config.vocab_size)
        with FlopCounterMode(display=False) as counter:
            model(batch.ids_BT, batch.labels_BT, batch.docs).loss_sum.backward()
        totals.append(counter.get_total_flops())
    inputs = inputs_of(build(config_of(name), RATIO))
    assert totals[1] - totals[0] == sum(i.flops_added(TOKENS) for i in inputs) < 0


def test_the_figures_of_a_layer_by_hand() -> None:
    """Gate and up of 4096 to 14336 in bf16 at a quarter, 8192 tokens: 50 of 67 MB."""
    found = CompressedInput(4096, (14336, 14336), 0.25)
    assert found.saved_bytes(8192) == 8192 * 3072 * 2
    assert found.passing_bytes() == 4096 * 1024 * 4
    assert found.state_saved_bytes(8) == 2 * 14336 * (4096 * 12 - 1024 * 16)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("policy", [KEEP, PER_BLOCK], ids=["kept", "by kind"])
def test_the_estimate_of_saved_activations(policy: CheckpointingPolicy, tp: int) -> None:
    """To the byte, of every kind of block; the last layer keeps its whole input."""
    heads = {"attention": {"num_heads": 4, "num_kv_heads": 2}, "m2rnn": {"num_heads": 2}}
    policy, mesh = dataclasses.replace(policy, compress=0.25), MeshConfig(dp_shard=1, tp=tp)
    agree(small_config("AEMRGFA", "bf16", policy, mesh, **heads))


@pytest.mark.parametrize("size", [1, 2])
def test_the_estimated_peak(size: int) -> None:
    flags = WIDE.replace("--model.depth 2", "--model.depth 6 --model.pattern FFFFFF")
    config = as_trained(parse_run(f"{flags} --recompute.compress 0.25".split(), size).config)
    peak = trace_step(config, size, full=True).peak()[1]
    assert step_bytes(config, size, 0).most == pytest.approx(peak, rel=0.02)
