"""Identity of a recipe's tokenizer: its content and never its path; on the hub, the commit of a revision."""

import hashlib
import json
import logging
import shutil
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

import huggingface_hub
import pytest
import yaml

from rowmill.build import prepare, steps
from rowmill.cli import main
from rowmill.core.errors import ConfigError, IntegrityError, UnreachableError
from rowmill.recipe.recipe import json_schema
from rowmill.schema import manifest
from rowmill.tokenization import stored_tokenizers, tokenizer_source
from tests.support.recipes import (
    PAIR,
    TO_EXAMPLES,
    Built,
    Workspace,
    chat,
    pair,
    rewrite_tokenizer,
    write_tokenizer,
)

pytestmark = pytest.mark.slow


def write(folder: Path, tokenizer: object = "tokenizer") -> Workspace:
    workspace = Workspace(folder)
    datasets = {
        "chats": workspace.dataset("c.jsonl", [chat(i) for i in range(20)]),
        "tasks": workspace.dataset("t.jsonl", [pair(i) for i in range(20)], PAIR),
    }
    return workspace.recipe(datasets, tokenizer=tokenizer)


def point(workspace: Workspace, tokenizer: object) -> Workspace:
    """Change the recipe's tokenizer alone."""
    return change(workspace, tokenizer=tokenizer)


def change(workspace: Workspace, **options: object) -> Workspace:
    values = yaml.safe_load(workspace.config.read_text(encoding="utf-8"))
    workspace.config.write_text(yaml.safe_dump(values | options, sort_keys=False), encoding="utf-8")
    return workspace


def other_tokenizer(folder: Path) -> Path:
    """Write a tokenizer with another vocabulary, in place of the one that is there: two tokens changed their ids."""

    def swap(parsed: dict[str, Any]) -> None:
        vocabulary: dict[str, int] = parsed["model"]["vocab"]
        first, second = list(vocabulary)[-2:]
        vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]

    shutil.rmtree(folder, ignore_errors=True)
    return rewrite_tokenizer(folder, swap)


def forecasts(workspace: Workspace) -> dict[str, tuple[str, str]]:
    return {"/".join(one.step.key[1:]): (one.action, one.why) for one in prepare.forecast_steps(workspace.project)}


# ── Folders ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("how", ["copy", "link", "absolute"])
def test_same_files_under_another_path_are_the_same_tokenizer(tmp_path: Path, how: str) -> None:
    workspace = write(tmp_path)
    first = workspace.build()
    if how == "copy":
        shutil.copytree(tmp_path / "tokenizer", tmp_path / "elsewhere/copied")
        (tmp_path / "tokenizer").rename(tmp_path / "gone")
    elif how == "link":
        (tmp_path / "linked").symlink_to(tmp_path / "tokenizer", target_is_directory=True)
    paths = {"copy": "elsewhere/copied", "link": "linked", "absolute": str(tmp_path / "tokenizer")}
    point(workspace, paths[how])

    assert {action for action, _ in forecasts(workspace).values()} == {"reuse"}
    again = workspace.build()
    assert (again.made(), again.versions()) == (set(), first.versions())


def test_store_with_the_tokenizer_under_another_name_gives_the_same_bytes(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "shared/tokenizer")
    used, fresh = (write(tmp_path / name, str(tokenizer)) for name in ("used", "fresh"))
    shutil.copytree(tokenizer, used.folder / "before")
    point(used, "before").build(only=TO_EXAMPLES)
    point(used, str(tokenizer))

    assert used.build().digests() == fresh.build().digests()


def test_changed_file_under_the_same_path_is_another_tokenizer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    workspace = write(tmp_path)
    first = workspace.build()
    before = {step.key: step.code_version for step in steps.plan_steps(workspace.project)}
    other_tokenizer(tmp_path / "tokenizer")
    after = {step.key: step.code_version for step in steps.plan_steps(workspace.project)}
    expected = write(tmp_path / "clean", str(tmp_path / "tokenizer")).build()

    planned = forecasts(workspace)
    with caplog.at_level(logging.WARNING, "rowmill"):
        second = workspace.build()

    assert {key[-1] for key in before if before[key] != after[key]} == {"tokenized_examples"}
    assert planned["chats/canonical_rows"][0] == "reuse"
    assert planned["chats/tokenized_examples"] == ("make", "its tokenizer's files changed")
    assert any("chats/tokenized_examples: its tokenizer's files changed" in line for line in caplog.messages)
    assert second.versions() == expected.versions()
    assert second.versions()["chats/tokenized_examples"] != first.versions()["chats/tokenized_examples"]


