"""Start of a run: the last checks, the header on the screen, config.json and launch.json."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from megacpp.config.arguments import Resolved, flatten
from megacpp.config.batch_schedule import BatchSchedule, batch_schedule
from megacpp.config.checks.every import tokens_formula
from megacpp.config.checks.mesh import batch_ranks
from megacpp.config.schema import Config
from megacpp.kernels.chosen import (
    as_chosen,
    check_compiler,
    choices,
    kernel_lines,
    kernel_record,
)
from megacpp.kernels.selection import BackendSelection
from megacpp.launch.features import feature_lines
from megacpp.launch.folder import open_folder, start_point
from megacpp.launch.gate import Admission, check_memory, set_allocator
from megacpp.launch.recompute_table import layer_rows, selective_offer
from megacpp.launch.recompute_table import table_lines as recompute_lines
from megacpp.launch.record import device_name, print_header, write_config, write_launch
from megacpp.memory.budget import as_run
from megacpp.memory.forms.activations import activation_bytes
from megacpp.model.count import count_parameters, table_lines
from megacpp.model.flops import train_flops_per_token
from megacpp.model.precision import check_device, compute_dtype, storage_dtype
from megacpp.model.stages import as_scheduled
from megacpp.run.code_tasks import CODE_TASKS, check_code_tasks
from megacpp.run.corpus import (
    RunCorpus,
    check_corpus,
    open_corpus,
    prepare_sources,
    vocabulary_lines,
)
from megacpp.run.hang import group_timeout
from megacpp.run.harness import load_tasks
from megacpp.run.kernel_check import verify_kernels
from megacpp.run.metrics import device_peak_flops
from megacpp.run.predicted import Prediction, check_mfu, foresee
from megacpp.run.rank_store import RankStore
from megacpp.run.sinks import check_sinks
from megacpp.run.tasks import task_names
from megacpp.state.remote import check_remote, remote_run, url_of
from megacpp.state.rng import seed_generators
from megacpp.state.training import TrainingState
from megacpp.terminal.screen import check_folder


def prepare(resolved: Resolved, peers: RankStore, device: torch.device) -> PreparedLaunch:
    """Check and resolve everything that doesn't need a process group; every rank calls it.

    Args:
        resolved: configuration of the run.
        peers: store of all ranks.
        device: device of this rank.

    Raises:
        DataError: the corpus is missing or damaged, or a task can't be loaded.
        ConfigError: corpus, device, sinks, first weights, kernels or memory don't suit the
            configuration.
        CheckpointError: tensors of the first weights aren't those of the model.
        MegacppError: an attempt to fit the run failed for another reason than memory.
    """
    seed_generators(resolved.config.run.seed)
    check_folder("run.dir", Path(resolved.config.run.dir))
    with peers.agree("remote"):
        if peers.rank == 0 and url_of(resolved.config):
            check_remote(resolved.config, peers.restarted)
    with peers.agree("sources"):
        if os.environ.get("LOCAL_RANK", "0") == "0":  # a node may have disks of its own
            prepare_sources(resolved.config)
    corpus = open_corpus(resolved.config)
    check_corpus(resolved.config, corpus)
    check_device(resolved.config, device)
    check_compiler(resolved.config, device)
    check_sinks(resolved.config)
    tasks = task_names(resolved.config.run.tasks)
    check_code_tasks(tasks, corpus.tokenizer, "run.tasks")
    others = [task for task in tasks if task not in CODE_TASKS]
    with peers.agree("tasks"):
        if others and peers.rank == 0:  # which evaluates them
            load_tasks(others, "run.tasks")
    if resolved.config.checkpoint.init:
        from megacpp.interop.start import check_start  # imports every map of names

        check_start(resolved.config, peers.rank == 0)
    kernels = choices(resolved.config, device)
    if resolved.config.memory.fit == "auto":
        from megacpp.launch.auto_fit import fitted  # imports the planner

        resolved, admission = fitted(resolved, peers, device)
    else:
        admission = check_memory(resolved, peers, device)
    as_it_runs = _as_it_runs(resolved.config, device)
    predicted = foresee(as_it_runs, peers.size, device.type, device_name(device))
    slow = check_mfu(resolved.config, predicted)
    set_allocator(resolved.config, device)
    agreed = tuple(verify_kernels(resolved.config, device, kernels))
    # Now: within a process group a process that has to import torch would trace its blocks.
    offer = [] if peers.rank else selective_offer(as_it_runs, peers.size)
    return PreparedLaunch(
        resolved, peers, corpus, device, admission, kernels, agreed, predicted, slow, offer
    )


@dataclass(frozen=True)
class PreparedLaunch:
    """Result of the checks before the process group exists.

    Attributes:
        resolved: configuration that runs (for a fitted run, the one that was found).
        kernels: backend of each operation, with the reason.
        agreed: a line for each kernel that was compared with the reference.
        predicted: speed of a step; None: the machine isn't known.
        slow: a warning if that is below `speed.min_mfu`.
        offer: line on activations that more recomputation would free, on rank 0.
    """

    resolved: Resolved
    peers: RankStore
    corpus: RunCorpus
    device: torch.device
    admission: Admission
    kernels: Mapping[str, BackendSelection]
    agreed: tuple[str, ...]
    predicted: Prediction | None = None
    slow: Sequence[str] = ()
    offer: Sequence[str] = ()

    @property
    def config(self) -> Config:
        """Configuration that runs."""
        return self.resolved.config

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return Path(self.config.run.dir)

    @cached_property
    def batches(self) -> BatchSchedule:
        """Microbatches and rows of each step."""
        return batch_schedule(self.config, self.peers.size)[0]

    @property
    def timeout(self) -> timedelta:
        """Timeout of collectives, longer than the limits of the watch over hangs."""
        return group_timeout(self.config.run.timeout)

    def open_folder(self) -> None:
        """Lock the run folder, which all ranks must see; every rank calls it (folder.py)."""
        open_folder(self.peers, self.config, self.corpus.fingerprint)

    def open_uploads(self, state: TrainingState) -> None:
        """Upload what is saved from now on, and what the run resumed from, on rank 0."""
        if self.peers.rank == 0 and url_of(self.config):
            from megacpp.state.uploads import Uploads

            saves = self.config.checkpoint
            uploads = Uploads(remote_run(self.config), saves.keep, saves.keep_every)
            state.writer.uploads = uploads
            if state.resumed is not None and state.resumed.parent == state.folder:
                uploads.offer(state.resumed)

    def start_point(self) -> str:
        """Return `checkpoint.resume` of this start, once the run folder is open."""
        return start_point(self.peers, self.config)

    @property
    def retried_s(self) -> float:
        """Seconds of attempts that ran out of memory."""
        return sum(a["wall_s"] for a in self.admission.attempts if a["outcome"] == "oom")


def announce(
    launch: PreparedLaunch,
    mesh: Mapping[str, int],
    active: bool,
    optimizer: Sequence[str],
    compiled: Mapping[int, str],
    fp8: Sequence[str],
    first_step: int,
    changed: Sequence[str],
) -> Callable[[float], float | None]:
    """Print the header and write the launch record, if `active`.

    Args:
        launch: result of `prepare`.
        mesh: degree of each axis.
        active: this rank prints and writes.
        optimizer, fp8: lines of the header.
        compiled: layers in which the compiler decides what is saved, with a description.
        first_step: first step of this start.
        changed: settings that differ from those of the checkpoint that the run resumes from.

    Returns:
        A function from tokens per second to model FLOP utilisation; it returns None on devices
        whose peak isn't published.
    """
    launch.peers.finished = None  # from here on the run folder is this start's
    resolved, corpus, device = launch.resolved, launch.corpus, launch.device
    kernels, agreed, admission = launch.kernels, launch.agreed, launch.admission
    config = resolved.config
    axes = {name: degree for name, degree in mesh.items() if name != "ep"}  # ep is a view
    ranks, rows = math.prod(axes.values()), batch_ranks(config.mesh, math.prod(axes.values()))
    flops = train_flops_per_token(config.model, config.data.seq_len)
    peak = device_peak_flops(device)
    if active:
        folder = Path(config.run.dir)
        write_config(folder, config, resolved.provenance)
        count = count_parameters(config.model)
        write_launch(
            folder,
            config,
            dict(mesh),
            count,
            flops_per_token=flops,
            data_fingerprint=corpus.fingerprint,
            first_step=first_step,
            device=device_name(device),
            recompute=layer_rows(config, compiled),
            fp8=list(fp8),
            kernels=kernel_record(kernels),
            kernels_agreed=list(agreed),
            activations=kept_by_a_microbatch(config, ranks, device),
            memory=admission.as_dict(),
            plan=admission.plan,
            attempts=list(admission.attempts),
            speed=launch.predicted.as_dict() if launch.predicted else None,
        )
        ahead = launch.predicted.lines() if launch.predicted else []
        given = [f"{k} = {v}" for k, v in sorted(_given(resolved).items())]
        print_header(
            [
                (f"megacpp {config.preset}", [f"run folder {folder}", *given, *resolved.notes]),
                ("model", [*table_lines(config.model), *feature_lines(config)]),
                ("mesh", [_mesh_line(mesh, device), _precision_line(config, device)]),
                (
                    "batch",
                    [
                        tokens_formula(config.train, config.data.seq_len, rows),
                        *_warmup_line(config, ranks),
                        _gradient_line(config),
                        f"{flops:,.0f} FLOPs a token, forward and backward",
                    ],
                ),
                ("kernels", [*kernel_lines(kernels), *agreed]),
                ("memory", admission.lines()),
                *([("speed", [*ahead, *launch.slow])] if ahead or launch.slow else []),
                ("backward runs again", [*recompute_lines(config, compiled), *launch.offer, *fp8]),
                ("optimizer" + _whose(mesh), optimizer),
                ("data", [*corpus.describe(), *vocabulary_lines(config, corpus)]),
                ("start", [_start_line(config, first_step), *changed]),
            ]
        )
    return lambda tokens_per_s: None if peak is None else tokens_per_s * flops / (peak * ranks)


def kept_by_a_microbatch(config: Config, ranks: int, device: torch.device) -> dict[str, Any]:
    """Return the bytes that a forward saves on the first rank, by kind of block."""
    return activation_bytes(_as_it_runs(config, device), ranks).as_dict()


def _as_it_runs(config: Config, device: torch.device) -> Config:
    """Return the configuration with `auto` resolved for a device."""
    narrow = compute_dtype(config.precision, device) == torch.bfloat16
    return as_run(as_chosen(as_scheduled(config), device), device.type, narrow)


def _given(resolved: Resolved) -> dict[str, object]:

    values = flatten(resolved.config)
    return {key: values[key] for key in resolved.given}


def _whose(mesh: Mapping[str, int]) -> str:
    """Name this rank's pipeline stages: parameters are counted over shards, not stages."""
    return f" (stages of the first of {mesh['pp']} pipeline ranks)" if mesh.get("pp", 1) > 1 else ""


