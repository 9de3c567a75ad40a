"""Plans and advice for records datasets as text for a terminal."""

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.text import Text

from rowmill.core.console import BAD, DIM, GOOD, HEAD, LOOK, escape_control_characters, make_grid
from rowmill.core.number_text import format_count, join_facts
from rowmill.inspection.dry_run import DatasetAdvice, DatasetTablePlan
from rowmill.stages.table_plan_facts import TablePlan
from rowmill.tabular.assembly import FLUSHES

MAX_SHOWN_OVERFLOWS = 20


def render_table_plans(planned: Iterable[DatasetTablePlan]) -> RenderableType:
    """Show the plan of each records dataset."""
    return Group(*(_render_table_plan(one) for one in planned))


def _render_table_plan(one: DatasetTablePlan) -> RenderableType:
    head = Text(f"\n{one.dataset}", HEAD)
    if one.plan is None:
        return Group(head, Text(f"  ✗ {escape_control_characters(one.overflow)}", BAD))
    lines: list[RenderableType] = [
        head.append(f"  {one.plan.mode}", DIM),
        Text(f"  {_format_plan_options(one.plan)}", DIM),
    ]
    lines.append(
        make_grid(
            ["split", "records", "groups", "examples", "tokens", "why examples ended"],
            _list_split_counts(one.plan),
            indent=2,
        )
    )
    lines.append(make_grid(["", "", "min", "mean", "max", "std"], _list_sizes(one.plan), indent=2))
    lines += [
        Text(f"  ! {over.kind} {escape_control_characters(over.description)}", LOOK)
        for over in one.plan.overflows.first[:MAX_SHOWN_OVERFLOWS]
    ]
    if one.plan.overflows.count > MAX_SHOWN_OVERFLOWS:
        lines.append(Text(f"  ! and {one.plan.overflows.count - MAX_SHOWN_OVERFLOWS} more", LOOK))
    if one.plan.changed:
        lines.append(Text(f"  ! the reference serialization changes {format_count(one.plan.changed, 'record')}", LOOK))
    return Group(*lines)


def _format_plan_options(plan: TablePlan) -> str:
    options, limits = plan.options, plan.limits
    cap = "no cap" if limits.cap is None else f"cap {limits.cap}"
    terms = [
        f"L {limits.limit:,}", f"P {limits.prompt:,}", f"M {limits.records:,}", cap,
        f"BOS {options['bos']} {options['bos_id']}", f"EOS {options['eos']} {options['eos_id']}",
        *([f"order {options['order']}"] if options["order"] is not None else []),
        *([f"{options['wanted']:,} records wanted"] if options["wanted"] is not None else []),
        *([f"privacy unit {options['privacy_unit']}"] if options["privacy_unit"] else []),
    ]  # fmt: skip
    return escape_control_characters(join_facts(terms))


def _list_split_counts(plan: TablePlan) -> list[tuple[object, ...]]:
    lines: list[tuple[object, ...]] = []
    for split, counts in plan.facts.items():
        flushes = join_facts(f"{name} {counts[f'flush_{name}']:,}" for name in FLUSHES if counts[f"flush_{name}"])
        lines.append((split, counts["records"], counts["groups"], counts["examples"], counts["tokens"], flushes))
    return lines


_SIZE_NAMES = {
    "record_tokens": "tokens per record",
    "group_tokens": "tokens per group",
    "example_tokens": "tokens per example",
    "example_records": "records per example",
    "example_groups": "groups per example",
}


def _list_sizes(plan: TablePlan) -> list[tuple[object, ...]]:
    lines: list[tuple[object, ...]] = []
    for split, counts in plan.facts.items():
        for name, label in _SIZE_NAMES.items():
            if counts[f"{name}_max"]:
                lines.append(
                    (split, label, *(_format_size(counts[f"{name}_{what}"]) for what in ("min", "mean", "max", "std")))
                )
    return lines


def _format_size(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


_SIZE_STATISTICS = ("mean", "std", "min", "p25", "p50", "p75", "max")


def render_advice(advised: Iterable[DatasetAdvice]) -> RenderableType:
    """Show how well each column groups records, and the estimated length of examples."""
    return Group(*(_render_dataset_advice(one) for one in advised))


def _render_dataset_advice(one: DatasetAdvice) -> RenderableType:
    size = one.estimate
    fits = "fits" if size.fits else "does not fit"
    estimates = [
        f"{size.unit_tokens:,} tokens per {'record' if one.mode == 'tabular' else 'group'} on average",
        f"{size.example_tokens:,} per example, which {fits}",
        f"at most {size.units:,} {'groups' if one.mode == 'grouped' else 'records'} in one",
        *size.advice,
    ]
    lines: list[RenderableType] = [
        Text(f"\n{one.dataset}", HEAD).append(f"  {one.mode}", DIM),
        Text(f"  {join_facts(estimates)}", DIM),
    ]
    rows: list[tuple[object, ...]] = []
    for column in one.columns:
        sizes = column.sizes
        mark = Text("✗", BAD) if column.unsuitable else Text("!", LOOK) if column.warnings else Text("✓", GOOD)
        chosen = "chosen" if column.column in one.chosen else ""
        rows.append(
            (mark, escape_control_characters(column.column), chosen, int(sizes["count"]),
             *(f"{sizes[name]:g}" for name in _SIZE_STATISTICS),
             ", ".join([*column.unsuitable, *column.warnings]))
        )  # fmt: skip
    lines.append(
        make_grid(
            ["", "column", "", "groups", "mean", "std", "min", "p25", "p50", "p75", "max", "objections"], rows, indent=2
        )
    )
    for column in one.columns:
        objections = {**column.unsuitable, **column.warnings}
        lines.append(
            Text(f"\n  {escape_control_characters(column.column)}  {escape_control_characters(column.largest)}", DIM)
        )
        lines += [
            Text(f"    {name}: {escape_control_characters(why)}", BAD if name in column.unsuitable else LOOK)
            for name, why in objections.items()
        ]
    if not rows:
        lines.append(Text("  no column groups records: each column's values are all different, or all equal", DIM))
    return Group(*lines)
