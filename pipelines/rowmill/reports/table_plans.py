"""Plans and advice on records as text for a terminal.

What belongs here: wording them. What does not: any number (`dry_run.py`).
"""

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.text import Text

from rowmill.core.console import BAD, DIM, GOOD, HEAD, LOOK, grid, visible
from rowmill.core.number_text import counted, dotted
from rowmill.inspection.dry_run import Advised, Planned
from rowmill.stages.table_plan import RecordPlan
from rowmill.tabular.assembly import FLUSHES

LARGEST = 20


def plans(planned: Iterable[Planned]) -> RenderableType:
    """Show the plan of each records dataset."""
    return Group(*(_plan(one) for one in planned))


def _plan(one: Planned) -> RenderableType:
    head = Text(f"\n{one.dataset}", HEAD)
    if one.plan is None:
        return Group(head, Text(f"  ✗ {visible(one.overflow)}", BAD))
    lines: list[RenderableType] = [head.append(f"  {one.plan.mode}", DIM), Text(f"  {_options(one.plan)}", DIM)]
    lines.append(
        grid(["split", "records", "groups", "examples", "tokens", "why examples ended"], _counts(one.plan), indent=2)
    )
    lines.append(grid(["", "", "min", "mean", "max", "std"], _sizes(one.plan), indent=2))
    lines += [Text(f"  ! {over.kind} {visible(over.sentence)}", LOOK) for over in one.plan.overflows[:LARGEST]]
    if len(one.plan.overflows) > LARGEST:
        lines.append(Text(f"  ! and {len(one.plan.overflows) - LARGEST} more", LOOK))
    if one.plan.changed:
        lines.append(Text(f"  ! the reference wire changes {counted(one.plan.changed, 'record')}", LOOK))
    return Group(*lines)


def _options(plan: RecordPlan) -> str:
    told, room = plan.options, plan.room
    cap = "no cap" if room.cap is None else f"cap {room.cap}"
    words = [
        f"L {room.limit:,}", f"P {room.prompt:,}", f"M {room.records:,}", cap,
        f"BOS {told['bos']} {told['bos_id']}", f"EOS {told['eos']} {told['eos_id']}",
        *([f"order {told['order']}"] if told["order"] is not None else []),
        *([f"{told['wanted']:,} records wanted"] if told["wanted"] is not None else []),
        *([f"one {told['privacy_unit']} is the unit of privacy"] if told["privacy_unit"] else []),
    ]  # fmt: skip
    return visible(dotted(words))


def _counts(plan: RecordPlan) -> list[tuple[object, ...]]:
    lines: list[tuple[object, ...]] = []
    for split, told in plan.facts["splits"].items():
        flushes = dotted(f"{name} {told[f'flush_{name}']:,}" for name in FLUSHES if told[f"flush_{name}"])
        lines.append((split, told["records"], told["groups"], told["examples"], told["tokens"], flushes))
    return lines


_SIZES = {
    "record_tokens": "tokens per record",
    "group_tokens": "tokens per group",
    "example_tokens": "tokens per example",
    "example_records": "records per example",
    "example_groups": "groups per example",
}


def _sizes(plan: RecordPlan) -> list[tuple[object, ...]]:
    lines: list[tuple[object, ...]] = []
    for split, told in plan.facts["splits"].items():
        for name, words in _SIZES.items():
            if told[f"{name}_max"]:
                lines.append(
                    (split, words, *(_short(told[f"{name}_{what}"]) for what in ("min", "mean", "max", "std")))
                )
    return lines


def _short(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


_SHOWN = ("mean", "std", "min", "p25", "p50", "p75", "max")


def advice(advised: Iterable[Advised]) -> RenderableType:
    """Show what speaks for and against each column as a group, and what examples come to."""
    return Group(*(_advice(one) for one in advised))


def _advice(one: Advised) -> RenderableType:
    size = one.estimate
    fits = "fits" if size.fits else "does not fit"
    words = [
        f"{size.unit_tokens:,} tokens per {'record' if one.mode == 'tabular' else 'group'} on average",
        f"{size.example_tokens:,} per example, which {fits}",
        f"at most {size.units:,} {'groups' if one.mode == 'grouped' else 'records'} in one",
        *size.advice,
    ]
    lines: list[RenderableType] = [
        Text(f"\n{one.dataset}", HEAD).append(f"  {one.mode}", DIM),
        Text(f"  {dotted(words)}", DIM),
    ]
    rows: list[tuple[object, ...]] = []
    for column in one.columns:
        sizes = column.sizes
        mark = Text("✗", BAD) if column.unsuitable else Text("!", LOOK) if column.warnings else Text("✓", GOOD)
        chosen = "chosen" if column.column in one.chosen else ""
        rows.append(
            (mark, visible(column.column), chosen, int(sizes["count"]), *(f"{sizes[name]:g}" for name in _SHOWN),
             ", ".join([*column.unsuitable, *column.warnings]))
        )  # fmt: skip
    lines.append(
        grid(
            ["", "column", "", "groups", "mean", "std", "min", "p25", "p50", "p75", "max", "against it"], rows, indent=2
        )
    )
    for column in one.columns:
        said = {**column.unsuitable, **column.warnings}
        lines.append(Text(f"\n  {visible(column.column)}  {visible(column.largest)}", DIM))
        lines += [
            Text(f"    {name}: {visible(why)}", BAD if name in column.unsuitable else LOOK)
            for name, why in said.items()
        ]
    if not rows:
        lines.append(Text("  no column groups records: every value stands once, or always", DIM))
    return Group(*lines)
