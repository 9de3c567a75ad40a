"""Tabular and grouped records from a model: the generation prompt, sampled until there are enough.

What belongs here: batches of prompts, when to stop. What does not: time series (`series.py`).
"""

from rowmill.core.errors import ConfigError
from rowmill.core.permutation import key
from rowmill.tabular.backends import Completer, Completion
from rowmill.tabular.generation.options import Generation
from rowmill.tabular.generation.outcome import Generated, Tally, Trained, is_closed
from rowmill.tabular.generation.sampling import SEEDS, ask, told
from rowmill.tabular.parsing import Parsed, Parser, add_up
from rowmill.tabular.schema import Record

_PROMPTS = 100
"""Prompts per batch at most."""


def generate_records(
    completer: Completer,
    *,
    trained: Trained,
    options: Generation,
    num_records: int = 1000,
    seed: int = 0,
) -> Generated:
    """Generate records, in groups where they were trained in groups, until there are so many or patience ends.

    Groups stay whole, so of grouped records a few more may come. Every batch but `patience` in a row adds a record:
    there are at most `patience` × (`num_records` + 1).

    Raises
    ------
    ConfigError
        If the model was trained on series.

    """
    if trained.mode == "sequential":
        raise ConfigError(
            "generation: single records of a time series; a series is generated from its beginning; use generate_series"
        )
    parser = trained.parser(options)
    tally = Tally()
    records: list[Record] = []
    batches = bad_batches = 0
    error = ""
    while len(records) < num_records and bad_batches < options.patience:
        prompts = min(_PROMPTS, num_records - len(records))
        answers = ask(
            completer,
            [trained.prompt] * prompts,
            n=1,
            max_tokens=trained.max_tokens(trained.max_seq_length - trained.prompt_length),
            seeds=[key(seed, "generate", batches, number) % SEEDS for number in range(prompts)],
            stop=trained.eos,
            bad_rounds=bad_batches,
            options=options,
        )
        parsed = [_parsed(parser, one[0], tally) for one in answers if not isinstance(one, Exception)]
        error = next((told(one) for one in answers if isinstance(one, Exception)), error)
        found = [record for one in parsed for record in one.records]
        report = add_up(one.report for one in parsed)
        objects = report.valid + report.invalid
        is_bad = not found or report.invalid >= options.invalid_fraction_threshold * objects
        batches, bad_batches = batches + 1, bad_batches + 1 if is_bad else 0
        records += found
    if trained.mode == "tabular" and len(records) > num_records:
        tally.counts["invalid:past_bound"] += len(records) - num_records
        del records[num_records:]
    tally.counts["record"] = len(records)
    status = "complete" if len(records) >= num_records else "partial" if records else "failed"
    return Generated(status, records, tally.refused, dict(sorted(tally.counts.items())), error=error)


def _parsed(parser: Parser, completion: Completion, tally: Tally) -> Parsed:
    parsed = parser(completion.text, open_at_start=True, closed_at_end=is_closed(completion))
    tally.look_over(parsed, completion.text, "")
    return parsed
