"""Saving and loading of stages through Spark: on any path that Spark can write, also on Connect.

A saved stage is a folder as Spark's own: ``metadata`` (text, JSON) with the Params, and what
sparkdl adds below ``"sparkdl"``; ``model`` (parquet) with the Keras file in chunks of 1 MiB;
``tables`` with the rows of a model that has tables; ``data``, in place of both, with the bytes of a
stage without a Keras model.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.ml.util import (
    DefaultParamsReader,
    DefaultParamsWriter,
    MLReadable,
    MLReader,
    MLWritable,
    MLWriter,
)  # fmt: skip

from sparkdl.errors import ConfigError, ModelError
from sparkdl.files.model_file import check_keras_file, damaged_model, sane_bytes
from sparkdl.learner.archives.archive import ModelArchive
from sparkdl.learner.prediction.model_source import ModelSource
from sparkdl.process import payload
from sparkdl.spark.files import HadoopFileSystem
from sparkdl.spark.session.running import is_connect
from sparkdl.spark.session.versions import frame_of_table, metadata_place, table_of_frame
from sparkdl.tables.checkpoints import copy_beside, found_beside, require_elsewhere

CHUNK_BYTES = 1 << 20
_CHUNKS_PER_FILE = 32
"""So a file, and what the driver sends or receives at once, has 32 MiB: one task of a job carries
it, and ``spark.rpc.message.maxSize`` (128 MiB unless set) bounds a task."""
_CODECS = frozenset({"UNCOMPRESSED", "SNAPPY"})
"""What sparkdl writes, and what Spark does unless told otherwise; snappy packs at most 1:21."""


def folder_here(spark: object, path: str) -> str | None:
    """The place of one of Spark's paths on this machine's disks; None if it is elsewhere.

    What is here is read and written without a job: Spark would take the bytes through a socket and
    a second process.
    """
    return None if is_connect(spark) else HadoopFileSystem(spark).on_disk(path)


def write_here(folder: str, content: bytes) -> None:
    """Bytes as rows ``(idx, chunk)``, in files of a few chunks each."""
    os.makedirs(folder)
    for number, table in enumerate(_tables(content)):
        pq.write_table(
            table, f"{folder}/part-{number:05d}.parquet", compression="none",
            use_dictionary=False, write_statistics=["idx"],
        )  # fmt: skip


def write_elsewhere(spark: object, path: str, content: bytes) -> None:
    """The same by Spark: a job per file, so that no task grows large."""
    for number, table in enumerate(_tables(content)):
        writer = frame_of_table(spark, table).coalesce(1).write
        writer = writer.option("compression", "uncompressed")
        writer.mode("append" if number else "error").parquet(path)


def _tables(content: bytes) -> Iterator[pa.Table]:
    """The rows, file by file; their chunks are parts of ``content``, not copies."""
    whole = pa.py_buffer(content)
    step = CHUNK_BYTES * _CHUNKS_PER_FILE
    for start in range(0, max(len(content), 1), step):
        part = whole.slice(start, min(step, len(content) - start))
        offsets = [*range(0, part.size, CHUNK_BYTES), part.size]
        buffers = [None, pa.array(offsets, pa.int32()).buffers()[1], part]
        chunks = pa.Array.from_buffers(pa.binary(), len(offsets) - 1, buffers)
        first = start // CHUNK_BYTES
        indices = pa.array(range(first, first + len(chunks)), pa.int32())
        yield pa.table({"idx": indices, "chunk": chunks})


def read_chunks(spark: object, path: str, said: Mapping[str, Any], stage_path: str) -> bytes:
    """The bytes in the files of a folder, one copy of them, hashed while they are read.

    Raises:
        ModelError: Bytes are missing or were changed, or there are many more than the files have.
    """
    folder = folder_here(spark, path)
    here = folder is not None and os.path.isdir(folder)
    model, digest = f"the model in {stage_path!r}", hashlib.sha256()
    content, done = _room(said["bytes"], model), 0

    def hash_part(start: int, stop: int) -> None:
        with room[start:stop] as part:
            digest.update(part)

    with content.getbuffer() as room, ThreadPoolExecutor(1, "sparkdl-digest") as beside:
        hashed = beside.submit(hash_part, 0, 0)
        size = len(room)
        if here:
            tables = _tables_here(str(folder), size, model)
        else:
            tables = _tables_elsewhere(spark, path, size, model)
        for chunks in _in_order(tables, model):
            start = done
            for chunk in chunks:
                if done + chunk.size <= size:
                    room[done : done + chunk.size] = memoryview(chunk).cast("B")
                done += chunk.size
            # In one piece: a thread that hashes holds no lock of Python's
            hashed = beside.submit(hash_part, start, done)
            if done > size:
                break
        hashed.result()
    if done != said["bytes"] or digest.hexdigest() != said["sha256"]:
        raise damaged_model(
            f"{model} is not whole", f"{said['bytes']} bytes, as they were written",
            f"{done} bytes" + ("" if done != said["bytes"] else ", others than were written"),
        )  # fmt: skip
    return content.getvalue()


def _room(size: int, model: str) -> io.BytesIO:
    """A buffer of a known size to write to, which becomes ``bytes`` without a copy."""
    try:
        return io.BytesIO(bytes(operator.index(size)))
    except (TypeError, ValueError, OverflowError, MemoryError) as error:
        raise damaged_model(
            f"{model} is not whole", "a size that fits into the memory", f"{size!r} bytes"
        ) from error


def _tables_elsewhere(spark: Any, path: str, size: int, model: str) -> Iterator[pa.Table]:
    """Rows, a few chunks a job."""
    from pyspark.sql import functions as f

    frame = spark.read.parquet(path)
    file = f.struct("_metadata.file_path", "_metadata.file_size")
    told = frame.agg(f.count(f.lit(1)).alias("rows"), f.collect_set(file).alias("files"))
    (found,) = told.collect()
    _require_sane(size, sum(file.file_size for file in found.files), model)
    rows = -(-size // CHUNK_BYTES)
    if found.rows != rows:
        raise damaged_model(f"{model} is not whole", f"{rows} chunks", f"{found.rows}")
    whole = f.length("chunk") <= CHUNK_BYTES
    for first in range(0, rows, _CHUNKS_PER_FILE):
        wanted = (frame["idx"] >= first) & (frame["idx"] < first + _CHUNKS_PER_FILE)
        yield table_of_frame(frame.where(wanted & whole))


def _tables_here(folder: str, size: int, model: str) -> Iterator[pa.Table]:
    """Rows of all files in a local folder, some chunks at once, each file's by its first chunk."""
    with _parquet_read(model):
        paths = [
            f"{folder}/{name}"
            for name in os.listdir(folder)
            if name.endswith(".parquet")
            and not name.startswith((".", "_"))
            and os.path.isfile(f"{folder}/{name}")  # a pipe would be read for ever
        ]
        packed = sum(os.path.getsize(path) for path in paths)
    _require_sane(size, packed, model)
    with _parquet_read(model):
        firsts = {}
        for path in paths:
            for batch in _opened(path).iter_batches(1, columns=["idx"]):
                firsts[path] = int(batch["idx"][0].as_py())
                break
        for path in sorted(firsts, key=lambda path: firsts[path]):
            for batch in _opened(path).iter_batches(_CHUNKS_PER_FILE, columns=["idx", "chunk"]):
                yield pa.Table.from_batches([batch])


