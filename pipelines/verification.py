"""Every law on what is current, and on request every byte of it read again.

What belongs here: going over a recipe's stages, and comparing files with their manifests. What does not: the
laws (`findings.py`), showing what was found (`reports.py`).

A build never re-reads what it wrote before; this does, on purpose. Damage is collected, not raised: whoever
asks wants to hear of all of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from pipelines import build, manifest
from pipelines.build import Project, Step
from pipelines.errors import IntegrityError
from pipelines.findings import Verdict
from pipelines.manifest import File, Manifest, Part
from pipelines.shards import native
from pipelines.storage import Store, digest_bytes, digest_file


@dataclass(frozen=True, slots=True)
class Checked:
    """One stage: its current output if it has one, the verdicts on it, and what is damaged.

    `files` and `size_bytes` say how much a deep reading read.
    """

    step: Step
    manifest: Manifest | None
    verdicts: tuple[Verdict, ...] = ()
    damage: tuple[str, ...] = ()
    files: int = 0
    size_bytes: int = 0

    @property
    def fails(self) -> bool:
        """Tell whether nothing may be built on this."""
        return bool(self.damage) or any(verdict.blocking for verdict in self.verdicts)


def verify(project: Project, *, deep: bool) -> list[Checked]:
    """Judge the current output of every stage; with `deep`, compare its files with their digests and content hashes.

    Raises
    ------
    IntegrityError
        If nothing of the recipe was ever built.

    """
    checked = [_check(project, step, deep=deep) for step in build.road(project)]
    if all(one.manifest is None for one in checked):
        raise IntegrityError(
            f"{project.recipe.name}: nothing is built in {project.store.path('')}; something built is needed; "
            f"run `rowmill build {project.recipe.name}`, or name another --root"
        )
    return checked


def _check(project: Project, step: Step, *, deep: bool) -> Checked:
    made = manifest.current(project.store, step.key)
    if made is None:
        return Checked(step, None)
    verdicts = tuple(build.judge(project, step, made))
    if not deep:
        return Checked(step, made, verdicts)
    files = [file for part in made.parts for file in part.files.values()]
    size = sum(file.bytes for file in files)
    return Checked(step, made, verdicts, tuple(_damage(project.store, made)), len(files), size)


def _damage(store: Store, made: Manifest) -> Iterator[str]:
    """Yield a sentence for each file that is not what its manifest says, and for content that does not add up."""
    whole = True
    for part in made.parts:
        for file in part.files.values():
            found = _digest(store, file)
            if found != file.digest:
                whole = False
                state = "missing" if found is None else f"digest {found}"
                yield f"{file.path}: {state}, its manifest says {file.digest}; remove it and build again"
    if whole:
        yield from _content_damage(store, made)


def _digest(store: Store, file: File) -> str | None:
    if not store.exists(file.path):
        return None
    return digest_file(store.path(file.path)) if store.is_local else digest_bytes(store.read(file.path))


def _content_damage(store: Store, made: Manifest) -> Iterator[str]:
    """Compare the content hashes of sequences, read from the shards, with those that the stage wrote down."""
    match made.stage:
        case "packed_shards":
            files = made.files("shard")
            yield from _compare(store, "/".join(made.key), files, str(made.facts["content_hash"]))
        case "gpu_partitions":
            for part in made.parts:
                yield from _compare(store, _rank(part), _data(part), str(part.facts["content_hash"]))
        case _:
            return


def _data(part: Part) -> list[File]:
    return [file for name, file in part.files.items() if name.startswith("data/")]


def _rank(part: Part) -> str:
    return part.files["facts"].path.rsplit("/", 1)[0]


def _compare(store: Store, where: str, files: list[File], expected: str) -> Iterator[str]:
    total = 0
    for file in files:
        table = store.table(file).combine_chunks()
        total += sum(native.sequence_hashes(native.segments_of(table)))
    found = f"{total % native.MODULUS:032x}"
    if found != expected:
        yield (
            f"{where}: its sequences hash to {found}, its manifest says {expected}; "
            "remove the stage's folder and build again"
        )
