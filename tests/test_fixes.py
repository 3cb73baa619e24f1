"""The fix of an error is typed as it stands: what it is about is gone, and soon all is accepted.

Configurations are drawn near presets by a fixed seed, with values in the range of each setting: the
rules between settings are what refuses them. A fix in other words (`swap them`) ends its draw.
"""

from __future__ import annotations

import random
import re
import typing
from collections.abc import Iterator
from typing import Any

import pytest

from megacpp.config.arguments import read_run, replace_keys
from megacpp.config.checks.every import broken
from megacpp.config.schema import Config
from megacpp.config.settings import Setting, flatten, settings_of
from megacpp.config.values import read_value
from megacpp.errors import ConfigError

SETTINGS = {one.flag: one for one in settings_of(Config).values()}
TYPED = re.compile(r"(--[a-z0-9.-]+) ([^\s,]+?)(?=[.,]?(?: |$))")
MOST_FIXES = 12
# command line, ranks, what the first error offers
CASES = [
    ("tiny --recompute.activation-memory-budget 0.5", 1, "activation-memory-budget -1 with a"),
    (
        "tiny_full --model.attention.kind mla --model.attention.no-qk-norm"
        " --model.attention.qk-rope-head-dim 65 --model.attention.sparse.head-dim 64",
        1,
        "use --model.attention.sparse.head-dim 66.",
    ),
    (
        "tiny_full --train.device cpu --precision.fp8 torchao --precision.fp8-recipe tensorwise"
        " --precision.fp8-all-gather --precision.dtype bf16 --model.attention.head-dim 64",
        2,
        "--precision.fp8-recipe rowwise_with_gw_hp with --precision.fp8-all-gather false, or",
    ),
    # as many microbatches as stages, in a step whose tokens are given: grad_accum would contradict
    ("tiny --mesh.pp 4 --train.tokens-per-step 2048", 4, "use --train.tokens-per-step 4096."),
    ("tiny --mesh.pp 4 --train.grad-accum 2", 4, "use --train.grad-accum 4 or --mesh.pp 2."),
]


def typed(config: Config, world: int, line: str) -> list[tuple[Config, int]]:
    """Return what each alternative of a fix leads to, as far as it can be typed."""
    found, last = [], None
    for part in re.split(r",? or (?!more|less)", line.rpartition(". Fix: ")[2].rstrip(".")):
        pairs = TYPED.findall(part)
        last = pairs[-1][0] if pairs else last
        if not pairs and last and re.fullmatch(r"-?[\d.e+-]+", part):
            pairs = [(last, part)]
        values = {
            SETTINGS[flag].key: read_value(
                SETTINGS[flag].key, SETTINGS[flag].kind, value.strip("'")
            )
            for flag, value in pairs
        }
        if start := re.search(r"start (\d+) ranks", part):
            found.append((config, int(start[1])))
        elif values:
            found.append((replace_keys(config, values), world))
    return found


def lines(config: Config, world: int) -> list[str]:
    return [str(error) for error in broken(config, world)]


def about(line: str) -> str:
    """Return the setting of an error and its rule, without numbers."""
    setting, _, rule = line.rpartition(". Fix: ")[0].partition("=")
    return setting + re.sub(r"\d+", "#", rule.partition(": ")[2])


def mended(config: Config, world: int, number: int) -> Iterator[str]:
    """Yield the errors of a configuration whose first error is mended by one of its fixes, and on.

    Args:
        number: of the alternative that is taken, counted from the last one.
    """
    for _ in range(MOST_FIXES):
        said = lines(config, world)
        if not said:
            return
        yield said[0]
        ways = typed(config, world, said[0])
        if not ways:
            return
        config, world = ways[max(len(ways) - 1 - number, 0)]
        assert about(said[0]) not in map(about, lines(config, world)), said[0]
    raise AssertionError(f"still refused: {lines(config, world)}")


def value(draw: random.Random, one: Setting, own: Any) -> Any:
    """Return a value of a setting that is in its range, near the one it has."""
    choices = typing.get_args(one.kind)
    if one.kind is bool:
        return not own
    if choices and all(isinstance(choice, str) for choice in choices):
        return draw.choice(choices)
    if one.kind is int:
        return draw.choice((0, 1, 2, 3, 6, 7, own * 2, own // 2, own + 1))
    if one.kind is float or one.optional:
        return draw.choice((0.25, 0.5, 1.0, 8.0))
    return "".join(draw.choices("AMERGF", k=3)) if one.key == "model.pattern" else own


def drawn(draw: random.Random) -> tuple[Config, int]:
    """Return a preset with a mesh and further settings, and a number of ranks."""
    name = draw.choice(("tiny", "tiny_full", "moe_small", "hybrid_400m", "nam56r"))
    config = read_run([name]).config
    own = flatten(config)
    near = {"mesh.pp": (1, 2, 4), "mesh.cp": (1, 2), "mesh.tp": (1, 2, 3), "mesh.ep": (1, 2, 4)}
    found: dict[str, Any] = {key: draw.choice(degrees) for key, degrees in near.items()}
    sections = ("model.", "mesh.", "optim.", "precision.", "train.", "recompute.", "kernels.")
    able = [one for one in SETTINGS.values() if one.key.startswith(sections) and one.key in own]
    for one in draw.sample(able, 5):
        given = value(draw, one, own[one.key])
        if one.broken(given) is None:
            found.setdefault(one.key, given)
    return replace_keys(config, found), draw.choice((1, 2, 4, 6, 8))


@pytest.mark.parametrize(("words", "world", "offers"), CASES)
def test_each_alternative_mends_it(words: str, world: int, offers: str) -> None:
    config = read_run(words.split()).config
    line = next(line for line in lines(config, world) if offers in line)
    ways = typed(config, world, line)
    assert ways
    for other, ranks in ways:
        assert about(line) not in map(about, lines(other, ranks)), line


@pytest.mark.parametrize("number", [0, 1])
def test_fixes_lead_to_a_legal_configuration(number: int) -> None:
    draw, refused = random.Random(number), 0
    for _ in range(120):
        config, world = drawn(draw)
        refused += bool(list(mended(config, world, number)))
    assert refused > 60


def test_an_unreadable_pattern_hides_no_other_mistake() -> None:
    config = read_run("tiny --model.pattern GA|AG --precision.fp8 torchao".split()).config
    wrong = replace_keys(config, {"checkpoint.remote": "x", "mesh.tp": 5})
    keys = [line.partition("=")[0] for line in lines(wrong, 4)]
    assert keys.count("model.pattern") == 1
    assert {"mesh.tp", "checkpoint.remote"} <= set(keys), keys


@pytest.mark.parametrize("key", ["attention.sparse.layers", "engram.layers"])
@pytest.mark.parametrize(
    ("ranks", "pattern", "said"),
    [
        ("every:5", "AE", "names none of the model's 4 A blocks. Fix: use --model.KEY every:4"),
        (",", "AE", "names none of the model's 4 A blocks"),
        ("all", "ME", "the model has no A block. Fix: use a pattern with A, or leave it empty"),
        ("1", "ME", "the model has no A block"),
    ],
)
def test_a_setting_names_some_attention_block(
    key: str, ranks: str, pattern: str, said: str
) -> None:
    """A warm-up of no indexer would train nothing."""
    config = read_run(f"tiny --model.pattern {pattern} --model.depth 8".split()).config
    config = replace_keys(config, {f"model.{key}": ranks})
    with pytest.raises(ConfigError) as error:
        raise next(broken(config, 1))
    assert f"model.{key}={ranks}: {said.replace('KEY', key)}" in str(error.value)
