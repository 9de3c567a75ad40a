"""Lists of rows, rejects and examples that are left out: filters, orders and pages over the views, and search in texts.

    ?dataset=chats&removed=any&order=-removed        a SELECT over `history.rows` and `history.examples`
    ?q=saturn                                        parts are read one after the other, hits are yielded as they come

`history` is asked for the versions of the build that a page shows, so a build that runs at the moment changes no list.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

import pyarrow.compute as pc

from rowmill.core.errors import ConfigError
from rowmill.core.json import to_json
from rowmill.core.stage_names import CANONICAL_ROWS, PACKED_SHARDS, TOKENIZED_EXAMPLES, TRAINING_SPLITS
from rowmill.schema.manifest import File
from rowmill.stages.inputs import load_order
from rowmill.viewer.builds import Build, require_kept
from rowmill.viewer.links import IN_NO_STEP, NOTED_COLUMNS, quote_text

if TYPE_CHECKING:
    import duckdb

PAGE_ROWS = 50
ListName = Literal["rows", "rejects", "left_out"]

REMOVED: Final[Mapping[str, str]] = {
    "any": "original_tokens > tokens",
    "exchanges": "exchanges_removed > 0",
    "reasoning": "reasoning_removed > 0",
    "tokens": "tokens_cut > 0",
}
"""What truncation removed, as `rowmill stats` names its stages."""

_SHARE = "100.0 * trained_tokens / nullif(tokens, 0)"
_OF_ROW: Final[Mapping[str, str]] = {
    "dataset": "r.dataset = ?", "split": "r.split = ?", "domain": "r.domain = ?", "schema": "r.schema = ?",
    "file": "r.source = ?", "group": "r.group_key = ?", "line": "r.line = ?",
}  # fmt: skip
_OF_REJECT: Final[Mapping[str, str]] = {
    "dataset": "r.dataset = ?", "reason": "r.reason = ?", "stage": "r.stage = ?", "file": "r.source = ?",
    "domain": "r.domain = ?",
}  # fmt: skip
_OF_LEFT_OUT: Final[Mapping[str, str]] = {
    "dataset": "r.dataset = ?", "state": "r.state = ?", "split": "r.split = ?", "reason": "r.reason = ?",
}  # fmt: skip
_OF_TOKENS: Final[Mapping[str, str]] = {
    "tokens_from": "e.tokens >= ?", "tokens_below": "e.tokens < ?", "original_from": "e.original_tokens >= ?",
    "original_below": "e.original_tokens < ?", "share_from": f"{_SHARE} >= ?", "share_below": f"{_SHARE} < ?",
}  # fmt: skip
_NUMBERS = frozenset({*_OF_TOKENS, "line"})
_ORDERS: Final[Mapping[ListName, Mapping[str, str]]] = {
    "rows": {
        "dataset": "r.dataset", "split": "r.split", "domain": "r.domain", "file": "r.source", "line": "r.line",
        "group": "r.group_key", "preview": "r.preview", "tokens": "e.tokens", "trained": _SHARE,
        "removed": "e.original_tokens - e.tokens", "loss": "l.loss", "above_step": "l.above_step",
    },
    "rejects": {
        "dataset": "r.dataset", "reason": "r.reason", "file": "r.source", "line": "r.line", "detail": "r.detail",
        "preview": "r.preview",
    },
    "left_out": {
        "dataset": "r.dataset", "split": "r.split", "state": "r.state", "example": "r.example_id",
        "tokens": "r.tokens", "of_tokens": "r.of_tokens", "loss": "l.loss", "above_step": "l.above_step",
    },
}  # fmt: skip

FILTERS: Final[Mapping[ListName, tuple[str, ...]]] = {
    "rows": (*_OF_ROW, *_OF_TOKENS, "removed", "role", "noted", "check", "stage"),
    "rejects": tuple(_OF_REJECT),
    "left_out": tuple(_OF_LEFT_OUT),
}
"""The filters of each list; `q`, `order` and `page` come beside them."""


@dataclass(frozen=True)
class ListQuery:
    """What a list shows: its filters by name, the text to search, an order such as `-tokens`, and the page from 0."""

    name: ListName
    filters: Mapping[str, str]
    text: str = ""
    order: str = ""
    page: int = 0
    ids: Sequence[str] | None = None
    """Only these rows: those that a check's samples or a comparison name."""

    @classmethod
    def parse(cls, name: ListName, values: Mapping[str, str]) -> "ListQuery":
        """Return the list that an address names; ConfigError says which values it may have."""
        filters = {key: values[key] for key in FILTERS[name] if values.get(key)}
        for key in _NUMBERS & filters.keys():
            _parse_number(key, filters[key])
        order, page = values.get("order", ""), values.get("page", "0")
        if order and order.removeprefix("-") not in _ORDERS[name]:
            names = ", ".join(_ORDERS[name])
            raise ConfigError(
                f"order={order}: no such column; there are {names}; name one, with - for the largest first"
            )
        if not page.isdecimal() or int(page) > MAX_PAGE:
            raise ConfigError(f"page={page}: expected a number from 0 to {MAX_PAGE:,}; give one, or narrow the list")
        for key, allowed in (("removed", tuple(REMOVED)), ("noted", NOTED_COLUMNS)):
            if filters.get(key, allowed[0]) not in allowed:
                raise ConfigError(f"{key}={filters[key]}: expected one of {', '.join(allowed)}; choose one")
        return cls(name, filters, values.get("q", "").strip(), order, int(page))