@contextlib.contextmanager
def _parquet_read(model: str) -> Iterator[None]:
    """Around what is done with files of parquet: their errors say that the model is not whole."""
    try:
        yield
    except (OSError, KeyError, TypeError, ValueError, pa.ArrowException) as error:
        raise damaged_model(f"{model} is not whole", "files of parquet", str(error)) from error


def _opened(path: str) -> pq.ParquetFile:
    """A file of which no page is much larger than it is itself."""
    file = pq.ParquetFile(path, memory_map=True)
    told = file.metadata
    for group in range(told.num_row_groups):
        for column in range(told.num_columns):
            codec = told.row_group(group).column(column).compression
            if codec not in _CODECS:
                raise ValueError(f"{path} is compressed by {codec}")
    return file


def _require_sane(size: int, packed: int, model: str) -> None:
    """Refuses what would fill the memory."""
    if size > sane_bytes(packed):
        raise damaged_model(
            f"{model} would fill the memory",
            f"at most {sane_bytes(packed)} bytes in files of {packed} bytes", f"{size} bytes",
        )  # fmt: skip


def _in_order(tables: Iterable[pa.Table], model: str) -> Iterator[list[pa.Buffer]]:
    """The bytes in each table's chunks, those of all tables without a gap."""
    done = 0
    for table in tables:
        received = table["idx"].to_pylist()
        rows = table if received == sorted(received) else table.sort_by("idx")
        expected = range(done, done + rows.num_rows)
        received.sort()
        if received != list(expected):
            raise damaged_model(f"{model} is not whole", f"chunks {expected}", f"chunks {received}")
        done = expected.stop
        yield [_values(part) for part in rows["chunk"].cast(pa.binary()).chunks]


