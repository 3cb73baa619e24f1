"""Linear layers that may compute in FP8, and settings that FP8 excludes; no torch here.

FP8 multiplies numbers of 8 bits, each tensor or row scaled to their range first. The scale is
computed from the operands, so a recomputation finds the same one. But Transformer Engine's layers
compute in FP8 only inside of its context, which a forward has and a recomputation in the backward
doesn't: it would compute in bf16, and its gradients would belong to no forward, unless it is
Transformer Engine's own recomputation (checkpointing/fp8.py).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence

from megacpp.blocks.kinds import KINDS as BLOCK_KINDS
from megacpp.config.checks.mesh import batch_ranks
from megacpp.config.schema import Config, ModelConfig, PrecisionConfig
from megacpp.errors import ConfigError, config_error
from megacpp.model.pattern import block_letters
from megacpp.model.regions import Region, layer_regions

MULTIPLE = 16  # of both dims of a weight, and of the tokens where they are summed over in FP8
KINDS = "".join(sorted(BLOCK_KINDS))  # all have something for FP8
TE_KINDS = "AF"  # those that Transformer Engine takes
# Regions of which FP8 layers are a part, and the setting that runs them again.
AGAIN: dict[tuple[str, Region], str] = {
    ("E", "expert_gemm"): "eblock",
    ("E", "mlp"): "mlp",
    ("F", "mlp"): "mlp",
}
PACKAGES = {"torchao": "torchao", "te": "transformer_engine"}


def fp8_layers(model: ModelConfig) -> dict[str, dict[str, tuple[int, int]]]:
    """Rows and columns of the linear layers that FP8 is for, by letter and name.

    Projections of attention and feed-forwards, shared experts, and the wide projections of
    recurrent mixers; never routers, norms, latents, or what a recurrence reads its steps from.
    """
    return {
        letter: {
            name.removesuffix(".weight"): (shape[0], shape[1])
            for name, shape, row in kind.shapes(model)
            if row.fp8
        }
        for letter, kind in BLOCK_KINDS.items()
    }


def fp8_experts(model: ModelConfig) -> bool:
    """Return whether the routed experts of E blocks can multiply in FP8."""
    return divides(model.moe.hidden_dim, model.dim)


def divides(rows: int, columns: int) -> bool:
    """Return whether both dims are multiples of 16, as the hardware's FP8 products need them."""
    return rows % MULTIPLE == 0 and columns % MULTIPLE == 0


def fp8_kinds(precision: PrecisionConfig) -> str:
    """Letters of `precision.fp8_layers` whose blocks have layers for FP8."""
    kinds = TE_KINDS if precision.fp8 == "te" else KINDS
    return "".join(k for k in kinds if k in precision.fp8_layers)


def fp8_wanted(config: Config) -> list[int]:
    """Layers of these kinds, away from the ends, whether or not their dims allow FP8."""
    model, precision = config.model, config.precision
    if precision.fp8 == "off":
        return []
    letters, ends, kinds = _letters(model), precision.fp8_ends, fp8_kinds(precision)
    return [i for i in range(ends, model.depth - ends) if letters[i] in kinds]


def fp8_blocks(config: Config) -> list[int]:
    """Return the layers with linear layers or experts in FP8."""
    if config.precision.fp8 == "off":
        return []
    model = config.model
    letters, shapes = _letters(model), fp8_layers(model)
    able = {k for k in KINDS if any(divides(*shape) for shape in shapes[k].values())}
    if fp8_experts(model):
        able.add("E")
    return [i for i in fp8_wanted(config) if letters[i] in able]


def fp8_weights(config: Config) -> dict[int, frozenset[str]]:
    """Return the names in the mixer of linear layers, and `experts`, in FP8, by layer."""
    if config.precision.fp8 == "off":
        return {}
    shapes, letters = fp8_layers(config.model), _letters(config.model)
    experts = {"experts"} if fp8_experts(config.model) else set()
    return {
        i: frozenset(
            {name for name, shape in shapes[letters[i]].items() if divides(*shape)}
            | (experts if letters[i] == "E" else set())
        )
        for i in fp8_blocks(config)
    }


