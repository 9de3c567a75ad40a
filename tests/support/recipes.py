"""A recipe builder for tests that need a real build without Dagster: data, a tiny tokenizer, a project, its results."""

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from rowmill import sources
from rowmill.build import runner
from rowmill.build.steps import Project, open_project
from rowmill.checks.judge import CheckResult
from rowmill.core.storage import digest_file
from rowmill.executors import LocalPool
from rowmill.reader import Reader
from rowmill.recipe.recipe import Dataset
from rowmill.schema.manifest import Manifest, Part, load_current
from rowmill.schema.rows import parse_row_id
from rowmill.stages.base import StageContext
from rowmill.stages.canonical_rows import text_rows
from rowmill.stages.tokenized_examples import stage as tokenized_examples
from rowmill.stages.tokenized_examples import text_parts
from rowmill.tokenization import stored_tokenizers
from rowmill.tokenization.reference_sample import MIN_PART_CHARS
from rowmill.tokenization.tokenizer import Encoder, open_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% if m['tool_calls'] %}{% for c in m['tool_calls'] %}\n<tool_call>\n"
    "{\"name\": \"{{ c['function']['name'] }}\", \"arguments\": {{ c['function']['arguments'] | tojson }}}\n"
    "</tool_call>{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Prints every role alike, and calls; like most real templates it trims nothing and checks nothing."""

THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['reasoning_content'] %}({{ m['reasoning_content'] }})"
    "{% endif %}{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A chat template that prints reasoning before the content of its message."""

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""The control tokens, in the order of their ids from 0."""

WORDS = tuple(
    "the a river stone maps winter seven of and under light paper train keeps moving slowly past green houses where "
    "people cook rice count boats answer letters ask why numbers add up to eleven twelve thirteen".split()
)

_SHARES = (
    "rejects", "zero_loss_rows", "context_overflow", "packing_loss", "end_to_end_loss", "shrunk", "unknown_roles",
    "duplicates", "rank_balance", "split_share", "content_dropped", "dropped_share", "filler_share", "ambiguous_times",
)  # fmt: skip
LENIENT: dict[str, Any] = {
    "nonempty": {"at_least": 0},
    "order_nonempty": {"at_least": 0},
    "fill": {"at_least": 0},
    **{check: {"at_most": 1} for check in _SHARES},
}
"""Gates that let a handful of rows through whatever is wrong with them: the subject is what becomes of each row."""

TO_ROWS = ("raw_dataset", "canonical_rows")
TO_EXAMPLES = (*TO_ROWS, "tokenized_examples")
TO_LENGTHS = (*TO_EXAMPLES, "truncation_stats")
TO_SHARDS = (*TO_LENGTHS, "packed_shards")
"""The stages of a dataset up to one of them."""


@functools.cache
def tokenizer_json() -> str:
    """Train a byte-level BPE of some 600 tokens on our own words; equal input gives equal files."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in CONTROL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([sentence(i, 40) for i in range(200)], trainer)
    return tokenizer.to_str()


def write_tokenizer(folder: Path, *, template: str = CHATML) -> Path:
    """Write the tiny tokenizer as a folder that `transformers` opens."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": template,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1 << 20,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def rewrite_tokenizer(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Write the tiny tokenizer with its `tokenizer.json` changed."""
    path = write_tokenizer(folder) / "tokenizer.json"
    parsed = json.loads(path.read_text(encoding="utf-8"))
    change(parsed)
    path.write_text(json.dumps(parsed), encoding="utf-8")
    return folder