def _values(chunks: pa.Array) -> pa.Buffer:
    """The bytes of binary values, one after the other, without the copies that scalars are."""
    _, offsets, values = chunks.buffers()
    if offsets is None or values is None or not len(chunks):
        return pa.py_buffer(b"")
    found = np.frombuffer(offsets, np.int32)[chunks.offset : chunks.offset + len(chunks) + 1]
    return values.slice(int(found[0]), int(found[-1] - found[0]))


FORMAT = 1
"""Number of the form of these files; a reader takes this one and those before it."""
_SECTION = "sparkdl"

Json = Any


@dataclass(frozen=True)
class StageContent:
    """The parts of a stage beside its Params.

    Args:
        plain: What JSON can hold.
        archive: A model; its custom objects are code.
        code: What only pickle can hold; loaded only by readers that are told to trust the file.
        data: Bytes of a stage without a Keras model, in a form of its own that runs no code.
    """

    plain: Mapping[str, Json] = field(default_factory=dict)
    archive: ModelArchive | None = None
    code: Mapping[str, Any] = field(default_factory=dict)
    data: bytes | None = None


@dataclass(frozen=True)
class Loaded:
    """The parts that a reader found, for the stage to take.

    Args:
        model: The Keras file, whole as it was written; None if there is none.
        objects: Custom objects of the model: those of the file, if it is trusted, and the reader's.
        safe: Keras must refuse what runs code: the file is not trusted.
        digest: SHA-256 of the model.
    """

    plain: Mapping[str, Json]
    code: Mapping[str, Any]
    model: bytes | None
    objects: Mapping[str, Any]
    safe: bool
    path: str
    digest: str = ""
    data: bytes | None = None


S = TypeVar("S")
Own = TypeVar("Own", bound="SavedStage")


class StageWriter(MLWriter):
    """Saves a stage; see ``pyspark.ml.util.MLWriter``."""

    def __init__(self, stage: Any) -> None:
        super().__init__()
        self._stage = stage

    def _handleOverwrite(self, path: str) -> None:
        archive = self._stage.content().archive
        if archive is not None:
            place = folder_here(self.sparkSession, path) or path
            require_elsewhere(payload.joined(archive.content), place)
        if not is_connect(self.sparkSession):
            super()._handleOverwrite(path)
            return
        from pyspark.ml.connect.readwrite import RemoteMLWriter

        RemoteMLWriter.handleOverwrite(path, True)

    def saveImpl(self, path: str) -> None:
        content: StageContent = self._stage.content()
        section: dict[str, Json] = {"format": FORMAT, **content.plain}
        code: dict[str, Any] = dict(content.code)
        archive = content.archive
        own = {} if archive is None else archive.own_code()
        for name, thing in own.items():  # that of sparkdl is there where it is loaded
            if not str(getattr(thing, "__module__", "")).startswith("sparkdl."):
                code.setdefault("objects", {})[name] = thing
        if code:
            section["code"] = _pickled(code, self._stage)
        model = None if archive is None else payload.joined(archive.content)
        name, whole = ("data", content.data) if model is None else ("model", model)
        if whole is None:
            self._save_metadata(path, section)
            return
        folder = folder_here(self.sparkSession, path)
        new = folder is not None and not os.path.exists(folder)
        with ThreadPoolExecutor(1, "sparkdl-digest") as beside:
            digest = beside.submit(lambda: hashlib.sha256(whole).hexdigest())
            if folder is not None and new:
                write_here(f"{folder}/{name}", whole)
            section[name] = {"bytes": len(whole), "sha256": digest.result()}
        self._save_metadata(path, section)  # which refuses a path where something is already
        if model is not None:
            copy_beside(model, _tables_of(folder, path))
        if folder is None:
            write_elsewhere(self.sparkSession, f"{path.rstrip('/')}/{name}", whole)
        elif not new:
            write_here(f"{folder}/{name}", whole)

    def _save_metadata(self, path: str, section: Mapping[str, Json]) -> None:
        place = metadata_place(self.sparkSession)
        DefaultParamsWriter.saveMetadata(self._stage, path, place, {_SECTION: section})