def fp8_line(config: Config) -> list[str]:
    """Return a line that names the layers in FP8, for the header; none without such layers."""
    precision, found = config.precision, fp8_blocks(config)
    if not found:
        return []
    by = "te" if precision.fp8 == "te" else f"{precision.fp8}, {precision.fp8_recipe}"
    gathered = ", gathered in it" if precision.fp8_all_gather else ""
    return [f"FP8: layers {_ranges(found)} of {config.model.depth} ({by}){gathered}"]


def _ranges(layers: Sequence[int]) -> str:
    """Layer numbers as text such as `2, 4-7`."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def fp8_letters(config: Config) -> frozenset[str]:
    """Return the kinds of block with linear layers or experts in FP8."""
    letters = _letters(config.model)
    return frozenset(letters[layer] for layer in fp8_blocks(config))


def _letters(model: ModelConfig) -> Sequence[str]:
    return block_letters(model.pattern, model.depth)


def fp8_rules(config: Config) -> Iterator[ConfigError]:
    """Yield broken rules of `precision.fp8`."""
    fp8 = config.precision.fp8
    if fp8 == "off":
        return
    yield from _layers(config)
    if importlib.util.find_spec(PACKAGES[fp8]) is None:
        package = PACKAGES[fp8].replace("_", "-")
        wanted = "'transformer-engine[pytorch]'" if fp8 == "te" else package
        yield config_error(
            "precision.fp8",
            fp8,
            f"needs {package}, which isn't installed",
            f"pip install {wanted}, or use precision.fp8=off",
        )
    yield from _numbers(config)
    yield from _mesh(config)
    yield from _recompute(config)


def _layers(config: Config) -> Iterator[ConfigError]:
    """Yield broken rules of `precision.fp8_layers` and of the recipe."""
    precision, fp8 = config.precision, config.precision.fp8
    unknown = set(precision.fp8_layers) - set(KINDS)
    if unknown or not precision.fp8_layers:
        yield config_error(
            "precision.fp8_layers",
            precision.fp8_layers,
            f"names kinds of block by their letters, {KINDS} (mixers of M and R are slower in FP8)",
            "use precision.fp8_layers=AFE",
        )
    elif not fp8_blocks(config):
        yield config_error(
            "precision.fp8",
            fp8,
            f"no layer of kinds {fp8_kinds(precision) or 'none'} between the first and last "
            f"{precision.fp8_ends} of {config.model.depth} has weights with dims that are "
            f"multiples of {MULTIPLE}",
            "use precision.fp8=off, such dims, precision.fp8_ends=0, or other precision.fp8_layers",
        )
    if fp8 == "te" and precision.fp8_recipe != "rowwise_with_gw_hp":
        yield config_error(
            "precision.fp8_recipe",
            precision.fp8_recipe,
            "is torchao's; Transformer Engine has one scale for each tensor (current scaling)",
            "use precision.fp8=torchao, or leave precision.fp8_recipe alone",
        )
    if fp8 == "torchao" and "E" in precision.fp8_layers and config.kernels.experts == "reference":
        yield config_error(
            "kernels.experts",
            config.kernels.experts,
            "multiplies experts in bf16, which precision.fp8_layers wants in FP8",
            "use kernels.experts=auto, or precision.fp8_layers=AF",
        )
    if precision.fp8_all_gather:
        yield from _all_gather(config)


def _all_gather(config: Config) -> Iterator[ConfigError]:
    """Yield an error if an FP8 gather would send shards without one scale of the whole weight."""
    precision, key = config.precision, "precision.fp8_all_gather"
    if precision.fp8 != "torchao" or precision.fp8_recipe != "tensorwise":
        yield config_error(
            key,
            True,
            "needs one scale of a whole weight: what a rank holds of a row or column has no scale "
            f"of its own (precision.fp8={precision.fp8}, fp8_recipe={precision.fp8_recipe})",
            "use precision.fp8=torchao with precision.fp8_recipe=tensorwise, or false",
        )


def _numbers(config: Config) -> Iterator[ConfigError]:
    """Yield broken rules of dtypes and sizes."""
    precision, train, fp8 = config.precision, config.train, config.precision.fp8
    if fp8 == "te" and train.device == "cpu":
        yield config_error(
            "precision.fp8", fp8, "runs on a GPU alone", "use precision.fp8=torchao, or off"
        )
    emulated = fp8 == "torchao" and train.device == "cpu"
    if precision.dtype in ("fp16", "fp64") or (precision.dtype == "fp32" and not emulated):
        yield config_error(
            "precision.fp8",
            fp8,
            f"multiplies what is in bf16 otherwise (precision.dtype={precision.dtype})",
            "use precision.dtype=bf16, or precision.fp8=off",
        )
    tokens = train.device_batch_size * config.data.seq_len
    if fp8 == "te" and tokens % MULTIPLE:
        yield config_error(
            "precision.fp8",
            fp8,
            f"tokens of a microbatch must be a multiple of {MULTIPLE} (device_batch_size * seq_len "
            f"= {tokens})",
            "use such a data.seq_len, or precision.fp8=torchao",
        )
    if config.recompute.compress:
        yield config_error(
            "recompute.compress",
            config.recompute.compress,
            f"replaces the same linear layers as precision.fp8={fp8}",
            "use recompute.compress=0, or precision.fp8=off",
        )


def _mesh(config: Config) -> Iterator[ConfigError]:
    """Yield meshes on which a scale would depend on how a tensor is sharded."""
    fp8, mesh = config.precision.fp8, config.mesh
    if mesh.tp > 1:
        yield from _tensor_parallel(config)
    if (
        mesh.ep > 1
        and fp8 == "torchao"
        and "E" in fp8_letters(config)
        and fp8_experts(config.model)
    ):
        yield from _weighed_later(config)
    if fp8 != "te":
        return
    for axis in ("pp", "cp", "ep"):
        if getattr(mesh, axis) > 1:
            yield config_error(
                f"mesh.{axis}",
                getattr(mesh, axis),
                "Transformer Engine's context and recomputation are around whole models and rows: "
                "only data axes are written for it",
                f"use mesh.{axis}=1, or precision.fp8=torchao",
            )


def _tensor_parallel(config: Config) -> Iterator[ConfigError]:
    """Yield errors of `tp` for what scales that its ranks agree on can't do."""
    precision, tp = config.precision, config.mesh.tp
    if precision.fp8 == "te":
        yield config_error(
            "mesh.tp",
            tp,
            "each rank would scale its part of a row by itself (precision.fp8=te), so the loss "
            "would depend on the mesh",
            "use mesh.tp=1, or precision.fp8=torchao",
        )
        return
    if precision.fp8_all_gather:
        yield config_error(
            "precision.fp8_all_gather",
            True,
            f"gathers whole weights, of which a rank of mesh.tp={tp} has a part",
            "use precision.fp8_all_gather=false, or mesh.tp=1",
        )
    for letter in sorted(fp8_letters(config)):
        for name, shape, row in BLOCK_KINDS[letter].shapes(config.model):
            dim = row.dim_on("tp")
            if row.fp8 and dim is not None and divides(*shape) and shape[dim] // tp % MULTIPLE:
                yield config_error(
                    "mesh.tp",
                    tp,
                    f"leaves {shape[dim] // tp} of {shape[dim]} {('rows', 'columns')[dim]} of "
                    f"{letter} {name} on a rank; FP8 takes multiples of {MULTIPLE}",
                    "use a smaller mesh.tp, or precision.fp8_layers without this kind",
                )
                return


