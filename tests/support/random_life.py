"""A random life of a project, and what each moment of it must be: the first build of the same inputs on an empty store.

    step ─► a change (rows, files, options, a flipped byte, gc, use) ─► builds (killed, with workers, on Ray) ─► outcome
                       └─► the same inputs, a store in which nothing is but tokenizers ─► the outcome it must be

A life is a list of steps that JSON can hold. A step names what it changes by numbers that are taken modulo what there
is, so that each list of steps is a life, and a failed one can be shortened by leaving out steps.

What compares a build with the one that was published before is about history, by its declaration
(`CrossStageFact.compares`): the values of `drift`, `shrunk` and `table_drift` are not compared, and the recipe lets
them warn, so that no build is blocked by what was published before. What is published stays when a build is blocked.
"""

import copy
import hashlib
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import yaml

from rowmill.build import gate, gc, runner, share, steps
from rowmill.build.steps import Project, Step, plan_steps
from rowmill.checks.cross_stage import CROSS_STAGE_FACTS
from rowmill.checks.judge import CheckResult
from rowmill.cli.error_boundary import ExitStatus, choose_exit_status
from rowmill.core.errors import PipelineError
from rowmill.executors import RayExecutor, local
from rowmill.inspection import verify
from rowmill.reader import Reader
from rowmill.schema import manifest
from rowmill.schema.manifest import StageKey
from rowmill.sources import parts
from rowmill.tokenization import stored_tokenizers
from tests.support.option_changes import (
    OptionChange,
    change_option,
    options_of,
    parsed,
    put,
    varied_chat,
    write_project,
)
from tests.support.recipes import LENIENT, Workspace, chat, document, pair

LifeStep: TypeAlias = list[Any]
"""`[how, what, number, …]`: how it is built, and what is changed before."""

PROCESSES = multiprocessing.get_context("forkserver")
"""Where builds run that are killed: forked from a server that has imported everything once and done nothing."""
PROCESSES.set_forkserver_preload(["rowmill.build.runner", "pandas", "polars", "transformers", __name__])

KINDS = (("chats", "tasks", "table"), ("chats", "texts", "table"), ("tasks", "texts", "series"))
"""The datasets of a life, of three kinds; a life's seed chooses."""
PART_BYTES = 2 << 10
"""Size from which a file has two parts: files of a life have few rows."""
FIRST_ROWS = 9
HISTORICAL = {"table_drift", *(check for check, fact in CROSS_STAGE_FACTS.items() if fact.compares)}
"""Checks that compare with the published build."""
PATIENCE_S = 300.0

GATES = LENIENT | {check: {"severity": "warn"} for check in sorted(HISTORICAL)}


# ── Inputs ─────────────────────────────────────────────────────────────────────────────────────────