# ── Rows ───────────────────────────────────────────────────────────────────────────────────────────
def sentence(i: int, words: int) -> str:
    """Return a text of `words` words that differs from that of any other `i`."""
    return " ".join(WORDS[(i * 7 + k * (i % 5 + 1) + k // 3) % len(WORDS)] for k in range(words)) + f" {i}."


def chat(i: int, *, turns: int = 1, words: int = 8) -> dict[str, Any]:
    """Return a conversation of `turns` exchanges."""
    messages: list[dict[str, Any]] = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{sentence(1000 * turn + i, words)} why?"})
        messages.append({"role": "assistant", "content": sentence(1000 * turn + i + 3, 2 * words)})
    return {"messages": messages}


def pair(i: int, *, words: int = 8) -> dict[str, Any]:
    """Return an instruction with its answer."""
    return {"prompt": f"Say something about {sentence(i, words)}", "answer": sentence(i + 1, words)}


def document(i: int, *, words: int = 40) -> dict[str, Any]:
    """Return a short document."""
    return {"text": sentence(i, words)}


CHAT: dict[str, Any] = {"kind": "chat"}
PAIR: dict[str, Any] = {"kind": "supervised", "input_field": "prompt", "output_field": "answer"}
TEXT: dict[str, Any] = {"kind": "text"}


def lines(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """Encode rows as JSON Lines."""
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


# ── Projects ───────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True)
class Workspace:
    """A project in a folder: `data/`, `tokenizer/`, `configs/mini.yaml`, and a store in `root` (or beside them)."""

    folder: Path
    root: str | None = None

    def write(self, name: str, content: "bytes | Iterable[Mapping[str, Any]]") -> str:
        """Write a source file from bytes or rows; return its path relative to the project."""
        path = self.folder / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else lines(content))
        return f"data/{name}"

    def recipe(self, datasets: Mapping[str, Mapping[str, Any]], **changes: Any) -> "Workspace":
        """Write the recipe; `changes` replace top-level keys. The tokenizer is written if there is none."""
        if not (self.folder / "tokenizer").exists():
            write_tokenizer(self.folder / "tokenizer")
        values: dict[str, Any] = {
            "tokenizer": "tokenizer",
            "seq_len": 256,
            "defaults": {"splits": {"validation": 0}},
            "datasets": dict(datasets),
            "partitions": {"world_size": 2},
            "gates": LENIENT,
            "execution": {"workers": 1},
        }
        self.config.parent.mkdir(exist_ok=True)
        self.config.write_text(yaml.safe_dump(values | changes, sort_keys=False), encoding="utf-8")
        return self

    def dataset(
        self, name: str, content: "bytes | Iterable[Mapping[str, Any]]", kind: Mapping[str, Any] = CHAT, *,
        held: "bytes | Iterable[Mapping[str, Any]] | None" = None, source: Mapping[str, Any] | None = None,
        **groups: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """Write one file, and one of validation rows if they are given; return the options of a dataset of both.

        `source` are further options of the source.
        """
        urls = {"train_urls": [self.write(name, content)]}
        if held is not None:
            urls["validation_urls"] = [self.write(f"held-{name}", held)]
        return {"source": {**urls, **(source or {})}, "format": kind, **groups}

    def files(
        self, contents: "Mapping[str, bytes | Iterable[Mapping[str, Any]]]", kind: Mapping[str, Any] = CHAT,
        **groups: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """Write files, by name; return the options of a dataset of them in that order."""
        urls = [self.write(name, content) for name, content in contents.items()]
        return {"source": {"train_urls": urls}, "format": kind, **groups}

    def one(
        self, name: str, content: "bytes | Iterable[Mapping[str, Any]]", kind: Mapping[str, Any] = CHAT, **options: Any
    ) -> "Workspace":
        """Write one file and a recipe of one dataset, `rows`, that reads it; options are of either."""
        own = ("held", *Dataset.model_fields)
        groups = {group: options.pop(group) for group in [*options] if group in own}
        return self.recipe({"rows": self.dataset(name, content, kind, **groups)}, **options)

    @property
    def config(self) -> Path:
        return self.folder / "configs" / "mini.yaml"

    @property
    def store(self) -> Path:
        return Path(self.root or self.folder / ".rowmill")

    @property
    def project(self) -> Project:
        return open_project(self.config, self.root)

    def examples(self, dataset: str = "rows") -> list[dict[str, Any]]:
        """Return a dataset's examples by the parts' own work alone: no judging, no statistics, no workers."""
        project, found = self.project, list[dict[str, Any]]()
        context = StageContext(
            project.store, project.base, ("mini", dataset, "-"), dataset, {}, LocalPool(1), recipe=project.recipe
        )
        loaded, path = stored_tokenizers.open_recipe_tokenizer(context)
        limit = project.recipe.limit_of(dataset)
        stage = sources.StoreStager(project.store, "staged")
        source = context.dataset.source
        assert not isinstance(source, sources.GeneratedSource)
        for scan in sources.scan_source(source, project.base, stage, {}):
            for part in scan.parts:
                rows = text_rows.canonicalize_part.make(
                    text_rows.CanonicalInputs("mini", ((part, None),), context.dataset, dataset, project.base),
                    context.store,
                    "r",
                )
                made = text_parts.tokenize_part.make(
                    text_parts.TokenizeInputs(
                        options="mini",
                        is_text_file=False,
                        tokenizer=path,
                        dataset=context.dataset,
                        renderer=tokenized_examples.resolve_renderer_spec(context, loaded),
                        limit=limit,
                        vocab_size=loaded.card.vocab_size,
                        rows=rows.files["rows"],
                        min_compared_chars=MIN_PART_CHARS,
                        base=project.base,
                    ),
                    context.store,
                    "e",
                )
                found += project.store.table(made.files["examples"]).to_pylist()
        return found

    def build(self, **options: Any) -> "Built":
        """Build all stages in this process."""
        return build_project(self.project, **options)


def build_project(project: Project, **options: Any) -> "Built":
    """Build a project in this process."""
    done = runner.build(project, **options)
    return Built(project, {step.key[1:]: (report, results) for step, report, results in done})


def current(project: Project, *key: str) -> Manifest:
    """Return the manifest of a stage's current version."""
    found = load_current(project.store, (project.recipe.name, *key))
    assert found is not None
    return found


def current_rows(project: Project, *key: str, file: str) -> list[dict[str, Any]]:
    """Return the rows of one kind of file of a stage's current version, over all parts."""
    return [row for one in current(project, *key).files(file) for row in project.store.table(one).to_pylist()]


@dataclass(frozen=True)
class Built:
    """What a build came to, by `(dataset, stage)` or `(stage,)`."""

    project: Project
    steps: "dict[tuple[str, ...], tuple[runner.StepReport, Sequence[CheckResult]]]"

    def report(self, *key: str) -> runner.StepReport:
        return self.steps[key][0]

    def manifest(self, *key: str) -> Manifest:
        return self.report(*key).manifest

    def facts(self, *key: str) -> dict[str, Any]:
        return self.manifest(*key).facts

    def outcomes(self, *key: str) -> dict[str, str]:
        """Return the outcome of every check of a step."""
        return {result.check: result.outcome for result in self.steps[key][1]}

    def result(self, check: str, *key: str) -> CheckResult:
        """Return the result of one check of a step."""
        return next(result for result in self.steps[key][1] if result.check == check)

    def versions(self) -> dict[str, str]:
        """Return the content digest of every step."""
        return {"/".join(key): report.version for key, (report, _) in self.steps.items()}

    def made(self) -> set[str]:
        """Return the steps that were not reused whole."""
        return {"/".join(key) for key, (report, _) in self.steps.items() if not report.reused}

    def digests(self) -> dict[str, str]:
        """Read every file that the manifests name; return path → digest of its bytes."""
        parts = [part for report, _ in self.steps.values() for part in report.manifest.parts]
        paths = [file.path for part in parts for file in part.files.values()]
        return {path: digest_file(self.project.store.local(path)) for path in paths}

    def rows_of(self, *key: str, file: str, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Return the rows of one kind of file of a step, over all parts, with all columns or with those named."""
        files = self.manifest(*key).files(file)
        return [row for one in files for row in self.project.store.table(one, columns).to_pylist()]

    def rejects(self, dataset: str = "rows") -> list[tuple[int, str]]:
        """Return the rejects of all stages as (record number from 0, reason), in order of number."""
        found = self.rejected_rows(dataset)
        return sorted((parse_row_id(row["row_id"])[1], str(row["reason"])) for row in found)

    def details(self, dataset: str = "rows") -> list[str]:
        """Return the details of all rejects."""
        return [str(row["detail"]) for row in self.rejected_rows(dataset)]

    def rejected_rows(self, dataset: str = "rows") -> list[dict[str, Any]]:
        """Return the rejects of the stages that were built, with all columns."""
        stages = [stage for stage in ("canonical_rows", "tokenized_examples") if (dataset, stage) in self.steps]
        return [row for stage in stages for row in self.rows_of(dataset, stage, file="rejects")]

    def kept(self, dataset: str = "rows") -> list[int]:
        """Return the record numbers that became examples."""
        rows = self.examples(dataset, columns=["row_ids"])
        return sorted({parse_row_id(row["row_ids"][0])[1] for row in rows})

    def examples(self, dataset: str = "rows", *, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
        return self.rows_of(dataset, "tokenized_examples", file="examples", columns=columns)

    def rank_rows(self, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Return the rows of every rank, fillers included."""
        parts: Sequence[Part] = self.manifest("gpu_partitions").parts
        files = [file for part in parts for name, file in part.files.items() if name.startswith("data/")]
        return [row for file in files for row in self.project.store.table(file, columns).to_pylist()]

    def segments(self) -> list[str]:
        """Return the example ids of every segment on every rank, sorted; with fillers left out."""
        rows = self.rank_rows(["example_ids", "filler"])
        return sorted(name for row in rows if not row["filler"] for name in row["example_ids"])


def open_encoder(built: Built) -> Encoder:
    """Open the tokenizer of a project in its folder."""
    return Encoder(open_tokenizer("tokenizer", built.project.base))


def text_of(example: Mapping[str, Any]) -> str:
    """Decode an example's ids, control tokens included."""
    return Tokenizer.from_str(tokenizer_json()).decode(example["input_ids"], skip_special_tokens=False)


def open_reader(made: Workspace | Built, rank: int = 0, world_size: int = 1, **options: Any) -> Reader:
    """Open what was built, as arrays unless the options say otherwise."""
    project, every = made.project, dict[str, Any]({"as_torch": False} | options)
    return Reader(project.store.root, project.recipe.name, rank=rank, world_size=world_size, **every)


def flip_bit(path: Path, place: int | None = None) -> None:
    """Flip a bit of the byte at a place, by default in the middle of the file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if place is None else place] ^= 1
    path.write_bytes(content)
