"""Adapter for EleutherAI's lm-evaluation-harness (``lm-eval``): its model interface, and running its tasks."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from jspeed.errors import BadInput, first_line, nearest
from jspeed.inference.generate import STOPPED, Generator, Sampling, context_length
from jspeed.inference.score import scorer
from jspeed.inference.trained import Model

TOKENS = 256  # most new tokens of an answer, where a task does not say
BATCH = 8  # answers that are generated at once


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
        raise BadInput(f"the data of {', '.join(map(str, tasks))} cannot be fetched ({first_line(error)})") from None
    assert found is not None
    return dict(found["results"])


def harness(model: Model) -> Any:
    """Return ``model`` as lm-eval's ``TemplateLM``. A text longer than the model's context is cut from the left."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    tokenizer, limit, scored = model.tokenizer(), context_length(model.recipe), scorer(model, greedy=True)

    @cache
    def generator(temperature: float) -> Generator:
        return Generator(model, BATCH, Sampling(temperature))

    class Harness(TemplateLM):
        @property
        def eot_token_id(self) -> int:
            if (bos_id := model.facts["bos_id"]) is None:
                raise BadInput(f"model {model.recipe.name} has no BOS token, which this task needs")
            return int(bos_id)

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **more: Any) -> list[int]:
            return tokenizer.encode(string.encode()).tolist()

        def _loglikelihood_tokens(self, requests: Any, **more: Any) -> list[tuple[float, bool]]:
            scores = scored([(context, ending) for _, context, ending in requests])
            return [(-score.loss, bool(score.greedy)) for score in scores]

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            totals = []
            for request in requests:
                ids = self.tok_encode(request.args[0])
                windows = get_rolling_token_windows(ids, self.prefix_token_id, limit, 1)
                totals.append(
                    -sum(score.loss for score in scored([make_disjoint_window(window) for window in windows]))
                )
            return totals

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            asked = [request.args for request in requests]
            by_settings: dict[tuple[float, int], list[int]] = {}  # numbers of requests by their settings
            for n, (_, how) in enumerate(asked):
                by_settings.setdefault(settings_of(how), []).append(n)
            answers: dict[int, str] = {}
            for (temperature, max_tokens), numbers in by_settings.items():
                for start in range(0, len(numbers), BATCH):
                    group = numbers[start : start + BATCH]
                    texts = self.written([asked[n] for n in group], temperature, max_tokens)
                    answers |= zip(group, texts, strict=True)
            return [answers[n] for n in range(len(asked))]

        def written(
            self, asked: Sequence[tuple[str, Mapping[str, Any]]], temperature: float, max_tokens: int
        ) -> Iterator[str]:
            stops = [stops_of(given) for _, given in asked]
            prompts = [self.tok_encode(context) for context, _ in asked]
            texts = [b""] * len(asked)
            for new in generator(temperature)(prompts + prompts[:1] * (BATCH - len(asked)), max_tokens):
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
    """Return temperature (0: the argmax) and most new tokens of an answer."""
    temperature = float(given.get("temperature", 1.0)) if given.get("do_sample") else 0.0
    return temperature, int(given.get("max_gen_toks", TOKENS))


def stops_of(given: Mapping[str, Any]) -> list[str]:
    """Return the texts before which an answer ends."""
    until = given.get("until") or []
    return [until] if isinstance(until, str) else [stop for stop in until if stop]
