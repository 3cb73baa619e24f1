"""Operators and collectives against arithmetic by hand."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import fields, replace
from itertools import product
from math import lcm
from pathlib import Path

import pytest

from megacpp.cli.main import main
from megacpp.config.arguments import parse_run
from megacpp.errors import ConfigError
from megacpp.speed import collectives
from megacpp.speed.collectives import AxisSpread, spread
from megacpp.speed.hardware import GpuSpec, Rates, gpu, gpus, product_table
from megacpp.speed.operators import (
    K_FILL,
    WAVE_SHARED,
    Attend,
    Passes,
    Product,
    SerialWork,
    seconds,
)
from megacpp.speed.sent import axes

# Round figures: 100 SMs, 100 TFLOP/s, 1 TB/s, links of 100 and 10 GB/s, hops of 1 and 10 us.
PLAIN = GpuSpec(
    name="plain", sms=100, bf16_tflops=100, bf16_reached=1.0, hbm_gbs=1000, hbm_reached=1.0,
    hbm_gib=80, nvlink_gbs=100, nvlink_reached=1.0, node_latency_us=1, network_gbs=10,
    network_reached=1.0, network_latency_us=10, launch_us=10, l2_mib=40, power_w=400,
)  # fmt: skip
ONE = Rates()


def test_a_product_that_fills_its_waves_runs_at_the_peak() -> None:
    product = Product(2560, 1280, 8192)  # 10 x 10 tiles of 256 x 128: one wave of 100 SMs
    flops = 2 * 2560 * 1280 * 8192
    assert seconds(product, PLAIN, ONE) == pytest.approx(flops / 1e14 * (8192 + K_FILL) / 8192)
    assert seconds(product, PLAIN, Rates(products=0.5)) == pytest.approx(
        2 * seconds(product, PLAIN, ONE)
    )


def test_a_tile_more_begins_a_wave() -> None:
    full, more = Product(2560, 1280, 8192), Product(2560, 1281, 8192)
    # 110 tiles: waves count as 0.55 x 2 + 0.45 x 1.1 = 1.595 full ones.
    taken = 2 * (1 - WAVE_SHARED) + 1.1 * WAVE_SHARED
    assert seconds(more, PLAIN, ONE) <= seconds(full, PLAIN, ONE) * taken
    assert seconds(more, PLAIN, ONE) > 1.2 * seconds(full, PLAIN, ONE)


def test_products_that_are_kernels_of_their_own_take_longer() -> None:
    """2.8 us each; Transformer Engine's groups on an H100 take 164 and 186 us (its #2045)."""
    groups = [(8, 4096, 164e-6), (16, 2048, 186e-6)]
    for count, rows, measured in groups:
        one = Product(rows, 768, 2048, count)
        found = seconds(one._replace(apart=True), gpu("H100"), ONE)
        assert found - seconds(one, gpu("H100"), ONE) == pytest.approx(count * 2.8e-6)
        assert found == pytest.approx(measured, rel=0.1)


def test_a_thin_product_waits_for_memory() -> None:
    thin, quick = Product(65536, 128, 128), replace(PLAIN, bf16_tflops=1e5)
    assert seconds(thin, quick, ONE) == pytest.approx(2 * (65536 * 256 + 128 * 128) / 1e12)
    added = thin._replace(added=True)  # the fp32 sum is read and written
    moved = 2 * (65536 * 128 + 128 * 128) + 8 * 65536 * 128
    assert seconds(added, quick, ONE) == pytest.approx(moved / 1e12)


def test_a_measured_product_has_its_measured_speed() -> None:
    table = product_table("B200")
    assert table[4096, 8192, 8192, "TN"] == 1041.0
    product = Product(4096, 8192, 8192)
    assert seconds(product, gpu("B200"), ONE) == pytest.approx(product.flops / 1041e12)


