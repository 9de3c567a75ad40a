"""Runs every check on the current outputs, and on request reads every byte of them again.

A build compares the digest of what it reads, and reads only what it needs; a deep verification reads everything. Damage
is collected, not raised, so that one run reports all of it. `discard_damage` removes damaged files and all that was
built from them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rowmill.build import runner, steps
from rowmill.build.steps import Project, Step
from rowmill.checks import expectation_suite
from rowmill.checks.judge import CheckResult
from rowmill.core.errors import DamagedFileError, IntegrityError
from rowmill.core.storage import Store
from rowmill.schema import manifest
from rowmill.schema.manifest import Manifest
from rowmill.stats.tables import find_damage
from rowmill.tokenization.stored_tokenizers import COMMIT_FOLDER, TOKENIZER_FOLDER


@dataclass(frozen=True, slots=True)
class StageVerification:
    """One stage: its current output if it is built, its check results, and its damage.

    `files` and `size_bytes` count what a deep verification read; `unread_files` and `unread_bytes` what was not read of
    the files that its kept versions name, so that nothing is known of them.
    """

    step: Step
    manifest: Manifest | None
    results: tuple[CheckResult, ...] = ()
    damage: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()
    """Paths of the damaged files, relative to the storage root."""
    files: int = 0
    size_bytes: int = 0
    unread_files: int = 0
    unread_bytes: int = 0
    disagreements: tuple[str, ...] = ()
    """Results that Great Expectations contradicts."""

    @property
    def is_outdated(self) -> bool:
        """Whether the recipe's options changed since the output was built."""
        return self.manifest is not None and self.manifest.code_version != self.step.code_version

    @property
    def fails(self) -> bool:
        """Return whether later stages must not build on this output."""
        return bool(self.damage or self.disagreements) or any(result.blocking for result in self.results)


def verify_recipe(project: Project, *, deep: bool) -> list[StageVerification]:
    """Run the checks on the current output of every stage; with `deep`, compare digests and contents of its files."""
    planned = steps.plan_steps(project)
    checked = [_verify_step(project, step, deep=deep, is_first=step is planned[0]) for step in planned]
    if all(one.manifest is None for one in checked):
        raise IntegrityError(
            f"{project.recipe.name}: nothing is built in {project.store.path('')}; verify reads an existing build; "
            f"run `rowmill build {project.recipe.name}`, or name another --root"
        )
    return checked


def _verify_step(project: Project, step: Step, *, deep: bool, is_first: bool) -> StageVerification:
    damage: dict[str, str] = {}
    if deep:
        damage = _find_broken_seals(
            project.store, _list_sealed_files(project.store, manifest.get_stage_folder(step.key))
        )
        if is_first:
            # The tokenizers are the store's; they are reported once.
            for folder in (TOKENIZER_FOLDER, COMMIT_FOLDER):
                damage |= _find_broken_seals(project.store, _list_sealed_files(project.store, folder))
    made = manifest.load_current(project.store, step.key)
    if made is None:
        return StageVerification(step, None, damage=tuple(damage.values()), damaged=tuple(damage))
    results = tuple(runner.check_step(project, step, made))
    differences = tuple(expectation_suite.find_disagreements(results, step.thresholds))
    files = [file for part in made.parts for file in part.files.values()]
    size = sum(file.bytes for file in files)
    kept = manifest.list_outputs(project.store, step.key)
    unread = {file.path: file.bytes for one in kept for part in one.parts for file in part.files.values()}
    if not deep:
        unread |= {file.path: file.bytes for file in files}
        return StageVerification(
            step, made, results, unread_files=len(unread), unread_bytes=sum(unread.values()), disagreements=differences
        )
    for file in files:
        unread.pop(file.path, None)
    for file in files:
        try:
            project.store.content(file)
        except DamagedFileError as error:
            damage[file.path] = error.damage.removeprefix(project.store.path("") + "/")
    damage |= find_damage(project.store, made.key, made.version)
    # Content is compared only if the files are intact.
    find = step.stage.find_content_damage
    sentences = tuple(damage.values()) or (() if find is None else tuple(find(project.store, made)))
    return StageVerification(
        step, made, results, sentences, tuple(damage), len(files), size, len(unread), sum(unread.values()), differences
    )


def _list_sealed_files(store: Store, folder: str) -> Iterator[str]:
    """Yield the JSON files in a folder: a stage's pointers, manifests, results and records of parts, or tokenizers.

    Each carries a digest of itself. What the folders of parts hold beside their records is named by manifests.
    """
    for name in store.list(folder):
        path = f"{folder}/{name}"
        if name.endswith(".json"):
            yield path
        elif name == "parts":
            yield from (f"{path}/{part}/part.json" for part in store.list(path))
        elif "." not in name:
            yield from (f"{path}/{inner}" for inner in store.list(path) if inner.endswith(".json"))


def _find_broken_seals(store: Store, paths: Iterable[str]) -> dict[str, str]:
    """Return a message for each file whose content is not that of the digest it carries, by path."""
    return {
        path: f"{path}: cut, or changed since it was written; expected content of the digest that it carries"
        for path in paths
        if store.read_sealed(path) is None and store.exists(path)
    }


def discard_damage(project: Project, checked: Sequence[StageVerification]) -> list[str]:
    """Remove damaged files, and every version built from one; the next build makes them again.

    No version is built from tables of statistics, so of these only the damaged file is removed.

    A build refuses a damaged input, but nobody can tell what was read before its damage was noticed. Files that
    trainers open are removed with their version of the ranks. Returns a line per version.
    """
    store = project.store
    suspect: set[tuple[str, str]] = set()
    lines: list[str] = []
    for one in checked:
        name = "/".join(one.step.key)
        for made in manifest.list_outputs(store, one.step.key):
            paths = {file.path for part in made.parts for file in part.files.values()}
            if paths & set(one.damaged):
                suspect.add((name, made.version))
            elif suspect & set(made.inputs.items()):
                suspect.add((name, made.version))
                manifest.remove_output(store, made)
                lines.append(f"{name}: version {made.version[:12]} removed: it was built from damaged files")
        for path in one.damaged:
            store.remove(path)
    return lines
