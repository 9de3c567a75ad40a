"""Manifests: found by what went in and by what came out, whole or not at all."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rowmill.core.errors import IntegrityError
from rowmill.core.storage import Store, digest_bytes
from rowmill.schema import manifest
from rowmill.schema.manifest import DisplayTable, File, Histogram, Manifest, Part

KEY = ("demo", "chats", "canonical_rows")


def _manifest(store: Store, content: bytes = b"rows", **changes: Any) -> Manifest:
    path = f"demo/chats/canonical_rows/parts/{digest_bytes(content)}/rows.arrow"
    store.write(path, content)
    file = File(path=path, bytes=len(content), digest=digest_bytes(content), rows=3)
    made = Manifest(
        key=KEY, stage="canonical_rows", fingerprint="f1", code_version="c1", inputs={"demo/chats/raw_dataset": "v0"},
        parts=(Part("p1", {"rows": file}, {"RowCounts": {"kept": 3}}),), values={"nonempty": 3},
        ledger=(("kept", "", 3), ("rejected", "bad_messages", 1)), token_ledger=(("train", "trained", 7),),
        tables={"rejects": DisplayTable(("reason", "records"), (("bad_messages", 1),))},
        histograms={"lengths": Histogram("lengths", "tokens", (0.0, 8.0), (3,), 8.0)},
        samples={"rejects": ("a:1",)}, schema=(("row_id", "string"),), waivers=("x",), built_at="2026-01-01T00:00:00",
    )  # fmt: skip
    return replace(made, **changes)


def test_save_then_load_gives_the_same_manifest(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    saved = manifest.save_manifest(store, _manifest(store))

    assert saved.version
    assert manifest.load_version(store, KEY, saved.version) == saved
    assert manifest.find_by_fingerprint(store, KEY, "f1") == saved
    assert manifest.load_current(store, KEY) == saved


def test_version_depends_on_content_and_not_on_when_or_from_what(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    first = manifest.save_manifest(store, _manifest(store))
    again = manifest.save_manifest(
        store, _manifest(store, fingerprint="f2", built_at="2027-01-01", run_id="r", seconds=9.0)
    )
    other = manifest.save_manifest(store, _manifest(store, b"other rows"))
    fewer = manifest.save_manifest(store, _manifest(store, ledger=(("kept", "", 3),)))

    assert again.version == first.version
    assert len({first.version, other.version, fewer.version}) == 3


def test_version_with_a_part_gone_or_never_built_is_not_found(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    saved = manifest.save_manifest(store, _manifest(store))
    store.remove(saved.parts[0].files["rows"].path)
    assert manifest.find_by_fingerprint(store, KEY, "f1") is None
    with pytest.raises(IntegrityError, match="demo/chats/canonical_rows: it was never built"):
        manifest.load_version(Store(str(tmp_path)), KEY, None)


def test_verify_files_after_a_flipped_byte_names_the_file(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    saved = manifest.save_manifest(store, _manifest(store))
    manifest.verify_files(store, saved)
    store.write(saved.parts[0].files["rows"].path, b"rowz")

    with pytest.raises(IntegrityError, match=r"rows\.arrow: digest"):
        manifest.verify_files(store, saved)


def test_versions_are_listed_oldest_first(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    late = manifest.save_manifest(store, _manifest(store, built_at="2026-02-01"))
    early = manifest.save_manifest(store, _manifest(store, b"older", built_at="2026-01-01"))
    assert [one.version for one in manifest.list_versions(store, KEY)] == [early.version, late.version]
