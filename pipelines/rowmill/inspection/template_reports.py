"""What a recipe's chat templates do, and whether their masks hold: the report and the proof of each dataset."""

from collections.abc import Iterator
from dataclasses import dataclass

from rowmill.build.steps import Project
from rowmill.conversation.options import MaskRules
from rowmill.conversation.renderer import Renderer
from rowmill.conversation.template_contract import TemplateBehavior, find_mismatched_prompts, list_template_warnings
from rowmill.core.storage import digest_json
from rowmill.inspection.inspect import open_memory_context
from rowmill.inspection.template_proof import TemplateProof, prove_template
from rowmill.stages import tokenizer_files
from rowmill.stages.tokenized_examples import stage as tokenized_examples

# ── Templates ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """Behaviour of one dataset's chat template on probes, and warnings for its user."""

    dataset: str
    template_digest: str
    contract: TemplateBehavior
    warnings: tuple[str, ...]


def report_templates(project: Project) -> list[TemplateReport]:
    """Probe the chat template of each dataset; datasets without one are skipped."""
    found: list[TemplateReport] = []
    for name, dataset in project.recipe.datasets.items():
        with open_memory_context(project, name) as context:
            loaded, _ = tokenizer_files.open_recipe_tokenizer(context)
            spec = tokenized_examples.resolve_renderer_spec(context, loaded)
            if spec is not None:
                observed = Renderer(spec).contract
                warnings = (
                    *list_template_warnings(observed, finish=dataset.loss.finish),
                    *_describe_prompt_mismatches(observed),
                )
                found.append(TemplateReport(name, digest_json(spec.text), observed, warnings))
    return found


def prove_templates(project: Project) -> Iterator[tuple[str, TemplateProof]]:
    """Prove the masks of each dataset's chat template on probes of all shapes; datasets without one are skipped."""
    for name, dataset in project.recipe.datasets.items():
        with open_memory_context(project, name) as context:
            loaded, _ = tokenizer_files.open_recipe_tokenizer(context)
            spec = tokenized_examples.resolve_renderer_spec(context, loaded)
            if spec is not None:
                on_dropped = {str(kind): policy for kind, policy in dataset.template.on_dropped.items()}
                rules = MaskRules(spans=dataset.template.spans, on_dropped=on_dropped)
                yield name, prove_template(Renderer(spec), rules)


def _describe_prompt_mismatches(observed: TemplateBehavior) -> Iterator[str]:
    for role in find_mismatched_prompts(observed):
        yield f"after {role}, inference prompts with {observed.prompts[role]!r}, but training text continues otherwise"
