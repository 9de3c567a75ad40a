"""TRL's own trainers on the export `trl_preference`: the code that it prints trains one step."""

import ast
from pathlib import Path
from typing import Any

import pytest

from rowmill.stages.exports import format_trainer_pointer
from tests.support.built_exports import load_rows
from tests.support.messages import assistant
from tests.support.preferences import preference, preference_workspace
from tests.support.recipes import Built

TORCH: Any = pytest.importorskip("torch", reason="torch is not installed; TRL's trainers need it")
TRL: Any = pytest.importorskip("trl", reason="TRL is not installed; its trainers are what is tested")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def _build(folder: Path, objective: str, *trainers: str, **groups: Any) -> Built:
    kto = {"kl_block": 4} if objective == "unpaired" else {}
    exports = [{"kind": "trl_preference", "name": name, "trainer": name, **kto} for name in trainers]
    form = {"kind": "preference", "objective": objective}
    return preference_workspace(folder, form, exports, count=12, **groups).build()


def _open(built: Built, rows: Any, trainer: Any, arguments: Any, model: str) -> Any:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(built.project.base / "tokenizer")
    settings = arguments(
        output_dir=str(built.project.base / "out"),
        max_length=None,
        max_steps=1,
        per_device_train_batch_size=4,
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        disable_tqdm=True,
    )
    return trainer(model=model, args=settings, train_dataset=rows, processing_class=tokenizer)


def _train(built: Built, name: str, trainer: Any, arguments: Any, model: str) -> tuple[Any, float]:
    """Train one step; return the rows that the trainer holds and the loss."""
    made = _open(built, load_rows(built, name), trainer, arguments, model)
    return made.train_dataset, float(made.train().training_loss)


def _config() -> Any:
    import transformers

    TORCH.manual_seed(0)
    return transformers.LlamaConfig(
        vocab_size=608, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=1024, pad_token_id=0, eos_token_id=2, bos_token_id=None,
    )  # fmt: skip


def _save_language_model(folder: Path) -> str:
    """Save a tiny model and return its folder; DPO and KTO load their reference from there."""
    import transformers

    transformers.LlamaForCausalLM(_config()).save_pretrained(folder / "model")
    return str(folder / "model")


def _save_reward_model(folder: Path) -> str:
    import transformers

    config = _config()
    config.num_labels = 1
    transformers.LlamaForSequenceClassification(config).save_pretrained(folder / "judge")
    return str(folder / "judge")


def _read_printed_class(built: Built, name: str, trainer: Any) -> Any:
    """Return the subclass that the export prints."""
    [export] = [one for one in built.project.recipe.exports if one.name == name]
    printed = format_trainer_pointer(export, built.manifest("exports", name), "/data").replace("…", "*a")
    [made] = [node for node in ast.walk(ast.parse(printed)) if isinstance(node, ast.ClassDef)]
    names: dict[str, Any] = {trainer.__name__: trainer}
    exec(compile(ast.Module([made], []), "printed", "exec"), names)
    return names[made.name]


def test_rewards_and_dpo_train_a_step(tmp_path: Path) -> None:
    built = _build(tmp_path, "paired", "reward", "dpo")
    dpo = _read_printed_class(built, "dpo", TRL.DPOTrainer)
    rewarded, reward_loss = _train(built, "reward", TRL.RewardTrainer, TRL.RewardConfig, _save_reward_model(tmp_path))
    preferred, dpo_loss = _train(built, "dpo", dpo, TRL.DPOConfig, _save_language_model(tmp_path))
    columns = ["chosen_ids", "rejected_ids"]
    assert rewarded.select_columns(columns).to_list() == load_rows(built, "reward").select_columns(columns).to_list()
    assert preferred.to_list() == load_rows(built, "dpo").to_list()
    assert 0 < reward_loss < 5
    # Policy and reference are one model before the first step.
    assert dpo_loss == pytest.approx(0.6931, abs=1e-3)


def test_marked_answers_train_a_step_of_kto(tmp_path: Path) -> None:
    kto = pytest.importorskip("trl.experimental.kto", reason="this TRL has KTO in another place")
    built = _build(tmp_path, "unpaired", "kto")
    rows, loss = _train(
        built, "kto", _read_printed_class(built, "kto", kto.KTOTrainer), kto.KTOConfig, _save_language_model(tmp_path)
    )

    assert rows.to_list() == load_rows(built, "kto").to_list()
    assert loss == pytest.approx(0.5, abs=1e-2)


def test_trl_still_refuses_tokenized_pairs_without_the_subclass(tmp_path: Path) -> None:
    built = _build(tmp_path, "paired", "dpo")
    with pytest.raises(KeyError, match="chosen"):
        _train(built, "dpo", TRL.DPOTrainer, TRL.DPOConfig, _save_language_model(tmp_path))


def test_ids_are_those_that_trl_makes_of_the_messages(tmp_path: Path) -> None:
    import datasets

    built = _build(tmp_path, "paired", "dpo", loss={"trailing": "train"})
    raw = [
        {"prompt": one["prompt"], **{side: [assistant(one[side])] for side in ("chosen", "rejected")}}
        for one in map(preference, range(12))
    ]
    made = _open(built, datasets.Dataset.from_list(raw), TRL.DPOTrainer, TRL.DPOConfig, _save_language_model(tmp_path))
    columns = ["prompt_ids", "chosen_ids", "rejected_ids"]
    own, exported = made.train_dataset.select_columns(columns).to_list(), load_rows(built, "dpo").to_list()
    assert sorted(own, key=str) == sorted(exported, key=str)
