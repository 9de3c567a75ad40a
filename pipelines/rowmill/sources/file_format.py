"""The base class of source file formats: suffixes, properties, and the method that cuts a file into parts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from rowmill.core.config import describe_type
from rowmill.core.json import Json
from rowmill.schema.rows import Rejected
from rowmill.sources.dialect import DialectOptions
from rowmill.sources.limits import Limits
from rowmill.sources.parts import FileScan, PartContent, SampleBy

OpenStream = Callable[[], BinaryIO]
"""Opens a file's content from its beginning, decompressed."""


@dataclass(frozen=True, slots=True)
class FileOptions:
    """The recipe's options for a file, and how it can be read.

    `suffix` selected the format. `is_seekable`: the stream is the file itself, not its decompressed content. `field` is
    the path of the list in a JSON object whose elements are the records.
    """

    suffix: str
    limits: Limits
    is_seekable: bool = False
    sample_by: SampleBy = "document"
    dialect: DialectOptions = DialectOptions()  # noqa: RUF009  (frozen)
    encoding: str | None = None
    field: str | None = None
    file_format: str | None = None
    keeps_non_finite: bool = False

    def list_asked(self, options: frozenset[str]) -> dict[str, Any]:
        """Return the options for reading that the recipe sets, of those that a format has."""
        general = {"encoding": self.encoding, "field": self.field, "file_format": self.file_format}
        requested = self.dialect.list_asked() | {name: value for name, value in general.items() if value is not None}
        return {name: value for name, value in requested.items() if name in options or name == "file_format"}


@dataclass(frozen=True)
class FileFormat:
    """Base class of all formats; an instance of it describes records that never were a file."""

    name: str
    """The name that scans and parts record as their reader."""
    version: int = 0
    """Raised when it reads some file otherwise than before; files that were scanned before are scanned again."""
    suffixes: tuple[str, ...] = ()
    """Suffixes of its files, without a compression codec; each suffix belongs to one format."""
    options: frozenset[str] = frozenset()
    """Options of `kind: files` that apply only to this format."""
    is_seekable: bool = False
    """Whether its reader seeks in an uncompressed file."""
    is_text: bool = False
    """Whether its files are text, which has an encoding."""
    is_json: bool = False
    """Whether its records are written as JSON in the file."""
    is_arrow: bool = False
    """Whether its records come from Arrow, which gives every mapping the union of all keys, null where absent."""
    is_own_lines: bool = False
    """Whether a record is a line of the file, read from the file itself; other formats are staged."""
    has_cells: bool = False
    """Whether every value is the text of a cell."""
    has_documents: bool = False
    """Whether its records are pieces of text; blank ones are rejected."""
    syntax_hint: str = ""
    """Text added to the error of a record that is not valid JSON."""

    def detect(self, open_stream: OpenStream, file: FileOptions) -> "FileFormat":
        """Return the actual format of a file, decided by its content if the suffix is ambiguous."""
        return self

    def note_options(self, scan: FileScan, file: FileOptions, open_stream: OpenStream) -> FileScan:
        """Return the scan with the options that decide the file's parts."""
        return scan

    def is_current(self, scan: FileScan, file: FileOptions) -> bool:
        """Return whether an earlier scan of the same bytes is valid under the current options."""
        return scan.reader_version == self.version and scan.asked == file.list_asked(self.options)

    def cut_parts(self, stream: BinaryIO, scan: FileScan, file: FileOptions) -> Iterator[PartContent]:
        """Cut the file into parts; raises SourceError when the file cannot be read."""
        raise NotImplementedError

    def read_columns(self, scan: FileScan, file: FileOptions, open_stream: OpenStream) -> dict[str, str] | None:
        """Return the columns that the file declares, and their types; None for formats that declare none."""
        return None

    def find_line(self, stream: BinaryIO, scan: FileScan, record: int) -> int | None:
        """Return the line of the file on which a record begins, counted from 0; None where files have no lines."""
        return None

    def reject_non_object(self, value: Json) -> Rejected:
        """Return the reject of a record that is not an object."""
        return Rejected("not_an_object", f"{describe_type(value)}; a record is an object")
