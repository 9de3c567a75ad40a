"""Records of real tables with real tokenizers: every unmasked token reads back as the row it came from."""

import csv
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from rowmill.core.errors import ConfigError, ContextOverflowError
from rowmill.kinds.tables.inference import describe_column_contract
from rowmill.kinds.tables.prompt import Encode, PromptFrame, build_prompt_frame
from rowmill.kinds.tables.records import Records
from rowmill.kinds.tables.schema import Column, RecordSchema
from rowmill.kinds.tables.table_contract import TableContract
from rowmill.tokenization.tokenizer import Encoder, LoadedTokenizer, open_tokenizer
from tests.support.recipes import TO_EXAMPLES, TO_ROWS, Built, Workspace
from tests.support.tables import as_written, cells, read_back, records, schema_of
from tests.support.tiers import mark_all_but

pytestmark = [pytest.mark.slow, pytest.mark.real_data]
SERIES = {"is_timeseries": True}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "weather, tabular": ("nyc_weather_hourly.csv", "qwen3", {}),
    "weather, grouped by day": (
        "nyc_weather_hourly.csv", "smollm3",
        {"data": {"group_training_examples_by": ["origin", "month", "day"], "order_training_examples_by": "time_hour"}},
    ),
    "weather, series by origin": (
        "nyc_weather_hourly.csv", "smollm3",
        {"data": {"group_training_examples_by": "origin", "order_training_examples_by": "time_hour"},
         "time_series": SERIES},
    ),
    "stocks, series by symbol": (
        "stocks_monthly.csv", "tinyllama",
        {"data": {"group_training_examples_by": "symbol", "order_training_examples_by": "date"}, "time_series": SERIES},
    ),
    "stocks, grouped, by Qwen": (
        "stocks_monthly.csv", "qwen3",
        {"data": {"group_training_examples_by": "symbol", "order_training_examples_by": "date"}},
    ),
    "seattle, one long series": (
        "seattle_weather.csv", "tinyllama",
        {"data": {"order_training_examples_by": "date", "max_sequences_per_example": None}, "time_series": SERIES},
    ),
}  # fmt: skip
"""What is read, by which tokenizer, in which mode."""
ROWS = 1200
"""Rows of a file that are used: enough for several parts and for months of hours."""


