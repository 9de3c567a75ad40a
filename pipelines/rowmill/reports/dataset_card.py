"""The dataset card of a published build: README.md as the Hugging Face hub shows it, and Croissant JSON-LD.

    current.json ─► ranks that trainers read ─► all that they are made of ─► README.md, croissant.json

Both describe the build that trainers read, which is not always the newest. Nothing is made up: a licence is what the
recipe states, and a card without one is asked for.
"""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

import rowmill
from rowmill import sources
from rowmill.build.comparison import collect_lineage
from rowmill.build.steps import Project, plan_steps
from rowmill.core.arrays import NO_NUMBER
from rowmill.core.console import escape_control_characters
from rowmill.core.errors import ConfigError
from rowmill.core.stage_names import (
    EXPORTS,
    GPU_PARTITIONS,
    PACKED_SHARDS,
    RAW_DATASET,
    TOKENIZED_EXAMPLES,
    TRAINING_SPLITS,
)
from rowmill.core.storage import File, Store, damaged_file_error
from rowmill.reader.published import PublishedBuild, open_published
from rowmill.reports.build_view import BuildView
from rowmill.schema import manifest
from rowmill.schema.manifest import Manifest, StageKey
from rowmill.schema.shard_counts import ShardDetails
from rowmill.schema.source_counts import SourceCounts

README_NAME, CROISSANT_NAME = "README.md", "croissant.json"
LICENSE_PATTERN = re.compile(r"[a-z0-9][a-z0-9.+-]*")
"""What the hub's identifiers of licences look like, in lower case; any other text is `other` with a name."""
SIZE_STEPS = (("n<1K", 10**3), ("1K<n<10K", 10**4), ("10K<n<100K", 10**5), ("100K<n<1M", 10**6), ("1M<n<10M", 10**7),
              ("10M<n<100M", 10**8), ("100M<n<1B", 10**9), ("1B<n<10B", 10**10), ("10B<n<100B", 10**11),
              ("100B<n<1T", 10**12))  # fmt: skip
"""The hub's classes of sizes, and the number of sequences that each is below."""
PARQUET_TYPE = "application/x-parquet"
MEDIA_TYPES = {".parquet": PARQUET_TYPE, ".arrow": "application/vnd.apache.arrow.file", ".json": "application/json",
               ".jsonl": "application/jsonlines"}  # fmt: skip
BLOCK_BYTES = 1 << 20

# The context of Croissant 1.1, as the specification prints it.
CROISSANT_CONTEXT: dict[str, Any] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "cr": "http://mlcommons.org/croissant/",
    "dct": "http://purl.org/dc/terms/",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "sc": "https://schema.org/",
    "conformsTo": "dct:conformsTo",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "description": {"@container": "@language"},
    "examples": {"@id": "cr:examples", "@type": "@json"},
    "name": {"@container": "@language"},
    **{
        name: f"cr:{name}"
        for name in (
            "arrayShape citeAs column containedIn equivalentProperty extract field fileObject fileProperty fileSet "
            "format includes isArray isLiveDataset jsonPath key md5 parentField path recordSet references regex "
            "repeated replace samplingRate separator source subField transform"
        ).split()
    },
}


