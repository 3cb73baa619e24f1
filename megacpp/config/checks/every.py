"""All rules between settings, checked before anything starts; no torch import here.

`check(config, world_size)` raises the first broken rule as one line: key, value, rule, fix.
`resolve(config, world_size)` fills in what is derived (mesh, accumulation, folders).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from megacpp.blocks.attention.sparse_checks import sparse_rules
from megacpp.blocks.features import mixer_letters
from megacpp.config.batch_schedule import batch_schedule
from megacpp.config.checks.fp8 import fp8_mesh_rules
from megacpp.config.checks.mesh import batch_ranks, mesh_rules, resolve_mesh
from megacpp.config.checks.model import model_rules
from megacpp.config.checks.optimizer import optimizer_rules
from megacpp.config.checks.recompute import recompute_rules
from megacpp.config.mix import mix_rules
from megacpp.config.schema import Config, RunConfig, TrainConfig
from megacpp.config.settings import field_name, flatten, settings_of
from megacpp.errors import ConfigError, config_error
from megacpp.kernels.selection import kernel_rules
from megacpp.model.regions import compiled_budget
from megacpp.model.stages import chunk_rules, enough_microbatches, pipeline_rules
from megacpp.urls import is_url

OWN_TASKS = ("fim", "compiles")  # need no lm-eval (megacpp/run/code_tasks.py)

Rules = Callable[[Config, int], Iterator[ConfigError]]
SIZES = ("model.", "mesh.", "run.", "data.", "train.", "precision.fp8_ends")
MOST_PLACES = 2**31 - 1  # tokens of a microbatch: kernels number them in 32 bits
LONGEST_WAIT_S = 30 * 86400  # of run.timeout
MOST_MICROBATCHES = 1_000_000  # of a step


def check(config: Config, world_size: int) -> None:
    """Raise the first broken rule of a configuration on `world_size` ranks.

    Raises:
        ConfigError: key, value, rule and fix in one line.
    """
    for error in broken(config, world_size):
        raise error


def broken(config: Config, world_size: int) -> Iterator[ConfigError]:
    """Every broken rule, in the order of the configuration.

    Sizes out of range are all that is said: the rules after them divide by sizes and count layers.
    Other groups of rules end at a pattern that can't be read, which those of the model report.
    """
    said = list(_ranges(config))
    yield from said
    if any(str(error).startswith(SIZES) for error in said):
        return
    for rules in RULES.values():
        try:
            for error in rules(config, world_size):
                said.append(error)
                yield error
        except ConfigError as error:
            if str(error) not in map(str, said):
                yield error


def resolve(config: Config, world_size: int) -> Config:
    """Return the configuration with derived settings filled in; call after `check`."""
    ranks = batch_ranks(config.mesh, world_size)
    per_micro = config.train.device_batch_size * config.data.seq_len * ranks
    accum = config.train.grad_accum or max(1, config.train.tokens_per_step // per_micro)
    train = dataclasses.replace(config.train, grad_accum=accum, tokens_per_step=per_micro * accum)
    mesh = resolve_mesh(config.mesh, world_size)
    run = dataclasses.replace(config.run, dir=config.run.dir.replace("{preset}", config.preset))
    recompute = config.recompute
    if train.compile != "off":
        budget = compiled_budget(recompute, config.model)
        recompute = dataclasses.replace(recompute, activation_memory_budget=budget)
    return dataclasses.replace(config, train=train, mesh=mesh, run=run, recompute=recompute)


def surprises(config: Config, final: Config) -> Iterator[str]:
    """Yield a sentence for each legal setting that does something else than its name says.

    Args:
        config: as given.
        final: the same, resolved.
    """
    budget, mesh = final.recompute.activation_memory_budget, final.mesh
    if 0 <= budget < 1 and config.recompute.activation_memory_budget < 0:
        yield (
            f"compiled blocks keep recompute.activation_memory_budget={budget:g} of their "
            "activations instead of following the recompute policy; 1 keeps all"
        )
    if mesh.dp_replicate > 1 == mesh.dp_shard * mesh.cp:
        yield (
            f"mesh.dp_replicate={mesh.dp_replicate} has no shards to copy (dp_shard * cp = 1): its "
            f"ranks share parameters as with mesh.dp_shard={mesh.dp_replicate}"
        )
    longest = final.model.attention.max_seq_len
    if final.data.seq_len > longest and "A" in final.model.pattern.upper():
        yield (
            f"rows have {final.data.seq_len:,} tokens, model.attention.max_seq_len={longest}: an "
            "export, chat and tasks keep to that, raise it too"
        )


def lookup(config: Config, key: str) -> Any:
    """Return the value of a dotted key such as `mesh.tp`."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, field_name(part))
    return value