def _mesh_line(mesh: Mapping[str, int], device: torch.device) -> str:
    if not mesh:
        return f"one process, no process group, on {device.type}"
    backend = "NCCL" if device.type == "cuda" else "gloo"
    axes = " x ".join(f"{name} {n}" for name, n in mesh.items() if n > 1 and name != "ep")
    experts = f", experts on ep {mesh['ep']} of them" if mesh["ep"] > 1 else ""
    return f"{axes or 'one rank'}{experts}, FSDP2 over {backend}"


def _warmup_line(config: Config, ranks: int) -> list[str]:
    schedule, reason = batch_schedule(config, ranks)
    warms_up = [f"batch warmup: {schedule.describe()}"] if schedule.warmup_steps else []
    return [reason] if reason else warms_up


def _gradient_line(config: Config) -> str:
    """Return a line about the accumulation: divisor, reduction over ranks, non-finite steps."""
    train = config.train
    mean = {"tokens": "over the valid tokens of a step", "microbatches": "of microbatches' means"}
    summed = {
        "defer": "summed over ranks once a step",
        "each": "summed over ranks after each microbatch",
        "resident": "summed over ranks once a step, parameters gathered once as well",
    }
    bad = {
        "skip": f"a step that is not finite is skipped ({train.max_skips} in a row end the run)",
        "sanitize": "what is not finite is taken as zero",
        "raise": "a step that is not finite ends the run",
        "off": "not looked at before they are summed, a step without a finite norm is skipped",
    }
    return (
        f"gradients: of the mean {mean[train.divisor]}, {summed[train.gradient_sync]}; "
        f"{bad[train.nonfinite]}"
    )


def _precision_line(config: Config, device: torch.device) -> str:
    stored = str(storage_dtype(config.precision)).removeprefix("torch.")
    computed = str(compute_dtype(config.precision, device)).removeprefix("torch.")
    return f"parameters {stored}, compute {computed}, fp32-contract parameters never narrower"


def _start_line(config: Config, first_step: int) -> str:
    if first_step and first_step == config.run.steps:
        return (
            f"resumed at step {first_step} of {config.run.steps}: nothing is left to train "
            "(--checkpoint.resume never starts over)"
        )
    if first_step:
        return f"resumed at step {first_step} of {config.run.steps}"
    return f"fresh start, {config.run.steps} steps, seed {config.run.seed}"