def write_card(project: Project, folder: str | None = None) -> tuple[str, str]:
    """Write README.md and croissant.json of the published build; return their paths or URLs.

    `folder` is a path or fsspec URL; None is the recipe's folder in the store, where both lie above all files that they
    describe. Every described file is read once, for its SHA-256. Raises ConfigError if a source has no licence, or
    options changed since the published build. Raises IntegrityError if nothing was published, or a described file is
    missing or damaged.
    """
    recipe = project.recipe
    unlicensed = [f"datasets.{name}.source" for name, dataset in recipe.datasets.items() if not dataset.source.license]
    if unlicensed:
        raise ConfigError(
            f"{recipe.name}: {', '.join(unlicensed)}: no license; a card states the licence of every source; write "
            "what its owner states, such as license: cc-by-4.0, or license: unknown if nobody knows"
        )
    published = open_published(project.store, recipe.name)
    ranks = manifest.load_version(project.store, (recipe.name, GPU_PARTITIONS), published.version)
    made: dict[StageKey, Manifest | None] = {step.key: None for step in plan_steps(project)}
    made |= collect_lineage(project, ranks)
    for export in recipe.exports:
        key = (recipe.name, EXPORTS, export.name)
        output = manifest.load_current(project.store, key)
        # An export of another build is not described.
        if output is not None and output.inputs.items() <= ranks.inputs.items():
            made[key] = output
    changed = [
        "/".join(step.key[1:])
        for step in plan_steps(project)
        if (output := made[step.key]) is not None and output.code_version != step.code_version
    ]
    if changed or list(published.datasets) != list(recipe.datasets):
        raise ConfigError(
            f"{recipe.name}: the recipe changed since the published build ({', '.join(changed) or 'its datasets'}); a "
            f"card describes the recipe that made the data; run `rowmill build {recipe.name}`, or restore the recipe"
        )
    store = Store(folder or project.store.path(recipe.name))
    card = _Card(BuildView(project, made), published, ranks, store)
    body = "\n".join(card.render_body())
    front_matter = yaml.safe_dump(card.describe_front_matter(), sort_keys=False, allow_unicode=True)
    store.write(README_NAME, f"---\n{front_matter}---\n\n{body}".encode())
    store.write(CROISSANT_NAME, orjson.dumps(card.describe_croissant(body), option=orjson.OPT_INDENT_2) + b"\n")
    return store.path(README_NAME), store.path(CROISSANT_NAME)


@dataclass(frozen=True, eq=False)
class _DescribedFile:
    """A file of the build: its name on the card, its address for readers of the card, its columns if it has some."""

    name: str
    url: str
    sha256: str
    size_bytes: int
    schema: pa.Schema | None


