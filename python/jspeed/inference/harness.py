"""A trained model as EleutherAI's lm-evaluation-harness (``lm-eval``) asks for one, and its tasks run on it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from jspeed.errors import BadInput, first_line, nearest
from jspeed.inference.generate import STOPPED, Generator, Sampling, context_length
from jspeed.inference.score import ROWS, filled, likeliest, token_losses
from jspeed.inference.trained import Model

TOKENS = 256  # most new tokens of an answer, where a task does not say
WRITERS = 8  # answers that are written at once

Pair = tuple[list[int], list[int]]
"""Ids that are given, and ids that are scored after them."""


def run_tasks(model: Model, tasks: Sequence[str | dict[str, Any]], limit: int | None = None) -> dict[str, Any]:
    """Return what lm-eval's ``tasks`` (names, or descriptions as its YAML files hold) measure: a table for each.

    ``limit``: only the first items of each. Raises BadInput where lm-eval is not installed, does not know a task, or
    cannot fetch its data.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise BadInput(f"--tasks needs the package lm-eval ({error}); pip install '.[eval]'") from None
    manager = TaskManager()
    for task in tasks:
        if isinstance(task, str) and task not in manager.all_tasks:
            raise BadInput(f"lm-eval has no task '{task}'{nearest(task, manager.all_tasks)}; see `lm-eval ls tasks`")
    try:
        found = simple_evaluate(harness(model), tasks=list(tasks), limit=limit, log_samples=False, task_manager=manager)
    except OSError as error:
        raise BadInput(
            f"the data of {', '.join(map(str, tasks))} cannot be fetched ({first_line(error)})"
        ) from None
    assert found is not None
    return dict(found["results"])


def harness(model: Model) -> Any:
    """Return ``model`` as lm-eval's ``TemplateLM``. A text longer than the model looks back on is cut from the left."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    tokenizer, limit, scored = model.tokenizer(), context_length(model.recipe), scorer(model)

    @cache
    def generator(temperature: float) -> Generator:
        return Generator(model, WRITERS, Sampling(temperature))

    class Harness(TemplateLM):
        @property
        def eot_token_id(self) -> int:
            if (mark := model.facts["bos_id"]) is None:
                raise BadInput(f"model {model.recipe.name} has no mark to begin a text with, which this task needs")
            return int(mark)

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **more: Any) -> list[int]:
            return tokenizer.encode(string.encode()).tolist()

        def _loglikelihood_tokens(self, requests: Any, **more: Any) -> list[tuple[float, bool]]:
            return scored([(context, ending) for _, context, ending in requests])

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            totals = []
            for request in requests:
                ids = self.tok_encode(request.args[0])
                windows = get_rolling_token_windows(ids, self.prefix_token_id, limit, 1)
                totals.append(sum(loss for loss, _ in scored([make_disjoint_window(window) for window in windows])))
            return totals

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            asked = [request.args for request in requests]
            alike: dict[tuple[float, int], list[int]] = {}  # numbers of requests by their settings
            for n, (_, how) in enumerate(asked):
                alike.setdefault(settings_of(how), []).append(n)
            answers: dict[int, str] = {}
            for (temperature, most), numbers in alike.items():
                for start in range(0, len(numbers), WRITERS):
                    group = numbers[start : start + WRITERS]
                    texts = self.written([asked[n] for n in group], temperature, most)
                    answers |= zip(group, texts, strict=True)
            return [answers[n] for n in range(len(asked))]

        def written(
            self, asked: Sequence[tuple[str, Mapping[str, Any]]], temperature: float, most: int
        ) -> Iterator[str]:
            stops = [stops_of(given) for _, given in asked]
            prompts = [self.tok_encode(context) for context, _ in asked]
            texts = [b""] * len(asked)
            for new in generator(temperature)(prompts + prompts[:1] * (WRITERS - len(asked)), most):
                texts = [
                    text + (b"" if token == STOPPED else tokenizer.decode([token]))
                    for text, token in zip(texts, new.tolist(), strict=False)
                ]
                if all(
                    any(stop in text.decode(errors="replace") for stop in ends)
                    for text, ends in zip(texts, stops, strict=True)
                ):
                    break
            for text, ends in zip(texts, stops, strict=True):
                answer = text.decode(errors="replace")
                for stop in ends:
                    answer = answer.partition(stop)[0]
                yield answer

    return Harness()


def settings_of(given: Mapping[str, Any]) -> tuple[float, int]:
    """Return temperature (0: the likeliest token) and most new tokens of an answer."""
    temperature = float(given.get("temperature", 1.0)) if given.get("do_sample") else 0.0
    return temperature, int(given.get("max_gen_toks", TOKENS))


def stops_of(given: Mapping[str, Any]) -> list[str]:
    """Return the texts before which an answer ends."""
    until = given.get("until") or []
    return [until] if isinstance(until, str) else [stop for stop in until if stop]


def scorer(model: Model) -> Callable[[Sequence[Pair]], list[tuple[float, bool]]]:
    """Return what gives for each pair the log-probability of what is scored, and whether every id of it is the
    likeliest one there."""
    limit, losses, choices = context_length(model.recipe), token_losses(model), likeliest(model)

    def scored(pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        rows_of = [((given + after)[-(limit + 1) :], min(len(after), limit)) for given, after in pairs]
        found: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
        order = sorted(range(len(pairs)), key=lambda n: len(rows_of[n][0]))
        for start in range(0, len(order), ROWS):
            group = order[start : start + ROWS]
            rows = filled([rows_of[n][0] for n in group], limit)
            per_token, best = losses(rows), choices(rows)
            for place, n in enumerate(group):
                ids, count = rows_of[n]
                part = slice(len(ids) - 1 - count, len(ids) - 1)
                likely = bool(np.all(best[place, part] == rows[place, 1:][part]))
                found[n] = -float(per_token[place, part].astype(np.float64).sum()), likely
        return found

    return scored