def _ranges(config: Config) -> Iterator[ConfigError]:
    """Yield errors of numbers outside the range that their setting states."""
    settings = settings_of(Config)
    for key, value in flatten(config).items():
        if key in settings and (error := settings[key].broken(value)):
            yield error


def _saved(config: Config) -> Iterator[ConfigError]:
    if (url := config.checkpoint.remote) and not is_url(url):
        fix = f"use checkpoint.remote=file://{url}" if url.startswith("/") else "give a URL"
        yield config_error("checkpoint.remote", url, "is no URL such as s3://bucket/run", fix)
    if config.checkpoint.init_check and not config.checkpoint.init:
        rule = "needs a Hugging Face folder (checkpoint.init), which isn't given"
        yield config_error("checkpoint.init_check", True, rule, "use checkpoint.init=FOLDER")


def _batch(config: Config, world_size: int) -> Iterator[ConfigError]:
    train = config.train
    if any(mesh_rules(config, world_size)):
        return
    per_micro = train.device_batch_size * config.data.seq_len * batch_ranks(config.mesh, world_size)
    if (rows := train.device_batch_size) * config.data.seq_len > MOST_PLACES:
        fix = f"use train.device_batch_size={MOST_PLACES // config.data.seq_len} or less"
        rule = f"times data.seq_len ({config.data.seq_len}) must be at most {MOST_PLACES} tokens"
        yield config_error("train.device_batch_size", rows, rule, fix)
    elif train.tokens_per_step > MOST_MICROBATCHES * per_micro:
        yield config_error(
            "train.tokens_per_step",
            train.tokens_per_step,
            f"is over {MOST_MICROBATCHES} microbatches of {per_micro} tokens",
            f"use train.tokens_per_step={MOST_MICROBATCHES * per_micro} or less",
        )
    elif train.tokens_per_step and train.tokens_per_step % per_micro:
        low = max(1, train.tokens_per_step // per_micro) * per_micro
        all_rows, rest = divmod(train.tokens_per_step, per_micro // rows)
        fewer = math.gcd(all_rows, rows)  # as on more ranks than before
        fix = "use " if rest else f"use train.device_batch_size={fewer}, or "
        yield config_error(
            "train.tokens_per_step",
            train.tokens_per_step,
            f"must be a multiple of device_batch_size * seq_len * data ranks ({per_micro})",
            f"{fix}train.tokens_per_step={low} or {low + per_micro}",
        )
    elif (
        train.tokens_per_step
        and train.grad_accum
        and per_micro * train.grad_accum != train.tokens_per_step
    ):
        yield config_error(
            "train.grad_accum",
            train.grad_accum,
            f"gives {per_micro * train.grad_accum} tokens, tokens_per_step={train.tokens_per_step}",
            "use train.tokens_per_step=0 or train.grad_accum=0",
        )


def _pipeline(config: Config, world_size: int) -> Iterator[ConfigError]:
    """Rules of a pipeline, at every number of microbatches that a step will have."""
    yield from chunk_rules(config)
    if config.mesh.pp == 1 or any(mesh_rules(config, world_size)):
        return
    resolved = resolve(config, world_size)
    if config.train.tokens_per_step:  # whole microbatches of them, which a fix multiplies
        whole = dataclasses.replace(config.train, tokens_per_step=resolved.train.tokens_per_step)
        config = dataclasses.replace(config, train=whole)
    yield from pipeline_rules(config, resolved.train.grad_accum)
    if config.train.gradient_sync == "each":
        yield config_error(
            "train.gradient_sync",
            "each",
            f"the schedule of a pipeline (mesh.pp={config.mesh.pp}) reduces once a step",
            "use train.gradient_sync=defer",
        )
    warmup = config.train.batch_warmup_steps
    if warmup <= 0 or any(pipeline_rules(config, resolved.train.grad_accum)):
        return
    for accum in batch_schedule(resolved, world_size)[0].distinct_accums():
        run = accum * config.train.num_chunks
        if not enough_microbatches(config.mesh.pp_schedule, config.mesh.pp, run):
            yield config_error(
                "train.batch_warmup_steps",
                config.train.batch_warmup_steps,
                f"makes steps of {accum} microbatches, which {config.mesh.pp_schedule} on "
                f"mesh.pp={config.mesh.pp} can't run",
                "use train.batch_warmup_steps=0",
            )
            return


def profiled_steps(steps: str) -> tuple[int, int]:
    """First and last step, counted from 1, that `run.profile` names; (0, -1): unreadable."""
    found = re.fullmatch(r"(\d{1,9})(?::(\d{1,9}))?", steps)
    if found is None:
        return 0, -1
    first = int(found[1])
    return first, int(found[2] or first)


def _profile(config: Config) -> Iterator[ConfigError]:
    steps = config.run.profile
    if not steps:
        return
    first, last = profiled_steps(steps)
    if not 1 <= first <= last:
        rule = "must be a step from 1 on, or two of them as FIRST:LAST"
        yield config_error("run.profile", steps, rule, "use run.profile=10:12")
    elif last > config.run.steps:
        rule = f"the run has {config.run.steps} steps"
        fix = f"use run.profile={config.run.steps}" if config.run.steps else "leave it empty"
        yield config_error("run.profile", steps, rule, fix)


def hang_limits(text: str) -> dict[str, float]:
    """Seconds by phase that `run.timeout` names; phases that it leaves out have the default.

    Raises:
        ValueError: it can't be read.
    """
    found: dict[str, float] = dict.fromkeys(("start", "step", "save", "evaluation"), 0.0)
    for part in (RunConfig().timeout, text) if "=" in text else (text,):
        for word in part.split(","):
            phase, equals, number = word.strip().rpartition("=")
            seconds = float(number)
            if not 0 <= seconds <= LONGEST_WAIT_S or (equals and phase not in found):
                raise ValueError(word)
            found.update({phase: seconds} if equals else dict.fromkeys(found, seconds))
    return found


def monitor_address(text: str) -> tuple[str, int]:
    """Host and port of `run.monitor`.

    Raises:
        ValueError: it can't be read.
    """
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16) or (
        ":" in text and not host
    ):
        raise ValueError(text)
    return host.strip("[]") or "127.0.0.1", int(port)


def _monitor(config: Config) -> Iterator[ConfigError]:
    try:
        monitor_address(config.run.monitor or "0")
    except ValueError:
        rule = "must be a port, or HOST:PORT"
        yield config_error("run.monitor", config.run.monitor, rule, "use run.monitor=8790")


def _timeout(config: Config) -> Iterator[ConfigError]:
    try:
        hang_limits(config.run.timeout)
    except ValueError:
        rule = "must be seconds, or start=, step=, save= and evaluation= with seconds"
        yield config_error("run.timeout", config.run.timeout, rule, "use run.timeout=600")


def _tasks(config: Config) -> Iterator[ConfigError]:
    run = config.run
    if run.tasks_every and not run.tasks.strip():
        rule = "there is no run.tasks to evaluate"
        yield config_error("run.tasks_every", run.tasks_every, rule, "name them, or use 0")
    others = {name.strip() for name in run.tasks.split(",")} - {"", *OWN_TASKS}
    if others and importlib.util.find_spec("lm_eval") is None:
        rule = f"lm-eval, which {', '.join(sorted(others))} needs, isn't installed"
        yield config_error("run.tasks", run.tasks, rule, "pip install 'megacpp[eval]'")


def _schedule(config: Config) -> Iterator[ConfigError]:
    for key, usual in (("run.dir", "runs/tiny"), ("data.path", "data/torch-headers")):
        if not lookup(config, key).strip():
            yield config_error(key, "", "must name a folder", f"use {key}={usual}")
    yield from mix_rules(config.data)
    if config.run.seed >= 2**63:
        yield config_error("run.seed", config.run.seed, "must be below 2**63", "use a smaller one")
    if config.optim.warmup_steps > config.run.steps:
        yield config_error(
            "optim.warmup_steps",
            config.optim.warmup_steps,
            f"must not exceed run.steps ({config.run.steps})",
            f"use {config.run.steps} or less",
        )
    yield from optimizer_rules(config)


def _precision(config: Config) -> Iterator[ConfigError]:
    precision, train = config.precision, config.train
    if precision.dtype == "fp16" and train.nonfinite not in ("skip", "off"):
        yield config_error(
            "train.nonfinite",
            train.nonfinite,
            "fp16 finds its loss scale by leaving out steps that overflow",
            "use train.nonfinite=skip",
        )
    scale = precision.loss_scale
    if scale > 0 and (math.frexp(scale)[0] != 0.5 or not 2**-16 <= scale <= 2**32):
        yield config_error(
            "precision.loss_scale",
            scale,
            "must be a power of two, so that dividing by it is exact, from 2^-16 to 2^32",
            "use 65536",
        )


def _optimizer(config: Config) -> Iterator[ConfigError]:
    optim, model = config.optim, config.model
    attention = model.attention
    if not optim.qk_clip:
        return
    try:
        letters = mixer_letters(model)
    except ConfigError:
        return  # reported by the rules of the model
    if "A" not in letters:
        yield config_error(
            "optim.qk_clip",
            optim.qk_clip,
            f"model.pattern={model.pattern} has no attention in {model.depth} layers",
            "use optim.qk_clip=0",
        )
    elif attention.kind == "gqa" and attention.qk_norm:
        yield config_error(
            "optim.qk_clip",
            optim.qk_clip,
            "does nothing to normalised queries and keys (model.attention.qk_norm=True)",
            "use optim.qk_clip=0, or model.attention.qk_norm=False",
        )


def _adamw_state(config: Config) -> Iterator[ConfigError]:
    """Yield broken rules of where moments are kept; the optimizer checks an `auto` device."""
    state = config.optim.adamw_state
    if state == "cpu_offload" and config.train.device == "cpu":
        yield config_error(
            "optim.adamw_state",
            state,
            "train.device=cpu has everything in the memory of the host already",
            "use optim.adamw_state=fp32, or train.device=cuda",
        )
    if state in ("8bit", "4bit") and importlib.util.find_spec("torchao") is None:
        yield config_error(
            "optim.adamw_state",
            state,
            "needs torchao, which isn't installed",
            "pip install torchao, or use optim.adamw_state=fp32",
        )


def _fp8(config: Config, world_size: int) -> Iterator[ConfigError]:
    if not any(mesh_rules(config, world_size)):
        yield from fp8_mesh_rules(resolve(config, world_size), world_size)


def _alone(rules: Callable[[Config], Iterator[ConfigError]]) -> Rules:
    """Yield broken rules that don't involve the mesh."""
    return lambda config, _: rules(config)


# Groups of rules between settings, in the order in which they are reported.
RULES: dict[str, Rules] = {
    "model": _alone(model_rules),
    "mesh": mesh_rules,
    "batch": _batch,
    "pipeline": _pipeline,
    "schedule": _alone(_schedule),
    "tasks": _alone(_tasks),
    "profile": _alone(_profile),
    "timeout": _alone(_timeout),
    "monitor": _alone(_monitor),
    "precision": _alone(_precision),
    "optimizer": _alone(_optimizer),
    "moments": _alone(_adamw_state),
    "kernels": _alone(kernel_rules),
    "recompute": _alone(recompute_rules),
    "remote": _alone(_saved),
    "fp8": _fp8,
    "sparse": _alone(sparse_rules),
}


def tokens_formula(train: TrainConfig, seq_len: int, ranks: int) -> str:
    """Return the product that makes the tokens of one optimizer step, for the header."""
    return (
        f"{train.device_batch_size} rows x {seq_len} tokens x {ranks} data ranks "
        f"x {train.grad_accum} microbatches = {train.tokens_per_step:,} tokens a step"
    )
