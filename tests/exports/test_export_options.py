"""Exports in a recipe: what is impossible is an error when the recipe loads, in four parts."""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import pytest

from docs.generate import reference
from rowmill.core.errors import ConfigError
from rowmill.exports import AnyExport, Export, astrai, base
from rowmill.recipe import recipe
from rowmill.recipe.recipe import Recipe
from rowmill.shards import label_conventions
from tests.docs.test_docs import ROOT, blocks
from tests.support.export_cases import export as export_of
from tests.support.export_cases import terms

CHATS: dict[str, Any] = {"source": {"train_urls": ["chats.jsonl"]}, "format": {"kind": "chat"}}
TEXT: dict[str, Any] = {"source": {"train_urls": ["text.jsonl"]}, "format": {"kind": "text"}}
PAIRS: dict[str, Any] = {"source": {"train_urls": ["pairs.jsonl"]}, "format": {"kind": "preference"}}
PROMPTS: dict[str, Any] = {"source": {"train_urls": ["prompts.jsonl"]}, "format": {"kind": "prompts"}}
OPEN: dict[str, Any] = {**TEXT, "packing": {"block_cross_document_attention": False}}


def load(*exports: dict[str, Any], **datasets: dict[str, Any]) -> Recipe:
    values = {"tokenizer": "t", "seq_len": 64, "datasets": datasets or {"chats": CHATS}, "exports": list(exports)}
    return recipe.parse_recipe(values, name="mine", where="mine.yaml")