MAX_PAGE = 20_000


def _parse_number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{name}={text}: expected a number; give one, or delete the filter") from None


@dataclass(frozen=True)
class ListPage:
    """Some lines of a list as mappings, the number of all, and whether more follow."""

    lines: list[dict[str, Any]]
    total: int | None
    has_more: bool


@dataclass
class _Select:
    """A SELECT that grows: conditions with their values."""

    where: list[str] = field(default_factory=list[str])
    values: list[Any] = field(default_factory=list[Any])

    def add(self, condition: str, *values: Any) -> None:
        self.where.append(condition)
        self.values += values

    def restrict(self, versions: Sequence[tuple[str, str]], recipe: str, alias: str) -> None:
        """Keep only the rows of some versions; the names of files have them, so others are not opened."""
        marks = ", ".join("?" * len(versions)) or "''"
        self.add(f"{alias}.recipe = ? AND {alias}.version IN ({marks})", recipe, *(version for _, version in versions))
        pairs = ", ".join("(?, ?)" for _ in versions) or "('', '')"
        self.add(f"({alias}.dataset, {alias}.version) IN ({pairs})", *(value for pair in versions for value in pair))


def read_list(
    connection: "duckdb.DuckDBPyConnection", build: Build, query: ListQuery, *, counts: bool = True
) -> ListPage:
    """Return a page of a list."""
    order = _ORDERS[query.name].get(query.order.removeprefix("-"), "")
    has_tokens = query.name == "rows" and any(key in query.filters for key in (*_OF_TOKENS, "removed"))
    needs_tokens = has_tokens or order.startswith("e.") or order == _SHARE
    needs_losses = order.startswith("l.")
    of_rows = _Select()
    stages = {"rows": [CANONICAL_ROWS], "rejects": [CANONICAL_ROWS, TOKENIZED_EXAMPLES], "left_out": [PACKED_SHARDS]}
    of_rows.restrict(build.list_versions(*stages[query.name]), build.recipe, "r")
    known = {"rows": _OF_ROW, "rejects": _OF_REJECT, "left_out": _OF_LEFT_OUT}[query.name]
    for key, value in query.filters.items():
        if key == "file" and "/" not in value:
            of_rows.add("parse_filename(r.source) = ?", value)
        elif key in known:
            of_rows.add(known[key], value)
        elif key in _OF_TOKENS:
            of_rows.add(_OF_TOKENS[key], float(value))
    if role := query.filters.get("role"):
        condition = "len(r.unknown_roles) > 0" if role == "any" else "list_contains(r.unknown_roles, ?)"
        of_rows.add(condition, *([] if role == "any" else [role]))
    if noted := query.filters.get("noted"):
        of_rows.add(f"CAST(r.{noted} AS BIGINT) > 0")
    if removed := query.filters.get("removed"):
        of_rows.add(REMOVED[removed])
    if query.ids is not None:
        of_rows.add(f"r.row_id IN ({', '.join('?' * len(query.ids)) or 'NULL'})", *query.ids)
    joined, values = "", list[Any]()
    if needs_tokens:
        joined, values = _join_examples(build)
    if needs_losses:
        joined += f" LEFT JOIN ({_LOSSES_OF_ROWS} GROUP BY row_id) AS l USING (row_id)"
    table, where = f"FROM history.{query.name} AS r", f"WHERE {' AND '.join(of_rows.where)}"
    if query.name == "left_out" and query.filters.get("state") == IN_NO_STEP:
        table = _select_unread_segments(connection, build)
    direction = "DESC NULLS LAST" if query.order.startswith("-") else "ASC NULLS LAST"
    ties = "r.example_id" if query.name == "left_out" else "r.source, r.record"
    sort = f" ORDER BY {order} {direction}, {ties}" if order else ""
    # Where tables are joined, only ids and numbers are: texts of a million rows would take most of the time and memory.
    is_narrow = bool(joined) and query.name == "rows"
    columns = "r.dataset, r.row_id" if is_narrow else "r.*"
    columns += ", e.original_tokens, e.tokens, e.trained_tokens" if needs_tokens else ""
    columns += ", l.loss, l.above_step" if needs_losses else ""
    sql = f"SELECT {columns} {table} {joined} {where}{sort} LIMIT {PAGE_ROWS + 1} OFFSET {query.page * PAGE_ROWS}"
    lines = _fetch(connection, sql, [*values, *of_rows.values])
    total = None
    if counts:
        # An order changes no count.
        own, held = (joined, values) if has_tokens else ("", [])
        [[total]] = connection.execute(f"SELECT count(*) {table} {own} {where}", [*held, *of_rows.values]).fetchall()
    has_more, lines = len(lines) > PAGE_ROWS, lines[:PAGE_ROWS]
    if is_narrow:
        lines = _add_columns(connection, build, lines)
    if query.name == "rows" and not needs_tokens:
        _add_tokens(connection, build, lines)
    require_kept(build)
    return ListPage(lines, total, has_more)


