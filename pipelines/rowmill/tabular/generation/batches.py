"""Generation of tabular and grouped records: the generation prompt is sampled until there are enough."""

from rowmill.core.errors import ConfigError
from rowmill.core.permutation import hash_labels
from rowmill.tabular.backends import Completer, Completion
from rowmill.tabular.generation.options import Generation
from rowmill.tabular.generation.outcome import GenerationResult, GenerationTally, TrainedModel, is_ended_by_model
from rowmill.tabular.generation.sampling import SEEDS, describe_error, sample_completions
from rowmill.tabular.parsing import ParsedText, Parser, merge_span_counts
from rowmill.tabular.schema import Record

_PROMPTS_PER_BATCH = 100
"""Maximum prompts per batch."""


def generate_records(
    completer: Completer,
    *,
    model: TrainedModel,
    options: Generation,
    num_records: int = 1000,
    seed: int = 0,
) -> GenerationResult:
    """Generate `num_records` records, in groups where training was grouped, or stop when `patience` runs out.

    Groups stay whole, so there may be a few records more. Of `patience` consecutive batches at least one adds a record,
    or generation ends: there are at most `patience` × (`num_records` + 1) batches.

    Raises
    ------
    ConfigError
        If the model was trained on series.

    """
    if model.mode == "sequential":
        raise ConfigError(
            "generation: the model was trained on time series, not on single records; use generate_series"
        )
    parser = model.parser(options)
    tally = GenerationTally()
    records: list[Record] = []
    batches = bad_batches = 0
    error = ""
    while len(records) < num_records and bad_batches < options.patience:
        prompts = min(_PROMPTS_PER_BATCH, num_records - len(records))
        answers = sample_completions(
            completer,
            [model.prompt] * prompts,
            n=1,
            max_tokens=model.max_tokens(model.max_seq_length - model.prompt_length),
            seeds=[hash_labels(seed, "generate", batches, number) % SEEDS for number in range(prompts)],
            stop=model.eos,
            bad_rounds=bad_batches,
            options=options,
        )
        parsed = [
            _parse_completion(parser, answer[0], tally) for answer in answers if not isinstance(answer, Exception)
        ]
        error = next((describe_error(answer) for answer in answers if isinstance(answer, Exception)), error)
        found = [record for one in parsed for record in one.records]
        report = merge_span_counts(one.report for one in parsed)
        objects = report.valid + report.invalid
        is_bad = not found or report.invalid >= options.invalid_fraction_threshold * objects
        batches, bad_batches = batches + 1, bad_batches + 1 if is_bad else 0
        records += found
    if model.mode == "tabular" and len(records) > num_records:
        tally.counts["invalid:past_bound"] += len(records) - num_records
        del records[num_records:]
    tally.counts["record"] = len(records)
    status = "complete" if len(records) >= num_records else "partial" if records else "failed"
    return GenerationResult(status, records, tally.rejected, dict(sorted(tally.counts.items())), error=error)


def _parse_completion(parser: Parser, completion: Completion, tally: GenerationTally) -> ParsedText:
    parsed = parser(completion.text, open_at_start=True, closed_at_end=is_ended_by_model(completion))
    tally.count_rejected_spans(parsed, completion.text, "")
    return parsed