def refusal(*exports: dict[str, Any], **datasets: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        load(*exports, **datasets)
    return str(error.value)


def members() -> tuple[type[Export], ...]:
    return reference.list_kinds(AnyExport)  # pyrefly: ignore[bad-return]


def kind_of(model: type[Export]) -> str:
    return str(model.model_fields["kind"].default)


@pytest.fixture
def with_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that every optional library is there: recipes are checked, nothing is written."""
    monkeypatch.setattr(base, "find_spec", str)


def test_every_module_with_a_kind_is_in_the_union() -> None:
    bases = {"base", "astrai", "masked_rows"}
    shared = {"__init__", "export_manifest", "dataset_dict", "preference_blocks", "verl_dataset"} | bases
    modules = {path.stem for path in Path(base.__file__).parent.glob("*.py")} - shared

    assert {model.__module__.rsplit(".", 1)[1] for model in members()} == modules
    assert len({kind_of(model) for model in members()}) == len(members())


@pytest.mark.parametrize("model", members(), ids=kind_of)
def test_kind_survives_its_own_dump(model: type[Export]) -> None:
    one = model(name="mine")

    assert model.model_validate(one.model_dump()) == one
    assert one.label_convention in get_args(label_conventions.LabelConvention)


@pytest.mark.usefixtures("with_libraries")
@pytest.mark.parametrize("model", members(), ids=kind_of)
def test_kind_with_its_defaults_is_possible_for_its_objective(model: type[Export]) -> None:
    rows = {"next_token": CHATS, "paired": PAIRS, "prompts": PROMPTS}[min(model.OBJECTIVES)]

    assert load({"kind": kind_of(model), "name": "mine"}, rows=rows).exports[0] == model(name="mine")


def test_unknown_kind_names_those_there_are() -> None:
    said = refusal({"kind": "litdata", "name": "mine"})

    assert said.startswith("mine.yaml: exports.0")
    assert "'litdata' is not a kind; choose native, hf, axolotl" in said


def test_export_without_a_kind_lists_the_kinds() -> None:
    said = refusal({"name": "flat"})

    assert "exports.0: has no kind; choose astrai_bin, " in said
    assert "native" in said


def test_unknown_option_names_the_nearest() -> None:
    said = refusal({"kind": "axolotl", "name": "mine", "sequence_length": 4096})

    assert "exports.0.sequence_length: unknown key" in said
    assert "did you mean sequence_len?" in said


@pytest.mark.parametrize("name", ["../x", "", "a/b", "training_splits", "1st"])
def test_name_that_is_not_a_valid_folder_is_refused(name: str) -> None:
    assert "cannot be a name" in refusal({"kind": "native", "name": name})


def test_names_of_exports_and_datasets_differ() -> None:
    assert "'chats' is already a dataset" in refusal({"kind": "native", "name": "chats"})
    assert "'a' is already another export" in refusal({"kind": "native", "name": "a"}, {"kind": "hf", "name": "a"})


def test_dataset_named_like_the_folder_of_exports_is_refused() -> None:
    assert "'exports' cannot be a name" in refusal(exports=CHATS)


@pytest.mark.parametrize(
    ("kind", "module", "extra"), [("astrai_h5", "h5py", "h5"), ("mds", "streaming", "mds")], ids=["h5", "mds"]
)
def test_missing_library_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, kind: str, module: str, extra: str
) -> None:
    monkeypatch.setattr(base, "find_spec", lambda name: None if name == module else object())

    said = refusal({"kind": kind, "name": "mine"})

    assert f"exports.mine: kind {kind} is written with {module}, which is not installed here" in said
    assert f"pip install 'rowmill[{extra}]'" in said


@pytest.mark.usefixtures("with_libraries")
@pytest.mark.parametrize(
    ("options", "datasets", "said"),
    [
        ({"kind": "tinker", "unit": "packed"}, {}, "exports.0.unit: must be unpacked; got 'packed'"),
        ({"kind": "native", "unit": "unpacked"}, {}, "exports.0.unit: must be packed; got 'unpacked'"),
        ({"kind": "native", "split": "dev"}, {}, "exports.0.split: must be train, validation or test"),
        ({"kind": "native", "split": "test", "passes": "all"}, {}, "passes: all with split: test"),
        ({"kind": "hf", "arrow": True, "shard_sequences": 5}, {}, "shard_sequences with arrow: true"),
        ({"kind": "native", "shard_bytes": 0}, {}, "exports.0.shard_bytes"),
        (
            {"kind": "mds", "accept_untrained_as_trained": True},
            {},
            "accept_untrained_as_trained with profile: finetune",
        ),
        ({"kind": "mds", "profile": "pretrain"}, {}, "datasets.chats ends them where examples end"),
        ({"kind": "mds", "profile": "pretrain"}, {"text": TEXT}, "the first token of every document of datasets.text"),
        ({"kind": "mds", "size_limit_bytes": 1 << 32}, {}, "exports.0.size_limit_bytes"),
        ({"kind": "hf"}, {"text": OPEN}, "kind hf stores single segments, but attention of datasets.text crosses"),
        ({"kind": "tinker"}, {"text": OPEN}, "kind tinker stores single segments"),
        ({"kind": "llama_factory", "split": "test"}, {}, "split: test; LLaMA-Factory reads train and validation"),
        ({"kind": "llama_factory", "unit": "packed"}, {"pairs": PAIRS}, "unit: packed with datasets.pairs, whose"),
        ({"kind": "llama_factory"}, {"asked": PROMPTS}, "kind llama_factory cannot hold datasets.asked"),
        ({"kind": "megatron"}, {"text": TEXT}, "kind megatron stores whole documents, and those of datasets.text"),
        (
            {"kind": "megatron", "loss_mask": "companion", "accept_untrained_as_trained": True},
            {},
            "accept_untrained_as_trained with loss_mask: companion",
        ),
        ({"kind": "skyrl"}, {"text": OPEN}, "kind skyrl stores single segments"),
        ({"kind": "olmo_core"}, {"text": OPEN}, "kind olmo_core stores single segments"),
        ({"kind": "astrai_bin"}, {"text": OPEN, "chats": CHATS}, "sft, which separates all segments, but attention of"),
        ({"kind": "megatron_bridge", "pad_segments_to": 4}, {"text": OPEN}, "plan segments again, but attention of"),
        ({"kind": "megatron_bridge", "pack_size": 128}, {"text": OPEN}, "plan segments again, but attention of"),
    ],
)
def test_impossible_combination_is_refused_at_load(
    options: dict[str, Any], datasets: dict[str, dict[str, Any]], said: str
) -> None:
    assert said in refusal({"name": "mine", **options}, **datasets)


@pytest.mark.usefixtures("with_libraries")
@pytest.mark.parametrize(
    "options",
    [
        {"kind": "native"},
        {"kind": "hf", "unit": "packed"},
        {"kind": "astrai_bin"},
        {"kind": "megatron_bridge", "pack_size": 64},
        {"kind": "mds"},
        {"kind": "mds", "profile": "pretrain"},
    ],
)
def test_open_attention_is_possible_where_spans_or_streams_are_stored(options: dict[str, Any]) -> None:
    assert load({"name": "mine", **options}, text=OPEN).exports[0].name == "mine"


def options_of_trl(code: str) -> dict[str, Any]:
    """Return what the one `SFTConfig` in a piece of Python is called with, but for the output folder."""
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    [call] = [node for node in calls if isinstance(node.func, ast.Name) and node.func.id == "SFTConfig"]
    return {str(one.arg): ast.literal_eval(one.value) for one in call.keywords if one.arg != "output_dir"}


@pytest.mark.parametrize("page", ["docs/formats.md", "docs/how-to/train.md"])
@pytest.mark.parametrize(
    "options", [{"kind": "native"}, {"kind": "hf", "unit": "packed"}, {"kind": "hf", "unit": "packed", "arrow": True}]
)
def test_printed_trl_options_are_those_of_the_pages(options: dict[str, Any], page: str) -> None:
    printed = export_of(name="mine", **options).pointer("data", terms()).replace("…", "'model'")
    shown = [block for block in blocks(ROOT / page, "python") if "SFTConfig(" in block]

    assert options_of_trl(printed) == options_of_trl("\n".join(shown))
    assert options_of_trl(printed)["train_sampling_strategy"] == "sequential"


def test_printed_tinker_code_imports_a_function_that_exists() -> None:
    printed = export_of(name="mine", kind="tinker").pointer("data", terms()).replace("…", "...")
    [imported] = [node for node in ast.walk(ast.parse(printed)) if isinstance(node, ast.ImportFrom)]

    module = import_module(str(imported.module))
    assert all(callable(getattr(module, one.name)) for one in imported.names)


@pytest.mark.parametrize(
    ("options", "holds"),
    [
        ({"kind": "native"}, True),
        ({"kind": "tinker"}, True),
        ({"kind": "mds"}, True),
        ({"kind": "hf"}, False),
        ({"kind": "axolotl"}, False),
        ({"kind": "astrai_bin"}, False),
        ({"kind": "megatron_bridge"}, False),
        ({"kind": "olmo_core"}, False),
        ({"kind": "llm_foundry"}, False),
        ({"kind": "skyrl"}, False),
        ({"kind": "megatron"}, False),
        ({"kind": "verl"}, False),
        ({"kind": "llama_factory"}, False),
    ],
)
@pytest.mark.usefixtures("with_libraries")
def test_loss_weights_need_a_format_with_a_place_for_them(options: dict[str, Any], holds: bool) -> None:
    weighted = base.DatasetSummary("conversation", is_joined=False, is_open=False, has_weights=True)
    one = load({"name": "mine", **options}).exports[0]

    if holds:
        one.refuse(base.RecipeSummary(64, {"chats": weighted}))
    else:
        with pytest.raises(ConfigError, match=r"cannot store the loss weights of datasets\.chats"):
            one.refuse(base.RecipeSummary(64, {"chats": weighted}))


def test_an_export_refuses_an_objective_that_it_cannot_hold() -> None:
    asked = base.DatasetSummary("conversation", is_joined=False, is_open=False, has_weights=False, objective="prompts")
    one = load({"name": "mine", "kind": "native"}).exports[0]

    with pytest.raises(ConfigError, match=r"kind native cannot hold datasets\.asked, whose objective is prompts"):
        one.refuse(base.RecipeSummary(64, {"asked": asked}))


# ── Folders of domains ──


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("wiki", "wiki"),
        ("../x", "%2E.%2Fx"),
        ("/x", "%2Fx"),
        (".", "%2E"),
        ("..", "%2E."),
        ("a/b", "a%2Fb"),
        ("nul\0", "nul%00"),
        ("100%", "100%25"),
        ("ü", "%C3%BC"),
        ("", "__default__"),
        (None, "__default__"),
    ],
)
def test_folder_of_a_domain(value: str | None, name: str) -> None:
    assert astrai.name_folders([value]) == [name]


def test_folders_of_names_equal_except_case_are_distinct() -> None:
    names = astrai.name_folders(["A", "a", "b"])

    assert [name[:2] for name in names] == ["A-", "a-", "b"]
    assert [len(name) for name in names] == [10, 10, 1]
    assert len({name.lower() for name in names}) == 3


def test_domain_named_like_the_default_has_its_own_folder() -> None:
    none, spelled = astrai.name_folders([None, "__default__"])

    assert none == "__default__"
    assert spelled.startswith("__default__-")


def test_folder_of_a_long_name_is_shortened_and_distinct() -> None:
    one, other, fits = astrai.name_folders(["x" * 300, "x" * 301, "y" * 100])

    assert one[:81] == other[:81] == "x" * 80 + "-"
    assert one != other
    assert len(one) == len(other) == 97
    assert fits == "y" * 100
