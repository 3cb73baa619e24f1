"""Mamba-3 scans and layers against upstream's references, token by token and in chunks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from megacpp.blocks.mamba3.config import Mamba3Config
from megacpp.blocks.mamba3.descriptor import MAMBA3
from megacpp.blocks.mamba3.module import Mamba3
from megacpp.config.schema import ModelConfig
from megacpp.kernels.backend import Kernels, set_kernels
from megacpp.kernels.mamba3.chunks import mamba3_chunked
from megacpp.kernels.mamba3.inputs import HeadWeights, Mamba3State, Pairing, ScanInputs
from megacpp.kernels.mamba3.reference import mamba3_sequential
from megacpp.model.documents import Documents
from megacpp.model.upstream import from_upstream, to_upstream
from tests.golden.harness import GoldenFile

KNOWN = ("mamba3_*.safetensors",)
SKIP = ("mamba3_*_cp*.safetensors",)

Form = Callable[..., tuple[Tensor, Mamba3State]]
Scan = Callable[[ScanInputs, Documents, Mamba3State | None], tuple[Tensor, Mamba3State]]

SCALED = {"MIMO_V": "mimo_x", "MIMO_Z": "mimo_z", "MIMO_Out": "mimo_o", "norm_weight": "norm"}
STATE = ("angle", "ssm", "k", "v")


def check(golden: GoldenFile) -> None:
    check_layer(golden) if "u" in golden else check_scan(golden)


def uneven_chunk(tokens: int) -> int:
    """The smallest chunk above 3 that doesn't divide the row."""
    return next(c for c in range(4, tokens + 4) if tokens % c)


def documents(golden: GoldenFile, rows: int, tokens: int) -> Documents:
    return golden.documents() or Documents.rows(rows, tokens, golden.device)


def check_scan(golden: GoldenFile, forms: Iterable[Form] = ()) -> None:
    """Both forms; packed files with states also one document at a time, where states show."""
    state_per_document = "cu_seqlens" in golden and bool(golden.names("final_"))
    for form in forms or (token_by_token, in_chunks):
        if not (state_per_document and golden.names("init_")):
            run_scan(golden, form, alone=False, states=not state_per_document)
        if state_per_document:
            run_scan(golden, form, alone=True, states=True)


def in_chunks(
    pairing: Pairing,
    inputs: ScanInputs,
    weights: HeadWeights,
    docs: Documents,
    initial: Mamba3State | None = None,
) -> tuple[Tensor, Mamba3State]:
    chunk = uneven_chunk(inputs.V.shape[1])
    return mamba3_chunked(inputs, weights, docs, pairing, chunk, initial)


def scan_documents(
    scan: Scan, inputs: ScanInputs, docs: Documents, initial: Mamba3State | None = None
) -> tuple[Tensor, Mamba3State]:
    """Call a scan once per document, with an initial and a final state of each, in row order."""
    T, boundaries = docs.ids_BT.shape[1], docs.cu_seqlens.tolist()
    ys, finals = [], []
    for i, (start, end) in enumerate(pairwise(boundaries)):
        row, first = divmod(start, T)
        part = inputs.part(slice(row, row + 1), slice(first, first + end - start))
        whole = Documents.rows(1, end - start, docs.ids_BT.device)
        y, final = scan(part, whole, initial and initial.rows(slice(i, i + 1)))
        ys.append(y)
        finals.append(final)
    return torch.cat(ys, 1).view(inputs.V.shape), Mamba3State.joined(finals, torch.cat)


def run_scan(
    golden: GoldenFile,
    form: Form,
    alone: bool,
    states: bool,
) -> None:
    leaves = {
        name: golden.input(name, grad=True) for name in golden.names() if f"grad_{name}" in golden
    }
    mimo = leaves["Q"].ndim == 5
    inputs, weights, initial = arguments(leaves, mimo)
    docs = documents(golden, *inputs.V.shape[:2])
    pairing: Pairing = "half" if mimo else "interleaved"

    def scan(i: ScanInputs, d: Documents, s: Mamba3State | None) -> tuple[Tensor, Mamba3State]:
        return form(pairing, i, weights, d, s)

    out, state = (partial(scan_documents, scan) if alone else scan)(inputs, docs, initial)
    golden.expect("out", out)
    loss = (out * golden.input("d_out")).sum()
    if states:
        loss = loss + compare_states(golden, state)
    loss.backward()
    for name, leaf in leaves.items():
        golden.expect(f"grad_{name}", leaf.grad)


