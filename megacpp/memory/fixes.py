"""Find the cheapest settings that make a launch fit, each with the bytes that it saves.

No torch import here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megacpp.blocks.kinds import KINDS
from megacpp.config.arguments import flatten, replace_keys
from megacpp.config.checks.every import broken, resolve
from megacpp.config.schema import Config
from megacpp.errors import ConfigError, config_error
from megacpp.memory.budget import words
from megacpp.memory.estimate import MemoryEstimate
from megacpp.model.pattern import block_letters

Keys = dict[str, Any]
Price = Callable[[Config], MemoryEstimate]
MOST = 3
WORTH = 0.005  # of the estimate, that a change must gain to be named
LIGHT = {
    "eblock": ("expert_gemm_only",),
    "mblock": ("conv_bc_only",),
    "rblock": ("recurrence", "full_plus_norms"),
    "gblock": ("conv_gate",),
}
HEAVY = {
    "ablock": ("selective", "full"),
    "fblock": ("full",),
    "gblock": ("full",),
    "eblock": ("full",),
}


@dataclass(frozen=True)
class Fix:
    """Change of a configuration that keeps its tokens per step.

    Attributes:
        keys: dotted settings and their new values; `flags` writes them as options.
        config: the resolved configuration with these settings.
        gain_bytes: bytes that the fullest rank saves.
        fits: whether the change is enough, alone or after the changes in front of it.
    """

    keys: Keys
    config: Config
    gain_bytes: int
    fits: bool

    @property
    def flags(self) -> str:
        """Command-line options that make the change."""
        return " ".join(
            f"--{key.replace('_', '-')} {str(value).lower()}" for key, value in self.keys.items()
        )

    def __str__(self) -> str:
        return f"{self.flags} (-{words(self.gain_bytes)})"

    def as_dict(self) -> dict[str, Any]:
        """Return the settings, the gain in bytes and whether they fit, for JSON."""
        return {"keys": self.keys, "gain_bytes": self.gain_bytes, "fits": self.fits}


def levers(config: Config, size: int) -> Iterator[list[Keys]]:
    """Yield groups of settings that may be changed, least extra work first; a group is one lever.

    1. recompute without matrix products: norms, hidden units, convolutions, one recurrence
    2. the same work in other portions: fewer rows at once in more microbatches; fewer replicas,
       whose parameters are then gathered from more ranks
    3. gradients reduced, and parameters gathered, more often
    4. moments in 8 bits: no extra traffic, but the moments are rounded
    5. recompute with matrix products: core attention, whole blocks
    6. copies to the memory of the host and back
    7. more ranks to a row: exchanges within every layer (experts, tensors, tokens, stages)
    """
    recompute, train, mesh = config.recompute, config.train, config.mesh
    letters = set(block_letters(config.model.pattern, config.model.depth))
    if train.compile == "off":
        yield from _light_recompute(config, letters)
    else:
        budgets = [b for b in (0.5, 0.25, 0.0) if b < recompute.activation_memory_budget]
        yield [{"recompute.activation_memory_budget": b} for b in budgets]
    rows = _halves(train.device_batch_size)
    yield [{"train.device_batch_size": n, "train.grad_accum": 0} for n in rows]
    yield [{"mesh.dp_replicate": n, "mesh.dp_shard": -1} for n in _halves(mesh.dp_replicate)]
    if train.gradient_sync == "resident":
        yield [{"train.gradient_sync": "defer"}]
    if train.gradient_sync != "each":
        yield [{"train.gradient_sync": "each"}]
    if mesh.reshard != "always":
        yield [{"mesh.reshard": "always"}]
    if config.optim.adamw_state == "fp32":
        yield [{"optim.adamw_state": "8bit"}]
    if train.compile == "off":
        for name, values in HEAVY.items():
            now = getattr(recompute, name)
            left = values[values.index(now) + 1 :] if now in values else values
            if name[0].upper() in letters:
                yield [{f"recompute.{name}": value} for value in left]
    if train.device != "cpu" and train.compile == "off" and recompute.offload == "none":
        yield [{"recompute.offload": "block_inputs"}, {"recompute.offload": "saved_tensors"}]
    if train.device != "cpu" and config.optim.adamw_state != "cpu_offload":
        yield [{"optim.adamw_state": "cpu_offload"}]
    for axis in ("ep", "tp", "cp", "pp"):
        yield [
            {f"mesh.{axis}": n, "mesh.dp_shard": -1, "train.grad_accum": 0}
            for n in _doubles(getattr(mesh, axis), size)
        ]


def _light_recompute(config: Config, letters: set[str]) -> Iterator[list[Keys]]:
    recompute = config.recompute
    for name in ("norms", "mlp"):
        if not getattr(recompute, name):
            yield [{f"recompute.{name}": True}]
    for name, values in LIGHT.items():
        now = getattr(recompute, name)
        left = values[values.index(now) + 1 :] if now in values else values
        if name[0].upper() in letters and now != "full":
            yield [{f"recompute.{name}": value} for value in left]
    for name in ("mla_kv", "mla_q_upproj") if "A" in letters else ():
        more = replace(recompute, **{name: True})
        if more != recompute and name in KINDS["A"].regions(more, config.model):
            yield [{f"recompute.{name}": True}]


def cheapest_fixes(
    config: Config, size: int, price: Price, before: MemoryEstimate
) -> tuple[list[Fix], bool]:
    """Return at most three changes, and whether they make the launch fit.

    Changes that are enough alone come first, in the order of `levers`; those with the largest gains
    fill up the three. If no change is enough alone, the changes are to be made together: each is
    the cheapest that is enough after those in front of it, or the one that gains most.

    Args:
        config: resolved, for `size` ranks.
        size: number of ranks.
        price: estimates the fullest rank of a configuration, against the budget.
        before: estimate of `config`.
    """
    found = _fixes(config, size, price, before)
    enough = [fix for fix in found if fix.fits][:MOST]
    if enough:
        rest = sorted((f for f in found if not f.fits), key=lambda f: -f.gain_bytes)
        return [*enough, *rest][:MOST], True
    chosen: list[Fix] = []
    while found and len(chosen) < MOST:
        chosen.append(_pick(found))
        if chosen[-1].fits:
            break
        found = _fixes(chosen[-1].config, size, price, price(chosen[-1].config))
    return chosen, bool(chosen) and chosen[-1].fits


def _pick(found: Sequence[Fix]) -> Fix:
    return next((fix for fix in found if fix.fits), max(found, key=lambda fix: fix.gain_bytes))


def _fixes(config: Config, size: int, price: Price, before: MemoryEstimate) -> list[Fix]:
    """Return the best value of every lever that gains enough to be named."""
    tried = (_best(config, size, notches, price, before) for notches in levers(config, size))
    return [fix for fix in tried if fix is not None]


def _best(
    config: Config, size: int, notches: Sequence[Keys], price: Price, before: MemoryEstimate
) -> Fix | None:
    """Return the first value that is enough, else the one that gains most; None: no real gain."""
    found: list[Fix] = []
    for keys in notches:
        other = changed(config, size, keys)
        if other is None:
            continue
        after = price(other)
        fix = Fix(_said(config, other, keys), other, before.point - after.point, _fits(after))
        if fix.fits:
            return fix
        found.append(fix)
    best = max(found, key=lambda fix: fix.gain_bytes, default=None)
    return best if best and best.gain_bytes >= WORTH * before.point else None


def changed(config: Config, size: int, keys: Keys) -> Config | None:
    """Return the configuration with other settings, resolved again; None: that breaks a rule.

    Tokens per step stay; the number of microbatches follows from them.
    """
    touches_batch = any(key.startswith(("mesh.", "train.")) for key in keys)
    other = replace_keys(config, keys | ({"train.grad_accum": 0} if touches_batch else {}))
    if next(broken(other, size), None) is not None:
        return None
    return resolve(other, size)


def _said(config: Config, other: Config, first: Keys) -> Keys:
    """Return all settings that differ, derived ones included, so that any command can take them."""
    before, after = flatten(config), flatten(other)
    order = [*(key for key in first if key in after), *after]
    return {key: after[key] for key in dict.fromkeys(order) if before.get(key) != after[key]}


def memory_error(
    config: Config, size: int, rank: int, price: Price, needs: MemoryEstimate, room: str
) -> ConfigError:
    """Return the one-line error of a launch that doesn't fit.

    Args:
        config: resolved, for `size` ranks.
        size: number of ranks.
        rank: the rank that needs the most memory.
        price: estimates the fullest rank of a configuration, against the budget.
        needs: estimate of that rank; its budget must be known.
        room: explains how the budget was found.
    """
    assert needs.budget is not None
    fixes, together = cheapest_fixes(config, size, price, needs)
    largest = sorted(needs.components.items(), key=lambda one: -one[1])[:3]
    parts = ", ".join(f"{name} {words(size_bytes)}" for name, size_bytes in largest if size_bytes)
    alone = [f"{fix}{'' if fix.fits else ', not enough alone'}" for fix in fixes]
    ways = ", or ".join(alone) or "use more or larger devices"
    if fixes and not fixes[0].fits:
        said = "together they fit" if together else "together they are not enough either"
        ways = f"{', and '.join(map(str, fixes))}; {said}"
    where = f" in {needs.moment}" if needs.moment else ""
    return config_error(
        "memory.gate",
        "on",
        f"rank {rank} of {size} needs {words(needs.point)}{where} ({parts}), "
        f"{words(needs.budget)} may be used ({room})",
        f"{ways}; --memory.gate off starts all the same",
    )


def _fits(needs: MemoryEstimate) -> bool:
    return needs.budget is not None and needs.point <= needs.budget


def _halves(n: int) -> list[int]:
    """Return n/2, n/4, ... 1, as long as 2 divides."""
    found = []
    while n > 1 and n % 2 == 0:
        n //= 2
        found.append(n)
    return found


def _doubles(n: int, most: int) -> list[int]:
    found = []
    while 2 * n <= most:
        n *= 2
        found.append(n)
    return found
