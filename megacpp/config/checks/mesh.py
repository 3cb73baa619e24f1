"""Rules between a mesh and the model on it; no torch import here.

One line an axis. A message that names another degree names the nearest one that breaks no rule of
this mesh and model; where there is none, it names what else would do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations, product

from megacpp.blocks.features import FEATURES, mixer_letters
from megacpp.blocks.kinds import KINDS
from megacpp.config.checks.broken import Broken
from megacpp.config.environment import MOST_RANKS
from megacpp.config.schema import Config, MeshConfig, ModelConfig
from megacpp.errors import ConfigError, config_error
from megacpp.model.primes import divisors

AXES = ("pp", "dp_replicate", "cp", "tp", "ep")
DENSE = ("tp", "cp", "pp", "dp_replicate")  # with dp_shard, what makes the world


def mesh_rules(config: Config, world_size: int) -> Iterator[ConfigError]:
    """Yield every broken rule; those between mesh and model only once the axes make a mesh."""
    for broken in _broken(config, world_size):
        near = _nearest_legal(config, world_size, broken.axes)
        if not near and not broken.otherwise:
            near = _fewer_axes(config, world_size)
        mends = 0 < broken.ranks <= MOST_RANKS and first_broken(config, broken.ranks) is None
        more = f"start {broken.ranks} ranks" if mends else ""
        fix = ", or ".join(part for part in (near, broken.otherwise, more) if part)
        yield config_error(f"mesh.{broken.key}", broken.value, broken.rule, fix)


def first_broken(config: Config, world_size: int) -> Broken | None:
    """Return the first broken rule, without a search for its fix."""
    return next(_broken(config, world_size), None)


def _broken(config: Config, world_size: int) -> Iterator[Broken]:
    axes = list(_axes(config.mesh, world_size))
    yield from axes
    if axes:
        return
    try:
        letters = mixer_letters(config.model)
    except ConfigError:
        return  # reported by the rules of the model
    mesh = resolve_mesh(config.mesh, world_size)
    yield from _tensor(config, mesh, letters)
    yield from _context(config, mesh, letters)
    for kind in KINDS.values():
        yield from kind.mesh_rules(config, mesh, letters)


def _nearest_legal(config: Config, world_size: int, axes: tuple[str, ...]) -> str:
    """Return `use mesh.AXIS=N` with the legal degree closest to the wanted one, or nothing."""
    for axis in axes:
        wanted = getattr(config.mesh, axis)
        for degree in sorted(divisors(world_size), key=lambda d: (abs(d - wanted), d)):
            other = replace(config, mesh=replace(config.mesh, **{axis: degree}))
            if degree != wanted and next(_broken(other, world_size), None) is None:
                return f"use mesh.{axis}={degree}"
    return ""


def _fewer_axes(config: Config, world_size: int) -> str:
    """Return the fewest smaller degrees that make a legal mesh, `dp_shard` filling the world."""
    mesh, rest = config.mesh, {} if config.mesh.dp_shard == -1 else {"dp_shard": -1}
    smaller = {
        axis: [d for d in range(degree - 1, 0, -1) if degree % d == 0]
        for axis in AXES
        if (degree := getattr(mesh, axis)) > 1
    }
    for axes in chain.from_iterable(combinations(smaller, n) for n in range(len(smaller) + 1)):
        for degrees in product(*(smaller[axis] for axis in axes)):
            fewer = dict(zip(axes, degrees, strict=True)) | rest
            other = replace(config, mesh=replace(mesh, **fewer))
            if first_broken(other, world_size) is None:
                return "use " + " ".join(f"mesh.{axis}={degree}" for axis, degree in fewer.items())
    raise AssertionError("data parallelism alone is legal")


def resolve_mesh(mesh: MeshConfig, world_size: int) -> MeshConfig:
    """Return the mesh with `dp_shard` filled in."""
    if mesh.dp_shard != -1:
        return mesh
    rest = max(1, mesh.pp * mesh.dp_replicate * mesh.cp * mesh.tp)  # a degree of 0 is refused later
    return replace(mesh, dp_shard=max(1, world_size // rest))


def batch_ranks(mesh: MeshConfig, world_size: int) -> int:
    """Ranks (or groups of them) that read different rows."""
    return mesh.dp_replicate * resolve_mesh(mesh, world_size).dp_shard


def row_chunks(mesh: MeshConfig) -> int:
    """Return the number of equal chunks into which context parallelism splits a row."""
    return mesh.cp * 2 if mesh.cp > 1 and mesh.cp_order == "head_tail" else mesh.cp


def _axes(mesh: MeshConfig, world_size: int) -> Iterator[Broken]:
    if mesh.dp_shard == 0:
        rule = "must be -1 (fill) or at least 1"
        yield Broken("dp_shard", mesh.dp_shard, rule, otherwise="use mesh.dp_shard=-1")
        return
    rest = mesh.pp * mesh.dp_replicate * mesh.cp * mesh.tp
    large = [axis for axis in DENSE if getattr(mesh, axis) > 1]
    factors = " * ".join(f"{axis}={getattr(mesh, axis)}" for axis in large)
    if mesh.dp_shard == -1 and world_size % rest:
        large.sort(key=lambda axis: -getattr(mesh, axis))
        yield Broken(
            large[0],
            getattr(mesh, large[0]),
            f"{factors if len(large) > 1 else 'it'} must divide the world ({world_size} ranks)",
            tuple(large),
            ranks=-(-world_size // rest) * rest,
        )
        return
    if mesh.dp_shard != -1 and rest * mesh.dp_shard != world_size:
        yield Broken(
            "dp_shard",
            mesh.dp_shard,
            f"makes {rest * mesh.dp_shard} ranks{' with ' if factors else ''}{factors}, "
            f"not {world_size}",
            ranks=rest * mesh.dp_shard,
        )
        return
    folded = resolve_mesh(mesh, world_size).dp_shard * mesh.cp * mesh.tp
    if folded % mesh.ep:
        rule = f"must divide dp_shard * cp * tp ({folded}), whose ranks share the experts"
        yield Broken("ep", mesh.ep, rule, ("ep",))


def tensor_dims(config: ModelConfig, letters: set[str]) -> dict[str, int]:
    """Return the sizes that `tp` must divide, by setting."""
    dims = {"model.vocab_size": config.vocab_size}
    for feature in FEATURES.values():
        dims |= feature.tensor_dims(config) if feature.present(config) else {}
    for letter, kind in KINDS.items():
        dims |= kind.tensor_dims(config) if letter in letters else {}
    return dims


def _tensor(config: Config, mesh: MeshConfig, letters: set[str]) -> Iterator[Broken]:
    """Yield the first dimension that `tp` doesn't divide."""
    if mesh.tp == 1:
        return
    for name, size in tensor_dims(config.model, letters).items():
        if size % mesh.tp:
            more = ""
            if name == "model.vocab_size":  # rows without an id, if they mend it
                rows = -(-size // mesh.tp) * mesh.tp
                grown = replace(config, model=replace(config.model, vocab_size=rows))
                if next(_tensor(grown, mesh, letters), None) is None:
                    more = f"{name}={rows}"
            yield Broken("tp", mesh.tp, f"must divide {name} ({size})", ("tp",), more)
            return
    for kind in (kind for letter, kind in KINDS.items() if letter in letters):
        for name, groups in kind.groups(config.model).items():
            if groups % mesh.tp and mesh.tp % groups:
                rule = f"must divide {name} ({groups}) or be a multiple of it"
                yield Broken("tp", mesh.tp, rule, ("tp",))
                return
    tokens = config.data.seq_len // mesh.cp
    if tokens % mesh.tp:
        rule = f"must divide data.seq_len / mesh.cp ({tokens}): sequence parallelism cuts tokens"
        yield Broken("tp", mesh.tp, rule, ("tp",))


def _context(config: Config, mesh: MeshConfig, letters: set[str]) -> Iterator[Broken]:
    if mesh.cp == 1:
        return
    chunks, model, row = row_chunks(mesh), config.model, config.data.seq_len
    if row % chunks:
        unit = chunks * mesh.tp
        rule = f"{mesh.cp_order} order cuts data.seq_len ({row}) into {chunks} chunks"
        yield Broken("cp", mesh.cp, rule, ("cp",), f"data.seq_len={-(-row // unit) * unit}")
        return
    exchanges = [k.context for letter, k in KINDS.items() if letter in letters and k.context]
    taps = [exchange.taps(model) for exchange in exchanges]
    taps += [one.taps(model) for one in FEATURES.values() if one.present(model)]
    back = max([1, *taps]) - 1
    if row // chunks < back:
        rule = f"leaves chunks of {row // chunks} tokens, a convolution looks back {back}"
        yield Broken("cp", mesh.cp, rule, ("cp",), f"data.seq_len={back * chunks} or more")
    ranks = mesh.tp * mesh.cp
    for exchange in exchanges:
        key, (name, heads) = exchange.setting, exchange.heads(model)
        if getattr(mesh, key) == "heads" and heads % ranks:
            rule = f"tp * cp ({ranks}) must divide {name} ({heads})"
            yield Broken(key, "heads", rule, otherwise=f"use mesh.{key}={exchange.otherwise}")
