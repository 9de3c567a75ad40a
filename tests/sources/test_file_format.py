"""A source file format is its module and its line in the list: a new one is read and built like the others."""

import gzip
from pathlib import Path

import pytest

from rowmill.sources.files import FILE_FORMATS, FORMATS_BY_SUFFIX, Files, choose_file_format, find_file_format
from tests.support.extended_engine import ExtendedEngine
from tests.support.recipes import Workspace

CARDS = '''
"""Cards: a front and a back on each line, with a bar between; a format that exists in this test only."""

from collections.abc import Iterator
from typing import BinaryIO

import orjson

from rowmill.sources.parts import FileFormat, FileScan, OpenStream, PartContent, SourceFile, cut_rows


class _Cards(FileFormat):
    def cut_parts(self, stream: BinaryIO, scan: FileScan, file: SourceFile) -> Iterator[PartContent]:
        cards = (line.decode().rstrip("\\n").partition("|") for line in stream)
        rows = (orjson.dumps({"prompt": front, "response": back}) for front, _, back in cards)
        return cut_rows(rows, file.limits.max_record_bytes)

    def read_columns(self, scan: FileScan, file: SourceFile, open_stream: OpenStream) -> dict[str, str]:
        return {"prompt": "text", "response": "text"}


FORMAT = _Cards("cards", suffixes=(".cards",))
'''

QUESTIONS = """
scanned, made = (load("mini", "rows", stage) for stage in ("raw_dataset", "canonical_rows"))
rows = [one for part in made.parts for one in store.table(part.files["rows"]).to_pylist()]
found["rows"] = [[one["text"], one["output"]] for one in rows]
found["scans"] = [[Path(scan["url"]).name, scan["reader"], scan["columns"]] for scan in scanned.details["scans"]]
found["built"] = load("mini", "gpu_partitions") is not None
"""


@pytest.mark.campaign
def test_format_in_one_file_is_built_to_partitions(tmp_path: Path) -> None:
    engine = ExtendedEngine(tmp_path / "engine")
    engine.write("pipelines/rowmill/sources/cards.py", CARDS)
    listed = "pipelines/rowmill/sources/files.py"
    engine.replace(listed, "    arrow_files.ARROW,\n", "    arrow_files.ARROW,\n    cards.FORMAT,\n")
    engine.replace(listed, "import arrow_files, delimited", "import arrow_files, cards, delimited")
    workspace = Workspace(tmp_path / "project").one(
        "more.cards.gz", gzip.compress(b"sky|blue\ngrass|green\n"), {"kind": "supervised"}
    )
    workspace.write("cards.cards", b"one and one|two\ntwo and two|four\n")
    text = workspace.config.read_text(encoding="utf-8").replace("data/more.cards.gz", "data/")
    workspace.config.write_text(text, encoding="utf-8")
    made = engine.build(workspace.config, tmp_path / "built", QUESTIONS)
    additions = [["one and one", "two"], ["two and two", "four"]]
    assert sorted(made["rows"]) == sorted([["grass", "green"], ["sky", "blue"], *additions])
    columns = {"prompt": "text", "response": "text"}
    assert sorted(made["scans"]) == [["cards.cards", "cards", columns], ["more.cards.gz", "cards", columns]]
    assert made["built"]


def test_every_suffix_name_and_option_belongs_to_a_format() -> None:
    assert len({one.name for one in FILE_FORMATS}) == len(FILE_FORMATS)
    assert len(FORMATS_BY_SUFFIX) == sum(len(one.suffixes) for one in FILE_FORMATS)
    for suffix, one in FORMATS_BY_SUFFIX.items():
        assert choose_file_format(f"a/b{suffix}.gz") == (one, suffix, ".gz")
        assert find_file_format(one.name) is one
    assert {option for one in FILE_FORMATS for option in one.options} <= set(Files.model_fields)
    huggingface = find_file_format("huggingface")
    assert not (huggingface.has_cells or huggingface.has_documents or huggingface.is_own_lines)
