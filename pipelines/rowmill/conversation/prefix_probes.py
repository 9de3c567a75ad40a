"""Learn the template text before a turn's own text: the header that the prompt has, and the rest, which trains.

What belongs here: the prefixes of turns, from renders of probes. What does not: the renders (`rendered_probes.py`),
inner text and ends (`frame_probes.py`).
"""

from collections.abc import Sequence

from rowmill.conversation.rendered_probes import ContentRun, RenderedProbes, RenderedShape
from rowmill.conversation.template_frames import (
    TemplateFrames,
    TurnPrefix,
    contains_prompt,
    cut_at_last_token,
    find_common_start,
    replace_call_ids,
    split_turn_prefix,
)
from rowmill.schema.rows import Message


class PrefixLearner:
    """Learns the prefixes of one template's turns."""

    def __init__(self, probes: RenderedProbes) -> None:
        self._probes = probes
        self._prefixes: set[TurnPrefix] = set()
        self._gaps_after_users: set[str] = set()

    def learn(self, seen: Sequence[RenderedShape]) -> set[TurnPrefix]:
        """Learn prefixes: first from turns that begin with the exact generation prompt, then from the others."""
        runs = [(one, run) for one in seen for run in one.runs]
        self._gaps_after_users = {
            one.text[run.start : run.pieces[0].start]
            for one, run in runs
            if run.message and one.messages[run.message - 1]["role"] == "user"
        }
        exact = [(run, prefix) for one, run in runs if (prefix := self._find_exact_prefix(one, run)) is not None]
        if not any(self._probes.get_prompt_after(one, "user") for one in seen[:1]):
            exact = self._move_constant_to_header(exact)
        self._prefixes |= {prefix for _, prefix in exact}
        self._prefixes |= {prefix for one, run in runs if (prefix := self._split_prefix(one, run)) is not None}
        for one, run in runs:
            gap = replace_call_ids(one.text[run.start : run.pieces[0].start], one.ids[run.message])
            known = TemplateFrames(tuple(self._prefixes))
            if known.match_prefix(one.text, run.start, run.pieces[0].start, one.ids[run.message]) is None:
                self._prefixes.add(self._infer_prefix(one, run, gap))
        return self._prefixes

    def _move_constant_to_header(
        self, exact: "list[tuple[ContentRun, TurnPrefix]]"
    ) -> "list[tuple[ContentRun, TurnPrefix]]":
        """Move the common prefix of all answers into the header, for templates without generation prompt."""
        rests = [prefix.rest for run, prefix in exact if run.pieces[0].kind == "assistant"]
        constant = rests[0] if rests else ""
        for rest in rests[1:]:
            constant = find_common_start(constant, rest, self._probes.tokens)
        found: list[tuple[ContentRun, TurnPrefix]] = []
        for run, prefix in exact:
            has = bool(constant) and prefix.rest.startswith(constant)
            moved = TurnPrefix(prefix.header + constant, prefix.rest[len(constant) :]) if has else prefix
            found.append((run, moved))
        return found

    def _find_exact_prefix(self, rendered_shape: RenderedShape, run: ContentRun) -> TurnPrefix | None:
        """Return the prefix of a turn that begins with the exact generation prompt, else None."""
        prompted = self._probes.render_with_prompt(rendered_shape, run.message)
        first = run.pieces[0].start
        if prompted is None or not (run.start <= len(prompted) <= first and rendered_shape.text.startswith(prompted)):
            return None
        rest = replace_call_ids(rendered_shape.text[len(prompted) : first], rendered_shape.ids[run.message])
        prompt = self._probes.get_prompt(rendered_shape, run.message)
        follows_model = run.message > 0 and rendered_shape.messages[run.message - 1]["role"] in self._probes.roles
        if follows_model and self._probes.list_prompts(rendered_shape, run.message):
            return None
        header = prompt or cut_at_last_token(prompted[run.start :], self._probes.tokens)
        if contains_prompt(rest, self._probes.list_prompts(rendered_shape, run.message), self._probes.tokens) and (
            prompt or any(gap.endswith(header + rest) for gap in self._gaps_after_users)
        ):
            # The rest contains a prompt that the template prints elsewhere, so the model does not write all of it.
            return None
        return TurnPrefix(header, rest) if prompted.endswith(header) else None

    def _split_prefix(self, rendered_shape: RenderedShape, run: ContentRun) -> TurnPrefix | None:
        gap = rendered_shape.text[run.start : run.pieces[0].start]
        prefix = split_turn_prefix(gap, self._probes.list_prompts(rendered_shape, run.message), self._probes.tokens)
        return (
            None
            if prefix is None
            else TurnPrefix(prefix.header, replace_call_ids(prefix.rest, rendered_shape.ids[run.message]))
        )

    def _infer_prefix(self, rendered_shape: RenderedShape, run: ContentRun, gap: str) -> TurnPrefix:
        """Return the prefix of a turn that contains no part of a prompt.

        Before an answer all of it counts as header. Before a call the header is the part that an answer at the same
        position also has; the remainder is the call's frame.
        """
        if run.pieces[0].kind == "tool_call":
            before = (
                self._probes.render_text(rendered_shape.messages[: run.message], rendered_shape.tools)
                if run.message
                else ""
            )
            answer: Message = {"role": rendered_shape.messages[run.message]["role"], "content": "qzanswer instead"}
            answered = self._probes.render_text([*rendered_shape.messages[: run.message], answer], rendered_shape.tools)
            added = gap
            if before is not None and rendered_shape.text.startswith(before) and len(before) >= run.start:
                added = rendered_shape.text[len(before) : run.pieces[0].start]
            if answered is not None and before is not None and answered.startswith(before):
                shared = find_common_start(added, answered[len(before) :].partition("qzanswer")[0], self._probes.tokens)
                before_others = (
                    self._probes.list_gaps_after(rendered_shape.messages[run.message - 1]["role"])
                    if run.message
                    else set[str]()
                )
                # Text printed after that message whatever follows closes it, and is not part of the call's frame.
                closing = max(
                    (len(find_common_start(added, gap, self._probes.tokens)) for gap in before_others), default=0
                )
                rest = replace_call_ids(added[max(len(shared), closing) :], rendered_shape.ids[run.message])
                if rest.strip():
                    header = gap[: len(gap) - len(rest)]
                    return TurnPrefix(cut_at_last_token(header, self._probes.tokens), rest)
        return TurnPrefix(cut_at_last_token(gap, self._probes.tokens), "")
