"""S1: what each kind of block runs again, by counted calls."""

from __future__ import annotations

from dataclasses import replace

from megacpp.config.checks.recompute import recompute_rules
from megacpp.config.schema import KEEP, MeshConfig
from tests.checkpointing import test_apply
from tests.parallel.parity import Run, config_of, traces_of


def test_s1_1_experts_run_again_without_their_collectives() -> None:
    """Products are repeated, calls of router and dispatch aren't; on two ranks not a byte is."""
    test_apply.test_experts_run_again_without_router_permutation_or_scan()
    keeps = Run("plain", MeshConfig(dp_shard=2, ep=2), accum=2)
    again = replace(keeps, recompute=replace(KEEP, eblock="expert_gemm_only"))
    found = traces_of([keeps, again], collectives=True)
    for one, other in zip(found[keeps], found[again], strict=True):
        sent = [c for c in one.collectives if c.kind == "all_to_all"]
        assert sent and one.collectives == other.collectives
        assert other.again["expert_gemm"] > 0 == len(one.again)
    whole = replace(config_of(keeps), recompute=replace(KEEP, eblock="full"))
    assert [str(e).split("=")[0] for e in recompute_rules(whole)] == ["recompute.eblock"]


def test_s1_2_mamba_runs_convolutions_again_and_never_the_scan() -> None:
    test_apply.test_experts_run_again_without_router_permutation_or_scan()
    model, ac = test_apply.build(replace(KEEP, mblock="conv_bc_only"))
    test_apply.train(model)
    assert ac.replays.counts.keys() == {"conv_bc"} and ac.replays.counts["conv_bc"] > 0


def test_s1_3_m2rnn_runs_its_recurrence_again() -> None:
    """From the states where chunks start, to the same bits; `full_plus_norms`: the whole block."""
    test_apply.test_states_kept_or_rebuilt_give_the_same_bits()
    model, ac = test_apply.build(replace(KEEP, rblock="full_plus_norms"))
    test_apply.train(model)
    assert ac.replays.counts == {"block": 1}


def test_s1_4_latent_attention_keeps_the_latent_and_rebuilds_keys_and_values() -> None:
    test_apply.test_keys_and_values_are_rebuilt_from_the_latent()
