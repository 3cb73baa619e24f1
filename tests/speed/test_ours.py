"""Our own configurations as work of the time model, and the commands that print it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from torch import Tensor, ones, ones_like
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megacpp.cli.main import main
from megacpp.cli.plan_order import Asked, by_speed
from megacpp.cli.speed import predicted
from megacpp.config.arguments import parse_run
from megacpp.config.schema import Config
from megacpp.memory.block_trace import kernel_bytes, timed_apart
from megacpp.memory.budget import as_run
from megacpp.memory.plan_space import mesh_is_legal, meshes, policies, row_choices, with_knobs
from megacpp.memory.traffic import traffic
from megacpp.model.block import Block
from megacpp.model.documents import Documents
from megacpp.model.flops import forward_flops_per_token
from megacpp.model.init import initialise
from megacpp.speed.hardware import Rates, gpu
from megacpp.speed.operators import Attend, Passes, Product
from megacpp.speed.ours import step_work
from megacpp.speed.step import least_seconds, passes_of, predict, unit_times
from parallel.pipeline import SCHEDULES


def config_of(*words: str, size: int = 1):
    return parse_run([*words, "--train.device", "cuda"], size).config


def test_products_and_attention_are_the_models_flops() -> None:
    config = config_of("dense_110m")
    step = step_work(config, 1, "H100")
    operators = [op for block in step.blocks for op in block.forward]
    tokens = config.train.device_batch_size * config.data.seq_len
    products = sum(op.flops for op in operators if isinstance(op, Product))
    attended = sum(op.flops for op in operators if isinstance(op, Attend))
    whole = tokens * forward_flops_per_token(config.model, config.data.seq_len)
    assert products + 2 * attended == pytest.approx(whole)  # a causal half is attended to
    back = [op for block in step.blocks for op in block.backward if isinstance(op, Product)]
    assert sum(op.flops for op in back) == pytest.approx(2 * products)


def test_blocks_send_the_bytes_that_are_counted() -> None:
    config = config_of("dense_110m", "--mesh.tp", "2", size=4)
    step = step_work(config, 4, "H100")
    sent = [t for b in step.blocks for t in (*b.sent_forward, *b.sent_backward) if t.axis == "tp"]
    counted = traffic(config, 4).parts
    wanted = sum(n for (axis, what), n in counted.items() if axis == "tp" and what != "gradients")
    assert step.microbatches * sum(t.bytes for t in sent) == pytest.approx(wanted)
    assert step.axes["data"] == (2, 2) and step.axes["tp"] == (2, 2)
    gathered = sum(b.dense for b in step.blocks)
    alone = sum(b.dense for b in step_work(config_of("dense_110m"), 1, "H100").blocks)
    assert gathered == pytest.approx(alone / 2)  # tp halves matrices; norms stay in fp32


@pytest.mark.parametrize(
    ("how", "kind", "times", "bytes_"),
    [
        ("all_gather", "all_gather", 1, 32768 * 4 * 128 * 2),  # keys and values of all tokens
        ("heads", "all_to_all", 2, 8192 * (2 * 12 * 64 + 4 * 128)),  # half of both, in bf16
        ("ring", "send", 3, 8192 * 4 * 128 * 2 * 2),  # a block there, two blocks and more back
    ],
)
def test_attention_starts_as_many_collectives_as_it_makes(
    how: str, kind: str, times: int, bytes_: int
) -> None:
    words = ("dense_110m", "--mesh.cp", "4", "--mesh.cp-attention", how)
    words += ("--data.seq-len", "32768", "--train.device-batch-size", "1")
    step = step_work(config_of(*words, size=4), 4, "H100")
    sent = next(b for b in step.blocks if b.kind == "A").sent_forward
    assert [(t.kind, t.bytes) for t in sent] == [(kind, pytest.approx(bytes_))] * times


def test_outputs_of_experts_come_back_beside_the_shared_expert() -> None:
    """The exposed time grows by what was hidden, if there is no shared expert to hide it."""
    words = ("nam52_deep_base", "--mesh.ep", "8")
    config = config_of(*words, size=64)
    e = next(b for b in step_work(config, 64, "H100").blocks if b.kind == "E")
    there, back = (t for t in e.sent_forward if t.axis == "ep")
    model, moe = config.model, config.model.moe
    shared = 3 * model.dim * moe.num_shared * moe.shared_hidden_dim
    routed = moe.top_k * 3 * model.dim * moe.hidden_dim + model.dim * moe.num_experts
    assert (there.hidden, back.hidden) == ("", "products") and there.bytes == back.bytes
    assert back.share == pytest.approx(shared / (shared + routed))
    bare = config_of(*words, "--model.moe.num-shared", "0", size=64)
    assert predicted_ep(config) < predicted_ep(bare)


def predicted_ep(config: Config) -> float:
    """Seconds of a step in which experts' rows are waited for."""
    return predict(step_work(config, 64, "H100"), gpu("H100"), Rates()).parts["exposed ep"]


