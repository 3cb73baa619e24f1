"""Model as lm-eval sees it: likelihoods of packed requests, generation with a cache.

lm-eval (EleutherAI) is imported inside functions: it comes with `pip install 'megacpp[eval]'`.
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megacpp.blocks.experts.module import Dispatch
from megacpp.data.tokenizer import CorpusTokenizer
from megacpp.errors import DataError, MegacppError, config_error
from megacpp.model.hybrid import HybridLM
from megacpp.run.code_tasks import CODE_TASKS, check_code_tasks, run_code_tasks
from megacpp.run.likelihood import log_likelihoods
from megacpp.run.sample import Sampling
from megacpp.run.text_stream import TextStream, continue_texts
from megacpp.urls import one_line

MAX_NEW = 256  # tokens of an answer whose task doesn't say


@dataclass(frozen=True)
class Subject:
    """Model under evaluation.

    Attributes:
        model: whole on one device.
        tokenizer: of the model.
        length: most tokens of a request; a longer one loses its beginning.
        row_tokens: tokens of a packed row.
        batch: prompts that are continued together.
        follow: wraps work to show its progress, by name and number of items.
        rank, size: of the processes that share the requests.
        gather: returns what each of them found, by number of request.
    """

    model: HybridLM
    tokenizer: CorpusTokenizer
    length: int
    row_tokens: int
    batch: int
    follow: Callable[[Iterable[Any], str, int], Iterable[Any]]
    rank: int = 0
    size: int = 1
    gather: Callable[[dict[int, Any]], list[dict[int, Any]]] = lambda own: [own]

    def merged(self, own: dict[int, Any]) -> dict[int, Any]:
        """Return what all processes found."""
        return {number: value for part in self.gather(own) for number, value in part.items()}


def adapted(subject: Subject) -> Any:
    """Return an `lm_eval.api.model.LM` of a model.

    A text starts with the ids that transformers puts in front of it: the begin-of-document id for
    a learned tokenizer, perhaps none for a given one. Contexts, continuations and windows of long
    texts are cut as lm-eval's own model of transformers cuts them.

    Raises:
        MegacppError: lm-eval isn't installed.
    """
    lm_model: Any = _imported("lm_eval.api.model")
    utils: Any = _imported("lm_eval.utils")
    marks, tokenizer = subject.tokenizer.specials, subject.tokenizer

    class Adapter(lm_model.TemplateLM):
        """Adapter of one model."""

        eot_token_id, prefix_token_id = marks.eos, marks.bos
        max_length, max_gen_toks = subject.length, MAX_NEW
        tokenizer_name = "megacpp"

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **_: Any
        ) -> list[int]:
            """Return the ids of a text, behind those that open it unless told otherwise."""
            ids = [int(i) for i in tokenizer.encode(string)]
            return ids if add_special_tokens is False else [*tokenizer.opening, *ids]

        def _loglikelihood_tokens(
            self, requests: Sequence[Any], disable_tqdm: bool = False, **_: Any
        ) -> list[tuple[float, bool]]:
            cut = []
            for _, context, continuation in requests:
                whole = [*context, *continuation][-(subject.length + 1) :]
                kept = min(len(continuation), len(whole) - 1)
                cut.append((whole[: len(whole) - kept], whole[len(whole) - kept :]))

            def follow(rows: list[list[int]]) -> Iterable[list[int]]:
                return subject.follow(rows, "likelihoods", len(rows))

            some = [(n, pair) for n, pair in enumerate(cut) if pair[1]]
            some = some[subject.rank :: subject.size]
            scores = log_likelihoods(
                subject.model, [pair for _, pair in some], subject.row_tokens, follow
            )
            found = subject.merged(dict(zip((n for n, _ in some), scores, strict=True)))
            return [found.get(n, (0.0, True)) for n in range(len(cut))]  # nothing to say is certain

        def loglikelihood_rolling(
            self, requests: Sequence[Any], disable_tqdm: bool = False
        ) -> list[float]:
            """Return the log-likelihood of whole texts, each token seen once."""
            windows: list[tuple[None, list[int], list[int]]] = []
            counts = []
            for request in requests:
                ids = self.tok_encode(request.args[0], add_special_tokens=False)
                found = utils.get_rolling_token_windows(
                    token_list=ids,
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                )
                parts = [utils.make_disjoint_window(window) for window in found]
                windows += [(None, *part) for part in parts]
                counts.append(len(parts))
            scores = iter(self._loglikelihood_tokens(windows))
            return [sum(next(scores)[0] for _ in range(count)) for count in counts]

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            """Return the continuation of each context, up to one of its stop strings."""
            told = [(repr(request.args[1]), -len(request.args[0])) for request in requests]
            order = sorted(range(len(requests)), key=told.__getitem__)
            batches: list[list[int]] = []
            for number in order:
                last = batches[-1] if batches else []
                same = last and requests[last[0]].args[1] == requests[number].args[1]
                if not same or len(last) == subject.batch:
                    batches.append([])
                batches[-1].append(number)
            texts: dict[int, str] = {}
            mine = batches[subject.rank :: subject.size]
            for batch in subject.follow(mine, "generation", len(mine)):
                texts.update(zip(batch, self._continued([requests[n] for n in batch]), strict=True))
            texts = subject.merged(texts)
            return [texts[number] for number in range(len(requests))]

        def _continued(self, requests: Sequence[Any]) -> list[str]:
            settings = dict(requests[0].args[1])
            until = settings.get("until") or []
            stops = [until] if isinstance(until, str) else list(until)
            most = int(settings.get("max_gen_toks", self.max_gen_toks))
            most = min(most, subject.length - 1)
            warm = float(settings.get("temperature") or 0.0) if settings.get("do_sample") else 0.0
            begun = [self.tok_encode(r.args[0]) or [self.prefix_token_id] for r in requests]
            prompts = [ids[-(subject.length - most) :] for ids in begun]
            streams = [TextStream(tokenizer, stops) for _ in requests]
            sampling = Sampling(warm, top_p=float(settings.get("top_p", 1.0)))
            continue_texts(subject.model, tokenizer, prompts, streams, most, sampling)
            for stream in streams:
                stream.end()
            return [stream.text for stream in streams]

    return Adapter()


def dropless(model: HybridLM) -> HybridLM:
    """Let no expert drop a token, whatever the capacity factor: as in decoding."""
    for module in model.modules():
        if isinstance(module, Dispatch):
            module.moe = replace(module.moe, capacity_factor=None)
    return model


def run_tasks(
    lm: Any, tasks: Sequence[str], limit: int | None, fewshot: int | None, key: str = "tasks"
) -> dict[str, Any]:
    """Return what lm-eval finds: figures by task, and the samples.

    Args:
        lm: from `adapted`.
        tasks: names that lm-eval knows, YAML files of tasks, or folders of them.
        limit: documents of each task; None: all.
        fewshot: examples in front of each question; None: the task's number.
        key: setting that names the tasks, for messages.

    Raises:
        MegacppError: lm-eval isn't installed.
        ConfigError: no such task.
        DataError: a task or its documents can't be loaded.
    """
    evaluator: Any = _imported("lm_eval.evaluator")
    loaded, known = load_tasks(tasks, key)
    return evaluator.simple_evaluate(
        model=lm,
        tasks=loaded,
        num_fewshot=fewshot,
        limit=limit,
        task_manager=known,
        bootstrap_iters=0,
        log_samples=True,
    )


def evaluated(
    subject: Subject,
    tasks: Sequence[str],
    documents: Callable[[], Iterable[str]],
    limit: int | None,
    fewshot: int | None,
    key: str = "tasks",
) -> dict[str, Any]:
    """Return what `run_tasks` and `run_code_tasks` find, together.

    Args:
        subject: model under evaluation.
        tasks: names of code_tasks.py, and what `run_tasks` takes.
        documents: returns the held-out texts.
        limit, fewshot, key: as in `run_tasks`.

    Raises:
        MegacppError: lm-eval isn't installed, and a task needs it.
        ConfigError: no such task, or it can't be evaluated.
    """
    own = [name for name in tasks if name in CODE_TASKS]
    check_code_tasks(own, subject.tokenizer, key)
    others = [name for name in tasks if name not in CODE_TASKS]
    if others:
        _imported("lm_eval.tasks", others, key)
    found = run_tasks(adapted(subject), others, limit, fewshot, key) if others else None
    found = found or {}  # lm-eval returns nothing on other ranks than the first
    more = run_code_tasks(own, subject, documents(), limit) if own else {}
    parts = ("results", "n-samples", "samples", "versions")
    return {part: {**found.get(part, {}), **more.get(part, {})} for part in parts}


def find_tasks(tasks: Sequence[str], key: str = "tasks") -> tuple[list[str], Any]:
    """Return the names of tasks, and lm-eval's manager that knows them.

    Args:
        tasks: names that lm-eval knows, YAML files of tasks, or folders of them.
        key: setting that names the tasks, for messages.

    Raises:
        MegacppError: lm-eval isn't installed.
        ConfigError: no such task.
    """
    manager: Any = _imported("lm_eval.tasks", tasks, key)
    files = [task for task in tasks if Path(task).exists()]
    names = [task for task in tasks if task not in files]
    lost = [name for name in names if name.endswith(".yaml") or "/" in name]
    if lost:
        raise config_error(key, lost[0], "no such file", "give a task's YAML file")
    folders = sorted({str(Path(f) if Path(f).is_dir() else Path(f).parent) for f in files})
    known = manager.TaskManager(include_path=folders or None, include_defaults=bool(names))
    for file in files:
        names += local_tasks(Path(file))
    unknown = [name for name in names if name not in known.all_tasks]
    if unknown:
        near = "give a name of lm-eval (`lm-eval ls tasks`), or a YAML file of a task"
        raise config_error(key, unknown[0], "no such task", _similar(unknown[0]) or near)
    return names, known


def load_tasks(tasks: Sequence[str], key: str = "tasks") -> tuple[list[Any], Any]:
    """Return tasks and groups with their documents, and lm-eval's manager that loaded them.

    Args:
        tasks: names that lm-eval knows, YAML files of tasks, or folders of them.
        key: setting that names the tasks, for messages.

    Raises:
        MegacppError: lm-eval isn't installed.
        ConfigError: no such task.
        DataError: a task or its documents can't be loaded.
    """
    names, known = find_tasks(tasks, key)
    loaded: dict[str, Any] = {}
    for name in names:
        try:
            found = known.load([name])
            group = found["groups"].get(name)
            loaded |= {name: group} if group else found["tasks"]
            known.load([*loaded.values()])  # tells whether two of them have a task in common
        except Exception as error:  # templates, metrics and `datasets` have errors of their own
            raise DataError(
                f"{key}={name}: the task can't be loaded ({one_line(error)}). Fix: check its file, "
                "its data and the network; what was downloaded before stays in HF_HOME."
            ) from None
    return list(loaded.values()), known


def figures_of(results: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return the numbers of each task by metric, without filters' names and standard errors."""
    return {
        task: {
            key.removesuffix(",none"): float(value)
            for key, value in found.items()
            if isinstance(value, int | float) and "_stderr" not in key and key != "sample_len"
        }
        for task, found in results.items()
    }


