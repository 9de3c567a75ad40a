"""Values that several stages read from an input's manifest: examples, packed shards, the order of training."""

from collections.abc import Collection, Mapping, Sequence

import pyarrow as pa

from rowmill.checks.cross_stage import iterate_history
from rowmill.core.errors import IntegrityError
from rowmill.core.stage_names import PACKED_SHARDS, RAW_DATASET, TOKENIZED_EXAMPLES, TRAINING_SPLITS
from rowmill.core.storage import Store, read_tables
from rowmill.recipe.recipe import Recipe
from rowmill.schema import manifest
from rowmill.schema.example_counts import JoinedExampleDetails
from rowmill.schema.manifest import Manifest, Part, StageKey
from rowmill.schema.rows import DOMAIN_FIELD, PADDING_FIELD, ROW_KINDS, TREE_FIELDS, RowKind
from rowmill.schema.shard_counts import select_shards
from rowmill.shards import native
from rowmill.sources import SourcePart
from rowmill.sources.reading import load_part_groups, load_source_parts
from rowmill.stages.base import StageContext, StageDeclaration


def load_order(store: Store, splits: Manifest, columns: Sequence[str] | None = None) -> pa.Table:
    """Return the order of training, a line for each place."""
    return pa.concat_tables(read_tables(store, splits.files("order"), columns))


def list_example_sources(context: StageContext) -> list[tuple[Part, Sequence[SourcePart]]]:
    """Return the parts of a dataset's examples, each with the source parts of its rows."""
    made = [part for part in context.input(TOKENIZED_EXAMPLES).parts if "examples" in part.files]
    scanned = context.input(RAW_DATASET)
    # A part of examples that join rows names the source parts of these: no other is in their lineage.
    by_id = {part.part_id: part for part in load_source_parts(scanned)}
    described = [one for part in made if (one := part.find_details(JoinedExampleDetails)) is not None]
    named = [[by_id[name] for name in one.source_parts] for one in described]
    sources: Sequence[Sequence[SourcePart]] = named if len(named) == len(made) else load_part_groups(scanned)
    return list(zip(made, sources, strict=True))


def list_segment_columns(recipe: Recipe, kind: RowKind) -> list[pa.Field]:
    """Return what shards have of each segment: columns of its kind, declared fields, domains, padding or trees."""
    padding = [PADDING_FIELD] if recipe.segment_multiple_of > 1 else []
    trees = TREE_FIELDS if recipe.shares_prefixes else ()
    return [*list_filled_columns(recipe, kind), *padding, *trees]


def list_filled_columns(recipe: Recipe, kind: RowKind) -> list[pa.Field]:
    """Return the columns of segments whose values come from examples."""
    domains = [DOMAIN_FIELD] if recipe.stores_domains else []
    return [*ROW_KINDS[kind].segment_columns, *recipe.rollout_fields.row_columns, *domains]


def list_input_versions(store: Store, inputs: Mapping[StageKey, Manifest], stage: StageDeclaration) -> dict[str, str]:
    """Return the versions of everything that a stage reads: its inputs, and what they were made of (`origins`)."""
    read = dict(inputs)
    for made in inputs.values() if stage.origins else ():
        read |= {one.key: one for one in iterate_history(store, made) if one.stage in stage.origins}
    return {"/".join(key): one.version for key, one in sorted(read.items())}


def load_origin(context: StageContext, output: Manifest, stage: str) -> Manifest:
    """Return the output of a dataset's stage that an output of the same dataset was made from."""
    key: StageKey = (*output.key[:-1], stage)
    return manifest.load_input(context.store, output, key)


def list_train_shards(packed: Mapping[str, Manifest]) -> list[Part]:
    """Return the parts that are train shards, in recipe order: what a shard's number in an index counts."""
    return [part for one in packed.values() for part in select_shards(one.parts, "train")]


def count_train_sequences(packed: Mapping[str, Manifest]) -> list[int]:
    """Return how many train sequences each dataset has, in recipe order."""
    return [sum(part.files["shard"].rows for part in list_train_shards({name: one})) for name, one in packed.items()]


