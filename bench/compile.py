"""Cost of compiling one block of a kind: nodes of its graphs, CPU seconds, generated kernels.

    python bench/compile.py                       # traced alone, rows of 256, 1,024 and 4,096
    python bench/compile.py --code --tokens 4096  # and compiled by inductor for this CPU (minutes)
    python bench/compile.py M "M MIMO" --tokens 4096

Widths are narrow: neither nodes nor seconds depend on them. `trace` is Dynamo and the cut into
forward and backward, the same on any device; `code` is inductor's, which on a GPU compiles Triton
in processes of its own instead of C++. Each row is a process of its own; caches are off.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import parser_of
from megacpp.blocks.attention.config import AttentionConfig
from megacpp.blocks.dense.config import MLPConfig
from megacpp.blocks.experts.config import MoEConfig
from megacpp.blocks.hyper_connections.config import HyperConnectionConfig
from megacpp.blocks.mamba3.config import Mamba3Config
from megacpp.config.schema import Config, ModelConfig, PrecisionConfig

B, D = 2, 64
PLAIN = ModelConfig(
    dim=D,
    depth=2,
    pattern="FF",
    vocab_size=64,
    attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=16),
    mamba3=Mamba3Config(d_state=16, headdim=16),
    moe=MoEConfig(num_experts=4, top_k=2, hidden_dim=32, shared_hidden_dim=64),
    mlp=MLPConfig(hidden_dim=128),
)
LATENT = AttentionConfig(
    kind="mla",
    num_heads=4,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=16,
)


def _with(letter: str, **parts: Any) -> ModelConfig:
    return replace(PLAIN, pattern=f"{letter}F", **parts)


MIMO = replace(PLAIN.mamba3, mimo_rank=4, chunk_size=16)
KINDS: dict[str, tuple[ModelConfig, bool]] = {  # and whether rows are packed
    "A": (_with("A"), False),
    "A packed": (_with("A"), True),
    "A MLA packed": (_with("A", attention=LATENT), True),
    "F": (_with("F"), False),
    "F 4 streams": (_with("F", mhc=HyperConnectionConfig(streams=4)), False),
    "E shared expert": (_with("E"), False),
    "M": (_with("M"), False),
    "M packed": (_with("M"), True),
    "M conv packed": (_with("M", mamba3=replace(PLAIN.mamba3, conv_kernel=4)), True),
    "M MIMO": (_with("M", mamba3=MIMO), False),
    "M MIMO packed": (_with("M", mamba3=MIMO), True),
}


def main() -> None:
    """Run the benchmark from the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--tokens", nargs="+", type=int, default=[256, 1024, 4096])
    parser.add_argument("--code", action="store_true", help="by inductor too")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds of a row (default 900)")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for kind in options.kinds:
        if kind not in KINDS:
            parser.error(f"no such kind: {kind} (one of {', '.join(KINDS)})")
    if options.one:
        print(json.dumps(measure(options.kinds[0], options.tokens[0], options.code)))
        return
    columns = ("nodes forward", "nodes backward", "trace s", "code s", "kernels")
    print(f"{'kind':17}{'tokens':>8}" + "".join(f"{name:>16}" for name in columns))
    for kind in options.kinds or KINDS:
        for tokens in options.tokens:
            row = _apart(kind, tokens, options.code, options.limit)
            print(f"{kind:17}{tokens:8,}" + "".join(f"{x:>16}" for x in row), flush=True)


def _apart(kind: str, tokens: int, code: bool, limit_s: float) -> list[str]:
    words = [sys.executable, __file__, kind, "--tokens", str(tokens), "--one"]
    words += ["--code"] if code else []
    env = os.environ | {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "OMP_NUM_THREADS": "1"}
    try:
        out = subprocess.run(words, env=env, capture_output=True, timeout=limit_s, check=True)
    except subprocess.TimeoutExpired:
        return [f"over {limit_s:g} s"]
    except subprocess.CalledProcessError as error:
        return [error.stderr.decode().strip().splitlines()[-1][:70]]
    found = json.loads(out.stdout.decode().splitlines()[-1])
    return [
        *(f"{n:,}" for n in found["nodes"]),
        f"{found['trace_s']:.1f}",
        f"{found['code_s']:.1f}" if code else "",
        f"{found['kernels']}" if code else "",
    ]


def measure(kind: str, tokens: int, code: bool = False) -> dict[str, Any]:
    """Compile one block, forward and backward, in this process."""
    import torch
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor import compile_fx, metrics
    from torch._inductor import config as inductor

    from checkpointing.compile import compile_blocks
    from megacpp.model.documents import Documents
    from parallel.build import build_model
    from parallel.mesh import World

    nodes: list[int] = []
    code_s = 0.0

    def inner(graph: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal code_s
        nodes.append(len(graph.graph.nodes))
        began = cpu_s()
        made = compile_fx.compile_fx_inner(graph, inputs, *args, **kwargs)
        code_s += cpu_s() - began
        return made

    def traced(graph: Any, inputs: Any) -> Any:
        from functorch.compile import make_boxed_func

        nodes.append(len(graph.graph.nodes))
        return make_boxed_func(graph.forward)

    def by_inductor(graph: Any, inputs: Any) -> Any:
        return compile_fx.compile_fx(graph, inputs, inner_compile=inner)

    alone = aot_autograd(
        fw_compiler=traced, bw_compiler=traced, partition_fn=min_cut_rematerialization_partition
    )
    if code:
        inductor.compile_threads = 1  # in this process, whose seconds are counted
        # The compiler's own headers.
        torch.compile(lambda x: x.sin() + 1)(torch.ones(8))
    torch._dynamo.reset()
    metrics.reset()
    model, packed = KINDS[kind]
    config = Config(model=model, precision=PrecisionConfig("fp32"))
    device = torch.device("cpu")
    backend: Any = by_inductor if code else alone
    block = build_model(
        config, World(0, 1, device), lambda m: compile_blocks(m, backend, 1.0)
    ).blocks["0"]
    docs = Documents.rows(B, tokens)
    if packed:
        docs = Documents.from_ids((torch.arange(tokens) * 4 // tokens).expand(B, tokens))
    x_BTD = torch.randn(B, tokens, *model.stream_dims, requires_grad=True)
    seconds = []
    for _ in range(2):  # the first makes the graphs
        began = cpu_s()
        with torch.autocast("cpu", torch.bfloat16):
            y_BTD = block(x_BTD, docs)
        y_BTD.float().sum().backward()
        seconds.append(cpu_s() - began)
    trace_s = seconds[0] - seconds[1] - code_s
    kernels = metrics.generated_kernel_count
    return {"nodes": nodes, "trace_s": trace_s, "code_s": code_s, "kernels": kernels}


def cpu_s() -> float:
    """Return the CPU seconds of this process and its finished children."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


if __name__ == "__main__":
    main()
