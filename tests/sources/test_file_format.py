"""The list of source file formats; that a new one is read like the others is in `docs/test_extend_the_engine.py`."""

from rowmill.sources.files import FILE_FORMATS, FORMATS_BY_SUFFIX, Files, choose_file_format, find_file_format


def test_every_suffix_name_and_option_belongs_to_a_format() -> None:
    assert len({one.name for one in FILE_FORMATS}) == len(FILE_FORMATS)
    assert len(FORMATS_BY_SUFFIX) == sum(len(one.suffixes) for one in FILE_FORMATS)
    for suffix, one in FORMATS_BY_SUFFIX.items():
        assert choose_file_format(f"a/b{suffix}.gz") == (one, suffix, ".gz")
        assert find_file_format(one.name) is one
    assert {option for one in FILE_FORMATS for option in one.options} <= set(Files.model_fields)
    huggingface = find_file_format("huggingface")
    assert not (huggingface.has_cells or huggingface.has_documents or huggingface.is_own_lines)
