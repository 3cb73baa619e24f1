"""Table of the pictures: name of the file -> function that draws it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bench.pictures import (
    architecture,
    blocks,
    continued,
    corpora,
    dispatch,
    features,
    first_steps,
    measured,
    memory,
    meshes,
    planning,
    rooms,
    running,
    saved,
    schedules,
    sharding,
)
from bench.pictures.svg import Drawing

FOLDER = Path(__file__).parents[2] / "docs/pictures"
PICTURES: dict[str, Callable[[], Drawing]] = {
    "the-run": architecture.the_run,
    "step-stages": first_steps.stages_of_a_step,
    "settings": first_steps.settings_by_layer,
    "first-weights": first_steps.weights_on_ranks,
    "rows": first_steps.row_of_a_step,
    "attention": blocks.attention_reads_and_keeps,
    "chunks": blocks.tokens_of_m2rnn,
    "head-memory": blocks.memory_of_the_head,
    "rooms": rooms.picture_of_rooms,
    "foldings": meshes.foldings,
    "placements": meshes.placements,
    "slices": meshes.slices,
    "masks": meshes.masks,
    "pipelines": schedules.pipeline_timetables,
    "dispatch": dispatch.expert_dispatch,
    "fsdp": sharding.fsdp_timeline,
    "tensor-block": sharding.tensor_blocks,
    "step-memory": memory.memory_of_a_step,
    "context-memory": memory.buckets_over_context,
    "plan-front": planning.plan_front,
    "continued": continued.other_corpus_and_tails,
    "longer-rows": continued.longer_rows_more_ids,
    "tiny-loss": measured.tiny_loss,
    "activation-pareto": measured.activation_pareto,
    "published": measured.published_steps,
    "chosen-keys": features.chosen_keys,
    "further-tokens": features.tokens_further_ahead,
    "token-order": features.order_of_words,
    "hashed-rows": features.hashed_rows,
    "memory-gate": features.memory_gates,
    "four-streams": features.four_streams,
    "ablation": features.ablation_intervals,
    "mixture": corpora.rows_of_a_mixture,
    "conversations": corpora.rows_of_conversations,
    "leaving-rows": corpora.rows_that_leave,
    "right-answers": corpora.right_answers,
    "run-seconds": running.seconds_of_a_run,
    "backends": running.backends_of_hosts,
    "roofs": running.products_under_roofs,
    "decoding-states": running.decoding_states,
    "hang": running.waits_of_a_hang,
    "saved-pieces": saved.pieces_on_another_mesh,
}
