"""A run written by hand, on one process: what `train.py` must equal on any mesh.

Model, optimizer classes and corpus are the trainer's, each tested by itself. What is written out
here is their order and what goes from one to the next: divisors, loss scale, clipping, schedule,
steps that are left out, QK-clip, the selection bias, evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from megacpp.blocks.experts.router import Router
from megacpp.blocks.mtp.module import MultiTokenPrediction
from megacpp.config.schema import Config
from megacpp.data.batches import Batch
from megacpp.data.corpus import Corpus
from megacpp.model.auxiliary import TERMS, AuxiliarySource
from megacpp.model.hybrid import HybridLM
from optim.build import build_optimizer
from optim.qk_clip import QKClip
from parallel.build import build_model
from parallel.mesh import World


@dataclass
class Composed:
    """Figures of each step, the held-out loss, and the final weights.

    Attributes:
        rows: by step, as in metrics.jsonl.
        held_out: nats per valid token of the held-out rows, by step after which they are evaluated.
        weights: by name.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    held_out: dict[int, float] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def composed(config: Config, corpus: Corpus, bad_steps: Collection[int] = ()) -> Composed:
    """Train by hand.

    Args:
        config: resolved for one process.
        corpus: rows, in the order in which the loader gives them.
        bad_steps: steps in which a gradient is NaN, so that nothing may change.
    """
    world = World(0, 1, torch.device("cpu"))
    model = build_model(config, world)
    if config.checkpoint.init:
        first = load_file(Path(config.checkpoint.init) / "model.safetensors")
        model.load_state_dict(first, strict=False)
    optimizer = build_optimizer(model, config, world.holders)
    peaks = [group["lr"] for group in optimizer.param_groups]
    qk_clip = QKClip(model, config.optim.qk_clip, lambda x: x) if config.optim.qk_clip else None
    fp16, found = config.precision.dtype == "fp16", Composed()
    scale, good, updates, position = config.precision.loss_scale if fp16 else 1.0, 0, 0, 0
    average = weight = 0.0  # of gradient norms, and the sum of their weights
    for step in range(config.run.steps):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * cosine(updates, config)
        batches = []
        for _ in range(microbatches(step, config)):
            rows = range(position, position + config.train.device_batch_size)
            batches.append(corpus.train_batch(rows))
            position = rows.stop
        valid = sum(int(batch.num_targets) for batch in batches)
        nll = accumulate(model, batches, valid, scale, step, config)
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        squares = [torch.linalg.vector_norm(g).double().square() for g in grads]  # fp32 stays fp32
        norm = math.sqrt(float(sum(squares))) / scale
        sound = step not in bad_steps and math.isfinite(norm) and math.isfinite(nll)
        lr = config.optim.lr * cosine(updates, config)
        row = {"loss": nll / valid if valid else None, "lr": lr, "skipped": not (sound and valid)}
        row |= {"valid_tokens": valid, "loss_scale": scale if fp16 else None}
        row |= {"grad_accum": len(batches), "tokens": sum(b.ids_BT.numel() for b in batches)}
        sources = [m for m in model.modules() if isinstance(m, AuxiliarySource)]
        losses: Any = sum(source.loss_sums.double() for source in sources)
        row |= {
            f"aux_{t}": x / row["tokens"] for t, x in zip(TERMS, losses.tolist(), strict=True) if x
        }
        if sound:  # else of what is finite
            row["grad_norm"] = norm
        if sound and valid:
            factor = min(1.0, config.optim.clip_norm / (norm + 1e-6)) / scale
            for g in grads:
                g.mul_(factor)
            optimizer.step()
            updates += 1
            row["grad_norm_ratio"] = norm / average if average else None
            weight += 0.01 * (1 - weight)
            average += 0.01 / weight * (norm - average)
            if qk_clip is not None:
                row["max_logit"] = qk_clip.clip().figures()["max_logit"]
        elif qk_clip is not None:
            qk_clip.reset()
        optimizer.zero_grad()
        for source in sources:
            if isinstance(source, Router) and sound and valid:
                source.update_bias()
            source.forget()
        if fp16 and (valid or not sound):  # without a label nothing could overflow
            good = good + 1 if sound else 0
            if not sound:
                scale /= 2
            elif good == config.precision.loss_scale_growth:
                scale, good = scale * 2, 0
        found.rows.append(row)
        if (step + 1) % config.run.eval_every == 0 or step + 1 == config.run.steps:
            found.held_out[step] = held_out(model, corpus, config)
            model.train()
    found.weights = {name: p.detach() for name, p in model.named_parameters()}
    return found


def accumulate(
    model: HybridLM, batches: list[Batch], valid: int, scale: float, step: int, config: Config
) -> float:
    """Sum the gradients of `scale` times the mean loss of a step; return its summed nats."""
    tokens, nll = sum(batch.ids_BT.numel() for batch in batches), 0.0
    for source in (m for m in model.modules() if isinstance(m, AuxiliarySource)):
        source.aux_scale.fill_(scale / tokens)
        if isinstance(source, MultiTokenPrediction):
            mtp = config.model.mtp
            first = step < mtp.switch * config.run.steps
            powers = [mtp.beta**k for k in range(mtp.depths)]
            for k, power in enumerate(powers):
                ahead = sum(int(batch.num_ahead(k + 1)) for batch in batches)
                weight = (mtp.loss if first else mtp.loss_final) * power / sum(powers)
                source.weights_K[k] = weight * tokens / max(1, ahead)
    for batch in batches:
        with torch.autocast("cpu", torch.float16, enabled=config.precision.dtype == "fp16"):
            out = model(batch.ids_BT, batch.labels_BT, batch.docs)
        (out.loss_sum / (max(1, valid) / scale)).backward()
        nll += out.nll_sum.item()
    return nll


def microbatches(step: int, config: Config) -> int:
    """Return the microbatches of a step: a line from one to all of them, rounded."""
    steps, most = config.train.batch_warmup_steps, config.train.grad_accum
    return round(1 + (most - 1) * min(1, step / steps)) if steps else most


def cosine(update: int, config: Config) -> float:
    """Return the factor of the peak rate: a line up, then half a cosine."""
    warmup, total, final = (
        config.optim.warmup_steps,
        config.run.steps,
        config.optim.final_lr_ratio,
    )
    if update < warmup:
        return (update + 1) / warmup
    done = (update - warmup) / (total - warmup)
    return final + (1 - final) * (1 + math.cos(math.pi * done)) / 2


@torch.no_grad()
def held_out(model: HybridLM, corpus: Corpus, config: Config) -> float:
    """Return the loss of `run.eval_rows` rows, taken one by one."""
    model.eval()
    nll, valid = 0.0, 0
    for row in range(config.run.eval_rows):
        batch = corpus.validation_batch([row])
        with torch.autocast("cpu", torch.float16, enabled=config.precision.dtype == "fp16"):
            nll += model(batch.ids_BT, batch.labels_BT, batch.docs).nll_sum.item()
        valid += int(batch.num_targets)
    return nll / valid
