"""The filters that compare rows with other texts, in their order, and what they add to the stage's output."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rowmill.kinds.shared.filters import identify_removal_filters
from rowmill.parts.context import StageOutput, compute_share
from rowmill.recipe.recipe import Recipe
from rowmill.schema.manifest import Part
from rowmill.stages.base import StageContext
from rowmill.stages.canonical_rows import contaminated_rows, near_duplicate_rows
from rowmill.stages.canonical_rows.contaminated_rows import ContaminationSearch, ScannedBenchmark
from rowmill.stages.canonical_rows.near_duplicate_rows import NearDuplicateSearch
from rowmill.tokenization.stored_tokenizers import identify_tokenizer, open_recipe_tokenizer


@dataclass(frozen=True, slots=True)
class FilteredRows:
    """The parts after the filters, and what each filter found; None: the dataset does not ask for it."""

    parts: list[Part]
    contamination: ContaminationSearch | None
    near_duplicates: NearDuplicateSearch | None
    scans: Sequence[Mapping[str, Any]]

    def count_facts(self, taken: int) -> dict[str, Any]:
        """Return the facts of the filters that ran, of `taken` records."""
        facts: dict[str, Any] = {}
        if self.contamination is not None:
            facts["decontamination_items"] = self.contamination.fewest_items
            facts["contaminated"] = compute_share(self.contamination.rows, taken)
        if self.near_duplicates is not None:
            facts["near_duplicates"] = compute_share(self.near_duplicates.rows, taken)
            facts["displaced"] = self.near_duplicates.displaced
        return facts

    def complete_output(self, draft: StageOutput) -> None:
        """Add the files and tables about what was found, and the scans of benchmarks."""
        for search in (self.contamination, self.near_duplicates):
            if search is not None:
                draft.parts = [
                    replace(part, files=part.files | files)
                    for part, files in zip(draft.parts, search.found, strict=True)
                ]
                draft.tables |= search.tables
        if self.contamination is not None:
            draft.details["scans"] = list(self.scans)


def filter_similar_rows(
    context: StageContext, parts: list[Part], benchmarks: tuple[ScannedBenchmark, ...]
) -> FilteredRows:
    """Remove contaminated rows, then near duplicates among the others, as the dataset asks for it."""
    contamination = contaminated_rows.remove_contaminated_rows(context, parts, benchmarks)
    clean = parts if contamination is None else contamination.parts
    near = near_duplicate_rows.remove_near_duplicates(context, clean)
    scans = [scan.to_json() for one in benchmarks for scan in one.scans]
    return FilteredRows(clean if near is None else near.parts, contamination, near, scans)


def identify_filters(recipe: Recipe, name: str) -> dict[str, Any]:
    """Return the options and versions of the filters that a dataset asks for."""
    dataset = recipe.datasets[name]
    versions = {"decontaminate": [contaminated_rows.index_benchmarks.version, contaminated_rows.search_part.version],
                "near_duplicates": [near_duplicate_rows.sign_part.version]}  # fmt: skip
    removal = identify_removal_filters(dataset.filters)
    own: dict[str, Any] = {"removal": {name: [*versions[name], options] for name, options in removal.items()}}
    # The texts of token ids are those that the tokenizer has for them.
    return (
        own | {"tokenizer": identify_tokenizer(recipe.tokenizer_choice)}
        if removal and dataset.row_kind == "tokens"
        else own
    )


def identify_texts(context: StageContext) -> list[str]:
    """Return the digest of the tokenizer, if the filters of a dataset need one for its rows."""
    if context.dataset.row_kind != "tokens" or not identify_removal_filters(context.dataset.filters):
        return []
    return [open_recipe_tokenizer(context)[0].card.digest]