def test_model_files_are_not_part_of_the_tokenizer_and_other_cards_keep_shards_apart(tmp_path: Path) -> None:
    workspace = write(tmp_path)
    first = workspace.build()
    (tmp_path / "tokenizer/model.safetensors.index.json").write_text("{}", encoding="utf-8")
    assert workspace.build().versions() == first.versions()

    path = tmp_path / "tokenizer/tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | {"pad_token": "<|im_start|>"}), encoding="utf-8")
    second = workspace.build()

    for key in (("chats", "packed_shards"), ("gpu_partitions",)):
        assert first.manifest(*key).version != second.manifest(*key).version
        manifest.verify_files(workspace.project.store, first.manifest(*key))

    other_tokenizer(tmp_path / "tokenizer")
    workspace.build(only=["tokenized_examples", "truncation_stats", "packed_shards"], datasets={"chats"})
    with pytest.raises(
        IntegrityError, match=r"packed with 2 tokenizers \(chats with tokenizer \w+; tasks with tokenizer \w+\)"
    ):
        workspace.build(only=["training_splits"])


@pytest.mark.parametrize(
    ("tokenizer", "words"),
    [
        ({"name": "tokenizer", "revision": "main"}, "only names on the hub have revisions; delete it"),
        (
            {"name": "tokenizer", "content": "0"},
            r"mini\.yaml: tokenizer\.content: it is computed from the folder's files",
        ),
        ({"name": "tokenizer", "revisio": "main"}, r"tokenizer\.revisio: unknown key; .*; did you mean revision\?"),
        ({"revision": "main"}, r"tokenizer\.name: is missing"),
        (3, r"tokenizer: must be a string; got 3, which is an integer"),
        ("nowhere/at/all", r"tokenizer: no folder 'nowhere/at/all' \(looked in"),
    ],
)
def test_wrong_choice_of_a_tokenizer_is_one_clear_error(tmp_path: Path, tokenizer: object, words: str) -> None:
    workspace = write(tmp_path, tokenizer)
    with pytest.raises(ConfigError, match=words) as caught:
        workspace.build()
    assert "\n" not in str(caught.value)


def test_schema_offers_name_and_revision_alone() -> None:
    assert set(json_schema()["$defs"]["TokenizerChoice"]["properties"]) == {"name", "revision"}


# ── The hub ────────────────────────────────────────────────────────────────────────────────────────


class Hub:
    """A hub with one repository, `owner/words`, whose branches can be moved; it can stop answering."""

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, bytes]] = {}
        self.branches: dict[str, str] = {}
        self.answers = True
        self.asked: list[str] = []

    def push(self, folder: Path, branch: str = "main") -> str:
        files = {one.name: one.read_bytes() for one in sorted(folder.iterdir())}
        files["README.md"] = f"commit {len(self.commits)}".encode()
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits[commit] = files
        self.branches[branch] = commit
        return commit