def local_tasks(path: Path) -> list[str]:
    """Return the names of the tasks in a YAML file, or in those of a folder.

    Raises:
        ConfigError: a file without a task.
    """
    found = []
    for file in sorted(path.glob("*.yaml")) if path.is_dir() else [path]:
        name = re.search(r"^task:\s*([^\s#]+)\s*$", file.read_text(encoding="utf-8"), re.MULTILINE)
        if name is None:
            raise config_error("tasks", file, "has no line `task: NAME`", "give a task's YAML file")
        found.append(name[1].strip("'\""))
    if not found:
        raise config_error("tasks", path, "has no YAML file", "give a task's YAML file")
    return found


def _similar(task: str) -> str:
    """Return `did you mean 'x'` for a name like one of our own tasks, or nothing."""
    close = difflib.get_close_matches(task, CODE_TASKS, n=1)
    return f"did you mean {close[0]!r}" if close else ""


def _imported(module: str, tasks: Sequence[str] = (), key: str = "tasks") -> Any:
    """Return a module of lm-eval; without it, `tasks` that are ours but for a letter are named."""
    try:
        return importlib.import_module(module)
    except ImportError:
        for task in filter(_similar, tasks):
            fix = f"{_similar(task)}, or for tasks of lm-eval pip install 'megacpp[eval]'"
            raise config_error(key, task, "no such task of megacpp", fix) from None
        raise MegacppError(
            "eval: lm-eval isn't installed. Fix: pip install 'megacpp[eval]'."
        ) from None
