"""Sequences and files: the native shards, and every trainer's form of them.

| module | what |
|---|---|
| `native` | packed sequences as Parquet, readable by HF `datasets` and TRL with no glue |
| `gather` | rows of many files in a planned order, with flat memory |
| `sequences` | packed sequences as flat arrays, and what must be true of them |
| `letters` | the four ways of storing which tokens are targets |
| `export`, `cards` | what all exports have in common; identity card, manifest, opening |

A kind of export is one file and one line below.
"""

from typing import Annotated, TypeAlias

from pydantic import Field

from rowmill.exports.astrai_bin import AstrAIBin
from rowmill.exports.astrai_h5 import AstrAIH5
from rowmill.exports.axolotl import Axolotl
from rowmill.exports.base import DatasetSummary, Export, RecipeSummary
from rowmill.exports.export_manifest import Exported, open_export
from rowmill.exports.hf import HuggingFaceExport
from rowmill.exports.llm_foundry import LLMFoundry
from rowmill.exports.mds import MDS
from rowmill.exports.megatron_bridge import MegatronBridge
from rowmill.exports.native import Native
from rowmill.exports.olmo_core import OLMoCore
from rowmill.exports.tinker import Tinker, read_datums

__all__ = ["AnyExport", "DatasetSummary", "Export", "Exported", "RecipeSummary", "open_export", "read_datums"]

AnyExport: TypeAlias = Annotated[
    Native  # our own shards, in the order of training
    | HuggingFaceExport  # datasets, TRL, Trainer
    | Axolotl  # packs by itself
    | AstrAIBin  # a stream of tokens per domain, raw
    | AstrAIH5  # the same in HDF5
    | Tinker  # a Datum per segment
    | MegatronBridge  # packed, with starts of segments
    | MDS  # mosaicml-streaming
    | LLMFoundry  # the same shards with turns
    | OLMoCore,  # raw arrays, cut at EOS
    Field(discriminator="kind"),
]
