"""How often a build opens a chat template, and what workers find open when they are forked."""

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import CodeType

import pytest

from rowmill.build import preflight, prepare
from rowmill.build.steps import plan_steps
from rowmill.checks import mask_judge
from rowmill.conversation import frame_learning
from rowmill.conversation.options import RendererSpec
from rowmill.conversation.renderer import Renderer
from rowmill.conversation.template_frames import TemplateFrames
from rowmill.core.json import Json
from rowmill.executors import local
from rowmill.stages.tokenized_examples import conversation_examples, text_parts
from tests.support.recipes import CHAT, TO_EXAMPLES, Workspace, chat, lines


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count openings in a process that has no template open yet."""
    found: Counter[str] = Counter()
    learn, compile_anew = frame_learning.learn_frames, mask_judge.compile_template.__wrapped__

    def open_renderer(spec: RendererSpec) -> Renderer:
        found["renderer"] += 1
        return Renderer(spec)

    def compile_judge(text: str) -> CodeType:
        found["judge"] += 1
        return compile_anew(text)

    def learn_frames(renderer: Renderer, roles: frozenset[str], kwargs: Mapping[str, Json]) -> TemplateFrames:
        found["frames"] += 1
        return learn(renderer, roles, kwargs)

    for module, name in (
        (conversation_examples, "_RENDERERS"),
        (conversation_examples, "_SHARED_TEMPLATES"),
        (text_parts, "_EXAMPLE_BUILDERS"),
        (frame_learning, "_FRAME_CACHE"),
    ):
        monkeypatch.setattr(module, name, {})
    monkeypatch.setattr(local, "_OPENED_IN_WORKERS", [])
    monkeypatch.setattr(conversation_examples, "Renderer", open_renderer)
    monkeypatch.setattr(frame_learning, "learn_frames", learn_frames)
    monkeypatch.setattr(mask_judge, "compile_template", lru_cache(compile_judge))
    return found


def make_workspace(folder: Path) -> Workspace:
    return Workspace(folder).one("rows.jsonl", lines(chat(i) for i in range(40)), CHAT)


@pytest.mark.slow
def test_a_fork_after_the_requirements_has_the_template_that_trial_and_build_use(
    tmp_path: Path, opened: Counter[str]
) -> None:
    project = make_workspace(tmp_path).project
    steps = plan_steps(project)

    assert prepare.find_unmet_requirements(project, steps) == {}
    assert not opened
    local.open_here()
    assert opened == {"renderer": 1, "frames": 1, "judge": 1}
    preflight.require_no_mistakes(project)
    make_workspace(tmp_path).build(only=TO_EXAMPLES)

    assert opened == {"renderer": 1, "frames": 1, "judge": 1}


def test_datasets_with_the_same_template_share_its_renderer_and_others_have_their_own() -> None:
    spec = RendererSpec("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    same = RendererSpec(spec.text, {}, {})
    other = RendererSpec(spec.text, template_kwargs={"n": 1})
    equal_to_other = RendererSpec(spec.text, template_kwargs={"n": 1.0})

    first = conversation_examples.open_renderer(spec)

    assert conversation_examples.open_renderer(same) is first
    found = [first, *map(conversation_examples.open_renderer, (other, equal_to_other))]
    assert len(set(map(id, found))) == len(found)


def test_a_process_without_the_template_opens_nothing_by_its_name(opened: Counter[str]) -> None:
    conversation_examples.open_shared_template("unknown")

    assert not opened