class StageReader(MLReader, Generic[S]):
    """Loads a stage; see ``pyspark.ml.util.MLReader``."""

    def __init__(self, cls: Callable[[], S]) -> None:
        super().__init__()
        self._cls = cls
        self._trusted = False
        self._objects: dict[str, Any] = {}

    def trusted(self) -> StageReader[S]:
        """Loads the code in the file, too, and runs it: only for files of people whom you trust."""
        self._trusted = True
        return self

    def customObjects(self, objects: Mapping[str, Any]) -> StageReader[S]:
        """Takes classes and functions of the model from here, name -> object, not from the file."""
        self._objects = dict(objects)
        return self

    def load(self, path: str) -> S:
        """The stage that was saved at ``path``.

        Raises:
            ConfigError: Another stage was saved there, or it has code and is not trusted.
            ModelError: A newer version wrote it, or it is damaged.
        """
        spark = self.sparkSession
        metadata = DefaultParamsReader.loadMetadata(path, metadata_place(spark))
        stage: Any = self._cls()
        section = _checked(metadata, stage, path)
        trusted = self._trusted or is_trusted()
        code = self._code(section, stage, path, trusted=trusted)
        objects = {**code.pop("objects", {}), **self._objects}
        stage._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(stage, metadata)
        model, digest, said = None, "", section.get("model", {})
        if said:
            model = read_chunks(spark, f"{path.rstrip('/')}/model", said, path)
            check_keras_file(model, f"{path.rstrip('/')}/model")
            model, moved = found_beside(model, _tables_of(folder_here(spark, path), path))
            digest = said["sha256"] if moved is None else hashlib.sha256(model).hexdigest()
        data = None
        if section.get("data"):
            data = read_chunks(spark, f"{path.rstrip('/')}/data", section["data"], path)
        stage.take(Loaded(section, code, model, objects, not trusted, path, digest, data))
        return stage  # type: ignore[no-any-return]

    def _code(
        self, section: Mapping[str, Json], stage: object, path: str, *, trusted: bool
    ) -> dict[str, Any]:
        """The code in a file: loaded if it is trusted, without it if it is not needed."""
        saved = section.get("code")
        if saved is None:
            return {}
        names = list(saved["names"])
        if not trusted and names == ["objects"] and self._objects:
            return {}
        if not trusted:
            name = type(stage).__name__
            raise ConfigError(
                f"{path!r} has code, which would run when it is loaded",
                expected="a reader that is told to trust it",
                received="code of " + ", ".join(names),
                hint=f"{name}.read().trusted().load(path), or 'with sparkdl.ml.trusted():' around "
                "the load of a pipeline; only if you trust whoever wrote it"
                + ("; or read().customObjects({...})" if names == ["objects"] else ""),
            )
        try:
            code: dict[str, Any] = payload.load(base64.b64decode(saved["pickled"]))
        except Exception as error:
            raise ModelError(
                f"the code in {path!r} cannot be loaded",
                expected="modules that can be imported here, and the Python that wrote it",
                received=f"{type(error).__name__}: {error}",
            ) from error
        return code


class SavedStage(MLReadable, MLWritable):
    """A stage with ``content()``, which files hold, and ``take(loaded)``."""

    def write(self) -> StageWriter:
        """Saves the stage: ``write().overwrite().save(path)``."""
        return StageWriter(self)

    @classmethod
    def read(cls: type[Own]) -> StageReader[Own]:
        """Loads what ``write`` saved: ``read().load(path)``; ``read().trusted()`` with code."""
        return StageReader(cls._empty)

    @classmethod
    def _empty(cls: type[Own]) -> Own:
        """A stage without arguments, for a reader to fill."""
        return cls()