def fp8_mesh_rules(config: Config, world_size: int) -> Iterator[ConfigError]:
    """Yield broken rules of a resolved configuration on a legal mesh."""
    precision, mesh = config.precision, config.mesh
    if precision.fp8 == "off":
        return
    parts = batch_ranks(mesh, world_size) * mesh.cp * config.train.grad_accum
    if parts > 1 and local_scales(precision) and not precision.fp8_local_scales:
        te = precision.fp8 == "te"
        key, value = ("fp8", "te") if te else ("fp8_recipe", precision.fp8_recipe)
        other = "fp8=torchao" if te else "fp8_recipe=rowwise_with_gw_hp"
        if precision.fp8_all_gather and not te:  # which rows with scales of their own exclude
            other += " with precision.fp8_all_gather=false"
        yield config_error(
            f"precision.{key}",
            value,
            "takes a scale from all tokens of a rank's microbatch, and a step has "
            f"{parts} of these, so the loss would depend on the mesh",
            f"use precision.{other}, or agree to that with precision.fp8_local_scales=true",
        )
    if precision.fp8_all_gather:
        yield from _whole_rows(config)


def _whole_rows(config: Config) -> Iterator[ConfigError]:
    """Yield an error if FSDP2's FP8 gather would get shards with unequal numbers of rows.

    FSDP2 gathers a rank's FP8 rows unpadded: torch 2.13 pads its own gathers, but not the tensors
    that `fsdp_pre_all_gather` returns.
    """
    mesh = config.mesh
    shards = mesh.dp_shard * mesh.cp
    shards = shards if shards > 1 else mesh.dp_replicate  # replicas take the place of shards
    layers = fp8_layers(config.model)
    rows = {
        f"{letter} {name}": shape[0]
        for letter in sorted(fp8_letters(config))
        for name, shape in layers[letter].items()
        if divides(*shape) and shape[0] % shards
    }
    if rows:
        name, odd = next(iter(rows.items()))
        yield config_error(
            "precision.fp8_all_gather",
            True,
            f"needs weights with as many rows on each of {shards} shards ({name} has {odd} rows)",
            "use precision.fp8_all_gather=false, or a mesh.dp_shard that divides them",
        )


