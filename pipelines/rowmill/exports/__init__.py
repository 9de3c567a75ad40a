"""Export the sequences of a build as files in a trainer's own format: one line below per kind."""

from typing import Annotated, TypeAlias

from pydantic import Field

from rowmill.exports.astrai import AstrAIBin, AstrAIH5
from rowmill.exports.base import Export, Exported, open_export
from rowmill.exports.hf import Axolotl, HuggingFaceExport, Native, SkyRL, Verl
from rowmill.exports.llama_factory import LLaMAFactory
from rowmill.exports.mds import MDS, LLMFoundry
from rowmill.exports.megatron import Megatron, MegatronBridge
from rowmill.exports.olmo_core import OLMoCore
from rowmill.exports.rl_prompts import RLPrompts
from rowmill.exports.tinker import Tinker, read_datums
from rowmill.exports.trl_preference import TRLPreference

__all__ = ["AnyExport", "Export", "Exported", "open_export", "read_datums"]

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
    | OLMoCore  # raw arrays, cut at EOS
    | TRLPreference  # pairs and marked answers
    | RLPrompts  # messages and ground truths
    | SkyRL  # ids and a mask
    | LLaMAFactory  # a DatasetDict of any objective but prompts
    | Megatron  # documents, end to end
    | Verl,  # ids and a mask, read by a class of ours
    Field(discriminator="kind"),
]