def arguments(
    leaves: dict[str, Tensor], mimo: bool
) -> tuple[ScanInputs, HeadWeights, Mamba3State | None]:
    """The file's tensors as our arguments: SISO files have no rank axis."""
    bias = {n: leaves[n] if mimo else leaves[n].unsqueeze(1) for n in ("Q_bias", "K_bias")}
    scaled = {ours: leaves[name] for name, ours in SCALED.items() if name in leaves}
    weights = HeadWeights(D=leaves["D"], **bias, **scaled)  # type: ignore[arg-type]
    qk = {n: leaves[n] if mimo else leaves[n].unsqueeze(2) for n in ("Q", "K")}
    others = {n: leaves[n] for n in ("V", "ADT", "DT", "Trap", "Angles")}
    inputs = ScanInputs(**qk, **others, Z=leaves.get("Z"))
    if "init_ssm" not in leaves:
        return inputs, weights, None
    angle, ssm, k, v = (leaves[f"init_{name}"] for name in STATE)
    return inputs, weights, Mamba3State(angle, ssm, k if mimo else k.unsqueeze(2), v)


def compare_states(golden: GoldenFile, state: Mamba3State) -> Tensor:
    """Compares final states; returns their part of the loss."""
    total = state.ssm.new_zeros(())
    for name in STATE:
        if f"final_{name}" not in golden:
            continue
        got = getattr(state, name)
        want = golden.input(f"final_{name}")
        if name == "angle":  # equal modulo a turn
            got = want + torch.remainder(got - want + math.pi, 2 * math.pi) - math.pi
        got = got.view_as(want)
        golden.expect(f"final_{name}", got)
        if f"d_final_{name}" in golden:
            total = total + (got * golden.input(f"d_final_{name}")).sum()
    return total


def check_layer(
    golden: GoldenFile, backends: tuple[str, ...] = ("reference", "torch"), chunk: int = 0
) -> None:
    for backend in backends:
        u_BTD = golden.input("u", grad=True)
        layer = build_layer(golden, chunk or uneven_chunk(u_BTD.shape[1]))
        set_kernels(layer, Kernels(mamba3=backend))
        y_BTD = layer(u_BTD, documents(golden, *u_BTD.shape[:2]))
        golden.expect("y", y_BTD)
        (y_BTD * golden.input("d_out")).sum().backward()
        golden.expect("grad.u", u_BTD.grad)
        grads = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
        for name, grad in to_upstream(MAMBA3, grads, layer.config).items():
            golden.expect(f"grad.{name}", grad)


def token_by_token(
    pairing: Pairing,
    inputs: ScanInputs,
    weights: HeadWeights,
    docs: Documents,
    initial: Mamba3State | None = None,
) -> tuple[Tensor, Mamba3State]:
    return mamba3_sequential(inputs, weights, docs, pairing, initial)


def build_layer(golden: GoldenFile, chunk: int) -> Mamba3:
    c = golden.config
    mamba = Mamba3Config(
        d_state=c["d_state"],
        expand=c["expand"],
        headdim=c["headdim"],
        ngroups=c["ngroups"],
        mimo_rank=c["mimo_rank"] if c["is_mimo"] else 1,
        rope_fraction=c["rope_fraction"],
        a_activation="heavy_tail" if c["A_activation"].startswith("heavy_tail") else "softplus",
        a_floor=c["A_floor"],
        out_norm=c["is_outproj_norm"],
        chunk_size=chunk,
    )
    config = ModelConfig(dim=c["d_model"], norm_eps=1e-5, mamba3=mamba)
    layer = Mamba3(config).to(golden.dtype)
    stored = {n.removeprefix("param."): golden.input(n) for n in golden.names("param.")}
    layer.load_state_dict(from_upstream(MAMBA3, stored, config))
    return layer