def make_line(dataset: str, number: int) -> str:
    """Return a line of a dataset's file; one in nine has something odd about it."""
    odd, kind = number % 9 == 5, (number // 9) % 6
    if dataset == "chats":
        row: dict[str, Any] = varied_chat(number % 50)
        if odd:
            return [
                '{"messages": [', json.dumps(row | {"messages": []}), json.dumps(chat(number, words=300)),
                json.dumps({"messages": [{"role": "narrator", "content": "Once."}, *row["messages"]]}),
                json.dumps(row | {"messages": row["messages"][:1]}), json.dumps(row | {"time": "noon", "who": None}),
            ][kind]  # fmt: skip
    elif dataset == "tasks":
        row = pair(number % 50)
        if odd:
            return [
                "[1]", json.dumps({"prompt": "?"}), json.dumps(row | {"answer": 7}), json.dumps(row | {"answer": ""}),
                json.dumps(pair(number, words=300)), json.dumps(row | {"note": "x"}),
            ][kind]  # fmt: skip
    elif dataset == "texts":
        row = document(number % 50)
        if odd:
            return [
                '{"text":', json.dumps({"text": ""}), json.dumps({"text": None}), json.dumps({"text": "One."}),
                json.dumps(document(number, words=900)), json.dumps(row | {"text": 5}),
            ][kind]  # fmt: skip
    else:
        row = {"who": number % 9, "time": number, "amount": number * number}
        if odd:
            return [
                '{"who": 1', json.dumps(row | {"who": "guest"}), json.dumps(row | {"amount": "NA"}),
                json.dumps(row | {"amount": number / 2}), json.dumps(row | {"channel": "web"}),
                json.dumps({"who": number % 9, "time": number}),
            ][kind]  # fmt: skip
    return json.dumps(row)


@dataclass
class Inputs:
    """Everything that may decide a build: lines of files by dataset and name, changed options, datasets left out."""

    files: dict[str, dict[str, list[str]]]
    changes: dict[str, tuple[OptionChange, ...]] = field(default_factory=dict[str, "tuple[OptionChange, ...]"])
    left_out: set[str] = field(default_factory=set[str])

    def write(self, workspace: Workspace, written: Mapping[str, Any]) -> str:
        """Write the files and the recipe; return a digest of both."""
        digest = hashlib.sha256()
        for dataset, files in sorted(self.files.items()):
            folder = workspace.folder / "data" / dataset
            folder.mkdir(parents=True, exist_ok=True)
            for path in folder.iterdir():
                if path.name not in files:
                    path.unlink()
            for name, lines in sorted(files.items()):
                content = "".join(f"{line}\n" for line in lines).encode()
                digest.update(f"{dataset}/{name} {len(content)}\n".encode() + content)
                path = folder / name
                # A file that nobody touched keeps its time.
                if not path.exists() or path.read_bytes() != content:
                    path.write_bytes(content)
        values = copy.deepcopy(dict(written))
        for [change] in self.changes.values():
            for path, value in change.together.items():
                put(values, path, value)
        for [change] in self.changes.values():
            change.write(values)
        for dataset in self.left_out:
            del values["datasets"][dataset]
        recipe = yaml.safe_dump(values, sort_keys=False)
        workspace.config.write_text(recipe, encoding="utf-8")
        digest.update(recipe.encode())
        return digest.hexdigest()


# ── Outcomes ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Outcome:
    """What a build came to: exit status, message, and version and check results of each step that ran.

    `published` is the version of the ranks that trainers read, and `batches` a digest of what the Reader gives of it.
    """

    status: int
    message: str
    steps: Mapping[StageKey, tuple[str, Mapping[str, object]]]
    published: str = ""
    batches: str = ""

    def list_differences(self, other: "Outcome", aside: frozenset[StageKey] = frozenset()) -> list[str]:
        """Return the differences between this outcome and the one that it must be, leaving out some steps."""
        found: list[str] = []
        if not aside and (self.status, self.message) != (other.status, other.message):
            found.append(f"status {self.status} {self.message!r}, must be {other.status} {other.message!r}")
        for key in {**self.steps, **other.steps}:
            if key in aside:
                continue
            here, there = self.steps.get(key), other.steps.get(key)
            if here is None or there is None:
                found += [] if aside else [f"{'/'.join(key)}: {'left out' if here is None else 'built'}, must not be"]
                continue
            if here[0] != there[0]:
                found.append(f"{'/'.join(key)}: version {here[0][:12]}, must be {there[0][:12]}")
            checks = {**here[1], **there[1]}
            found += [
                f"{'/'.join(key)}: {check} {here[1].get(check)}, must be {there[1].get(check)}"
                for check in checks
                if here[1].get(check) != there[1].get(check)
            ]
        if not aside and (self.published, self.batches) != (other.published, other.batches):
            found.append(
                f"the Reader gives {self.batches} of {self.published[:12]}, must give {other.batches} of "
                f"{other.published[:12]}"
            )
        return found


def run_build(project: Project) -> Outcome:
    """Build a project as `rowmill build` does, and describe it without what the Reader gives."""
    done: dict[StageKey, tuple[str, Mapping[str, object]]] = {}
    blocked = False

    def finish(step: Step, report: runner.StepReport, results: list[CheckResult]) -> None:
        nonlocal blocked
        blocked = blocked or any(result.blocking for result in results)
        done[step.key] = (report.version, {result.check: describe(result) for result in results})

    status, message = ExitStatus.SUCCESS, ""
    try:
        runner.build(project, finish=finish)
        status = ExitStatus.GATE_CLOSED if blocked else status
    except (PipelineError, OSError) as error:
        status, message = choose_exit_status(error), str(error)
    return Outcome(int(status), message.replace(project.store.path(""), "STORE"), done)


def describe(result: CheckResult) -> object:
    """Return a check result as it must be on every store."""
    if result.check in HISTORICAL:
        return "historical"
    samples = tuple(_PLACE.sub("PLACE", sample) for sample in result.samples)
    return result.value, result.outcome, result.severity, result.blocking, result.what, samples, result.waiver


_PLACE = re.compile(r"data/\S+( (line|record) \d+)?")
"""A sample names the place that its row had when its output was made; an output of which nothing else changed is kept
when a file is renamed. The row's id is compared."""


def read_published(project: Project) -> tuple[str, str]:
    """Return the version that trainers read, and a digest of all that the Reader gives of it, or why it refuses."""
    path = f"{project.recipe.name}/gpu_partitions/current.json"
    current = project.store.read_sealed(path)
    if current is None:
        return "", ""
    digest, version = hashlib.sha256(), str(current["version"])
    try:
        reader = Reader(project.store.root, project.recipe.name, rank=0, world_size=1, as_torch=False, verify=True)
        for batch in reader:
            for name, value in sorted(batch.items()):
                array = np.asarray(value)
                content = repr(value).encode() if array.dtype == object else array.tobytes()
                digest.update(f"{name} {array.dtype} {array.shape} ".encode() + content)
    except PipelineError as error:
        return version, str(error).replace(project.store.path(""), "STORE")
    return version, digest.hexdigest()


# ── Killed builds ──────────────────────────────────────────────────────────────────────────────────

_WRITES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir")


def run_and_die(config: Path, store: str, command: str, last: int) -> None:
    """Run a command, and kill this process before its n-th change of a file or folder."""
    parts.SMALLEST_PART_BYTES = PART_BYTES
    numbers = itertools.count(1)

    def hear(event: str, args: tuple[object, ...]) -> None:
        opens = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if (opens or event in _WRITES) and next(numbers) == last:
            os.kill(os.getpid(), signal.SIGKILL)

    project = steps.open_project(config, store)
    sys.addaudithook(hear)
    if command == "gc":
        gc.collect_garbage(project, keep=1, dry_run=False)
    else:
        runner.build(project)


# ── A life ─────────────────────────────────────────────────────────────────────────────────────────


class Reference:
    """What builds on empty stores came to, by the digest of their inputs; opened tokenizers are kept for the next."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.known: dict[str, Outcome] = {}
        self.batches: dict[str, str] = {}
        """What the Reader gives, by the version of the ranks."""
        self.builds = 0
        self._tokenizers = runner.Store(str(folder / "tokenizers"))

    def find(self, digest: str, config: Path) -> Outcome:
        """Return the outcome of the first build of some inputs, which the recipe's project has now."""
        if digest not in self.known:
            root = self.folder / "empty"
            project = open_life(config, str(root))
            if isinstance(project, Outcome):
                self.known[digest] = project
                return project
            stored_tokenizers.copy_tokenizers(self._tokenizers, project.store)
            self.builds += 1
            made = run_build(project)
            published, batches = read_published(project)
            stored_tokenizers.copy_tokenizers(project.store, self._tokenizers)
            shutil.rmtree(root)
            if published:
                self.batches[published] = batches
            self.known[digest] = replace(made, published=published, batches=batches)
        return self.known[digest]


def open_life(config: Path, root: str) -> Project | Outcome:
    """Return the project on a storage root; of a recipe that is not valid, the outcome of its build."""
    try:
        return steps.open_project(config, root)
    except PipelineError as error:
        return Outcome(int(choose_exit_status(error)), str(error), {})


@dataclass
class Counts:
    """What a life had: steps by what and how, builds, kills that came to something, damage that was mended."""

    steps: Counter[str] = field(default_factory=Counter[str])
    builds: int = 0
    kills: int = 0
    mended: int = 0
    blocked: int = 0
    seconds: float = 0.0


class Life:
    """A project that is changed and built, step by step, in one store."""

    def __init__(self, folder: Path, seed: int, reference: Reference, ray: str = "") -> None:
        self.reference, self.counts, self.ray = reference, Counts(), ray
        self.datasets = KINDS[seed % len(KINDS)]
        self.workspace = write_project(folder)
        written = yaml.safe_load(self.workspace.config.read_text(encoding="utf-8"))
        self.written = written | {
            "datasets": {
                name: written["datasets"][name] | {"source": {"train_urls": [f"data/{name}/*.jsonl"]}}
                for name in self.datasets
            },
            "defaults": {"splits": {"validation": 0.1}},
            "gates": GATES,
        }
        # They can be set, and cost every build some time.
        self.written["datasets"].get("chats", {}).pop("filters", None)
        self.inputs = Inputs(
            {
                name: {
                    f"{letter}.jsonl": [make_line(name, 100 * at + i) for i in range(FIRST_ROWS)]
                    for at, letter in enumerate("ab")
                }
                for name in self.datasets
            }
        )
        self.root = str(folder / "life")
        self.may_be_damaged = False
        self.last_published = ("", "")
        self.inputs.write(self.workspace, self.written)

    def list_options(self) -> list[OptionChange]:
        """Return a change of every option that has one."""
        models = options_of(parsed(self.workspace, self.written))
        made = (change_option(self.workspace, self.written, path, model) for path, model in models)
        return [one for one in made if one is not None]

    # ── One step ──

    def live(self, step: LifeStep, *, compares: bool = True) -> list[str]:
        """Carry out a step; return how what was built differs from what an empty store gives, unless not asked for."""
        started = time.monotonic()
        how, what, *numbers = step
        self.counts.steps[what] += 1
        self.counts.steps[f"{how} build"] += 1
        problem = getattr(self, f"_{what}")(*numbers)
        if problem:
            return [problem]
        digest = self.inputs.write(self.workspace, self.written)
        expected = self.reference.find(digest, self.workspace.config) if compares else None
        project = open_life(self.workspace.config, self.root)
        made = project if isinstance(project, Outcome) else self._build(project, how)
        found: list[str] = []
        if expected is not None:
            found = self._compare(project, made, expected)
        elif not isinstance(project, Outcome):
            self.last_published = read_published(project)
        self.counts.seconds += time.monotonic() - started
        return found

    def _compare(self, project: Project | Outcome, made: Outcome, expected: Outcome) -> list[str]:
        self.counts.blocked += expected.status != 0
        found = self._list_differences(project, made, expected)
        if not found or not self.may_be_damaged or isinstance(project, Outcome):
            return found
        # Damage may strike at any later build; then it must be found, and the build after it be a clean one.
        self._release_all(project)
        checked = verify.verify_recipe(project, deep=True)
        if not any(one.damage for one in checked) and made.status != ExitStatus.DAMAGED:
            return [*found, "and verify --deep finds no damage"]
        verify.discard_damage(project, checked)
        self.counts.mended += 1
        return self._list_differences(project, self._build(project, "plain"), expected)

    def _list_differences(self, project: Project | Outcome, made: Outcome, expected: Outcome) -> list[str]:
        if isinstance(project, Outcome):
            return made.list_differences(expected)
        published, batches = read_published(project)
        held = {
            step.key: hold for step in plan_steps(project) if (hold := gate.find_held_version(project.store, step.key))
        }
        if held:
            # What is held is what it was, and what does not read it is what it must be.
            aside = set(held)
            for step in plan_steps(project):
                # What waits for the checks of an output follows its history, too.
                aside |= {step.key} if aside & {*step.inputs, *step.gates} else set()
            found = made.list_differences(expected, frozenset(aside))
            found += [
                f"{'/'.join(key)}: version {made.steps[key][0][:12]}, is held at {hold.version[:12]}"
                for key, hold in held.items()
                if key in made.steps and made.steps[key][0] != hold.version
            ]
            # What a held version needs may have gone, or be of other options; then the error names the hold.
            may_end_so = made.status in (ExitStatus.SUCCESS, ExitStatus.GATE_CLOSED, expected.status)
            if not may_end_so and "is held at version" not in made.message:
                found.append(f"status {made.status} while a version is held: {made.message}")
            if self.reference.batches.get(published, batches) != batches:
                found.append(f"the Reader gives {batches} of {published[:12]}, did not when it was published")
            self.last_published = (published, batches)
            return found
        if not expected.published:
            # A build that is blocked leaves what was published.
            if (published, batches) != self.last_published:
                return [f"{published[:12]} is published by a build that is blocked, was {self.last_published[0][:12]}"]
            return made.list_differences(expected)
        self.last_published = (published, batches)
        return replace(made, published=published, batches=batches).list_differences(expected)

    def _build(self, project: Project, how: str) -> Outcome:
        """Build in one of several ways, and then in this process."""
        self.counts.builds += 1
        kind, _, number = how.partition(":")
        match kind:
            case "kill":
                self.counts.builds += 1
                self.counts.kills += self._run_apart("build", int(number)) == -signal.SIGKILL
            case "two":
                self.counts.builds += 1
                both = [self._start_apart("build", last) for last in (int(number), 0)]
                for process in both:
                    process.join(PATIENCE_S)
                self.counts.kills += both[0].exitcode == -signal.SIGKILL
            case "share":
                self._make_share(project, int(number))
            case "workers" | "ray":
                execution = project.recipe.execution.model_copy(update={"workers": int(number or 1)})
                if kind == "ray" and self.ray:
                    executor = RayExecutor(kind="ray", address=self.ray)
                    execution = execution.model_copy(update={"executor": executor})
                project = replace(project, recipe=project.recipe.model_copy(update={"execution": execution}))
                before, local.INLINE_BELOW_BYTES = local.INLINE_BELOW_BYTES, 0
                try:
                    return run_build(project)
                finally:
                    local.INLINE_BELOW_BYTES = before
            case _:
                pass
        return run_build(project)

    def _make_share(self, project: Project, number: int) -> None:
        # What is wrong, the build says, too.
        try:
            share.make_share(project, share.Share(1 + number % 2, 2))
        except PipelineError:
            return

    def _start_apart(self, command: str, last: int) -> Any:
        process = PROCESSES.Process(target=run_and_die, args=(self.workspace.config, self.root, command, last))
        process.start()
        return process

    def _run_apart(self, command: str, last: int) -> int | None:
        process = self._start_apart(command, last)
        process.join(PATIENCE_S)
        if process.exitcode is None:
            process.kill()
        return process.exitcode

    # ── Changes of rows and files ──

    def _choose_file(self, dataset: int, file: int) -> tuple[str, str] | None:
        name = self.datasets[dataset % len(self.datasets)]
        files = sorted(self.inputs.files[name])
        return (name, files[file % len(files)]) if files else None

    def _nothing(self) -> None:
        pass

    def _append(self, dataset: int, file: int, first: int, count: int) -> None:
        if (chosen := self._choose_file(dataset, file)) is not None:
            self.inputs.files[chosen[0]][chosen[1]] += [make_line(chosen[0], first + i) for i in range(count)]

    def _edit(self, dataset: int, file: int, row: int, number: int) -> None:
        if (chosen := self._choose_file(dataset, file)) is not None and (
            rows := self.inputs.files[chosen[0]][chosen[1]]
        ):
            rows[row % len(rows)] = make_line(chosen[0], number)

    def _remove(self, dataset: int, file: int, row: int, count: int) -> None:
        if (chosen := self._choose_file(dataset, file)) is not None and (
            rows := self.inputs.files[chosen[0]][chosen[1]]
        ):
            at = row % len(rows)
            del rows[at : at + count]

    def _add_file(self, dataset: int, number: int, first: int, count: int) -> None:
        name = self.datasets[dataset % len(self.datasets)]
        self.inputs.files[name][f"f{number % 7}.jsonl"] = [make_line(name, first + i) for i in range(count)]

    def _remove_file(self, dataset: int, file: int) -> None:
        if (chosen := self._choose_file(dataset, file)) is not None and len(self.inputs.files[chosen[0]]) > 1:
            del self.inputs.files[chosen[0]][chosen[1]]

    def _rename_file(self, dataset: int, file: int, number: int) -> None:
        chosen, name = self._choose_file(dataset, file), f"r{number % 7}.jsonl"
        if chosen is not None and name not in self.inputs.files[chosen[0]]:
            self.inputs.files[chosen[0]][name] = self.inputs.files[chosen[0]].pop(chosen[1])

    # ── Changes of the recipe ──

    def _set(self, number: int) -> None:
        options = self.options
        change = options[number % len(options)]
        self.inputs.changes[change.name] = (change,)

    def _set_back(self, number: int) -> None:
        names = list(self.inputs.changes)
        if names:
            del self.inputs.changes[names[number % len(names)]]

    def _leave_out(self, dataset: int) -> None:
        if len(self.inputs.left_out) < len(self.datasets) - 1:
            self.inputs.left_out.add(self.datasets[dataset % len(self.datasets)])

    def _take_in(self) -> None:
        self.inputs.left_out.clear()

    # ── Changes of the store ──

    def _flip(self, number: int, place: int) -> None:
        files = [path for path in sorted(Path(self.root).rglob("*")) if path.is_file() and path.stat().st_size]
        if files:
            path = files[number % len(files)]
            content = bytearray(path.read_bytes())
            content[place % len(content)] ^= 1 << place % 8
            path.write_bytes(content)
            self.may_be_damaged = True

    def _gc(self, keep: int, last: int) -> str:
        project = open_life(self.workspace.config, self.root)
        if isinstance(project, Outcome) or not os.path.isdir(self.root):
            return ""
        if last:
            self.counts.kills += self._run_apart("gc", last) == -signal.SIGKILL
        try:
            gc.collect_garbage(project, keep=keep, dry_run=False)
        except PipelineError as error:
            return "" if self.may_be_damaged else f"gc: {error}"
        return ""

    def _use(self, stage: int, version: int) -> str:
        """Hold a stage at a kept version, as `rowmill use` does."""
        project = open_life(self.workspace.config, self.root)
        if isinstance(project, Outcome):
            return ""
        stages = [step for step in plan_steps(project) if not step.on_demand]
        step = stages[stage % len(stages)]
        kept = manifest.list_versions(project.store, step.key)
        if not kept:
            return ""
        chosen = kept[version % len(kept)]
        try:
            report = runner.run_step(project, step, {}, version=chosen.version)
        except PipelineError as error:
            # A version whose ancestors fail a check under the recipe's gates may not be used.
            is_gate = choose_exit_status(error) == ExitStatus.GATE_CLOSED
            return "" if is_gate or self.may_be_damaged else f"use {'/'.join(step.key)} {chosen.version[:12]}: {error}"
        gate.hold_version(project.store, report.manifest)
        return ""

    def _release(self) -> None:
        project = open_life(self.workspace.config, self.root)
        if not isinstance(project, Outcome):
            self._release_all(project)

    def _release_all(self, project: Project) -> None:
        # Of datasets that are left out, too.
        for path in Path(self.root).rglob("held.json"):
            path.unlink()

    @property
    def options(self) -> list[OptionChange]:
        """The changes of options that steps name by number: the same list whatever is set now."""
        key = "/".join(self.datasets)
        if key not in _OPTIONS:
            _OPTIONS[key] = self.list_options()
        return _OPTIONS[key]


_OPTIONS: dict[str, list[OptionChange]] = {}


# ── Drawing a life, and shortening it ──────────────────────────────────────────────────────────────


def draw_steps(seed: int, count: int, *, has_ray: bool) -> Iterator[LifeStep]:
    """Yield the steps of a random life: options are set in a random order, each as often as any other."""
    chance = random.Random(f"life {seed}")
    number = partial(chance.randrange, 1 << 16)
    options = itertools.cycle(chance.sample(range(1 << 10), 1 << 10))
    draws: dict[str, Callable[[], list[int]]] = {
        "append": lambda: [number(), number(), number(), 1 + number() % 6],
        "edit": lambda: [number(), number(), number(), number()],
        "remove": lambda: [number(), number(), number(), 1 + number() % 3],
        "add_file": lambda: [number(), number(), number(), number() % 12],
        "remove_file": lambda: [number(), number()],
        "rename_file": lambda: [number(), number(), number()],
        "set": lambda: [next(options)],
        "set_back": lambda: [number()],
        "leave_out": lambda: [number()],
        "take_in": list,
        "nothing": list,
        "flip": lambda: [number(), number()],
        "gc": lambda: [1 + number() % 3, number() % 2 and 1 + number() % 40],
        "use": lambda: [number(), number()],
        "release": list,
    }
    undone = Counter[str]()
    ways: dict[Callable[[], str], int] = {
        lambda: "plain": 64,
        # Most changes of files are in the first hundreds.
        lambda: f"kill:{int(2 ** chance.uniform(0, 9.3))}": 18,
        lambda: f"two:{int(2 ** chance.uniform(0, 9.3))}": 2,
        lambda: f"share:{number() % 2}": 5,
        lambda: "workers:2": 4,
        lambda: "ray": 2 if has_ray else 0,
    }
    for _ in range(count):
        [draw_way] = chance.choices(list(ways), list(ways.values()))
        weights = {
            "append": 14, "edit": 10, "remove": 8, "add_file": 5, "remove_file": 4, "rename_file": 4, "nothing": 3,
            # What was changed is changed back soon, so that no life is one of two dozen odd options at once.
            "set": 8 if undone["set"] else 20, "set_back": 25 if undone["set"] else 0,
            "leave_out": 0 if undone["leave_out"] else 2, "take_in": 10 if undone["leave_out"] else 0,
            "gc": 4, "use": 4, "release": 20 if undone["use"] else 0, "flip": 0 if undone["use"] else 6,
        }  # fmt: skip
        [what] = chance.choices(list(weights), list(weights.values()))
        undone[what] += 1
        for change, back in (("leave_out", "take_in"), ("use", "release")):
            undone[change] = 0 if what == back else undone[change]
        undone["set"] -= what == "set_back"
        yield [draw_way(), what, *draws[what]()]


@dataclass(frozen=True)
class Difference:
    """The steps of a life after which a build is not that of an empty store, and how it differs."""

    seed: int
    steps: Sequence[LifeStep]
    found: Sequence[str]

    def __str__(self) -> str:
        """Return the seed, the steps one a line, and both sides."""
        lines = [f"seed {self.seed}, {len(self.steps)} steps:", *(f"  {json.dumps(step)}," for step in self.steps)]
        return "\n".join([*lines, *self.found])


def replay(folder: Path, seed: int, life_steps: Sequence[LifeStep], reference: Reference, ray: str = "") -> list[str]:
    """Live some steps in a new folder; return how the build of the last one differs from that of an empty store."""
    if folder.exists():
        shutil.rmtree(folder)
    life = Life(folder, seed, reference, ray)
    for step in life_steps[:-1]:
        # A step that fails before its build is not what is looked for.
        life.live(step, compares=life.may_be_damaged or step[1] == "flip")
    return life.live(life_steps[-1])


def shorten(
    folder: Path, seed: int, life_steps: Sequence[LifeStep], reference: Reference, *, ray: str = "", limit_s: float
) -> Difference:
    """Leave out steps, first half of them at once, then ever fewer, as long as the last build still differs."""
    deadline = time.monotonic() + limit_s
    kept, found = list(life_steps), replay(folder, seed, life_steps, reference, ray)
    size = len(kept) // 2
    while size and found:
        at = 0
        while at < len(kept) - 1 and time.monotonic() < deadline:
            shorter = [*kept[:at], *kept[min(at + size, len(kept) - 1) :]]
            if differs := replay(folder, seed, shorter, reference, ray):
                kept, found = shorter, differs
            else:
                at += size
        size //= 2
    # Those that are built in peace are easier to read.
    for at, step in enumerate(kept):
        if found and step[0] != "plain" and time.monotonic() < deadline:
            simpler = [*kept[:at], ["plain", *step[1:]], *kept[at + 1 :]]
            if differs := replay(folder, seed, simpler, reference, ray):
                kept, found = simpler, differs
    return Difference(seed, kept, found)
