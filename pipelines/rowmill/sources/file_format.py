"""What a format of source files is: one object with its suffixes, its reader, and what is asked of it.

What belongs here: the base class, and what the recipe says of one file. What does not: any one format; each is declared
in the module that reads it and listed in `file_formats.py`.

A format is added in one file and one line of that list: an object with a name, its suffixes, and `cut_parts`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

from rowmill.core.config import describe_type
from rowmill.core.json import Json
from rowmill.sources.limits import Limits
from rowmill.sources.parts import FileScan, PartContent, SampleBy

OpenStream = Callable[[], BinaryIO]
"""Opens a file's content from its beginning, decompressed."""


@dataclass(frozen=True, slots=True)
class FileOptions:
    """What the recipe says of a file, and how it can be read.

    `suffix` is the one that chose the format. `is_seekable`: the stream is the file itself, not decompressed.
    """

    suffix: str
    limits: Limits
    is_seekable: bool = False
    sample_by: SampleBy = "document"
    delimiter: str | None = None
    quote: str | None = None
    keeps_non_finite: bool = False


@dataclass(frozen=True)
class FileFormat:
    """The base of all formats; as it is, it describes records that were never a file of their own."""

    name: str
    """What scans and parts record as their reader."""
    suffixes: tuple[str, ...] = ()
    """How the names of its files end, without the codec of a compressed file; each suffix is of one format."""
    options: frozenset[str] = frozenset()
    """Options of `kind: files` that only such files have."""
    is_seekable: bool = False
    """Whether its reader seeks in the file where it is not compressed."""
    is_arrow: bool = False
    """Whether its records come from a table that gives every mapping the keys of all the others, null where absent."""
    is_own_lines: bool = False
    """Whether a record is a line of the file that is read from there again; other formats are staged."""
    has_cells: bool = False
    """Whether every value is the text of a cell."""
    has_documents: bool = False
    """Whether its records are pieces of one text; blank ones are rejected."""
    syntax_hint: str = ""
    """What is added to the error of a record that is no valid JSON."""

    def detect(self, open_stream: OpenStream, limits: Limits) -> "FileFormat":
        """Return the format that a file really has, by its content where its suffix leaves a choice."""
        return self

    def note_options(self, scan: FileScan, file: FileOptions, open_stream: OpenStream) -> FileScan:
        """Return the scan with what decides the file's parts besides its bytes."""
        return scan

    def is_current(self, scan: FileScan, file: FileOptions) -> bool:
        """Tell whether an earlier scan of the same bytes would be the same with the options of now."""
        return True

    def cut_parts(self, stream: BinaryIO, scan: FileScan, file: FileOptions) -> Iterator[PartContent]:
        """Cut the file into parts.

        Raises
        ------
        SourceError
            When the file cannot be read.

        """
        raise NotImplementedError

    def read_columns(self, scan: FileScan, file: FileOptions, open_stream: OpenStream) -> dict[str, str] | None:
        """Return the columns that the file declares, and their types; None for formats that declare none."""
        return None

    def find_line(self, stream: BinaryIO, scan: FileScan, record: int) -> int | None:
        """Return the line of the file on which a record begins, counted from 0; None where files have no lines."""
        return None

    def explain_non_object(self, value: Json) -> str:
        """Say what a record is that is no object."""
        return f"{describe_type(value)}; a record is an object"