def _tables_of(folder: str | None, path: str) -> str:
    return f"{(folder or path).rstrip('/')}/tables"


def load_model(loaded: Loaded) -> tuple[Any, ModelArchive] | None:
    """The Keras model of a loaded stage, and its archive; None if it has none.

    Raises:
        ModelError: Keras cannot load it, or not without running code of a file not trusted.
    """
    from sparkdl.launch import interrupts
    from sparkdl.learner.archives.archive import archive_of_bytes, making_models, model_from_bytes

    if loaded.model is None:
        return None
    objects = dict(loaded.objects)
    with making_models, interrupts.held():
        model = model_from_bytes(
            loaded.model, objects, safe_mode=loaded.safe, path=f"{loaded.path}/model"
        )
    return model, archive_of_bytes(loaded.model, objects)


def load_source(loaded: Loaded) -> tuple[ModelSource, ModelArchive] | None:
    """The model of a loaded stage, whose weights Keras need not have read yet, and its archive.

    Raises:
        ModelError: Keras cannot make it, or not without running code of a file not trusted.
    """
    from sparkdl.launch import interrupts
    from sparkdl.learner.archives.archive import archive_of_bytes, making_models
    from sparkdl.learner.prediction.model_source import ArchiveSource, KerasSource, outline_of

    if loaded.model is None:
        return None
    objects = dict(loaded.objects)
    with making_models, interrupts.held():
        outline = outline_of(loaded.model, objects, safe_mode=loaded.safe)
    if outline is not None:
        archive = archive_of_bytes(loaded.model, objects)
        return ArchiveSource(archive, objects, outline, loaded.digest), archive
    found = load_model(loaded)
    return None if found is None else (KerasSource(found[0], objects), found[1])


def _checked(metadata: Mapping[str, Json], stage: Any, path: str) -> Mapping[str, Json]:
    cls = type(stage)
    name = f"{cls.__module__}.{cls.__name__}"
    section = metadata.get(_SECTION)
    if metadata["class"] != name or not isinstance(section, dict):
        other = metadata["class"].rpartition(".")[2]
        raise ConfigError(
            f"{path!r} is not a saved {cls.__name__}", expected=name, received=metadata["class"],
            hint=f"{other}.load(path)",
        )  # fmt: skip
    strange = [n for n in metadata["paramMap"] if not stage.hasParam(n)]
    strange += [n for n in metadata["defaultParamMap"] if not stage.hasParam(n)]
    number = section.get("format")
    if not isinstance(number, int) or number > FORMAT or strange:
        raise ModelError(
            f"{path!r} was written by a newer version of sparkdl",
            expected=f"format {FORMAT} or an older one, with Params that this version has",
            received=f"format {number}" + (f", Params {sorted(set(strange))}" if strange else ""),
            hint="install the version that wrote it",
        )
    return section


def _pickled(code: Mapping[str, Any], stage: object) -> dict[str, Json]:
    try:
        content = payload.dump(dict(code))
    except Exception as error:
        raise ConfigError(
            f"{type(stage).__name__} cannot be saved",
            expected=f"{', '.join(code)} that can be pickled",
            received=f"{type(error).__name__}: {error}",
            hint="set them to None before saving, and again after loading",
        ) from error
    return {"names": sorted(code), "pickled": base64.b64encode(content).decode()}


_trusted: ContextVar[bool] = ContextVar("sparkdl_trusted", default=False)


@contextlib.contextmanager
def trusted() -> Iterator[None]:
    """Within, stages are loaded with the code in their files, also those inside of a pipeline.

    ::

        with sparkdl.ml.trusted():
            pipeline_model = PipelineModel.load('models/churn')

    Code is what pickle holds and runs when it is loaded: layers, losses and callbacks of the
    user's own, decoders, model builders. Only for files of people whom you trust. Holds for the
    thread that enters it.
    """
    before = _trusted.set(True)
    try:
        yield
    finally:
        _trusted.reset(before)


def is_trusted() -> bool:
    """Whether the caller is inside of :func:`trusted`."""
    return _trusted.get()