class _Handler(BaseHTTPRequestHandler):
    """The part of the hub's interface that `huggingface_hub` uses to resolve, list and download."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        words = [unquote(one) for one in urlsplit(self.path).path.strip("/").split("/")]
        self.hub.asked.append("/".join(words))
        if not self.hub.answers:
            self._send(503, b"{}", {}, body=body)
            return
        match words:
            case ["api", "models", "owner", "words", *rest] if rest[:1] in ([], ["revision"]):
                commit = self._commit(rest[1] if rest else "main")
                if commit is None:
                    self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, body=body)
                    return
                names = [{"rfilename": name} for name in self.hub.commits[commit]]
                self._json({"id": "owner/words", "modelId": "owner/words", "sha": commit, "siblings": names}, body=body)
            case ["api", "models", "owner", "words", "tree", revision, *_]:
                files = self.hub.commits[self._commit(revision) or ""]
                tree = [
                    {"type": "file", "path": name, "size": len(one), "oid": _oid(one)} for name, one in files.items()
                ]
                self._json(tree, body=body)
            case ["owner", "words", "resolve", revision, name]:
                commit = self._commit(revision) or ""
                content = self.hub.commits[commit].get(name)
                if content is None:
                    self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, body=body)
                    return
                self._send(200, content, {"X-Repo-Commit": commit, "ETag": f'"{_oid(content)}"'}, body=body)
            case _:
                self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body=body)

    def _commit(self, revision: str) -> str | None:
        return revision if revision in self.hub.commits else self.hub.branches.get(revision)

    def _json(self, value: object, *, body: bool) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"}, body=body)

    def _send(self, status: int, content: bytes, headers: dict[str, str], *, body: bool) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the name is the base class's)
        del format, args


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Serve a hub on this machine; `huggingface_hub` uses it and a cache of its own."""
    made = Hub()
    # A tokenizer that another test opened is not fetched.
    monkeypatch.setattr(stored_tokenizers, "_ENCODERS", {})
    handler = type("Handler", (_Handler,), {"hub": made})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        thread = Thread(target=http.serve_forever, daemon=True)
        thread.start()
        address = f"http://127.0.0.1:{http.server_port}"
        monkeypatch.setenv("HF_ENDPOINT", address)
        constants = huggingface_hub.constants
        # They are read from the environment once, when the library is imported.
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        tokenizer_source.forget_commits()
        yield made
        tokenizer_source.forget_commits()
        http.shutdown()
        thread.join(timeout=60)


def origin(built: Built, dataset: str = "chats") -> dict[str, Any]:
    return built.manifest(dataset, "tokenized_examples").details["tokenizer"]


def test_name_on_the_hub_is_its_commit_and_the_same_tokenizer_as_its_folder(tmp_path: Path, hub: Hub) -> None:
    folder = write_tokenizer(tmp_path / "saved")
    commit = hub.push(folder)

    named = write(tmp_path / "named", "owner/words").build()

    assert origin(named) == {
        "name": "owner/words",
        "revision": None,
        "commit": commit,
        "digest": named.manifest("chats", "tokenized_examples").card["tokenizer_digest"],
    }
    assert named.digests() == write(tmp_path / "folder", str(folder)).build().digests()