def test_every_product_of_a_cpu_is_the_nearest_measured_one(tmp_path: Path) -> None:
    """Several products in one operator too: a CPU has no tiles that they could fill."""
    file = tmp_path / "cpu.json"
    figures = dict.fromkeys((f.name for f in fields(GpuSpec)[1:16]), 1.0) | {"on_host": True}
    rows = [[64, 64, 64, "TN", 0.5], [1024, 1024, 1024, "TN", 2.0], [64, 64, 64, "NN", 4.0]]
    file.write_text(json.dumps({"figures": figures | {"hbm_gbs": 1e9}, "products": rows}))
    machine = gpu(str(file))
    for size, count, layout, speed in ((96, 1, "TN", 0.5), (700, 8, "TN", 2.0), (700, 1, "NN", 4)):
        product = Product(size, size, size, count, layout)
        assert seconds(product, machine, ONE) == pytest.approx(product.flops / (speed * 1e12))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"hbm_gbs": -1.0}, "hbm_gbs=-1.0: must be a number above 0"),
        ({"nvlink_gbs": 0}, "nvlink_gbs=0: must be a number above 0"),
        ({"bf16_tflops": float("nan")}, "bf16_tflops=nan"),
        ({"launch_us": -1}, "launch_us=-1: must be a number at least 0"),
        ({"hbm_gib": "80"}, "hbm_gib=80"),
        ({"sms": True}, "sms=True"),
        ({"sms": 0.5}, "sms=0.5: must be a whole number"),
        ({"hbm_reached": 1.5}, "hbm_reached=1.5: must be a fraction"),
        ({"fp8_tflops": 100}, "fp8_reached=0"),
        ({"per_node": None}, "per_node=None"),
        ({"on_host": 1}, "on_host=1: must be true or false"),
        ({"generation": "V100"}, "generation=V100: must be one of A100, H100, B200"),
        ({"generation": ["H100"]}, "generation=['H100']"),
        ({"products": [[64, 64, 64, "TN"]]}, r"products: [64, 64, 64, 'TN'] must be"),
        ({"products": [[64, 64, 0, "TN", 1.0]]}, "products: [64, 64, 0"),
        ({"products": [[64, 64, 64, "TT", 1.0]]}, "products: [64, 64, 64, 'TT'"),
        ({"products": 7}, "products: 7"),
    ],
)
def test_a_wrong_figure_of_a_file_is_named(
    changed: dict[str, object], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "own.json"
    figures = {f.name: getattr(PLAIN, f.name) for f in fields(GpuSpec)[1:]} | changed
    products = figures.pop("products", [])
    file.write_text(json.dumps({"figures": figures, "products": products}))
    for words in (["speed", "dense_110m"], ["plan", "dense_110m", "--world", "8"]):
        assert main([*words, "--gpu", str(file)]) == 2
        assert f"must be a file with the figures of a GPU ({named}" in capsys.readouterr().err


def test_a_file_says_how_many_gpus_a_machine_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for per_node, more in ((2, []), (8, []), (2, ["--per-node", "8"])):
        file = tmp_path / f"{per_node}.json"
        figures = {f.name: getattr(PLAIN, f.name) for f in fields(GpuSpec)[1:]}
        file.write_text(json.dumps({"figures": figures | {"per_node": per_node}}))
        words = ["speed", "dense_110m", "--world", "8", "--gpu", str(file), "--json", *more]
        assert main(words) == 0
        found.append(json.loads(capsys.readouterr().out)["predicted"]["step_s"])
    assert found[0] > found[1] == found[2]
    fixed = ["--mesh.tp", "1", "--mesh.pp", "1", "--mesh.cp", "1", "--gpu", str(file)]
    assert main(["plan", "dense_110m", "--world", "8", *fixed]) == 0
    assert "torchrun --nnodes=4 --nproc-per-node=2" in capsys.readouterr().out


def test_memory_bound_work_moves_its_bytes() -> None:
    assert seconds(Passes(1e9), PLAIN, ONE) == pytest.approx(1e-3)
    assert seconds(Passes(1e9), PLAIN, Rates(memory=0.5)) == pytest.approx(2e-3)
    assert seconds(Passes(1.0, launches=10), PLAIN, ONE) == pytest.approx(30e-6)
    assert seconds(SerialWork(100, 2.0, 1e9), PLAIN, ONE) == pytest.approx(1e-3 + 200e-6)


def test_attention_multiplies_what_it_attends_to() -> None:
    forward = Attend(64, 4096, 2048, 256, "flash3")
    assert forward.flops == 2 * 64 * 4096 * 2048 * 256
    assert forward._replace(backward=True).flops == 2.5 * forward.flops
    long = Attend(4096, 65536, 32768, 256, "flash3")
    assert seconds(long, gpu("H100"), ONE) == pytest.approx(long.flops / 620e12, rel=0.01)


def test_a_ring_gathers_at_the_speed_of_its_link() -> None:
    time = collectives.seconds("all_gather", 8e9, AxisSpread(8, 8), PLAIN)
    assert time == pytest.approx(8e9 * 7 / 8 / 100e9 + 15e-6 + 7e-6)
    assert collectives.seconds("all_reduce", 8e9, AxisSpread(8, 8), PLAIN) == pytest.approx(
        2 * 8e9 * 7 / 8 / 100e9 + 15e-6 + 14e-6
    )


def test_all_cards_of_a_node_carry_a_ring_between_nodes() -> None:
    wide = collectives.seconds("all_gather", 16e9, AxisSpread(16, 8), PLAIN)
    # Eight rings of 2e9 bytes: each hands on 15 of 16 shares over a card of 10 GB/s.
    assert wide == pytest.approx(2e9 * 15 / 16 / 10e9 + (15 + 10 + 14) * 1e-6)
    narrow = collectives.seconds("all_gather", 16e9, AxisSpread(16, 1), PLAIN)
    assert narrow == pytest.approx(15e9 / 10e9, rel=1e-3)


def test_a_chain_over_nodes_waits_for_the_hop_that_leaves_one() -> None:
    inside, across, mixed = (
        collectives.seconds("send", 1e9, group, PLAIN)
        for group in (AxisSpread(4, 4), AxisSpread(4, 1), AxisSpread(4, 2))
    )
    assert inside < across == mixed


def test_an_all_to_all_has_one_card_a_rank() -> None:
    time = collectives.seconds("all_to_all", 16e9, AxisSpread(16, 8), PLAIN)
    assert time == pytest.approx(8e9 / 10e9 + (15 + 24) * 1e-6)


def test_axes_lie_over_nodes_by_their_stride() -> None:
    assert spread(8, 1, 8) == (8, 8)
    assert spread(16, 1, 8).nodes == 2
    assert spread(4, 8, 8) == (4, 1)
    assert spread(2048, 2, 8) == (2048, 4)
    assert spread(2048, 2, 8).nodes == 512


@pytest.mark.parametrize("per_node", [4, 6, 8])
def test_uneven_groups_wait_for_the_node_with_fewest_ranks(per_node: int) -> None:
    for size, stride in product((2, 3, 4, 5, 6, 8, 12, 16, 24), (1, 2, 3, 4, 6, 8, 12)):
        every = range(lcm(size * stride, per_node))
        nodes = [
            Counter(rank // per_node for rank in every[first : first + size * stride : stride])
            for start in every[:: size * stride]
            for first in range(start, start + stride)
        ]
        fewest = min(min(group.values()) for group in nodes)
        assert spread(size, stride, per_node).inside == fewest, (size, stride)


def test_three_ranks_on_nodes_of_eight_cross_the_network() -> None:
    """Ranks 6, 7 and 8 lie on two nodes; each of their ring's links carries two shares of three."""
    words = ["dense_110m", "--mesh.tp", "3", "--model.vocab-size", "49152"]
    words += ["--model.attention.num-kv-heads", "6", "--model.mlp.hidden-dim", "1536"]
    words += ["--train.tokens-per-step", "0", "--train.grad-accum", "1", "--data.seq-len", "3072"]
    config, alone = (parse_run(words, size).config for size in (24, 3))
    group = axes(config, 24, 8)["tp"]
    time = collectives.seconds("all_gather", 3e9, group, PLAIN)
    assert time == pytest.approx(2e9 / 10e9 + (15 + 2 * 10) * 1e-6)
    assert axes(config, 24, 6)["tp"] == (3, 3)
    assert axes(alone, 3, 8)["tp"] == (3, 3)  # on one node, which they don't fill


def test_every_gpu_has_figures_with_sources() -> None:
    for name in gpus():
        for figure in gpu(name).figures.values():
            assert figure.value >= 0 and figure.source
    assert gpu("h100-sxm-80gb") is gpu("H100")
    with pytest.raises(ConfigError, match="gpu=H1000: no such GPU is known"):
        gpu("H1000")
