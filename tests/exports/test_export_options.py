"""Exports in a recipe: what is impossible is an error when the recipe loads, in four parts."""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import pytest

from docs.generate import reference
from rowmill.core.errors import ConfigError
from rowmill.core.installation import format_install_command
from rowmill.exports import AnyExport, Export, astrai, base
from rowmill.recipe import recipe
from rowmill.recipe.recipe import Recipe
from rowmill.schema.recipe_summary import DatasetSummary, RecipeSummary
from rowmill.shards import label_conventions
from tests.docs.test_docs import ROOT, blocks
from tests.support.export_cases import export as export_of
from tests.support.export_cases import terms

CHATS: dict[str, Any] = {"source": {"train_urls": ["chats.jsonl"]}, "format": {"kind": "chat"}}
TEXT: dict[str, Any] = {"source": {"train_urls": ["text.jsonl"]}, "format": {"kind": "text"}}
PAIRS: dict[str, Any] = {"source": {"train_urls": ["pairs.jsonl"]}, "format": {"kind": "preference"}}
UNPAIRED: dict[str, Any] = {**PAIRS, "format": {**PAIRS["format"], "objective": "unpaired"}}
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


def test_every_kind_is_in_the_union() -> None:
    modules = [path.stem for path in Path(base.__file__).parent.glob("*.py") if path.stem != "verl_dataset"]
    values = [value for name in modules for value in vars(import_module(f"rowmill.exports.{name}")).values()]
    kinds = {value for value in values if isinstance(value, type) and issubclass(value, Export)}

    assert {kind for kind in kinds if "kind" in kind.model_fields} == set(members())
    assert len({kind_of(model) for model in members()}) == len(members())


@pytest.mark.parametrize("model", members(), ids=kind_of)
@pytest.mark.usefixtures("with_libraries")
def test_kind_survives_its_own_dump_and_is_possible_for_its_objective(model: type[Export]) -> None:
    one = model(name="mine")
    assert model.model_validate(one.model_dump()) == one
    assert one.label_convention in get_args(label_conventions.LabelConvention)
    rows = {"next_token": CHATS, "paired": PAIRS, "prompts": PROMPTS}[min(model.OBJECTIVES)]
    assert load({"kind": kind_of(model), "name": "mine"}, rows=rows).exports[0] == one


@pytest.mark.parametrize(
    ("exports", "said"),
    [
        (
            [{"kind": "litdata", "name": "mine"}],
            ["mine.yaml: exports.0", "'litdata' is not a kind; choose native, hf, axolotl"],
        ),
        ([{"name": "flat"}], ["exports.0: has no kind; choose astrai_bin, ", "native"]),
        (
            [{"kind": "axolotl", "name": "mine", "sequence_length": 4096}],
            ["exports.0.sequence_length: unknown key", "did you mean sequence_len?"],
        ),
        *[([{"kind": "native", "name": name}], ["cannot be a name"]) for name in ("../x", "", "a/b", "1st")],
        ([{"kind": "native", "name": "training_splits"}], ["cannot be a name"]),
        ([{"kind": "native", "name": "chats"}], ["'chats' is already a dataset"]),
        ([{"kind": "native", "name": "a"}, {"kind": "hf", "name": "a"}], ["'a' is already another export"]),
    ],
)
def test_unknown_kind_option_or_name_is_refused(exports: list[dict[str, Any]], said: list[str]) -> None:
    message = refusal(*exports)
    assert message.startswith("mine.yaml: ")
    assert [words for words in said if words not in message] == []
    assert "'exports' cannot be a name" in refusal(exports=CHATS)


@pytest.mark.parametrize(("kind", "module", "extra"), [("astrai_h5", "h5py", "h5"), ("mds", "streaming", "mds")])
def test_missing_library_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, kind: str, module: str, extra: str
) -> None:
    monkeypatch.setattr(base, "find_spec", lambda name: None if name == module else object())
    said = refusal({"kind": kind, "name": "mine"})
    assert f"exports.mine: kind {kind} is written with {module}, which is not installed here" in said
    assert format_install_command(extra) in said


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
        *[
            ({"kind": "trl_preference", **options}, {"rows": rows}, said)
            for rows, options, said in (
                (CHATS, {}, "kind trl_preference cannot hold datasets.rows, whose objective is next_token"),
                (UNPAIRED, {"trainer": "dpo"}, "trainer: dpo with datasets.rows, whose objective is unpaired"),
                (PAIRS, {"trainer": "kto"}, "trainer: kto with datasets.rows, whose objective is paired"),
                (PAIRS, {"trainer": "reward", "kl_block": 4}, "kl_block with trainer: reward"),
                (UNPAIRED, {"trainer": "kto", "kl_block": 1}, "exports.0.kl_block"),
            )
        ],
        ({"kind": "rl_prompts", "layout": "skyrl"}, {"rows": PROMPTS}, "env_class: null with layout: skyrl"),
        (
            {"kind": "rl_prompts", "layout": "trl", "env_class": "gsm8k"},
            {"rows": PROMPTS},
            "env_class: gsm8k with layout: trl",
        ),
        (
            {"kind": "rl_prompts", "layout": "tinker"},
            {"rows": PROMPTS},
            "exports.0.layout: must be verl, skyrl, trl, openrlhf, open_instruct or nemo_rl",
        ),
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


@pytest.mark.parametrize("kind", ["native", "tinker", "mds"])
@pytest.mark.usefixtures("with_libraries")
def test_loss_weights_are_taken_where_they_have_a_place(kind: str) -> None:
    load({"name": "mine", "kind": kind}).exports[0].refuse(RecipeSummary(64, {"chats": WEIGHTED}))


WEIGHTED = DatasetSummary("conversation", is_joined=False, is_open=False, has_weights=True)
ASKED = DatasetSummary("conversation", is_joined=False, is_open=False, has_weights=False, objective="prompts")
WITHOUT_WEIGHTS = (
    "hf axolotl astrai_bin megatron_bridge olmo_core llm_foundry skyrl megatron verl llama_factory"
).split()


@pytest.mark.parametrize(
    ("kind", "dataset", "message"),
    [
        *[(kind, WEIGHTED, r"cannot store the loss weights of datasets\.chats") for kind in WITHOUT_WEIGHTS],
        ("native", ASKED, r"kind native cannot hold datasets\.chats, whose objective is prompts"),
    ],
)
@pytest.mark.usefixtures("with_libraries")
def test_dataset_that_an_export_cannot_hold_is_refused(kind: str, dataset: DatasetSummary, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load({"name": "mine", "kind": kind}).exports[0].refuse(RecipeSummary(64, {"chats": dataset}))


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


def test_folders_of_names_that_would_be_equal_or_too_long_are_distinct() -> None:
    names = astrai.name_folders(["A", "a", "b"])
    assert [(name[:2], len(name)) for name in names] == [("A-", 10), ("a-", 10), ("b", 1)]
    assert len({name.lower() for name in names}) == 3
    none, spelled = astrai.name_folders([None, "__default__"])
    assert none == "__default__"
    assert spelled.startswith("__default__-")
    one, other, fits = astrai.name_folders(["x" * 300, "x" * 301, "y" * 100])
    assert one[:81] == other[:81] == "x" * 80 + "-"
    assert one != other
    assert (len(one), len(other), fits) == (97, 97, "y" * 100)
