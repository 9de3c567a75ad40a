"""One question to a backend: temperature, seeds, and an answer of the right shape or an error in its place.

What belongs here: what series and batches ask alike. What does not: what is asked, and what an answer is worth.
"""

from collections.abc import Sequence

from rowmill.core.errors import GenerationError
from rowmill.tabular.backends import Completer, Completion, PromptText
from rowmill.tabular.generation.options import Generation

SEEDS = 2**31
"""Seeds lie below it: some servers take no larger ones."""
_MAX_TEMPERATURE = 2.0
"""The most that retries raise the temperature to: the highest that servers take."""
_TEMPERATURE_STEP = 0.1

Answer = Sequence[Completion] | Exception


def sample_completions(
    completer: Completer,
    prompts: Sequence[PromptText],
    *,
    n: int,
    max_tokens: int,
    seeds: Sequence[int],
    stop: str,
    bad_rounds: int,
    options: Generation,
) -> Sequence[Answer]:
    """Return `n` completions per prompt, or what went wrong instead; nothing is raised.

    After bad rounds the temperature is a tenth higher for each.
    """
    warmer = min(_MAX_TEMPERATURE, options.temperature + _TEMPERATURE_STEP * bad_rounds)
    try:
        answers = completer.complete(
            prompts,
            n=n,
            max_tokens=max_tokens,
            temperature=round(max(options.temperature, warmer), 6),
            top_p=options.top_p,
            repetition_penalty=options.repetition_penalty,
            stop=[stop],
            seeds=seeds,
        )
        return [_check_completion_count(answer, n) for answer in _require_answer_count(answers, len(prompts))]
    except Exception as error:  # noqa: BLE001  (whatever a backend does is one bad round, and not the end of the run)
        return [error] * len(prompts)


def describe_error(error: Exception) -> str:
    """Word an error for a report."""
    return f"{type(error).__name__}: {error}"[:500]


def _require_answer_count(answers: Sequence[Answer], prompts: int) -> Sequence[Answer]:
    if len(answers) != prompts:
        raise GenerationError(
            f"generation.backend: {len(answers)} answers to {prompts} prompts; one for each is wanted"
        )
    return answers


def _check_completion_count(answer: Answer, n: int) -> Answer:
    if isinstance(answer, Exception) or len(answer) == n:
        return answer
    return GenerationError(f"generation.backend: {len(answer)} completions of a prompt; {n} were asked for")
