"""The table of templates on real chats: what it counts, and what the committed page claims."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from docs.generate import template_table
from docs.generate.template_table import PAGE, list_template_names, load_chats, render_template_page, study_template
from rowmill.conversation.loss_mask import Masker
from rowmill.schema.ledger import REASON_DESCRIPTIONS, REJECT_REASONS
from rowmill.schema.rows import Conversation, MaskedConversation, Message, Rejected
from tests.support.tiers import mark_all_but

ROOT = Path(__file__).resolve().parents[2]
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
    "{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('only | two') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}<e>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TALK: list[Message] = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "response"}]
TEKKEN = "axolotl__mistral_v3_tekken"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "plain.jinja").write_text(NO_SYSTEM, encoding="utf-8")
    return tmp_path


def test_study_counts_every_row_once_with_its_reason(folder: Path) -> None:
    system: Message = {"role": "system", "content": "be kind"}
    critic: Message = {"role": "critic", "content": "hm"}
    rows = [Conversation(TALK), Conversation([system, *TALK]), Conversation([*TALK, critic])]
    line = study_template(folder, "plain", rows)
    assert (line.rows, line.masked) == (3, 1)
    assert dict(line.refused) == {"content_dropped": 1, "template_error": 1}
    assert {reason: details.total() for reason, details in line.details.items()} == dict(line.refused)
    assert dict(line.dropped) == {"system": 1}
    assert dict(line.ways) == {"list": 1}
    assert dict(line.judged) == {"right": 1}
    assert line.defects == []
    assert line.proof.count("proven") > 3
    text = render_template_page([line])
    assert "**Result**: 3 rows rendered, 1 masked; judged right 1, wrong 0." in text
    assert "| `plain` | 1 | only \\| two |" in text
    for pattern in (
        r"^\| `plain` \| 1 \| all right \| \d+ of 42 \| Prints no .*\. \| \[2 rows\]\(#plain\) \|$",
        r"^- `content_dropped`, 1 row and \d+ shapes: .*`system` \(1\).*on_dropped: \{.*system: count",
        r"^- `template_error`, 1 row and \d+ shapes: it says “only \| two” \(1\)\. Choose ",
    ):
        assert re.search(pattern, text, re.MULTILINE)


def test_study_counts_a_wrong_mask(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoilt(masker: Masker, conversation: Conversation) -> MaskedConversation | Rejected:
        masked = mask(masker, conversation)
        return replace(masked, trained=()) if isinstance(masked, MaskedConversation) else masked

    mask = Masker.mask
    monkeypatch.setattr(template_table.Masker, "mask", lambda masker, one, **_: spoilt(masker, one))
    line = study_template(folder, "plain", [Conversation(TALK)])

    assert dict(line.judged) == {"wrong": 1}
    assert {defect.kind for defect in line.defects} == {"own_text_untrained", "end_untrained"}
    text = render_template_page([line])
    assert "**Result**: 1 row rendered, 1 masked; judged **wrong 1**, right 0." in text
    assert re.search(r"^\| `plain` \| 1 \| \*\*wrong 1\*\* \| 0 of 42, \*\*wrong \d+\*\*", text, re.MULTILINE)
    assert "- Message 1's text 'response' is not trained." in text.split("**Wrong masks**:")[1]


@pytest.mark.slow
def test_study_of_a_template_with_blocks_compares_them_with_the_learned_list(folder: Path) -> None:
    line = study_template(folder, "qwen3", [Conversation(TALK)])

    assert (line.truth, line.compared, line.equal) == ("qwen3", 1, 1)
    assert dict(line.ways) == {"blocks": 1}
    said = "\n1 of 1 rows are masked, by its `{% generation %}` blocks; judged: all right.\n"
    assert said in render_template_page([line])


def test_command_without_the_data_leaves_the_page_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROWMILL_REAL_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    assert template_table.main() == 0

    assert "left as it is" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


OVERVIEW = re.compile(
    r"^\| `(\S+)` \| ([\d,]+) \| all right \| (\d+) of 42 \| Prints [^|]+\. \| \[[^]]+\]\(#\S+\) \|$", re.MULTILINE
)
"""A line of a template whose masks are all right."""


def read_count(text: str) -> int:
    """Return a count that is written with commas."""
    return int(text.replace(",", ""))


def test_committed_page_knows_no_wrong_mask_and_a_remedy_for_every_refusal() -> None:
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    overview = OVERVIEW.findall(text.split("## What to do")[0])
    result = r"^\*\*Result\*\*: ([\d,]+) rows rendered, ([\d,]+) masked; judged right ([\d,]+), wrong 0\.$"
    total = re.search(result, text, re.MULTILINE)
    equal = re.findall(r"([\d,]+) of ([\d,]+) \|", text.split("## Compared with")[1].split("\n## ")[0])
    refused = set(re.findall(r"^- `([a-z_]+)`, [\d,]+ rows?\b", text, re.MULTILINE))

    assert len(overview) == 40
    assert not re.search(r"wrong [1-9]", text)
    assert total is not None
    rows, masked, right = map(read_count, total.groups())
    assert rows == 40 * 2_479
    assert masked == right == sum(read_count(count) for _, count, _ in overview)
    assert len(equal) >= 25
    assert all(one == other for one, other in equal)
    assert refused == {"content_dropped", "template_error", "assistant_untrained", "foreign_text_trained"}
    for reason in refused:
        assert f"| `{reason}` | {REASON_DESCRIPTIONS[reason].what} | {REASON_DESCRIPTIONS[reason].remedy} |" in text


def test_committed_page_has_a_short_section_for_every_line_that_accounts_for_all_rows_and_shapes() -> None:
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    overview = OVERVIEW.findall(text.split("## What to do")[0])
    _, *parts = re.split(r"^### `(\S+)`$", text, flags=re.MULTILINE)
    sections = dict(zip(parts[::2], parts[1::2], strict=True))

    assert list(sections) == [name for name, _, _ in overview]
    for name, masked, proven in overview:
        refusals = re.findall(
            r"^- `([a-z_]+)`, (?:([\d,]+) rows?)?(?: and )?(?:(\d+) shapes?)?: ", sections[name], re.MULTILINE
        )
        assert {reason for reason, _, _ in refusals} <= REJECT_REASONS
        assert read_count(masked) + sum(read_count(count or "0") for _, count, _ in refusals) == 2_479
        assert int(proven) + sum(int(count or "0") for _, _, count in refusals) == 42
        assert f"\n{masked} of 2,479 rows are masked, by " in sections[name]
    assert max(len(line.group()) for line in OVERVIEW.finditer(text)) <= 220
    # A refusal with its reasons, counts and remedy.
    assert max(len(line) for line in text.splitlines() if line.startswith("- ")) <= 400


@pytest.mark.real_data
def test_committed_page_has_a_line_for_every_template(real_data: Path) -> None:
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    assert [name for name, _, _ in OVERVIEW.findall(text)] == list_template_names(real_data)


@pytest.mark.slow
@pytest.mark.real_data
@pytest.mark.parametrize("name", mark_all_but([TEKKEN], ["llamacpp__GLM-4.6", TEKKEN, "trl__gptoss_training"]))
def test_study_of_real_chats_finds_no_unequal_mask(name: str, real_data: Path) -> None:
    line = study_template(real_data, name, load_chats(real_data, 10))
    assert line.rows == 120
    assert line.masked + sum(line.refused.values()) == line.rows
    assert line.equal == line.compared >= 80