@dataclass(frozen=True, eq=False)
class _Card:
    """What both files say about a published build."""

    view: BuildView
    published: PublishedBuild
    ranks: Manifest
    out: Store

    @cached_property
    def files(self) -> Mapping[tuple[str, str], Sequence[_DescribedFile]]:
        """The shards of each dataset and split, and the files of each export, by `(name, split)`.

        Of a dataset whose shards have no tokens, the files of its examples are by `(name, "examples")`.
        """
        found: dict[tuple[str, str], list[_DescribedFile]] = {}
        for key, output in self.view.made.items():
            if output is not None and output.stage == EXPORTS:
                files = output.parts[0].files.values()
                found["/".join(key[1:]), str(output.card["split"])] = list(map(self._describe_file, files))
            elif output is not None and output.stage == TOKENIZED_EXAMPLES and key[1] in self.indexed:
                files = [part.files["examples"] for part in output.parts if "examples" in part.files]
                found[key[1], "examples"] = list(map(self._describe_file, files))
            elif output is not None and output.stage == PACKED_SHARDS:
                # Other parts are plans.
                for part in (part for part in output.parts if "shard" in part.files):
                    shards = found.setdefault((key[1], part.get_details(ShardDetails).split), [])
                    shards.append(self._describe_file(part.files["shard"]))
        return found

    @property
    def indexed(self) -> Sequence[str]:
        """The datasets whose shards name the tokens of examples instead of holding them."""
        datasets = self.view.project.recipe.datasets
        return [name for name, dataset in datasets.items() if dataset.packing.layout == "index"]

    def _describe_file(self, file: File) -> _DescribedFile:
        store = self.view.project.store
        url = store.path(file.path)
        if store.is_local and self.out.is_local:
            url = os.path.relpath(os.path.abspath(url), os.path.abspath(self.out.root)).replace(os.sep, "/")
        sha256, digest, size = hashlib.sha256(), hashlib.blake2b(digest_size=16), 0
        try:
            with store.open(file.path) as content:
                while block := content.read(BLOCK_BYTES):
                    sha256.update(block)
                    digest.update(block)
                    size += len(block)
        except FileNotFoundError:
            raise damaged_file_error(store, file, "missing") from None
        if digest.hexdigest() != file.digest:
            raise damaged_file_error(store, file, f"digest {digest.hexdigest()}")
        schema = None
        if file.path.endswith(".parquet"):
            with store.open(file.path) as content:
                schema = pq.read_schema(content)
        return _DescribedFile(file.path.rpartition("/")[2], sources.public_url(url), sha256.hexdigest(), size, schema)

    @cached_property
    def licenses(self) -> Mapping[str, str]:
        """The licence of each dataset's source, as the recipe states it."""
        return {name: str(dataset.source.license) for name, dataset in self.view.project.recipe.datasets.items()}

    @cached_property
    def raw(self) -> Mapping[str, Manifest]:
        """The scanned source of each dataset."""
        recipe = self.view.project.recipe
        found = {name: self.view.find_output(name, RAW_DATASET) for name in recipe.datasets}
        return {name: output for name, output in found.items() if output is not None}

    # ── README.md ──────────────────────────────────────────────────────────────────────────────────

    def describe_front_matter(self) -> dict[str, Any]:
        """Return what the hub reads from a card: licence, size, task, tags, and the files to load."""
        recipe = self.view.project.recipe
        stated = list(dict.fromkeys(self.licenses.values()))
        names = [text for text in stated if not LICENSE_PATTERN.fullmatch(text.lower())]
        ids = [*(text.lower() for text in stated if text not in names), *(["other"] if names else [])]
        shards = [shards for entry in self.published.sets.values() for shards in entry.shards.values()]
        sequences = sum(shard.rows for group in shards for shard in group)
        tags = [tag for entry in self.published.sets.values() for tag in entry.tags]
        kinds = [dataset.format.get_name() for dataset in recipe.datasets.values()]
        configs = [
            {
                "config_name": name,
                "data_files": [
                    {"split": split, "path": [file.url for file in files]}
                    for (other, split), files in self.files.items()
                    if other == name
                ],
            }
            for name in recipe.datasets
            # The hub refuses a set of no files, and shows no tokens of shards without them.
            if name not in self.indexed and any(other == name for other, _ in self.files)
        ]
        is_above = not any(
            file.url.startswith("../") or "://" in file.url for files in self.files.values() for file in files
        )
        return {
            "pretty_name": recipe.name,
            "license": ids[0] if len(ids) == 1 else ids,
            **({"license_name": ", ".join(names)} if names else {}),
            "size_categories": [next((name for name, limit in SIZE_STEPS if sequences < limit), "n>1T")],
            "task_categories": ["text-generation"],
            "tags": list(dict.fromkeys(["rowmill", *kinds, *tags])),
            # The hub loads files of its own repository only.
            **({"configs": configs} if is_above and configs else {}),
        }

    def render_body(self) -> Iterator[str]:
        """Yield the lines of the card's text."""
        view, recipe = self.view, self.view.project.recipe
        identity = self.published.describe_identity()
        yield f"# {recipe.name}\n"
        yield (
            f"Packed token sequences for training language models, of at most {recipe.seq_len:,} tokens, made by "
            f"rowmill {rowmill.__version__}.\n"
        )
        shown = {name: identity[name] for name in ("version", "digest", "order", "tokenizer", "tokenizer_json")}
        tokenizer = recipe.tokenizer if isinstance(recipe.tokenizer, str) else recipe.tokenizer.name
        yield from _render_table(
            ("", ""), [("built", self.ranks.built_at), ("tokenizer name", tokenizer), *shown.items()]
        )
        yield "\n## Sources\n"
        facts = [(name, raw, raw.get_counts(SourceCounts)) for name, raw in self.raw.items()]
        yield from _render_table(
            ("dataset", "source", "licence", "files", "records", "content"),
            [
                (name, self._name_source(name), self.licenses[name], counts.files, counts.records, raw.card["parts"])
                for name, raw, counts in facts
            ],
        )
        yield "\n## Counts\n"
        yield from _render_table(view.dataset_counts.columns, view.dataset_counts.rows)
        yield "\n## Splits\n"
        order = view.find_output(None, TRAINING_SPLITS)
        assert order is not None, "ranks are made of an order"
        yield from _render_table(order.tables["splits"].columns, order.tables["splits"].rows)
        yield from self._render_filters()
        yield from self._render_checks()
        yield "\n## Rebuild\n"
        yield (
            f"Save this as `configs/{recipe.name}.yaml`, with the sources where it names them. The same sources give "
            f"the content digest `{identity['digest']}` on any machine.\n"
        )
        # The recipe as it can be written again, without secrets and without `execution`.
        dumped = recipe.model_dump(
            mode="json", exclude_unset=True, by_alias=True, exclude={"name": True, "execution": True}
        )
        if isinstance(dumped["tokenizer"], dict):
            dumped["tokenizer"].pop("content", None)
        yield f"```yaml\n{yaml.safe_dump(dumped, sort_keys=False, allow_unicode=True)}```\n"
        yield f"```\nrowmill build {recipe.name}   # rowmill {rowmill.__version__}\n```\n"

    def _render_filters(self) -> Iterator[str]:
        """Yield what was filtered: the options of each dataset, and the records that each stage left out."""
        view, recipe = self.view, self.view.project.recipe
        yield "\n## Filters\n"
        yield "What the recipe asks, and what no stage kept.\n"
        filters = {name: dataset.filters.model_dump(mode="json") for name, dataset in recipe.datasets.items()}
        shown_filters = {
            name: "; ".join(f"{option}: {orjson.dumps(value).decode()}" for option, value in options.items() if value)
            for name, options in filters.items()
        }
        yield from _render_table(("dataset", "filters"), shown_filters.items())
        left_out = [(name, *line) for name in recipe.datasets for line in view.list_left_out(name)]
        if left_out:
            yield ""
            yield from _render_table(("dataset", "stage", "state", "reason", "records"), left_out)

    def _render_checks(self) -> Iterator[str]:
        """Yield the results of all checks, failed ones first, and the failures that were excused."""
        view = self.view
        yield "\n## Checks\n"
        results = [result for step in view.steps for result in view.results[step.key]]
        counts = Counter(result.outcome for result in results)
        yield ", ".join(f"{counts[outcome]:,} {outcome}" for outcome in ("passed", "failed", "not_applicable")) + ".\n"
        columns = ("check", "stage", "value", "wanted", "severity", "outcome")
        lines = [
            (one.check, "/".join(one.key[1:]), one.shown, one.wanted, one.severity, one.outcome)
            for one in sorted(results, key=lambda one: not one.failed)
            if one.outcome != "not_applicable"
        ]
        yield from _render_table(columns, lines)
        yield "\n## Waivers\n"
        yield "\n".join(f"- {_escape(waiver)}" for waiver in view.waivers) or "None: no failed check was excused."

    def _name_source(self, name: str) -> str:
        """Name a source as the recipe does, a dataset of the hub with its commit."""
        source = self.view.project.recipe.datasets[name].source
        match source:
            case sources.Files():
                return ", ".join(map(sources.public_url, source.all_urls))
            case sources.HuggingFaceSource():
                commits = {str(scan["revision"]) for scan in self.raw[name].details["scans"] if scan["revision"]}
                return " ".join([source.id, *([source.name] if source.name else []), *sorted(commits)])
            case sources.GeneratedSource():
                return f"generated by a model: {source.generated}"

    # ── croissant.json ─────────────────────────────────────────────────────────────────────────────

    def describe_croissant(self, body: str) -> dict[str, Any]:
        """Return the JSON-LD: every shard and export as a file with its SHA-256, their columns as record sets."""
        recipe = self.view.project.recipe
        year, month, day = (int(text) for text in self.ranks.built_at[:10].split("-"))
        distribution: list[dict[str, Any]] = []
        record_sets: list[dict[str, Any]] = []
        for (name, split), files in self.files.items():
            at = f"{name}/{split}"
            distribution += [
                {
                    "@type": "cr:FileObject",
                    "@id": f"{at}/{number:05d}/{file.name}",
                    "name": file.name,
                    "contentUrl": file.url,
                    "contentSize": f"{file.size_bytes} B",
                    "encodingFormat": MEDIA_TYPES.get(os.path.splitext(file.name)[1], "application/octet-stream"),
                    "sha256": file.sha256,
                }
                for number, file in enumerate(files)
            ]
            tables = [file for file in files if file.schema is not None]
            if tables:
                urls = [file.url for file in tables]
                distribution.append(
                    {"@type": "cr:FileSet", "@id": f"{at}/files", "encodingFormat": PARQUET_TYPE, "includes": urls}
                )
                record_sets.append(describe_record_set(at, tables[0].schema))
        return {
            "@context": CROISSANT_CONTEXT,
            "@type": "sc:Dataset",
            "conformsTo": "http://mlcommons.org/croissant/1.1",
            "name": recipe.name,
            "description": body,
            "license": list(dict.fromkeys(self.licenses.values())),
            "datePublished": self.ranks.built_at,
            # Croissant wants three numbers: the day of the build, with the version of the ranks.
            "version": f"{year}.{month}.{day}+{self.published.version}",
            "keywords": self.describe_front_matter()["tags"],
            "isBasedOn": [
                {"@type": "sc:Dataset", "name": self._name_source(name), "license": license_}
                for name, license_ in self.licenses.items()
            ],
            "distribution": distribution,
            "recordSet": record_sets,
        }


