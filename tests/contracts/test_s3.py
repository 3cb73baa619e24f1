"""S3: the memory estimate as launch gate, its calibration, and what is left of a failure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megacpp.blocks.experts.router import Router
from megacpp.config.arguments import parse_run
from megacpp.config.presets import nam52_deep, nam52_deep_base, tiny
from megacpp.config.schema import KEEP
from megacpp.errors import ConfigError
from megacpp.memory.calibration import write_record
from megacpp.memory.estimate import estimate, estimate_memory
from megacpp.model.documents import Documents
from tests.checkpointing import test_compile_estimate
from tests.memory import (
    test_calibration,
    test_entries,
    test_generation,
    test_offload,
    test_parameters,
    test_planner,
    test_reference,
)
from tests.model.small import small
from tests.optim import test_groups, test_muon_memory
from tests.run import test_failed_forward, test_features, test_forensics

GIB, SPARSE = 1 << 30, "model.attention.sparse"


def test_s3_1_adamw_keeps_8_bytes_and_muon_2_for_a_parameter() -> None:
    test_muon_memory.test_state_is_two_bytes_under_muon_and_eight_under_adamw()
    test_reference.test_optimizer_state_of_four_billion_parameters()


def test_s3_2_activations_follow_the_formula_and_grow_with_tokens() -> None:
    test_reference.test_activations_of_a_dense_model_of_that_size()
    test_reference.test_four_times_the_tokens()


def test_s3_3_dispatch_buffers_grow_with_tokens_choices_and_capacity_only() -> None:
    test_reference.test_dispatch_of_an_expert_layer()
    test_reference.test_capacity_factor_is_paid_in_routing_memory()
    test_reference.test_more_experts_are_parameters_not_dispatch()
    rows = [
        test_reference.estimate_of(test_reference.with_moe(top_k=k)).detail["moe_routing"][
            "gathered inputs"
        ]
        for k in (2, 4, 8)
    ]
    assert rows[1] == 2 * rows[0] and rows[2] == 4 * rows[0]


def test_s3_4_router_logits_are_fp32_and_whole_on_every_rank() -> None:
    router = Router(small("E"))
    for p in router.parameters():
        torch.nn.init.normal_(p)
    seen: list[torch.dtype] = []
    choose = router.choose
    router.choose = lambda *a, **k: seen.append(a[0].dtype) or choose(*a, **k)  # type: ignore
    with torch.autocast("cpu", torch.bfloat16):
        router(torch.randn(2, 8, small("E").dim).bfloat16(), Documents.rows(2, 8))
    assert seen == [torch.float32]
    found = [
        test_reference.estimate_of(ep=ep).detail["moe_routing"]["router logits"] for ep in (1, 4)
    ]
    assert found[0] == found[1] == 4 * 4096 * 64


def test_s3_5_five_percent_decide_whether_an_estimate_is_trusted() -> None:
    for percent in (-5, 0, 5):
        test_calibration.test_within_five_percent_an_estimate_is_trusted(percent)
    test_calibration.test_a_miss_widens_the_margin_by_exactly_that_much()


def test_s3_5_the_key_holds_all_that_memory_depends_on(tmp_path: Path) -> None:
    """A record of one attention kernel doesn't replace that of another."""
    for name in ("torch", "reference"):
        where = test_calibration.key(test_calibration.resolved("--kernels.attention", name))
        given = {"key": where.key, "family": where.family}
        write_record(tmp_path, test_calibration.record(1.0, **given), where)
    assert len(list(tmp_path.iterdir())) == 2
    test_calibration.test_what_memory_does_not_depend_on_makes_none()
    test_calibration.test_trust_needs_every_bucket_that_was_measured()


def test_s3_6_the_worked_example_has_capacity_factor_1_25() -> None:
    for make in (nam52_deep_base, nam52_deep):
        moe = make().model.moe
        assert (moe.num_experts, moe.top_k, moe.capacity_factor) == (64, 6, 1.25)