def test_replicas_add_up_gradients_beside_the_backward() -> None:
    """On four machines of eight GPUs, each with all shards: an all-reduce of an eighth."""
    words = "nam56r_quarter", "--train.device-batch-size", "1", "--mesh.dp-replicate", "4"
    config = config_of(*words, size=32)
    step, machine = step_work(config, 32, "H100"), gpu("H100")
    assert step.axes["data copies"] == (4, 1) and step.axes["data"] == (8, 8)
    block = max(step.blocks, key=lambda b: b.dense)
    found = unit_times(step, passes_of(step, machine, Rates()), machine, Rates())[
        step.blocks.index(block)
    ]
    by_hand = 4 * block.dense * 7 / 8 / (450 * 0.79e9) + 50e-6
    by_hand += 2 * 4 * block.dense / 8 * 3 / 4 / (50 * 0.92e9) + 135e-6
    assert found.reduce == pytest.approx(by_hand)
    assert all(sent.axis != "dp_replicate" for sent in step.optimizer_sent)
    alone = config_of(*words[:3], "--mesh.dp-replicate", "8", size=8)  # they take the shards' place
    assert step_work(alone, 8, "H100").axes["data copies"].size == 1


@pytest.mark.parametrize(("words", "gathers"), [((), 5), (("--mesh.reshard", "never"), 1)])
def test_a_pipeline_gathers_weights_that_it_freed(words: tuple[str, ...], gathers: int) -> None:
    """In each of four forwards and before the first backward, as the bytes of a step say."""
    config = config_of("nam52_deep_base", "--mesh.pp", "2", *words, size=64)
    step = step_work(config, 64, "H100")
    assert config.train.grad_accum == 4 and step.stage_gathers == gathers
    exposed = predict(step, gpu("H100"), Rates()).parts["exposed data"]
    once = predict(replace(step, stage_gathers=1), gpu("H100"), Rates()).parts["exposed data"]
    assert exposed > once if gathers > 1 else exposed == once


def test_tensor_parallelism_halves_products_and_attention() -> None:
    flops = []
    for words, size in (((), 1), (("--mesh.tp", "2"), 2)):
        step = step_work(config_of("dense_110m", *words, size=size), size, "H100")
        operators = [op for block in step.blocks for op in (*block.forward, *block.backward)]
        products = sum(op.flops for op in operators if isinstance(op, Product))
        attended = sum(op.flops for op in operators if isinstance(op, Attend))
        flops.append((products, attended))
    assert flops[1] == pytest.approx([part / 2 for part in flops[0]])


def test_memory_bound_work_reads_operands_and_writes_results() -> None:
    assert kernel_bytes("mul", 10) == 30 and kernel_bytes("clone", 10) == 20
    assert kernel_bytes("new_empty", 10) == 25
    assert timed_apart("addmm") and not timed_apart("silu")


def test_operators_of_a_cpu_are_those_that_run() -> None:
    """Per block: all that are no views, in-place ones too, and their operands and results."""
    pattern = ["--model.depth", "2", "--model.pattern", "FF", "--train.device-batch-size", "1"]
    words = ["tiny", *pattern, "--data.seq-len", "64", "--recompute.fblock", "none"]
    config = parse_run([*words, "--train.device", "cpu"], 1).config
    block = step_work(config, 1, "H100").blocks[2]
    module, x = Block("F", config.model), ones(1, 64, config.model.dim, requires_grad=True)
    initialise(module, module.init_rules(), seed=0)
    docs = Documents.rows(1, 64)
    with EveryOperator() as forward:
        y = module(x, docs)
    with EveryOperator() as backward:
        y.backward(ones_like(y))
    passes = [next(op for op in way if isinstance(op, Passes)) for way in block[1:3]]
    assert block.launches[0] == forward.count and passes[0].bytes == forward.bytes
    assert block.launches[1] == backward.count  # the gradient that comes is one of them
    assert passes[1].bytes == pytest.approx(backward.bytes, rel=0.1)  # so is its memory