def local_scales(precision: PrecisionConfig) -> bool:
    """Return whether a scale is computed over all tokens that a rank computes at once."""
    return precision.fp8 == "te" or (
        precision.fp8 == "torchao" and precision.fp8_recipe != "rowwise_with_gw_hp"
    )


def _weighed_later(config: Config) -> Iterator[ConfigError]:
    """Yield an error if `ep` would change whether hidden units are weighed before rounding."""
    why = (
        "weighs outputs of experts on their tokens' rank; one rank alone weighs hidden units, "
        "before they are rounded to FP8, so the loss would depend on the mesh "
        f"(mesh.ep={config.mesh.ep}, precision.fp8=torchao)"
    )
    if config.mesh.ep_dispatch == "padded":
        return  # the weights travel with the tokens
    if config.model.moe.capacity_factor is not None:
        key, value = "model.moe.capacity_factor", config.model.moe.capacity_factor
        fix = "use mesh.ep_dispatch=padded, leave it out, or use precision.fp8_layers=AF"
        yield config_error(key, value, why, fix)
    elif config.mesh.ep_dispatch == "per_expert":
        fix = "use mesh.ep_dispatch=per_rank, or precision.fp8_layers=AF"
        yield config_error("mesh.ep_dispatch", "per_expert", why, fix)


def _recompute(config: Config) -> Iterator[ConfigError]:
    """Yield recompute policies under which an FP8 layer finds other scales or no FP8 context."""
    fp8, policy, layers = config.precision.fp8, config.recompute, fp8_blocks(config)
    if config.train.compile != "off":  # the policy is not used then
        if fp8 == "te":
            yield config_error(
                "train.compile",
                config.train.compile,
                "the compiler would run Transformer Engine's FP8 layers again outside of their "
                "context, in bf16",
                "use train.compile=off, or precision.fp8=torchao",
            )
        return
    letters = block_letters(config.model.pattern, config.model.depth)
    regions = layer_regions(policy, config.model)
    found = {(letters[layer], region) for layer in layers for region in regions[layer]}
    whole = sorted({letter for letter, region in found if region == "block"})
    key = f"recompute.{whole[0].lower()}block" if whole else ""
    if fp8 == "te" and whole and policy.fp8_wrapper == "torchao":
        yield config_error(
            "recompute.fp8_wrapper",
            policy.fp8_wrapper,
            f"{key}=full runs FP8 blocks again, and any recomputation but Transformer Engine's own "
            "does so outside of their context, in bf16: other numbers, wrong gradients",
            "use recompute.fp8_wrapper=te_checkpoint",
        )
    if fp8 == "te" and ("F", "mlp") in found:
        yield config_error(
            "recompute.mlp",
            True,
            "runs w1 and w3 of F blocks again outside of Transformer Engine's context, in bf16",
            "use recompute.fblock=full with recompute.fp8_wrapper=te_checkpoint",
        )
    parts = [
        f"recompute.{key}" for (_, region), key in sorted(AGAIN.items()) if (_, region) in found
    ]
    again = whole or parts
    if fp8 == "torchao" and again and policy.fp8_wrapper == "te_checkpoint":
        yield config_error(
            "recompute.fp8_wrapper",
            policy.fp8_wrapper,
            f"{key or parts[0]} runs layers of torchao again, which Transformer Engine's "
            "recomputation doesn't know; their scales need none of it",
            "use recompute.fp8_wrapper=torchao",
        )