@pytest.fixture(name="tmp_path")
def folder_with_tokenizers(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Lend a folder whose store has the tokenizers that earlier tests opened: that takes longer than all else."""
    kept, own = tmp_path_factory.getbasetemp() / "tokenizers", tmp_path / ".rowmill" / "tokenizers"
    for source, target in ((kept, own), (own, kept)):
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        if target is own:
            yield tmp_path


def workspace(folder: Path, real_data: Path, file: str, tokenizer: str, form: dict[str, Any]) -> Workspace:
    (folder / "data").mkdir(parents=True)
    with (real_data / "tabular" / file).open(encoding="utf-8") as source, (folder / "data" / file).open("w") as target:
        target.writelines(line for number, line in enumerate(source) if number <= ROWS)
    dataset = {"source": {"train_urls": [f"data/{file}"]}, "format": records(**form), "splits": {"test": 0}}
    where = str(real_data / "tokenizers" / tokenizer)
    return Workspace(folder).recipe({"rows": dataset}, tokenizer=where, seq_len=8192)


def rows_of(built: Built) -> list[dict[str, str]]:
    """Return the rows as written, but for the words that the table contract reads as no value."""
    [file] = (built.project.base / "data").iterdir()
    columns = built.manifest("rows", "canonical_rows").details["table"]["contract"]["columns"]
    with file.open(encoding="utf-8", newline="") as source:
        return [
            {name: "" if cell in columns[name]["na"] else cell for name, cell in row.items()}
            for row in csv.DictReader(source)
        ]


@pytest.mark.parametrize("case", mark_all_but(["weather, tabular", "stocks, series by symbol"], CASES))
def test_trained_tokens_of_a_real_table_read_back_as_its_rows(tmp_path: Path, real_data: Path, case: str) -> None:
    file, name, form = CASES[case]
    tokenizer = Tokenizer.from_file(str(real_data / "tokenizers" / name / "tokenizer.json"))
    built = workspace(tmp_path, real_data, file, name, form).build(only=TO_EXAMPLES)
    parsed, schema = read_back(built, tokenizer, form), schema_of(built)
    assert {span.kind for one in parsed for span in one.spans} == {"record", "delimiter"}
    assert as_written(parsed, schema) == cells(rows_of(built), schema.names)
    facts = built.manifest("rows", "tokenized_examples").facts
    assert (facts["accounted"], facts["text_roundtrip"], facts["token_ids"]) == (0, 0, 0)


def test_types_of_the_weather_are_those_of_its_cells(tmp_path: Path, real_data: Path) -> None:
    built = workspace(tmp_path, real_data, "nyc_weather_hourly.csv", "qwen3", {}).build(only=TO_ROWS)
    made = built.manifest("rows", "canonical_rows")
    types = {one["name"]: one["type"] for one in made.details["records"]["schema"]["columns"]}
    assert types["origin"] == types["time_hour"] == "string"
    assert types["year"] == types["hour"] == types["wind_dir"] == "integer"
    decimals = ("temp", "dewp", "humid", "wind_speed", "wind_gust", "precip", "pressure")
    assert {types[name] for name in decimals} == {"decimal"}
    contract = made.details["table"]["contract"]["columns"]
    assert contract["wind_gust"]["na"] == ["NA"]
    assert (contract["time_hour"]["type"], contract["time_hour"]["format"]) == ("datetime", "iso8601")
    assert made.facts["type_mismatch"] == 0


@pytest.mark.parametrize(
    ("file", "wanted"),
    [
        ("stocks_monthly.csv", {"symbol": "text", "date": "date as %b %d %Y", "price": "number"}),
        (
            "seattle_weather.csv",
            {"date": "date as iso8601", "weather": "text"}
            | dict.fromkeys(("precipitation", "temp_max", "temp_min", "wind"), "number"),
        ),
    ],
)
def test_contract_of_a_real_table_is_what_its_readers_would_write(
    tmp_path: Path, real_data: Path, file: str, wanted: dict[str, str]
) -> None:
    built = workspace(tmp_path, real_data, file, "qwen3", {}).build(only=TO_ROWS)
    details = built.manifest("rows", "canonical_rows").details["table"]
    contract = TableContract.from_json(details["contract"])
    assert {name: describe_column_contract(column) for name, column in contract.columns.items()} == wanted
    assert contract.delimiter == ","
    assert built.facts("rows", "canonical_rows")["type_mismatch"] == 0


def test_night_of_the_weather_with_a_reading_of_another_kind_stops_with_its_cell(
    tmp_path: Path, real_data: Path
) -> None:
    made = workspace(tmp_path, real_data, "nyc_weather_hourly.csv", "qwen3", {})
    before = made.build()
    [file] = (made.folder / "data").iterdir()
    cells = file.read_text(encoding="utf-8").splitlines()[-1].split(",")
    with file.open("a", encoding="utf-8") as night:
        night.write(",".join([*cells[:10], "calm", *cells[11:]]) + "\n")
    after = made.build(only=TO_ROWS)
    said = after.result("table_drift", "rows", "canonical_rows").samples
    place = f"data/nyc_weather_hourly.csv line {ROWS + 2}"
    assert said == (f"wind_gust was number, NA for no value, which 1 value does not fit: 'calm' ({place})",)
    rows = [[row["record"] for row in one.rows_of("rows", "canonical_rows", file="rows")] for one in (before, after)]
    assert rows[0] == rows[1]


def test_hours_of_the_weather_are_an_hour_apart_but_for_gaps(tmp_path: Path, real_data: Path) -> None:
    _, _, form = CASES["weather, series by origin"]
    timed = {**form, "time_series": {**SERIES, "timestamp_interval_seconds": 3600}}
    built = workspace(tmp_path, real_data, "nyc_weather_hourly.csv", "qwen3", timed).build(only=TO_ROWS)
    assert 0 < built.manifest("rows", "canonical_rows").facts["interval_mismatch"] < 0.01


@pytest.mark.campaign
def test_origins_of_the_weather_fit_no_example_and_the_plan_says_so(tmp_path: Path, real_data: Path) -> None:
    form = {"data": {"group_training_examples_by": "origin", "order_training_examples_by": "time_hour"}}
    made = workspace(tmp_path, real_data, "nyc_weather_hourly.csv", "qwen3", form)
    said = r"1 group does not fit: origin='EWR' needs \d+ tokens .* limit 8192"
    with pytest.raises(ContextOverflowError, match=said):
        made.build(only=TO_EXAMPLES)
    # The ids of the records, and the plan with what does not fit.
    written = (made.store / "mini" / "rows" / "tokenized_examples").rglob("*.arrow")
    assert {path.name for path in written} == {"states.arrow", "tokens.arrow"}


# ── The pinned tokenizers ──────────────────────────────────────────────────────────────────────────

PAGE = RecordSchema(tuple(Column(name, "string") for name in ("customer_id", "date", "amount", "category")))


@cache
def loaded_of(real_data: Path, name: str) -> LoadedTokenizer:
    return open_tokenizer(str(real_data / "tokenizers" / name), Path("/"))


def framed(
    real_data: Path,
    name: str,
    schema: RecordSchema = PAGE,
    group: str | None = "customer_id",
    tokens: dict[str, Any] | None = None,
    **prompt: Any,
) -> PromptFrame:
    loaded = loaded_of(real_data, name)
    encoder = Encoder(loaded, fast_path=False)
    given: dict[str, Any] = {"data": {"group_training_examples_by": group}, "tokens": tokens or {}, "prompt": prompt}
    encode: Encode = lambda text: encoder.reference.encode(text, add_special_tokens=False).ids  # noqa: E731
    return build_prompt_frame(schema, loaded.card, encode, Records(**given), tokenizer=name, where="format")


@pytest.mark.parametrize(
    ("name", "pair", "leads"),
    [
        pytest.param("smollm3", (128011, 128012), False, marks=pytest.mark.campaign),
        pytest.param("qwen3", (151644, 151645), False, marks=pytest.mark.campaign),
        ("tinyllama", (1, 2), True),
    ],
)
def test_delimiters_of_the_pinned_tokenizers(real_data: Path, name: str, pair: tuple[int, int], leads: bool) -> None:
    made = framed(real_data, name)

    assert (made.bos_id, made.eos_id) == pair
    assert (made.prompt_ids[0] == pair[0]) is leads
    body = 'Generate JSON Lines records with these keys: "customer_id","date","amount","category"\n'
    assert made.prompt_text.endswith(body)


def test_tokenizer_with_equal_bos_and_eos_is_refused_only_for_groups(real_data: Path) -> None:
    with pytest.raises(ConfigError, match=r"bos and eos are both '<\|endoftext\|>'"):
        framed(real_data, "gpt2")
    made = framed(real_data, "gpt2", group=None)
    assert (made.bos_id, made.eos_id) == (50256, 50256)


@pytest.mark.campaign
def test_reference_prompts_are_those_of_the_original(real_data: Path) -> None:
    names = ("smollm3", "qwen3", "tinyllama")
    smol, qwen, tiny = (framed(real_data, name, style="reference") for name in names)
    columns = '"customer_id":<unk>,"date":<unk>,"amount":<unk>,"category":<unk>'
    asked = f"Generate a JSONL dataset with the following columns:  {columns}"
    assert smol.prompt_text + smol.bos_text == f"<|im_start|>user\n {asked} <|im_end|> \n assistant\n<|im_start|>"
    assert qwen.prompt_text + qwen.bos_text == f"<|im_start|>user\n {asked} \n assistant\n<|im_start|>"
    assert tiny.prompt_text + tiny.bos_text == f"<s>[INST] {asked} [/INST]</s><s>"
    assert (tiny.prompt_ids[0], tiny.prompt_ids[-1]) == (1, 2)
    assert (qwen.prompt_ids[0], qwen.eos_id) == (151644, 151645)


@pytest.mark.campaign
def test_reference_prompt_of_two_columns_has_the_ids_of_the_original(real_data: Path) -> None:
    schema = RecordSchema((Column("a", "string"), Column("b", "string")))
    made = framed(real_data, "smollm3", style="reference", schema=schema)
    ids = (
        "128011 882 198 20400 264 4823 43 10550 449 279 2768 8310 25 220 330 64 794 27 3200 29 1359 65 794 27 3200 29 "
        "220 128012 720 18328 198"
    )
    assert made.prompt_ids == tuple(map(int, ids.split()))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokens": {"bos": "no such token"}}, "not one special token"),
        ({"tokens": {"bos": 10**9}}, "not the id of a special token"),
        ({"add_bos": True}, "the tokenizer has no such token"),
    ],
)
def test_invalid_prompt_frame_is_a_config_error(real_data: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        framed(real_data, "qwen3", **changes)


@pytest.mark.parametrize("name", mark_all_but(["tinyllama", "gpt2"], ["smollm3", "tinyllama", "qwen3", "gpt2"]))
def test_record_is_encoded_as_what_follows_a_line_end(real_data: Path, name: str) -> None:
    encoder = Encoder(loaded_of(real_data, name))
    with (real_data / "tabular" / "stocks_monthly.csv").open(encoding="utf-8") as file:
        texts = [f'{{"line":"{line.strip()}","漢":null}}\n' for line in file][:200]

    ids, offsets = encoder.encode_continuation_ids(texts)

    newline = len(encoder.reference.encode("\n", add_special_tokens=False).ids)
    for text, left, right in zip(texts, offsets.tolist(), offsets[1:].tolist(), strict=False):
        assert ids[left:right].tolist() == encoder.reference.encode(f"\n{text}", add_special_tokens=False).ids[newline:]
        assert encoder.decode(ids[left:right].tolist()) == text