def test_branch_that_moved_is_named_with_both_commits_and_what_is_made_again(
    tmp_path: Path, hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    before = hub.push(write_tokenizer(tmp_path / "saved"))
    workspace = write(tmp_path / "project", {"name": "owner/words", "revision": "main"})
    first = workspace.build()
    after = hub.push(other_tokenizer(tmp_path / "other"))
    moved = f"main of owner/words moved from {before[:12]} to {after[:12]} on the hub"

    planned = forecasts(workspace)
    with caplog.at_level(logging.WARNING, "rowmill"):
        second = workspace.build()

    assert planned["chats/tokenized_examples"] == planned["tasks/tokenized_examples"] == ("make", moved)
    assert planned["chats/packed_shards"][0] == planned["gpu_partitions"][0] == "make if changed"
    [told] = [line for line in caplog.messages if line.startswith("chats/") or "mini/chats" in line]
    assert moved in told
    assert told.endswith("chats/truncation_stats, chats/packed_shards, training_splits, gpu_partitions")
    assert origin(second)["commit"] == after
    assert second.versions() == write(tmp_path / "clean", str(tmp_path / "other")).build().versions()
    assert second.versions() != first.versions()


def test_branch_that_moved_to_the_same_tokenizer_makes_nothing_again(tmp_path: Path, hub: Hub) -> None:
    folder = write_tokenizer(tmp_path / "saved")
    before = hub.push(folder)
    workspace = write(tmp_path / "project", "owner/words")
    first = workspace.build()
    after = hub.push(folder)

    action, why = forecasts(workspace)["chats/tokenized_examples"]
    again = workspace.build()

    assert action == "reuse"
    assert f"moved from {before[:12]} to {after[:12]} on the hub, with the same tokenizer" in why
    assert again.made() == set()
    assert again.versions() == first.versions()


@pytest.mark.parametrize("is_pinned", [True, False])
def test_commit_that_is_pinned_is_never_asked_for_again_and_a_name_once(
    tmp_path: Path, hub: Hub, is_pinned: bool
) -> None:
    commit = hub.push(write_tokenizer(tmp_path / "saved"))
    choice = {"name": "owner/words", "revision": commit} if is_pinned else "owner/words"
    workspace = write(tmp_path / "project", choice)
    first = workspace.build()
    if is_pinned:
        hub.push(other_tokenizer(tmp_path / "other"))
    hub.asked.clear()

    again = workspace.build()

    assert (again.made(), again.versions()) == (set(), first.versions())
    assert hub.asked == ([] if is_pinned else ["api/models/owner/words"])


def test_hub_that_does_not_answer_leaves_the_last_commit(
    tmp_path: Path, hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    commit = hub.push(write_tokenizer(tmp_path / "saved"))
    workspace = write(tmp_path / "project", "owner/words")
    workspace.build()
    hub.answers = False
    shutil.rmtree(tmp_path / "hub-cache")
    with caplog.at_level(logging.WARNING, "rowmill"):
        again = workspace.build()

    assert again.made() == set()
    assert any(f"continuing with {commit[:12]}, the last known one" in line for line in caplog.messages)


def test_hub_that_never_answered_is_an_external_error(tmp_path: Path, hub: Hub) -> None:
    hub.answers = False
    with pytest.raises(UnreachableError, match=r"tokenizer: 'owner/words' cannot be loaded \(.*503.*\); the hub must"):
        write(tmp_path, "owner/words").build()


@pytest.mark.parametrize("command", ["plan", "build"])
def test_command_asks_the_hub_and_warns_once(
    tmp_path: Path, hub: Hub, caplog: pytest.LogCaptureFixture, command: str
) -> None:
    """The first records are tried under the commit of which the build is made."""
    hub.push(write_tokenizer(tmp_path / "saved"))
    workspace = write(tmp_path / "project", "owner/words")
    workspace.build()
    # The options of all datasets are others, so that their first records are tried.
    change(workspace, seq_len=128)
    hub.answers = False
    hub.asked.clear()

    with caplog.at_level(logging.WARNING, "rowmill"):
        assert main.main([command, str(workspace.config)]) == main.ExitStatus.SUCCESS

    assert hub.asked == ["api/models/owner/words"]
    assert len([line for line in caplog.messages if "the last known one" in line]) == 1


def test_hub_that_never_answered_is_asked_once_for_all_datasets(tmp_path: Path, hub: Hub) -> None:
    hub.answers = False
    workspace = write(tmp_path, "owner/words")

    for asked in (1, 2):
        assert main.main(["plan", str(workspace.config)]) == main.ExitStatus.OUTSIDE_FAILURE
        assert hub.asked == ["api/models/owner/words"] * asked


@pytest.mark.parametrize(
    ("tokenizer", "words"),
    [
        (
            "owner/nothing",
            r"'owner/nothing' cannot be loaded \(the hub has no such name, or you have no access to it\)",
        ),
        ({"name": "owner/words", "revision": "v9"}, r"cannot be loaded \(the hub has no revision 'v9' of it\)"),
        ("no name", r"'no name' cannot be loaded \(it is neither a folder nor a valid name on the hub\)"),
    ],
)
def test_name_or_revision_missing_from_the_hub_is_a_config_error(
    tmp_path: Path, hub: Hub, tokenizer: object, words: str
) -> None:
    hub.push(write_tokenizer(tmp_path / "saved"))
    with pytest.raises(ConfigError, match=words):
        write(tmp_path / "project", tokenizer).build()


def test_a_folder_is_read_once_in_a_block_unless_its_files_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tokenizer(tmp_path / "saved")
    read = list[Path]()
    open_file = Path.open

    def note_and_open(path: Path, *arguments: Any, **named: Any) -> Any:
        read.append(path)
        return open_file(path, *arguments, **named)

    monkeypatch.setattr(Path, "open", note_and_open)
    with tokenizer_source.hold_commits():
        first = tokenizer_source.hash_tokenizer_folder(folder)
        files = len(read)
        assert tokenizer_source.hash_tokenizer_folder(folder) == first
        assert len(read) == files > 0
        changed = folder / "tokenizer.json"
        changed.write_bytes(b" " + changed.read_bytes())
        second = tokenizer_source.hash_tokenizer_folder(folder)
        assert second != first
        (folder / "more.json").write_bytes(b"{}")
        assert tokenizer_source.hash_tokenizer_folder(folder) not in (first, second)
    read.clear()
    tokenizer_source.hash_tokenizer_folder(folder)
    assert len(read) > files