def get_packed_shards(context: StageContext) -> dict[str, Manifest]:
    """Return the packed shards of each dataset, in recipe order."""
    return {name: context.inputs[(context.recipe.name, name, PACKED_SHARDS)] for name in context.recipe.datasets}


def make_shard_schema(recipe: Recipe, kind: RowKind) -> pa.Schema:
    """Return the columns that packed shards give readers; the files of an index lack those of tokens."""
    return native.extend_schema(native.SHARD_SCHEMA, recipe.token_types, list_segment_columns(recipe, kind))


def describe_schema(schema: pa.Schema) -> tuple[tuple[str, str], ...]:
    """Return the names and types of columns."""
    return tuple((field.name, str(field.type)) for field in schema)


def _get_shard_columns(packed: Manifest) -> tuple[tuple[str, str], ...]:
    return tuple((name, kind) for name, kind in packed.details["columns"])


def open_joined_shards(context: StageContext) -> dict[str, Manifest]:
    """Return the packed shards of each dataset, in recipe order, which are all of one form.

    A version that somebody chose may have another tokenizer, sequence length or columns, as it was packed for another
    recipe. Raises IntegrityError, since no batch can hold both.
    """
    packed = get_packed_shards(context)
    columns = {name: _get_shard_columns(one) for name, one in packed.items()}
    common = set.intersection(*map(set, columns.values()))
    forms: dict[str, dict[str, list[str]]] = {}
    for name, one in packed.items():
        for what, form in (
            ("tokenizers", f"tokenizer {str(one.card['tokenizer_digest'])[:12]}"),
            ("lengths of sequences", f"seq_len {one.card['seq_len']}"),
            ("sets of columns", _describe_columns(columns[name], common)),
        ):
            forms.setdefault(what, {}).setdefault(form, []).append(name)
    for what, found in forms.items():
        if len(found) > 1:
            listed = "; ".join(f"{', '.join(names)} with {form}" for form, names in found.items())
            raise IntegrityError(
                f"{'/'.join(context.key)}: its datasets were packed with {len(found)} {what} ({listed}); the sequences "
                "of one order have the same; build the recipe again, and pin tokenizer.revision if it is on the hub"
            )
    return packed


def open_ordered_shards(context: StageContext) -> dict[str, Manifest]:
    """Return the packed shards of each dataset, in recipe order, of which the order of training was made.

    An order names sequences by the number of their dataset, and by theirs in it: in other shards these would be others.
    Raises IntegrityError for an order of others, which only a version can be that somebody chose.
    """
    packed = open_joined_shards(context)
    card = context.inputs[(context.recipe.name, TRAINING_SPLITS)].card
    ordered = [(name, card["packed"][name]) for name in card["datasets"]]
    given = [(name, one.version) for name, one in packed.items()]
    if ordered != given:
        made, now = (", ".join(f"{name} {version[:12]}" for name, version in of) for of in (ordered, given))
        raise IntegrityError(
            f"{'/'.join(context.key)}: the order was made of the packed shards {made}; the recipe has {now}; an order "
            f"is of its own shards alone; build {TRAINING_SPLITS} again, or set the datasets back"
        )
    return packed


def require_form_of_recipe(context: StageContext, packed: Mapping[str, Manifest]) -> None:
    """Refuse shards that were packed for another sequence length or other columns than the recipe's now."""
    recipe = context.recipe
    for name, one in packed.items():
        wanted = describe_schema(make_shard_schema(recipe, recipe.datasets[name].row_kind))
        found = _get_shard_columns(one)
        if int(one.card["seq_len"]) != recipe.seq_len or found != wanted:
            common = {*found} & {*wanted}
            raise IntegrityError(
                f"{'/'.join(context.key)}: the shards of {name} were packed with seq_len {one.card['seq_len']} and "
                f"{_describe_columns(found, common)}; the recipe has seq_len {recipe.seq_len} and "
                f"{_describe_columns(wanted, common)}; build {name}/{PACKED_SHARDS} again, or set the options back "
                "that it was packed under"
            )


def _describe_columns(schema: Sequence[tuple[str, str]], common: Collection[tuple[str, str]]) -> str:
    own = [f"{name}: {kind}" for name, kind in schema if (name, kind) not in common]
    return f"the columns {', '.join(own)}" if own else "no other columns"
