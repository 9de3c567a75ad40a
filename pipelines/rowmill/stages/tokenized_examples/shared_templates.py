"""Chat templates, opened once per process; those of a build, before its workers are forked.

Compiling a template, comparing its engines and learning its frames takes 0.6 s. A forked worker has all of it from the
calling process, which needs it for the first records; a worker of the fork server opens it itself.
"""

from rowmill.conversation.frame_learning import learn_frames_once
from rowmill.conversation.options import RendererSpec
from rowmill.conversation.renderer import Renderer
from rowmill.core.storage import digest_json
from rowmill.executors import open_in_workers

_MAX_RENDERERS = 8
"""Templates that a process keeps open, as many as it keeps example builders."""

_RENDERERS: dict[str, Renderer] = {}

_SHARED_TEMPLATES: dict[str, tuple[RendererSpec, frozenset[str]]] = {}
"""Templates that are opened before a fork, with the model's roles. The names of calls go to a fork server through its
environment, where a template's text is too long; so there the name means nothing and nothing is opened."""


def open_renderer(spec: RendererSpec) -> Renderer:
    """Return this process's renderer of a template; the latest are kept."""
    key = repr(spec)
    if key not in _RENDERERS:
        while len(_RENDERERS) >= _MAX_RENDERERS:
            del _RENDERERS[next(iter(_RENDERERS))]
        _RENDERERS[key] = Renderer(spec)
    return _RENDERERS[key]


def share_template(spec: RendererSpec, roles: frozenset[str]) -> None:
    """Have a template opened before workers are forked; `roles` are the model's roles."""
    name = digest_json(repr(spec), sorted(roles))
    if name not in _SHARED_TEMPLATES and len(_SHARED_TEMPLATES) < _MAX_RENDERERS:
        _SHARED_TEMPLATES[name] = spec, roles
        open_in_workers(open_shared_template, name)


def open_shared_template(name: str) -> None:
    """Open a template of `share_template`, observe its behavior and learn the frames of rows without values."""
    if name in _SHARED_TEMPLATES:
        spec, roles = _SHARED_TEMPLATES[name]
        renderer = open_renderer(spec)
        renderer.open_proofs()
        learn_frames_once(renderer, roles, {})
