"""S0: activation memory, what is kept, run again, or spread over ranks."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from unittest import mock

import pytest
import torch
from torch import nn

from bench import fused
from checkpointing.apply import ActivationCheckpointing
from checkpointing.recompute import BlockRecompute
from megacpp.config.arguments import parse_run, read_run
from megacpp.config.checks.fp8 import fp8_rules
from megacpp.config.presets import PER_BLOCK, PRESETS
from megacpp.config.schema import (
    KEEP,
    CheckpointingPolicy,
    Config,
    MeshConfig,
    PrecisionConfig,
    TrainConfig,
)
from megacpp.errors import ConfigError
from megacpp.home import HOME
from megacpp.kernels.selection import OPERATIONS
from megacpp.launch.recompute_table import selective_offer
from megacpp.memory.budget import words
from megacpp.memory.forms.activations import activation_bytes
from megacpp.memory.replayed import replayed_flops_per_token
from megacpp.model.flops import train_flops_per_token
from megacpp.model.recompute import PLAIN
from megacpp.speed.ours import step_work
from parallel.build import build_model
from parallel.mesh import World
from tests.checkpointing import test_apply
from tests.checkpointing.fp8_cases import broken_keys, changed, config_with, te_config
from tests.memory import test_activations
from tests.parallel.parity import Run, check, models, traces_of

ONE = World(0, 1, torch.device("cpu"))


def policy(*flags: str, preset: str = "tiny", world: int = 1) -> CheckpointingPolicy:
    return parse_run([preset, *flags], world).config.recompute


def compressed(block: nn.Module) -> bool:
    """Whether some linear layer saves a projection of its input."""
    return any(name.endswith("latent") for name, _ in block.named_parameters())


def test_s0_1_the_last_layer_is_never_wrapped() -> None:
    for name in ("all regions", "full", "saved tensors"):
        test_apply.test_the_last_layer_is_never_wrapped(name, streams=False)
    test_apply.test_the_last_layer_is_never_wrapped("full", streams=True)


def test_s0_1_multi_token_prediction_replays_k_minus_1_of_k_depths() -> None:
    ahead = models()["ahead"]
    assert ahead.mtp.depths == 2
    model, ac = test_apply.build(KEEP, ahead)
    model.mtp.aux_scale.fill_(1.0)
    test_apply.train(model)
    assert ac.replays.counts == {"block": ahead.mtp.depths - 1}


def test_s0_1_compression_leaves_the_last_layer_alone() -> None:
    model, _ = test_apply.build(replace(KEEP, compress=0.25))
    found = [compressed(block) for block in model.blocks.values()]
    assert any(found[:-1]) and not found[-1]


def test_s0_2_only_wrappers_of_experts_go_without_the_shape_check() -> None:
    test_apply.test_only_blocks_of_experts_go_without_the_shape_check()


def test_s0_3_wrappers_vanish_inside_a_compiled_block() -> None:
    config = Config(
        model=test_apply.hybrid(),
        precision=PrecisionConfig("fp64"),
        train=TrainConfig(compile="aot_eager"),
        recompute=replace(test_apply.FULL, norms=True, activation_memory_budget=0.5),
    )
    ac = ActivationCheckpointing(config)
    model = build_model(config, ONE, ac)
    whole = [int(k) for k, b in model.blocks.items() if not isinstance(b.recompute, BlockRecompute)]
    assert {0, 4, 6} <= set(whole) <= set(ac.compiled), "A, F and A are graphs"
    for key in whole:
        for module in model.blocks[str(key)].modules():
            assert getattr(module, "recompute", PLAIN) is PLAIN
    assert isinstance(model.blocks["1"].recompute, BlockRecompute), "E is no graph"


def test_s0_4_the_flag_becomes_a_budget_below_one() -> None:
    compiled = "--train.compile", "aot_eager"
    said = policy("--gradient-checkpointing", "true", *compiled, preset="dense_110m")
    assert 0 < said.activation_memory_budget < 1
    no = policy("--gradient-checkpointing", "false", *compiled, preset="dense_110m")
    assert no.activation_memory_budget == 1
    config = Config(model=models()["F"], recompute=said, train=TrainConfig(compile="aot_eager"))
    with mock.patch("checkpointing.compile.compile_blocks") as compile_blocks:
        build_model(config, ONE, ActivationCheckpointing(config))
    assert compile_blocks.call_args.args[2] == said.activation_memory_budget


def test_s0_4_a_presets_policy_becomes_a_budget_below_one() -> None:
    found = policy("--train.compile", "inductor", preset="nam56r_base", world=8)
    assert found.activation_memory_budget < 1


def test_s0_5_sequence_parallelism_is_on_exactly_with_tensor_parallelism() -> None:
    """Each rank holds its part of the tokens between blocks; no setting turns that off."""
    test_activations.test_fake_ranks_keep_a_part_of_the_residual_stream()
    assert not [name for name in vars(MeshConfig()) if "sequence" in name or name == "sp"]


def test_s0_6_context_parallelism_goes_through_mamba_exactly() -> None:
    """We differ: states are handed on between ranks, so nothing is refused."""
    run = Run("M", MeshConfig(cp=2, dp_shard=1))
    found = traces_of([run, run.reference])
    check(found[run], found[run.reference][0], run.dtype)


def test_s0_7_a_stock_checkpoint_of_a_transformer_engine_block_is_refused() -> None:
    config = te_config(fblock="full", fp8_wrapper="torchao")
    assert "recompute.fp8_wrapper" in broken_keys(config)
    allowed = te_config(fblock="full")
    assert "recompute.fp8_wrapper" not in broken_keys(allowed)


def test_s0_8_no_preset_leaves_expert_blocks_out() -> None:
    """Blocks of experts are recomputed wherever M blocks are; leaving them out is said by name."""
    assert policy("--skip-eblock-checkpointing").eblock == "none"
    assert policy().eblock == "expert_gemm_only"
    assert PER_BLOCK.eblock == "expert_gemm_only"
    for make in PRESETS.values():
        config = make()
        if {"E", "M"} <= set(config.model.pattern):
            assert config.recompute.eblock != "none", config.preset


def test_s0_9_activation_fields_are_in_the_launch_record() -> None:
    test_activations.test_the_launch_record_has_it()


def test_s0_10_activation_bytes_grow_linearly_with_tokens() -> None:
    for name in test_activations.EIGHT:
        test_activations.test_linear_in_tokens(name)


def test_s0_11_tensor_parallelism_divides_what_norms_leave() -> None:
    """With and without norms that run again, and with the presets' policy as it is."""
    kept = replace(test_activations.NONE, regather="on")
    for again in (kept, replace(test_activations.NONE, norms=True), PER_BLOCK):
        normed = []
        for tp in (1, 2, 4):
            mesh = MeshConfig(dp_shard=8 // tp, tp=tp)
            config = test_activations.of_preset("nam56r_base", mesh=mesh, recompute=again)
            parts = activation_bytes(config, 8).parts
            normed.append(sum(part.groups.get("norm", 0) for part in parts))
        assert normed[1] == normed[0] // 2 > 0 and normed[2] == normed[0] // 4


def test_s0_a_recompute_is_on_by_default() -> None:
    """Experts, M2RNN, Mamba's convolution and multi-token prediction; norms on demand."""
    default = CheckpointingPolicy()
    assert default.eblock == "expert_gemm_only" and default.mblock == "conv_bc_only"
    assert default.rblock != "none" and default.mtp


def test_s0_b_selective_attention_is_offered_with_its_cost() -> None:
    """In the header, beside what runs again; not where it is chosen, or nothing would be freed."""
    config = parse_run(["nam56r_base"], 8).config
    (line,) = selective_offer(config, 8)
    other = replace(config, recompute=replace(config.recompute, ablock="selective"))
    freed = activation_bytes(config, 8).bytes - activation_bytes(other, 8).bytes
    more = replayed_flops_per_token(other) - replayed_flops_per_token(config)
    more /= train_flops_per_token(config.model, config.data.seq_len)
    assert "recompute.ablock=selective" in line and words(freed) in line
    assert f"{more:.1%} more FLOPs" in line and 0 < more < 0.2
    assert selective_offer(other, 8) == []
    assert selective_offer(parse_run(["tiny", "--model.pattern", "F"], 1).config, 1) == []


def test_s0_c_every_older_flag_is_translated() -> None:
    """Translate the article's flags; a note says that a spacing becomes the policy by kind."""
    switches = (
        *("recompute_moe_experts", "recompute_m2rnn", "recompute_mamba_conv", "recompute_norms"),
        *("mtp_recompute", "cpu_offload_checkpointing", "gradient_checkpointing"),
    )
    for flag in switches:
        on, off = (policy(f"--{flag}={value}", preset="dense_110m") for value in ("true", "false"))
        assert on != off, flag
    resolved = parse_run(["dense_110m", "--checkpoint-spacing", "2"], 1)
    assert resolved.config.recompute == PER_BLOCK
    assert "no policy for one layer in 2" in resolved.notes[0]


def test_s0_f_random_projection_reaches_every_projection_of_a_normed_input() -> None:
    model, _ = test_apply.build(replace(KEEP, compress=0.25))
    letters = dict(zip("AEMRF", list(model.blocks.values())[:5], strict=True))
    assert [letter for letter, block in letters.items() if compressed(block)] == list("AEMRF")


def test_s0_g_fused_operations_are_kernels_by_name() -> None:
    """We differ: of the four one is a kernel, and the others would save next to nothing.

    Rows in expert order times their weights are computed by `experts=triton`, whose twin is torch.
    What each of the others would save is counted, and is what docs/benchmarks.md says.
    """
    names = [backend.name for backend in OPERATIONS["experts"].backends]
    assert names == ["triton", "torch", "reference"]
    config, issued = fused.config_of("moe_small", compiled=False), {}
    for name in names[:2]:
        other = replace(config, kernels=replace(config.kernels, experts=name))
        issued[name] = sum(sum(b.launches) for b in step_work(other, 8, "H100").blocks)
    assert issued["triton"] < issued["torch"] or find_spec("triton") is None
    chapter = (HOME / "docs/benchmarks.md").read_text()
    runs = (
        ("dense_110m", "dense_110m", "eager"),
        ("dense_110m", "dense_110m", "inductor"),
        ("nam56r_base", "nam56r_base", "eager"),
        ("nam56r_base, MLA", fused.LATENT, "eager"),
    )
    for run, flags, how in runs:
        found = fused.fusions(fused.config_of(flags, how == "inductor"))
        assert {"norm_qkv", "residual"} <= {fusion.operation for fusion in found}
        for fusion in found:
            assert fusion.row(run, how) in chapter
            assert 0 < fusion.of_time < 0.013 and fusion.bytes < 0.06 * fusion.of_bytes


def test_s0_h_transformer_engine_is_refused_in_a_pipeline_with_its_reason() -> None:
    """We differ: one line says why; torchao's FP8 layers run in a pipeline."""
    broken = map(str, fp8_rules(changed(te_config(), mesh={"pp": 2})))
    (found,) = (line for line in broken if line.startswith("mesh."))
    assert found.startswith("mesh.pp=2: Transformer Engine's context and recomputation are")
    assert "--precision.fp8 torchao" in found and "\n" not in found
    assert "mesh.pp" not in broken_keys(changed(config_with(), mesh={"pp": 2}))
    why = r"^precision.fp8_recipe=delayed: scales by maxima of earlier steps: .* isn't saved, .*"
    with pytest.raises(ConfigError, match=why + r" Fix: use --precision.fp8-recipe rowwise_.*\Z"):
        read_run(["tiny", "--precision.fp8", "te", "--precision.fp8-recipe", "delayed"])
