"""Facts that only rows of one kind have: margins and labels of preferences, truths of prompts, tokens' fields."""

from collections.abc import Sequence
from typing import Any

import polars as pl

from rowmill.formats.tokens import WITHOUT_FIELD
from rowmill.schema.ledger import sum_counts
from rowmill.schema.manifest import NOT_APPLICABLE, Part
from rowmill.schema.rows import make_row_schema
from rowmill.stages.base import StageContext, compute_share, scan_rows


def measure_preferences(context: StageContext, final: Sequence[Part]) -> dict[str, Any]:
    """Return the facts about preferences; nothing for other rows."""
    if "rejected" not in make_row_schema(context.dataset.row_kind).names:
        return {}
    files = [part.files["rows"] for part in final if part.files["rows"].rows]
    if not files:
        return {"swapped_pairs": 0, "nonpositive_margins": 0, "label_balance": NOT_APPLICABLE}
    rows = scan_rows(context.store, files, ["messages", "chosen", "rejected", "margin"])
    pairs = rows.filter(pl.col("chosen").is_not_null() & pl.col("rejected").is_not_null())
    own, swapped = (
        pairs.select(pl.concat_str(["messages", *sides], separator="\0").hash().alias("pair"))
        for sides in (("chosen", "rejected"), ("rejected", "chosen"))
    )
    counted = rows.select(
        pl.col("chosen").count().alias("good"),
        pl.col("rejected").count().alias("bad"),
        (pl.col("margin") <= 0).sum().alias("nonpositive"),
    ).collect(engine="streaming")
    good, bad, nonpositive = (int(value) for value in counted.row(0))
    return {
        "swapped_pairs": int(
            swapped.join(own, on="pair", how="semi").select(pl.len()).collect(engine="streaming").item()
        ),
        "nonpositive_margins": nonpositive,
        "label_balance": compute_share(min(good, bad), good + bad)
        if context.recipe.objective == "unpaired"
        else NOT_APPLICABLE,
    }


def measure_fields(context: StageContext, parts: Sequence[Part]) -> dict[str, Any]:
    """Return the share of token rows that lack the declared field that most rows lack."""
    if context.dataset.row_kind != "tokens":
        return {}
    names = context.dataset.format.get_rollout_fields().names
    notes = sum_counts(part.facts["notes"] for part in parts)
    rows = sum(sum(part.facts["schemas"].values()) for part in parts)
    lacking = max((notes.get(f"{WITHOUT_FIELD}{name}", 0) for name in names), default=0)
    return {"fields_absent": compute_share(lacking, rows) if rows and names else NOT_APPLICABLE}


def find_truth_conflicts(context: StageContext, parts: Sequence[Part]) -> list[str] | None:
    """Return the first row of each prompt whose copies have different ground truths; None for rows without any."""
    if "ground_truth" not in make_row_schema(context.dataset.row_kind).names:
        return None
    if not parts:
        return []
    rows = scan_rows(context.store, [part.files["rows"] for part in parts], ["row_id", "content_hash", "ground_truth"])
    by_prompt = rows.group_by("content_hash").agg(
        pl.col("row_id").min(), pl.col("ground_truth").n_unique().alias("truths")
    )
    found = by_prompt.filter(pl.col("truths") > 1).select("row_id").collect(engine="streaming")
    return sorted(found["row_id"].to_list())
