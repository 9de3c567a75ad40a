"""The engine of rowmill: raw datasets in, packed token shards and per-GPU partitions out.

Each name is imported from its module when it is first used, so that `import rowmill` takes milliseconds.
Names outside `__all__` may change without notice. The engine never imports Dagster; `dagster_rowmill` shows what it
did.

    source file ─ sources ─► records
    record ─ kinds ─► canonical row, with a split ─► rows.arrow
    row ─ conversation.renderer ─► text ─ conversation.loss_mask ─► trained characters ─ tokenization ─► example
    table ─ kinds.tables ─► rows ─► examples of several records
    examples' lengths ─ packing ─► plan ─ shards ─► sequences ─ packing ─► order of training ─► shards per rank
    shards per rank ─ reader ─► batches ─► trainer ─► generated text ─ kinds.tables.parsing ─► records

Layers, each importing only those below it (held by the contract in `pyproject.toml`):

    cli          commands
    viewer       pages over a store
    reports      console tables, the HTML report, plots
    inspection   questions about a build
    build        the graph of stages, running, gates, reuse
    stages       one module or package for each Dagster asset
    recipe       all options of a build, validated once
    checks       what an output must hold, and how it is judged
    formats      the names under which a class of the user's imports what it needs
    kinds        what only one kind of data needs; kinds/tables is a folder of its own
    exports · parts · stats
    alerts · conversation · executors · packing · reader · shards · similarity · sources · tokenization · tracking
    schema       rows, examples, ledger, manifest: the nouns and their Arrow schemas
    core         config, errors, storage, text

Each public name with an example: `docs/api.md`. One real row on its way, with its bytes: `docs/walk.md`.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if os.name == "nt":
    raise ImportError("rowmill: Windows has none of its file locks; Linux and macOS have; run it in WSL 2")

if TYPE_CHECKING:
    from rowmill.build.in_memory import Datum, canonicalize_rows, make_datum, make_datums, row_to_datum, sft_tokenize
    from rowmill.build.runner import build as build_recipe
    from rowmill.build.steps import Project, open_project
    from rowmill.conversation.template_registry import get_chat_template, register_chat_template
    from rowmill.core.errors import (
        BusyError,
        ConfigError,
        ContextOverflowError,
        DamagedFileError,
        GateError,
        GenerationError,
        IntegrityError,
        MissingPackageError,
        PipelineError,
        SchemaError,
        SourceError,
        UnreachableError,
    )
    from rowmill.core.json import Json
    from rowmill.exports.base import Exported, open_export
    from rowmill.exports.tinker import read_datums
    from rowmill.inspection.generated_output import ParsedFiles, parse_files
    from rowmill.kinds.base import BuildContext
    from rowmill.kinds.catalog import register_format
    from rowmill.kinds.python import RowFormat
    from rowmill.reader import (
        Batch,
        ExampleLosses,
        PackedSequence,
        Reader,
        SourceLosses,
        SourceNames,
        TrainingStep,
        View,
        loss_by_source,
    )
    from rowmill.reader.layouts import tree_mask
    from rowmill.schema.examples import ExampleTokens
    from rowmill.schema.rows import Rejected, Row

    __version__: str

__all__ = [
    "Batch",
    "BuildContext",
    "BusyError",
    "ConfigError",
    "ContextOverflowError",
    "DamagedFileError",
    "Datum",
    "ExampleLosses",
    "ExampleTokens",
    "Exported",
    "GateError",
    "GenerationError",
    "IntegrityError",
    "Json",
    "MissingPackageError",
    "PackedSequence",
    "ParsedFiles",
    "PipelineError",
    "Project",
    "Reader",
    "Rejected",
    "Row",
    "RowFormat",
    "SchemaError",
    "SourceError",
    "SourceLosses",
    "SourceNames",
    "TrainingStep",
    "UnreachableError",
    "View",
    "build_recipe",
    "canonicalize_rows",
    "get_chat_template",
    "loss_by_source",
    "make_datum",
    "make_datums",
    "open_export",
    "open_project",
    "parse_files",
    "read_datums",
    "register_chat_template",
    "register_format",
    "row_to_datum",
    "sft_tokenize",
    "tree_mask",
]

_MODULES = {
    "rowmill.build.in_memory": ("Datum canonicalize_rows make_datum make_datums row_to_datum sft_tokenize"),
    "rowmill.build.runner": "build_recipe=build",
    "rowmill.build.steps": "Project open_project",
    "rowmill.conversation.template_registry": "get_chat_template register_chat_template",
    "rowmill.core.errors": (
        "BusyError ConfigError ContextOverflowError DamagedFileError GateError GenerationError IntegrityError "
        "MissingPackageError PipelineError SchemaError SourceError UnreachableError"
    ),
    "rowmill.core.json": "Json",
    "rowmill.exports.base": "Exported open_export",
    "rowmill.exports.tinker": "read_datums",
    "rowmill.kinds.base": "BuildContext",
    "rowmill.kinds.catalog": "register_format",
    "rowmill.kinds.python": "RowFormat",
    "rowmill.inspection.generated_output": "ParsedFiles parse_files",
    "rowmill.reader": "Batch ExampleLosses PackedSequence Reader SourceLosses SourceNames TrainingStep View "
    "loss_by_source",
    "rowmill.reader.layouts": "tree_mask",
    "rowmill.schema.examples": "ExampleTokens",
    "rowmill.schema.rows": "Rejected Row",
}
"""The module of each public name; a test holds it equal to the imports above, which type checkers and editors read."""

_HOMES = {
    name.partition("=")[0]: (module, name.rpartition("=")[2])
    for module, names in _MODULES.items()
    for name in names.split()
}


if not TYPE_CHECKING:  # a type checker that saw it would take every misspelt name for a public one

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first asked for."""
        if name == "__version__":
            from importlib.metadata import version

            return version("rowmill")
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, own_name = _HOMES[name]
        try:
            value = getattr(import_module(module), own_name)
        except (AttributeError, ImportError) as error:
            from rowmill.core.installation import explain_failure

            raise explain_failure(f"rowmill.{name}", error) or error from error
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted({*globals(), *__all__})
