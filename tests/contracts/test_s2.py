"""S2: kernels whose memory or precision once went wrong elsewhere."""

from __future__ import annotations

import pytest

from tests import test_loss_backends
from tests.model import test_fp32_contract, test_lightning_indexer
from tests.model.small import small
from tests.packs import test_ours, test_packs


def test_s2_1_scores_streamed_by_head_are_the_formula_and_hold_no_slab() -> None:
    """Gradcheck at a small shape, two units in the last place of fp32, nothing above [B, T, S]."""
    test_lightning_indexer.test_scores_are_the_formula()
    test_lightning_indexer.test_scores_in_fp32_drift_no_further_than_rounding()
    test_lightning_indexer.test_scores_hold_two_tensors_of_their_size_and_none_per_head()


def test_s2_2_every_head_reaches_the_fused_loss() -> None:
    """Make no tensor of N * V numbers in a hybrid, further tokens and token order included."""
    test_ours.test_no_head_of_a_hybrid_model_makes_logits()


def test_s2_3_a_device_without_a_kernel_falls_back_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    test_loss_backends.test_an_old_gpu_takes_the_torch_path_and_says_so()
    test_loss_backends.test_a_run_warns_once_and_not_where_torch_was_asked_for(monkeypatch)


def test_s2_4_contract_parameters_stay_fp32_and_are_never_copied() -> None:
    test_ours.test_a_cast_of_the_whole_model_is_no_matter_of_steps()
    test_ours.test_autocast_copies_no_parameter_of_the_contract()


@pytest.mark.parametrize("mode", ["weights", "autocast"])
def test_s2_5_the_scan_is_fed_fp32_steps(mode: str) -> None:
    test_fp32_contract.test_the_scan_sees_fp32_on_one_process(small(), mode)


def test_s2_6_every_upstream_defect_keeps_a_regression_test() -> None:
    """Six packs, each alone; what has both sides in torch shows the defect and its repair."""
    test_packs.test_there_are_six()
    for number in test_packs.PACKS:
        test_packs.test_a_pack_needs_nothing_of_ours(number)
    test_packs.test_the_defect_and_its_repair("16")
