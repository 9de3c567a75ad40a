"""The table of templates on real chats: what it counts, and what the committed page claims."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from docs.generate import template_table
from docs.generate.template_table import PAGE, list_template_names, load_chats, render_template_page, study_template
from rowmill.conversation.loss_mask import Masker
from rowmill.schema.conversation import Conversation
from rowmill.schema.ledger import REJECT_REASONS
from rowmill.schema.reject_reasons import REASON_DESCRIPTIONS
from rowmill.schema.rows import MaskedConversation, Message, Rejected
from tests.support.tiers import mark_all_but

ROOT = Path(__file__).resolve().parents[2]
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
    "{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('only | two') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}<e>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TALK: list[Message] = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "response"}]


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
    assert dict(line.dropped) == {"system": 1}
    assert dict(line.ways) == {"list": 1}
    assert dict(line.judged) == {"right": 1}
    assert line.defects == []
    assert line.proof.count("proven") > 3
    text = render_template_page([line])
    assert re.search(r"\| `plain` \| 1 \| list \| right 1 \| proven \d+, refused \d+ \| content_dropped 1, ", text)
    assert "| `plain` | 1 | only \\| two |" in text


def test_study_counts_a_wrong_mask(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoilt(masker: Masker, conversation: Conversation) -> MaskedConversation | Rejected:
        masked = mask(masker, conversation)
        return replace(masked, trained=()) if isinstance(masked, MaskedConversation) else masked

    mask = Masker.mask
    monkeypatch.setattr(template_table.Masker, "mask", lambda masker, one, **_: spoilt(masker, one))
    line = study_template(folder, "plain", [Conversation(TALK)])

    assert dict(line.judged) == {"wrong": 1}
    assert {defect.kind for defect in line.defects} == {"own_text_untrained", "end_untrained"}


@pytest.mark.slow
def test_study_of_a_template_with_blocks_holds_them_against_marks(folder: Path) -> None:
    line = study_template(folder, "qwen3", [Conversation(TALK)])

    assert (line.truth, line.compared, line.equal) == ("qwen3", 1, 1)
    assert dict(line.ways) == {"generation": 1}


def test_command_without_the_data_leaves_the_page_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROWMILL_REAL_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    assert template_table.main() == 0

    assert "left as it is" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_committed_page_knows_no_wrong_mask_and_a_remedy_for_every_refusal() -> None:
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    table = text.split("## What to do")[0]
    refused = set(re.findall(r"\b([a-z_]+) \d", table)) & REJECT_REASONS

    equal = [
        (int(a.replace(",", "")), int(b.replace(",", ""))) for a, b in re.findall(r"([\d,]+) of ([\d,]+) equal", text)
    ]

    assert len(equal) >= 25
    assert all(one == other for one, other in equal)
    assert refused == {"content_dropped", "template_error", "assistant_untrained", "foreign_text_trained"}
    assert " wrong " not in table
    assert len(re.findall(r"\| right [\d,]+ \| proven \d+(, refused \d+)? \|", table)) == 40
    for reason in refused:
        assert f"| `{reason}` | {REASON_DESCRIPTIONS[reason].what} | {REASON_DESCRIPTIONS[reason].remedy} |" in text


@pytest.mark.real_data
def test_committed_page_has_a_line_for_every_template(real_data: Path) -> None:
    text = (ROOT / PAGE).read_text(encoding="utf-8")

    for name in list_template_names(real_data):
        assert f"| `{name}` |" in text


@pytest.mark.slow
@pytest.mark.real_data
@pytest.mark.parametrize(
    "name",
    mark_all_but(
        ["axolotl__mistral_v3_tekken"], ["llamacpp__GLM-4.6", "axolotl__mistral_v3_tekken", "trl__gptoss_training"]
    ),
)
def test_study_of_real_chats_finds_no_unequal_mask(name: str, real_data: Path) -> None:
    line = study_template(real_data, name, load_chats(real_data, 10))

    assert line.rows == 120
    assert line.masked + sum(line.refused.values()) == line.rows
    assert line.equal == line.compared >= 80