def test_s3_7_every_feature_has_an_estimator_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile, offload, compress and warm-up are counted, and a new setting must be.

    What a compiled layer's graph saves is what inductor's kernels leave, and the peaks of steps
    with compiled blocks, offload and a warm-up are those of traced steps.
    """
    for name in ("train.compile", "recompute.offload", "recompute.compress", f"{SPARSE}.stage"):
        test_entries.test_a_setting_changes_the_estimate(name)
    test_entries.test_no_setting_is_without_an_entry()
    test_entries.test_a_new_setting_needs_an_entry()
    torch._dynamo.reset()  # graphs of other tests are none of this one's
    test_compile_estimate.test_the_graphs_of_inductor_save_what_its_kernels_leave()
    test_compile_estimate.test_an_estimate_of_compiled_blocks_is_the_peak_of_a_traced_step(1, "")
    test_compile_estimate.test_the_warm_up_is_the_peak_of_a_traced_step(1, "")
    test_offload.test_the_peak_of_a_step("saved_tensors", 1, monkeypatch)


def test_s3_8_snapshots_are_a_thousand_steps_apart(tmp_path: Path) -> None:
    assert tiny().memory.snapshot_every == 1000
    test_forensics.test_the_default_looks_at_few_steps(tmp_path)


def test_s3_9_peak_of_every_rank_and_the_largest_growth_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a run that ended with an error, by each rank alone."""
    test_forensics.test_every_rank_is_in_the_summary(tmp_path / "whole")
    test_failed_forward.test_any_failure_leaves_a_summary(tmp_path, monkeypatch)


def test_s3_a_an_error_mid_forward_is_blamed_on_the_bucket_that_grew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the last E block on dispatch, with a snapshot and a summary; a changed chunk on states.

    A larger convolution is blamed on itself, and a step that wasn't recorded on nothing.
    """
    failed = test_failed_forward
    rows = failed.test_the_last_e_block_s_rows_are_dispatch_and_earlier_blocks_activations
    rows(tmp_path / "rows", KEEP, "AMRFE")
    test_failed_forward.test_what_is_written_at_the_error(tmp_path / "experts", capsys)
    test_failed_forward.test_a_changed_chunk_is_told_from_a_hot_expert_mid_forward(tmp_path)
    convolution = failed.test_a_larger_convolution_is_told_from_a_changed_chunk_mid_forward
    convolution(tmp_path / "convolution")
    failed.test_a_step_that_is_not_recorded_is_said_to_be_unknown(tmp_path / "not recorded")


def test_s3_10_the_peak_of_a_step_decides_and_counts_muons_whole_matrices() -> None:
    """The optimizer's step holds gathered matrices on top of what rests."""
    config = parse_run(["dense_110m", "--data.seq-len", "128"], 8).config
    found = estimate(config, 8)
    assert found.moments["optimizer step"] > found.resting
    bucket = replace(config, optim=replace(config.optim, name="adamw"))
    whole = [f.moments["optimizer step"] - f.resting for f in (found, estimate(bucket, 8))]
    assert whole[0] > whole[1], "AdamW steps on shards alone"
    peak = max(found.moments.values())
    assert found.tensors == peak and found.point >= peak
    assert estimate(config, 8, budget=found.point - 1).verdict == "does_not_fit"
    assert estimate(config, 8, budget=found.resting).verdict == "does_not_fit"


def test_s3_b_the_articles_snippet_runs_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    cfg = nam52_deep_base().model
    est = estimate_memory(
        model_config=cfg, world_size=8, tp_degree=2, ep_degree=4,
        dp_degree=1, batch_size=1, seq_len=4096,
        grad_checkpoint=True, optimizer="muon+adamw",
    )  # fmt: skip
    for name, gb in est.as_dict().items():
        print(f"{name:24s} {gb:6.2f} GiB")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 6 and all(line.endswith(" GiB") for line in lines)
    parts = [gb for name, gb in est.as_dict().items() if name in est.components]
    assert sum(parts) == pytest.approx(est.as_dict()["point"], rel=1e-12)


def test_s3_f_the_planner_chooses_between_padded_and_exact_dispatch() -> None:
    """Padded where it fits and few ranks share the experts, for it needs more memory."""
    test_planner.test_experts_rows_are_padded_where_that_fits()
    test_features.test_a_capacity_is_said_to_depend_on_the_mesh()


def test_s3_g_named_output_projections_step_with_adamw() -> None:
    config = parse_run(["tiny", "--optim.adamw-layers", "wo,out_proj"], 1).config
    assert config.optim.name == "muon_adamw"
    test_groups.test_named_layers_belong_to_adamw()
    test_parameters.test_bytes_are_those_of_the_model("outputs by adamw")
    with pytest.raises(ConfigError, match="no block of the model has such a layer"):
        parse_run(["tiny", "--optim.adamw-layers", "o_proj"], 1)


def test_s3_h_memory_of_evaluation_and_generation_is_estimated(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Weights, caches and states, and work; records of it lie apart from those of training."""
    for new in (0, 30):
        test_generation.test_the_estimate_is_what_tensors_with_values_take("plain", new)
    test_generation.test_what_was_measured_widens_the_next_estimate(capsys, tmp_path)
