"""Adapter for EleutherAI's lm-evaluation-harness (``lm-eval``): its model interface, and running
its tasks."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from jspeed.errors import BadInput, first_line, nearest
from jspeed.inference.generate import Generator, Sampling, context_length, write
from jspeed.inference.score import scorer
from jspeed.inference.trained import Model

TOKENS = 256  # most new tokens of an answer, where a task does not say
BATCH = 8  # answers that are generated at once


def run_tasks(
    model: Model, tasks: Sequence[str | dict[str, Any]], limit: int | None = None
) -> dict[str, Any]:
    """Return what lm-eval's ``tasks`` (names, or descriptions as its YAML files hold) measure: a
    table for each.

    ``limit``: only the first items of each. Raises BadInput where lm-eval is not installed, does
    not know a task, or cannot fetch its data.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise BadInput(
            f"--tasks needs the package lm-eval ({error}); pip install 'jspeed[eval]'"
        ) from None
    manager = TaskManager()
    for task in tasks:
        if isinstance(task, str) and task not in manager.all_tasks:
            raise BadInput(
                f"lm-eval has no task '{task}'{nearest(task, manager.all_tasks)}; see `lm-eval ls"
                " tasks`"
            )
    try:
        results = simple_evaluate(
            harness(model), tasks=list(tasks), limit=limit, log_samples=False, task_manager=manager
        )
    except OSError as error:
        raise BadInput(
            f"the data of {', '.join(map(str, tasks))} cannot be fetched ({first_line(error)}); try"
            " again where there is a network"
        ) from None
    assert results is not None
    return dict(results["results"])


def harness(model: Model) -> Any:
    """Return ``model`` as lm-eval's ``TemplateLM``. A text longer than the model's context is cut
    from the left."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    tokenizer, limit, scored = (
        model.tokenizer(),
        context_length(model.recipe),
        scorer(model, greedy=True),
    )

    @cache
    def generator(temperature: float) -> Generator:
        return Generator(model, BATCH, Sampling(temperature))

    def written(prompts: list[str], settings: Settings) -> list[str]:
        rows = prompts + prompts[:1] * (BATCH - len(prompts))  # always as many: one program
        texts = [""] * BATCH
        for new in write(generator(settings.temperature), rows, settings.tokens, settings.stops):
            texts = [text + more for text, more in zip(texts, new, strict=True)]
        return texts[: len(prompts)]

    class Harness(TemplateLM):
        @property
        def eot_token_id(self) -> int:
            if (bos_id := model.facts["bos_id"]) is None:
                raise BadInput(
                    f"model {model.recipe.name} has no BOS token, which this task needs; give"
                    " another task"
                )
            return int(bos_id)

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **more: Any
        ) -> list[int]:
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
                    -sum(
                        score.loss
                        for score in scored([make_disjoint_window(window) for window in windows])
                    )
                )
            return totals

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            by_settings: dict[Settings, list[int]] = {}  # numbers of requests
            for n, request in enumerate(requests):
                by_settings.setdefault(settings_of(request.args[1]), []).append(n)
            answers: dict[int, str] = {}
            for settings, numbers in by_settings.items():
                for start in range(0, len(numbers), BATCH):
                    group = numbers[start : start + BATCH]
                    answers |= zip(
                        group, written([requests[n].args[0] for n in group], settings), strict=True
                    )
            return [answers[n] for n in range(len(requests))]

    return Harness()


class Settings(NamedTuple):
    """How an answer is written: ``temperature`` (0: the argmax), most new ``tokens``, texts before
    which it ends."""

    temperature: float
    tokens: int
    stops: tuple[str, ...]


def settings_of(given: Mapping[str, Any]) -> Settings:
    """Return the settings that lm-eval gives with a request."""
    temperature = float(given.get("temperature", 1.0)) if given.get("do_sample") else 0.0
    until = given.get("until") or ()
    stops = (until,) if isinstance(until, str) else tuple(filter(None, until))
    return Settings(temperature, int(given.get("max_gen_toks", TOKENS)), stops)
