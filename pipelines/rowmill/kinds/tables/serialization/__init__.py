r"""Records as lines of text and back: the form that a model is trained on and generates.

Writing a record is in `writing.py`, checking and typing a decoded JSON object in `reading.py`, both compiled once per
schema.

    {"id": 7, "paid": Decimal("42.50")}  ──Serialiser──►  {"id":7,"paid":42.50}\n
                                         ◄──RecordDecoder── read_json

Decoding a serialized record returns an equal record, types included, for every record that the lossless format accepts.
A record that it does not accept is `Rejected`, never altered. The reference format prints as pandas' `to_json` with ten
decimals does, and loses what that loses.
"""

from rowmill.core.config import Config
from rowmill.kinds.tables.serialization.reading import RecordDecoder, RecordProblem, make_exact_decoder, read_json
from rowmill.kinds.tables.serialization.writing import Serialiser, Wire, serialise_record, write_decimal

__all__ = [
    "Codec",
    "RecordDecoder",
    "RecordProblem",
    "Serialiser",
    "Wire",
    "make_exact_decoder",
    "read_json",
    "serialise_record",
    "write_decimal",
]


class Codec(Config):
    """How a record is written as text."""

    wire: Wire = "lossless"
    """`lossless` reads back exactly; `reference` prints floats to 10 decimals and dates as epoch milliseconds."""
