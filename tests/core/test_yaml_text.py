"""Which YAML a recipe may hold, and which values it gives."""

import random
import string
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmill.core import config
from rowmill.core.config import parse_yaml
from rowmill.core.errors import ConfigError
from rowmill.recipe import recipe
from tests.support.tiers import draw

DEEP = r"lists and mappings are nested in hundreds of levels; .*"

REFUSED = {
    "flow-5,000-deep": ("a: " + "[" * 5000 + "]" * 5000, DEEP),
    "block-5,000-deep": ("- " * 5000 + "x", DEEP),
    "mapping-1,000-deep": ("\n".join(" " * n + "a:" for n in range(1000)), DEEP),
    "alias-of-itself": ("a: &a\n  - *a", r"not YAML: found unconstructable recursive node .*"),
    "integer-of-5,000-digits": ("x: 1\na: " + "9" * 5000, r"line 2: '9+\.\.\.' cannot be read as YAML's int .*"),
    "a-list-as-key": ("x: 1\n? [a, b]\n: 1", r"line 2: a list is a key; keys are texts or numbers; .*"),
    "a-mapping-as-key": ("{{a: 1}: 2}", r"line 1: a mapping is a key; .*"),
    "no-such-day": ("a: 2024-02-31", r"line 1: '2024-02-31' cannot be read as YAML's timestamp \(day is out of .*"),
    "tag-and-no-float": ("a: !!float x", r"line 1: 'x' cannot be read as YAML's float .*"),
    "tag-and-no-integer": ("a: !!int ''", r"line 1: '' cannot be read as YAML's int .*"),
    "a-key-twice": ("a: 1\nb: 2\na: 3", r"line 3: key 'a' is given twice .*"),
    "a-key-twice-beside-a-merge": ("x: &x {a: 1}\ny:\n  <<: *x\n  b: 1\n  b: 2", r"line 5: key 'b' is given twice .*"),
    "two-merges": ("x: &x {a: 1}\ny:\n  <<: *x\n  <<: *x", r"line 4: key '<<' is given twice .*"),
    "merge-of-text": ("a:\n  <<: text", r"not YAML: .* expected a mapping .* line 2, .*"),
    "a-python-object": ("a: !!python/object/apply:os.system [id]", r"not YAML: .*python/object.*"),
    "not-yaml": ("a: [", r"not YAML: .*"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_yaml_that_a_recipe_may_not_hold_is_refused(name: str) -> None:
    text, words = REFUSED[name]

    with pytest.raises(ConfigError, match=f"^{words}$"):
        parse_yaml(text)


@pytest.mark.parametrize("name", REFUSED)
def test_recipe_whose_yaml_is_refused_names_its_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / "demo.yaml"
    path.write_text(REFUSED[name][0])

    with pytest.raises(ConfigError) as caught:
        recipe.load_recipe(path)

    assert str(caught.value).startswith(f"{path}: ")


def test_recipe_that_is_no_regular_file_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^/dev/zero: is not a regular file; a recipe is a file of YAML; name one$"):
        config.read_yaml(Path("/dev/zero"))


def test_keys_are_names_and_no_truths() -> None:
    assert parse_yaml("{on: yes, off: [no], true: 1}") == {"on": True, "off": [False], "true": 1}


def test_merge_keys_fill_in_what_a_mapping_leaves_out_and_aliases_are_independent() -> None:
    value = parse_yaml("base: &x {a: 1, b: 2}\none:\n  b: 3\n  <<: *x\ntwo: {<<: *x}")

    assert value["one"] == {"a": 1, "b": 3}
    assert value["two"] == {"a": 1, "b": 2}
    value = parse_yaml("x: &x {a: 1}\ny: &y {a: 2, b: 2}\none: {<<: [*x, *y], c: 3}")
    assert value["one"] == {"a": 1, "b": 2, "c": 3}
    # What is written into one dataset's options must not change another's.
    value = parse_yaml("a: &x {k: [1]}\nb: *x")
    value["a"]["k"].append(2)
    assert value["b"] == {"k": [1]}


def test_recipe_may_share_options_by_merge_keys(tmp_path: Path) -> None:
    path = tmp_path / "demo.yaml"
    path.write_text("""
        tokenizer: t
        seq_len: 128
        datasets:
          a: &a
            source: {train_urls: [a.jsonl]}
            format: {kind: chat}
            filters: {max_items: 5}
          b:
            <<: *a
            source: {train_urls: [b.jsonl]}
    """)
    loaded = recipe.load_recipe(path)

    assert loaded.datasets["b"].filters == loaded.datasets["a"].filters
    assert loaded.datasets["b"].source.model_dump()["train_urls"] == ["b.jsonl"]


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(string.printable, max_size=9)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abc"), inner))


@pytest.mark.slow
@settings(max_examples=draw(200), deadline=None)
@given(VALUES)
def test_values_are_those_of_the_safe_loader(value: Any) -> None:
    text = yaml.safe_dump(value)

    assert parse_yaml(text) == yaml.safe_load(text)


PIECES = (
    *("a: ", "- ", "[", "]", "{", "}", "*x", "&x ", "<<: ", "\n", "\n  ", "!!int ", "!!set ", "? ", "2024-13-01"),
    *("1:99", "0x", "'", '"', "\\ud800", "1e999", ",", "~", "#", "|\n ", "!!binary =", "%YAML 1.1\n", "---\n"),
)


def test_pieces_of_yaml_in_any_order_are_read_or_refused() -> None:
    chance = random.Random(7)
    read = 0
    for _ in range(3000):
        text = "".join(chance.choices(PIECES, k=chance.randint(1, 14)))
        try:
            parse_yaml(text)
        except ConfigError:
            continue
        read += 1

    assert 100 < read < 2900