def _select_unread_segments(connection: "duckdb.DuckDBPyConnection", build: Build) -> str:
    """Return a table as SQL: segments of sequences that no step reads, with the columns of what is left out."""
    splits = build.find_output(None, TRAINING_SPLITS)
    if splits is None:
        raise ConfigError(
            f"{build.recipe}: the order of training is not built; state={IN_NO_STEP} needs one; run rowmill build "
            f"{build.recipe}"
        )
    connection.register("training_order", load_order(build.project.store, splits, ("dataset", "sequence_id")))
    numbers = ", ".join(f"({number}, {quote_text(name)})" for number, name in enumerate(splits.card["datasets"]))
    placed = (
        "SELECT name AS dataset, sequence_id FROM training_order AS o JOIN "
        f"(VALUES {numbers}) AS n(number, name) ON o.dataset = n.number"
    )
    columns = "t.recipe, t.dataset, t.version, t.split, t.example_id, t.row_id, t.length AS tokens"
    return (
        f"FROM (SELECT {columns}, t.length AS of_tokens, '{IN_NO_STEP}' AS state, '' AS reason FROM history.segments "
        f"AS t ANTI JOIN ({placed}) AS p USING (dataset, sequence_id) WHERE t.split = 'train') AS r"
    )


def _add_columns(
    connection: "duckdb.DuckDBPyConnection", build: Build, lines: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return lines that have the dataset and id of a row with all columns of the rows."""
    of_rows = _Select()
    of_rows.restrict(build.list_versions(CANONICAL_ROWS), build.recipe, "r")
    of_rows.add(f"r.row_id IN ({', '.join('?' * len(lines)) or 'NULL'})", *(line["row_id"] for line in lines))
    found = _fetch(connection, f"SELECT r.* FROM history.rows AS r WHERE {' AND '.join(of_rows.where)}", of_rows.values)
    rows = {(row["dataset"], row["row_id"]): row for row in found}
    return [rows[line["dataset"], line["row_id"]] | line for line in lines]


def _join_examples(build: Build) -> tuple[str, list[Any]]:
    """Return the join with each row's tokens, and its values."""
    of_examples = _Select()
    of_examples.restrict(build.list_versions(TOKENIZED_EXAMPLES), build.recipe, "t")
    sums = ("original_tokens", "tokens", "trained_tokens", "exchanges_removed", "reasoning_removed", "tokens_cut")
    if build.has_single_examples:
        columns = f"dataset, row_ids[1] AS row_id, {', '.join(sums)}"
        grouped = ""
    else:
        columns = f"dataset, unnest(row_ids) AS row_id, {', '.join(sums)}"
        grouped = f"SELECT dataset, row_id, {', '.join(f'sum({name}) AS {name}' for name in sums)} FROM "
    inner = f"(SELECT {columns} FROM history.examples AS t WHERE {' AND '.join(of_examples.where)})"
    inner = f"({grouped}{inner} GROUP BY ALL)" if grouped else inner
    return f"LEFT JOIN {inner} AS e USING (dataset, row_id)", of_examples.values


def _add_tokens(connection: "duckdb.DuckDBPyConnection", build: Build, lines: list[dict[str, Any]]) -> None:
    """Add the tokens of some rows; a join with all examples would read more."""
    if not lines:
        return
    ids, of_examples = [line["row_id"] for line in lines], _Select()
    of_examples.restrict(build.list_versions(TOKENIZED_EXAMPLES), build.recipe, "t")
    marks = ", ".join("?" * len(ids))
    if build.has_single_examples:
        # A column of lists takes three times as long to read as the ids of examples, which begin with that of the row.
        row_id = "split_part(example_id, '#', 1)"
        of_examples.add(f"example_id IN ({marks})", *(f"{row_id}#0" for row_id in ids))
    else:
        row_id = "unnest(row_ids)"
        of_examples.add(f"list_has_any(row_ids, [{marks}])", *ids)
    sql = (
        f"SELECT dataset, {row_id} AS row_id, original_tokens, tokens, trained_tokens FROM history.examples AS t "
        f"WHERE {' AND '.join(of_examples.where)}"
    )
    names = ("original_tokens", "tokens", "trained_tokens")
    sums: dict[tuple[str, str], dict[str, int]] = {}
    for example in _fetch(connection, sql, of_examples.values):
        of_row = sums.setdefault((example["dataset"], example["row_id"]), {})
        for name in names:
            of_row[name] = of_row.get(name, 0) + example[name]
    for line in lines:
        line.update(sums.get((line["dataset"], line["row_id"]), dict.fromkeys(names)))


_LOSSES_OF_ROWS = (
    "SELECT row_id, avg(loss) AS loss, avg(loss - of_step) AS above_step FROM (SELECT split_part(example_id, '#', 1) "
    "AS row_id, loss, avg(loss) OVER (PARTITION BY step) AS of_step FROM losses)"
)
"""The mean loss of each row, and by how much it is above the mean of all examples of the same steps: in the first steps
of a run, every loss is high."""


def read_losses(connection: "duckdb.DuckDBPyConnection", row_ids: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Return the mean loss of some rows, and by how much it is above that of their steps."""
    marks = ", ".join("?" * len(row_ids)) or "NULL"
    lines = _fetch(connection, f"{_LOSSES_OF_ROWS} WHERE row_id IN ({marks}) GROUP BY row_id", list(row_ids))
    return {line["row_id"]: (line["loss"], line["above_step"]) for line in lines}


def read_row_losses(connection: "duckdb.DuckDBPyConnection", row_id: str) -> list[dict[str, Any]]:
    """Return the losses of a row's examples, step by step, each with the mean of all examples of its step."""
    sql = (
        "SELECT example_id, step, loss, tokens, (SELECT avg(loss) FROM losses AS s WHERE s.step = l.step) AS of_step "
        "FROM losses AS l WHERE split_part(example_id, '#', 1) = ? ORDER BY step, example_id"
    )
    return _fetch(connection, sql, [row_id])


def read_step_losses(connection: "duckdb.DuckDBPyConnection", step: int) -> dict[str, float]:
    """Return the mean loss of each example that a run trained on in a step."""
    sql = "SELECT example_id, avg(loss) AS loss FROM losses WHERE step = ? GROUP BY example_id"
    return {line["example_id"]: line["loss"] for line in _fetch(connection, sql, [step])}


def read_losses_by_domain(connection: "duckdb.DuckDBPyConnection", build: Build) -> list[dict[str, Any]]:
    """Return the rows with losses, their mean loss and how much it is above that of their steps, by dataset and domain.

    The highest loss comes first.
    """
    of_rows = _Select()
    of_rows.restrict(build.list_versions(CANONICAL_ROWS), build.recipe, "r")
    sql = (
        "SELECT r.dataset, r.domain, count(*) AS rows, avg(l.loss) AS loss, avg(l.above_step) AS above_step FROM "
        f"history.rows AS r JOIN ({_LOSSES_OF_ROWS} GROUP BY row_id) AS l USING (row_id) WHERE "
        f"{' AND '.join(of_rows.where)} GROUP BY ALL ORDER BY loss DESC, r.dataset, r.domain LIMIT {PAGE_ROWS}"
    )
    return _fetch(connection, sql, of_rows.values)


def read_segments(
    connection: "duckdb.DuckDBPyConnection", build: Build, sequences: Sequence[tuple[str, int]]
) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Return the segments of some sequences of the order, each with the domain and preview of its row."""
    packed, rows = _Select(), _Select()
    packed.restrict(build.list_versions(PACKED_SHARDS), build.recipe, "t")
    marks = ", ".join("(?, ?)" for _ in sequences) or "('', -1)"
    values = [value for pair in sequences for value in pair]
    packed.add(f"t.split = 'train' AND (t.dataset, t.sequence_id) IN ({marks})", *values)
    rows.restrict(build.list_versions(CANONICAL_ROWS), build.recipe, "r")
    sql = (
        "WITH s AS (SELECT dataset, sequence_id, segment, example_id, row_id, source, record, start, length "
        f"FROM history.segments AS t WHERE {' AND '.join(packed.where)}) "
        "SELECT s.*, r.line, r.domain, r.preview FROM s LEFT JOIN (SELECT dataset, row_id, line, domain, preview FROM "
        f"history.rows AS r WHERE {' AND '.join(rows.where)} AND row_id IN (SELECT row_id FROM s)) AS r "
        "USING (dataset, row_id) ORDER BY s.dataset, s.sequence_id, s.segment"
    )
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    lines = _fetch(connection, sql, [*packed.values, *rows.values])
    require_kept(build)
    for line in lines:
        found.setdefault((line["dataset"], line["sequence_id"]), []).append(line)
    return found


def _fetch(connection: "duckdb.DuckDBPyConnection", sql: str, values: Sequence[Any]) -> list[dict[str, Any]]:
    result = connection.execute(sql, list(values))
    names = [str(column[0]) for column in result.description]
    return [dict(zip(names, row, strict=True)) for row in result.fetchall()]


def count_values(
    connection: "duckdb.DuckDBPyConnection", build: Build, query: ListQuery, column: str
) -> list[tuple[str, int]]:
    """Return the values of a column of a dataset's list, the most frequent first, each with its number of lines."""
    of_rows = _Select()
    stages = {"rows": [CANONICAL_ROWS], "rejects": [CANONICAL_ROWS, TOKENIZED_EXAMPLES], "left_out": [PACKED_SHARDS]}
    of_rows.restrict(build.list_versions(*stages[query.name]), build.recipe, "r")
    if dataset := query.filters.get("dataset"):
        of_rows.add("r.dataset = ?", dataset)
    sql = (
        f"SELECT {column} AS value, count(*) AS n FROM history.{query.name} AS r WHERE {' AND '.join(of_rows.where)} "
        f"AND {column} IS NOT NULL GROUP BY 1 ORDER BY n DESC, value LIMIT {MAX_CHOICES}"
    )
    return [(str(line["value"]), int(line["n"])) for line in _fetch(connection, sql, of_rows.values)]


MAX_CHOICES = 100
"""Values of a filter that a list offers."""


# ── Search in texts ────────────────────────────────────────────────────────────────────────────────

_TEXT_COLUMNS = ("messages", "tools", "text", "output", "record", "chosen", "rejected", "ground_truth", "raw")


@dataclass(frozen=True)
class SearchStep:
    """Rows with the text in one more file, and how many rows were read so far."""

    row_ids: list[str]
    read: int
    of: int
    place: str
    """Where to go on: the number of the file, and of the row in it."""


def search_texts(build: Build, query: ListQuery, start: str) -> Iterator[SearchStep]:
    """Yield the rows, or rejects, that hold a text, file by file; upper and lower case are the same.

    Texts are stored as JSON, so the text is looked for as JSON writes it.
    """
    files: list[tuple[str, File]] = []
    for (_, dataset, *_), output in ((key, one) for key, one in build.made.items() if len(key) == 3):
        stages = (CANONICAL_ROWS,) if query.name == "rows" else (CANONICAL_ROWS, TOKENIZED_EXAMPLES)
        if output is not None and output.stage in stages and query.filters.get("dataset") in (None, dataset):
            files += [(dataset, file) for file in output.files(query.name) if file.rows]
    of = sum(file.rows or 0 for _, file in files)
    first_file, _, first_row = start.partition(":")
    at = (int(first_file), int(first_row)) if first_file.isdecimal() and first_row.isdecimal() else (0, 0)
    read = sum(file.rows or 0 for _, file in files[: at[0]]) + at[1]
    written = to_json(query.text)[1:-1]
    store = build.project.store
    for number, (_, file) in enumerate(files[at[0] :], start=at[0]):
        skip = at[1] if number == at[0] else 0
        # A file of no known columns has nothing to search; an Arrow file is mapped, so only these are read.
        table = store.table(file)
        table = table.select([name for name in table.column_names if name in ("row_id", "split", *_TEXT_COLUMNS)])
        for begin in range(skip, len(table), SEARCH_ROWS):
            piece = table.slice(begin, SEARCH_ROWS)
            found = None
            for name in _TEXT_COLUMNS:
                if name not in piece.column_names:
                    continue
                column = piece.column(name)
                text = query.text if name in ("text", "output") else written
                pattern = text.encode() if str(column.type) == "binary" else text
                mask = pc.match_substring(column, pattern, ignore_case=str(column.type) != "binary")
                mask = pc.fill_null(mask, fill_value=False)
                found = mask if found is None else pc.or_(found, mask)
            hits = [] if found is None else piece.filter(found).column("row_id").to_pylist()
            read += len(piece)
            end = begin + len(piece)
            yield SearchStep(hits, read, of, f"{number}:{end}" if end < len(table) else f"{number + 1}:0")


SEARCH_ROWS = 20_000
"""Rows searched at a time."""
