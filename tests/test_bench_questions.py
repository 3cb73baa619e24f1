"""Questions on the default corpus: how they are made, and the record of their answers."""

from __future__ import annotations

import json

from bench.questions import RECORD, SETTINGS, STEPS
from bench.variant_runs import words
from megacpp.config.arguments import parse_run
from megacpp.config.presets import preset
from megacpp.config.settings import flatten
from megacpp.lessons.questions import questions_of


def test_the_tuning_of_tiny_is_legal() -> None:
    flags = [word for word in words(SETTINGS) if not word.startswith("--checkpoint.init")]
    assert parse_run(["tiny_chat", *flags], 1).config.run.steps == STEPS


def test_the_preset_is_what_the_record_was_made_with() -> None:
    """And the model is that of `tiny`, whose weights it goes on from."""
    base, tuned = flatten(preset("tiny")), flatten(preset("tiny_chat"))
    assert {key: value for key, value in tuned.items() if value != base[key]} == {
        "preset": "tiny_chat",
        "run.dir": "runs/tiny-chat",
        "run.steps": 60,
        "data.path": "data/questions",
        "data.seq_len": 128,
        "train.device_batch_size": 8,
        "optim.lr": 1e-3,
        "optim.muon_lr": 3e-3,
    }


def test_the_answers_are_those_of_held_out_questions() -> None:
    record = json.loads(RECORD.read_text())
    right = {int(step): number for step, number in record["right"].items()}
    assert right[0] == 0 and list(right) == sorted(right)
    assert record["most_frequent"][1] < right[max(right)] <= record["asked"] < record["learned"]


def test_a_question_is_made_of_a_schema_and_its_declaration() -> None:
    text = """// aten::abs_(Tensor(a!) self) -> Tensor(a!)
inline at::Tensor & abs_(at::Tensor & self) {
// aten::two(Tensor self) -> (Tensor, Tensor)
inline ::std::tuple<at::Tensor,at::Tensor> two(const at::Tensor & self) {
// aten::none(Tensor self) -> ()
TORCH_API void none(const at::Tensor & self);
"""
    found = questions_of([text, text])
    assert [one["completion"] for one in found] == [
        "at::Tensor &",
        "::std::tuple<at::Tensor,at::Tensor>",
    ]
    assert found[0]["prompt"].endswith("\naten::abs_(Tensor(a!) self) -> Tensor(a!)")