class EveryOperator(TorchDispatchMode):
    """Counts operators that are no views, and what those that multiply no matrices move."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.count += 1
            moved = sum(t.nbytes for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor))
            self.bytes += 0 if "mm" in func.__name__ else moved
        return out


def test_newton_schulz_is_three_products_a_step_of_each_shape() -> None:
    """Matrices of one shape are in one product; ranks share them."""
    words = ["tiny", "--model.depth", "4", "--model.pattern", "FFFF", "--train.device", "cuda"]
    made = []
    for size in (1, 2):
        config = parse_run(words, size).config
        step = step_work(config, size, "H100")
        made.append([op for op in step.optimizer if isinstance(op, Product)])
        dim, hidden = config.model.dim, config.model.mlp.hidden_dim
        short, long = sorted((dim, hidden))
        count = 4 * 3 // size
        times = config.optim.muon_steps
        assert made[-1] == times * [
            Product(short, short, long, count),
            Product(short, short, short, count),
            Product(short, long, short, count),
        ]


def test_a_compiled_block_moves_less_issues_fewer_operators_and_runs_products_again() -> None:
    """By its graphs: at a budget of 1 no product runs again, at 0 all of them but the last."""
    flags = ["--model.depth", "2", "--model.pattern", "FF", "--data.seq-len", "64"]
    flags += ["--kernels.rms-norm", "torch", "--kernels.gates", "torch", "--train.compile"]
    eager, kept, again = (
        step_work(config_of("dense_110m", *flags, *more), 1, "H100").blocks[1]
        for more in (
            ("off", "--recompute.fblock", "none"),
            ("inductor", "--recompute.activation-memory-budget", "1"),
            ("inductor", "--recompute.activation-memory-budget", "0"),
        )
    )
    products = [
        sum(op.flops for op in b.backward if isinstance(op, Product)) for b in (kept, again)
    ]
    forward = [op.flops for op in kept.forward if isinstance(op, Product)]
    assert products[1] - products[0] == pytest.approx(sum(forward) - forward[-1], rel=1e-3)
    for work in (kept, again):
        for ours, theirs in ((work.forward, eager.forward), (work.backward, eager.backward)):
            passes = [next(op for op in of if isinstance(op, Passes)) for of in (ours, theirs)]
            assert passes[0].bytes < passes[1].bytes and passes[0].launches < passes[1].launches
        assert work.launches[0] < eager.launches[0]


@pytest.mark.parametrize(
    ("words", "size"),
    [
        (("tiny", "--mesh.tp", "2"), 8),
        (("tiny", "--mesh.cp", "2"), 4),
        (("tiny", "--mesh.ep", "2", "--mesh.dp-replicate", "2"), 8),
        (("tiny", "--mesh.pp", "2", "--train.grad-accum", "4", "--train.tokens-per-step", "0"), 4),
    ],
)
def test_every_mesh_has_a_step(words: tuple[str, ...], size: int) -> None:
    step = step_work(config_of(*words, size=size), size, "H100")
    found = predict(step, gpu("H100"), Rates())
    assert found.step_s > 0 and sum(found.parts.values()) == pytest.approx(found.step_s)
    assert found.tokens_per_s == pytest.approx(step.tokens / found.step_s)
    kinds = {block.kind[0] for block in step.blocks}
    assert {"A", "E", "M", "R"} <= kinds


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_has_a_step(schedule: str) -> None:
    words = ["--model.depth", "8", "--mesh.pp", "2", "--mesh.pp-schedule", schedule]
    words += ["--train.tokens-per-step", "0", "--train.grad-accum", "8"]
    found = predicted(config_of("dense_110m", *words, size=2), 2, gpu("H100"))
    bubble = found.parts.get("bubble", 0.0)
    assert bubble < found.step_s / 3
    never = bubble < 1e-12 * found.step_s  # a difference of sums
    assert never == (schedule == "dualpipe"), "two ranks that do the same never wait"


def test_a_faster_gpu_is_faster() -> None:
    step = step_work(config_of("dense_110m", size=8), 8, "H100")
    times = [predict(step, gpu(name), Rates()).step_s for name in ("A100-40GB", "H100", "B200")]
    assert times == sorted(times, reverse=True)


def test_recomputation_takes_time() -> None:
    plain = step_work(config_of("dense_110m", "--recompute.ablock", "none"), 1, "H100")
    again = step_work(config_of("dense_110m", "--recompute.ablock", "full"), 1, "H100")
    times = [predict(step, gpu("H100"), Rates()).step_s for step in (plain, again)]
    assert times[0] < times[1]


def test_the_command_prints_a_budget(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["speed", "dense_110m", "--world", "8", "--gpu", "H200", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    found = content["predicted"]
    assert found["step_s"] == pytest.approx(sum(found["parts_s"].values()))
    assert found["step_s_range"][0] < found["step_s"] < found["step_s_range"][1]
    assert found["tokens_per_s_per_gpu"] > 0 and 0 < found["mfu"] < 1
    assert main(["speed", "dense_110m", "--world", "8"]) == 0
    text = capsys.readouterr().out
    assert "dense_110m on 8 GPUs (H100), predicted, not measured:" in text and "MFU" in text
    assert main(["speed", "dense_110m", "--gpu", "H1000"]) == 2
    assert "error: gpu=H1000: no such GPU is known" in capsys.readouterr().err


def test_the_host_takes_launch_us_for_each_launch_of_a_small_block(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The launches of a step fill the time of blocks that are bound by the host."""
    shown = {}
    for accum in (1, 2):
        words = ["--train.grad-accum", str(accum), "--json"]
        assert main(["speed", "tiny", "--gpu", "H100", *words]) == 0
        shown[accum] = json.loads(capsys.readouterr().out)["predicted"]
    launches, ms = shown[1]["launches"], shown[1]["blocks_s"]
    for kind in "AEM":  # an R block waits for its recurrence
        assert ms[kind] == pytest.approx(launches[kind] * gpu("H100").launch_us * 1e-6, rel=0.02)
    assert shown[2]["launches"] == {kind: 2 * count for kind, count in launches.items()}


