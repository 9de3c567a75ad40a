"""Tables of which no record can be read: each is a counted reject, and no contract is asked for."""

from pathlib import Path

import pytest

from rowmill.cli import main
from rowmill.cli.error_boundary import ExitStatus
from rowmill.stats.views import query_views
from tests.support.recipes import Workspace

pytestmark = pytest.mark.slow

TABLES = {
    "another encoding": ("t.csv", "name,city\nJosé,Orléans\nZoë,Köln\n".encode("latin-1"), "not_utf8", 2),
    "quotes inside quotes": ("t.csv", b'a,b\n0,"he said "hi", 0"\n1,"she said "no", 1"\n', "not_an_object", 2),
    "lines before the header": ("t.csv", b"Report of March\nMade,2024-03-31\n\nid,name\n1,ann\n", "not_an_object", 3),
    "objects without keys": ("t.jsonl", b"{}\n{}\n", "missing_field", 2),
    "no JSON": ("t.jsonl", b'{"a":\n{"b\n', "invalid_json", 2),
}


@pytest.mark.parametrize("case", TABLES)
def test_table_of_which_no_record_can_be_read_has_only_rejects(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, content, reason, count = TABLES[case]
    made = Workspace(tmp_path)
    made.one(name, content, {"kind": "records"}, gates={})

    before = main.main(["build", str(made.config)])
    said = capsys.readouterr().err
    after = main.main(["build", str(made.config), "--skip-preflight"])

    assert before == after == ExitStatus.GATE_CLOSED
    assert f"{reason}: {count}, the first is" in said
    found = query_views(made.project.store, "SELECT reason, count(*) FROM rejects GROUP BY ALL")[1]
    assert found == [(reason, count)]
