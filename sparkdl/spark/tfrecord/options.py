"""The options of the data source ``tfrecord``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from sparkdl.data.shards import FolderTypes
from sparkdl.data.tfrecord.blocks import Codec, codec_of
from sparkdl.data.tfrecord.decoding import RecordType
from sparkdl.errors import ConfigError, UnknownNameError
from sparkdl.spark.session.versions import spark_version

RECORD_TYPES: dict[str, RecordType] = {
    "example": "Example",
    "sequenceexample": "SequenceExample",
    "bytearray": "ByteArray",
}
_KNOWN = (
    "path",
    "paths",
    "recordType",
    "codec",
    "compression",
    "verifyCrc",
    "inferRows",
    "binaryFeatures",
    "maxPartitionBytes",
    "batchRows",
    "partitionBy",
    "rowsPerFile",
    "pathGlobFilter",
    "recursiveFileLookup",
    "timeZone",
    "inferFolders",
)


@dataclass(frozen=True)
class TFRecordOptions:
    """The user's words in ``.option(...)``; the names are without case.

    Args:
        paths: Files, folders or patterns.
        codec: ``codec`` or ``compression``; None when it is not said.
        verify_crc: ``verifyCrc``: whether the data of each record are held against their CRC.
        infer_rows: ``inferRows``: records that the schema is inferred from.
        binary_features: ``binaryFeatures``: names, divided by commas, of texts that are binary.
        partition_bytes: ``maxPartitionBytes``: bytes of files that a task reads, but whole files.
        batch_rows: ``batchRows``: rows in a batch at most.
        partition_by: ``partitionBy``: columns, divided by commas, that become folders.
        rows_per_file: ``rowsPerFile``: rows after which a task begins another file.
        name_pattern: ``pathGlobFilter``: the names of files that are read, as ``*.tfrecord``.
        recursive: ``recursiveFileLookup``: whether files of all folders below count, which
            then give no columns; otherwise see :func:`sparkdl.files.listing.find_files`.
        folder_types: ``timeZone`` and ``inferFolders``.
    """

    paths: tuple[str, ...]
    record_type: RecordType = "Example"
    codec: Codec | None = None
    verify_crc: bool = True
    infer_rows: int = 1000
    binary_features: tuple[str, ...] = ()
    partition_bytes: int = 128 << 20
    batch_rows: int = 10_000
    partition_by: tuple[str, ...] = ()
    rows_per_file: int | None = None
    name_pattern: str | None = None
    recursive: bool = False
    folder_types: FolderTypes = field(default_factory=FolderTypes)

    @classmethod
    def of(cls, options: Mapping[str, str]) -> TFRecordOptions:
        """The options as Spark hands them over.

        Raises:
            ConfigError: An option that is unknown or has a value that cannot be used.
        """
        given = {key.lower(): value for key, value in options.items()}
        known = {name.lower() for name in _KNOWN}
        for key in options:
            if key.lower() not in known:
                raise UnknownNameError("option of the data source tfrecord", key, _KNOWN)
        paths = json.loads(given["paths"]) if "paths" in given else [given.get("path", "")]
        if not all(paths):
            raise ConfigError(
                "no path for TFRecord files",
                expected=".load(path), .save(path) or .option('path', path)", received="none",
            )  # fmt: skip
        kind = given.get("recordtype", "Example")
        if kind.lower() not in RECORD_TYPES:
            raise UnknownNameError("recordType", kind, RECORD_TYPES.values())
        codec = given.get("codec", given.get("compression"))
        rows = _number(given, "rowsperfile", 0)
        infers = _truth(given, "inferfolders", True)
        return cls(
            tuple(paths), RECORD_TYPES[kind.lower()], None if codec is None else codec_of(codec),
            _truth(given, "verifycrc", True), _number(given, "inferrows", 1000) or 1,
            _names(given, "binaryfeatures"), _number(given, "maxpartitionbytes", 128 << 20),
            _number(given, "batchrows", 10_000) or 1, _names(given, "partitionby"), rows or None,
            given.get("pathglobfilter"), _truth(given, "recursivefilelookup", False),
            FolderTypes(given.get("timezone"), spark_version() >= (4, 1), infers),
        )  # fmt: skip


def _names(given: Mapping[str, str], key: str) -> tuple[str, ...]:
    text = given.get(key, "").strip()
    if text.startswith("["):
        return tuple(json.loads(text))
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _number(given: Mapping[str, str], key: str, default: int) -> int:
    text = str(given.get(key, default))
    if not text.isdecimal():
        raise ConfigError(f"option {key} is no number", expected="0 or more", received=repr(text))
    return int(text)


def _truth(given: Mapping[str, str], key: str, default: bool) -> bool:
    text = str(given.get(key, default)).lower()
    if text not in ("true", "false"):
        raise ConfigError(
            f"option {key} says yes or no", expected="true or false", received=repr(text)
        )
    return text == "true"