def test_hardware_is_listed_with_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hardware", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["H100"]["sms"] == {"value": 132, "unit": "", "source": "vendor data sheet"}
    assert main(["hardware"]) == 0
    assert "A100-80GB-PCIe" in capsys.readouterr().out


def test_a_plan_is_ordered_by_predicted_speed(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "dense_110m", "--world", "8", "--memory", "80GiB", "--gpu", "H100"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["candidates"]
    speeds = [one["predicted"]["tokens_per_s_per_gpu"] for one in found]
    assert speeds == sorted(speeds, reverse=True) and len(set(speeds)) > 1
    words += ["--price", "2", "--tokens", "1000000000"]
    assert main([*words, "--explain", "--top", "3"]) == 0
    text = capsys.readouterr().out
    assert "tok/s/GPU" in text and "#1 before #2:" in text and "ms shorter" in text
    assert "keeps that order" in " ".join(text.split()) or "the order changes with" in text
    hours = 1e9 / found[0]["predicted"]["tokens_per_s_per_gpu"] / 8 / 3600
    assert f"1,000,000,000 tokens take {hours:.1f} hours" in text
    assert f"cost {16 * hours:.1f} (" in " ".join(text.split())


def test_what_is_auto_is_timed_as_on_a_gpu() -> None:
    """A plan, which says no device, counts the kernels that the run will take there."""
    config = parse_run(["dense_110m"], 8).config
    assert config.train.device == config.kernels.rms_norm == "auto"
    found = step_work(config, 8, "H100")
    assert found == step_work(as_run(config, "cuda", narrow=True), 8, "H100")
    plain = replace(config.kernels, attention="torch", rms_norm="torch", cross_entropy="torch")
    by_torch = step_work(replace(config, kernels=plain), 8, "H100")
    both = zip(found.blocks, by_torch.blocks, strict=True)
    assert all(sum(a.launches) < sum(b.launches) for a, b in both if a.kind in "AF")


def test_what_is_made_once_for_all_layers_is_no_launch_of_each() -> None:
    """FlexAttention's blocks of a mask, under context parallelism."""
    blocks = [
        step_work(parse_run(["dense_110m", "--mesh.cp", degree], 8).config, 8, "H100").blocks[1]
        for degree in "12"
    ]
    assert 0 < blocks[1].launches[0] - blocks[0].launches[0] < 5


@pytest.mark.parametrize("row", [1024, 8192])
def test_a_compiled_block_runs_no_more_again_than_its_forward(row: int) -> None:
    """Attention in it is causal, however many documents a row may have."""
    config = config_of("dense_110m", "--data.seq-len", str(row), "--train.compile", "inductor")
    recompute = replace(config.recompute, activation_memory_budget=0.0)
    step = step_work(replace(config, recompute=recompute), 1, "H100")
    block = next(one for one in step.blocks if one.kind == "A")
    ahead = [op for op in block.forward if isinstance(op, Product)]
    again = sum(op.flops for op in block.backward if isinstance(op, Product))
    again -= 2 * sum(op.flops for op in ahead)
    attended = sum(op.flops for op in block.forward if isinstance(op, Attend))
    assert 0 < again - attended < sum(op.flops for op in ahead)


def test_experts_are_padded_only_where_a_step_is_shorter() -> None:
    """A plan by speed has candidates with fewer waits and more rows, and stays in order."""
    config = config_of("moe_small", size=4)
    fixed = dict.fromkeys(["mesh.pp", "mesh.cp", "mesh.tp", "mesh.dp_replicate"])
    for given in (fixed, fixed | {"mesh.ep": 2}):
        one = replace(config, mesh=replace(config.mesh, ep=2)) if "mesh.ep" in given else config
        asked = Asked(one, one, given, 4, 140 << 30, 1 << 17)
        plan, times = by_speed(asked, gpu("H100"), 3)
        assert [t.step_s for t in times] == sorted(t.step_s for t in times)
        for found, time in zip(plan.candidates, times, strict=True):
            if found.config.mesh.ep_dispatch == "padded":
                mesh = replace(found.config.mesh, ep_dispatch="per_rank")
                other = replace(found.config, mesh=mesh)
                assert predicted(other, 4, gpu("H100")).step_s >= time.step_s


def test_every_configuration_is_timed_before_memory_prunes_any() -> None:
    config = config_of("dense_110m", "--data.seq-len", "1024", size=4)
    given = ["mesh.pp", "mesh.cp"]
    asked = Asked(config, config, dict.fromkeys(given), 4, 60 << 30, 1 << 16)
    machine = gpu("H100")
    plan, times = by_speed(asked, machine, 3)
    mesh = [m for m in meshes(config, 4, given) if mesh_is_legal(config, m, 4)]
    all_ = [
        with_knobs(config, one, rows, asked.tokens, policy)
        for one in mesh
        for rows in row_choices(config, one, asked.tokens)
        for policy in policies(config)
    ]
    seconds = sorted(predicted(one, 4, machine).step_s for one in all_)  # all of them fit
    assert [time.step_s for time in times] == pytest.approx(seconds[:3])
    assert plan.considered == len(all_) + sum(
        plan.out[reason] for reason in ("indivisible", "mesh", "pipeline")
    )
    for one in all_:
        work = step_work(one, 4, machine.generation, least=True)
        assert least_seconds(work, machine, Rates()) <= predicted(one, 4, machine).step_s * 1.0001


def test_a_sweep_compares_sizes_of_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "dense_110m", "--memory", "80GiB", "--gpu", "H100", "--sweep", "gpus=1..4"]
    words += ["--mesh.tp", "1", "--mesh.cp", "1", "--mesh.pp", "1"]
    assert main([*words, "--json", "--price", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["world"] for one in found] == [1, 2, 4]
    speeds = [one["tokens_per_s"] for one in found]
    assert speeds == sorted(speeds) and speeds[2] < 4 * speeds[0] * 1.001
    assert found[0]["cost_per_1e9_tokens"] == pytest.approx(2e9 / speeds[0] / 3600)
    assert main(words) == 0
    assert "not modelled:" in capsys.readouterr().out
    assert main([*words[:-6], "--sweep", "8-16"]) == 2
    assert "error: sweep=8-16: must be gpus=FIRST..LAST" in capsys.readouterr().err
