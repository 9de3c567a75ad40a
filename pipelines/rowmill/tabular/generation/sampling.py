"""One request to a backend: temperature, seeds, and checked completions, or an error instead."""

from collections.abc import Sequence

from rowmill.core.errors import GenerationError
from rowmill.tabular.backends import Completer, Completion, PromptText
from rowmill.tabular.generation.options import Generation

SEEDS = 2**31
"""Exclusive upper bound of seeds: some servers accept none larger."""
_MAX_TEMPERATURE = 2.0
"""Maximum temperature of retries: the highest that servers accept."""
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
    """Return `n` completions per prompt, or the error instead; nothing is raised.

    Each bad round raises the temperature by 0.1.
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
    """Format an error for a report."""
    return f"{type(error).__name__}: {error}"[:500]


def _require_answer_count(answers: Sequence[Answer], prompts: int) -> Sequence[Answer]:
    if len(answers) != prompts:
        raise GenerationError(f"generation.backend: {len(answers)} answers to {prompts} prompts; return one per prompt")
    return answers


def _check_completion_count(answer: Answer, n: int) -> Answer:
    if isinstance(answer, Exception) or len(answer) == n:
        return answer
    return GenerationError(f"generation.backend: {len(answer)} completions of a prompt; {n} were requested")