def describe_record_set(at: str, schema: pa.Schema | None) -> dict[str, Any]:
    """Return the columns of a table's files, which are at this name, as a record set.

    A column of a type that Croissant has no word for, such as lists of structs, is only named: what is inside a struct
    has no name by which it could be extracted.
    """
    words = (
        ("sc:Integer", pa.types.is_integer),
        ("sc:Float", pa.types.is_floating),
        ("sc:Boolean", pa.types.is_boolean),
        ("sc:Text", pa.types.is_string),
        ("sc:Text", pa.types.is_large_string),
        ("sc:Text", pa.types.is_dictionary),
    )
    fields: list[dict[str, Any]] = []
    left_out: list[str] = []
    for column in schema or ():
        kind, shape = column.type, list[int]()
        while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
            shape.append(kind.list_size if pa.types.is_fixed_size_list(kind) else -1)
            kind = kind.value_type
        word = next((word for word, matches in words if matches(kind)), None)
        if word is None:
            left_out.append(f"{column.name} ({column.type})")
            continue
        fields.append(
            {
                "@type": "cr:Field",
                "@id": f"{at}/{column.name}",
                "name": column.name,
                "dataType": word,
                # -1 is any length: the rows of a batch, and the lists in a list, differ in theirs.
                **({"isArray": True, "arrayShape": ",".join(map(str, shape))} if shape else {}),
                "source": {"fileSet": {"@id": f"{at}/files"}, "extract": {"column": column.name}},
            }
        )
    remark = {"description": f"Columns that are not described: {', '.join(left_out)}."} if left_out else {}
    return {"@type": "cr:RecordSet", "@id": at, "name": at, **remark, "field": fields}


def _escape(value: object) -> str:
    """Return a value as the text of a Markdown cell."""
    if value is None or value == "":
        return NO_NUMBER if value is None else ""
    text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return escape_control_characters(text).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def _render_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        yield f"| {' | '.join(map(_escape, row))} |"
