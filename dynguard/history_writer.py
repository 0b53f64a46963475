"""Writes ``history.sqlite``: batches of records in short transactions, metrics in buckets of steps."""

from __future__ import annotations

import logging
import math
import os
import sqlite3
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, time
from typing import Any

import numpy as np

from dynguard import records
from dynguard.decimation import Buckets, Columns
from dynguard.errors import RunDirectoryError
from dynguard.findings import Metrics, Record, RunStart
from dynguard.history_file import NUMBERS, TABLES, check_version, from_text, history_file, to_text

MAX_SCALARS = 2_000  # columns per source; a plugin that invents a new name at every step must not eat the disk
MAX_VECTOR = 4_000_000  # entries of all vectors of a source together
_AT_RISK = 0.5  # seconds of data that may wait for a transaction
_PENDING = 2_000  # records that wait at most
_PENDING_BYTES = 64_000_000
_MIN_KEEP = 64  # buckets of a source that max_bytes may not go below
_BLOCK_BYTES = 1_000_000  # of rows that are merged in one transaction
_WIDEST = 2**40  # steps of a bucket
_FAR = 2**53  # steps are below it
_log = logging.getLogger("dynguard")


@dataclass(slots=True)
class _Source:
    id: int
    width: int
    rows: int
    columns: Columns
    cursor: int | None = None  # first step that the merging under way has not come to


class HistoryWriter:
    """Writes the records of a run into ``history.sqlite``. Errors of the disk are not raised; see ``lost``.

    One thread at a time. Records reach the disk with ``flush()``, or 0.5 s after they came.

    Args:
        path: the run directory.
        keep: buckets kept per source; with more (a quarter at most), neighbours are merged.
        max_bytes: about how large the buckets may grow altogether; very wide models keep fewer of them.

    Attributes:
        lost: records that could not be written (full disk, I/O error).
        problem: why writing fails at present, or "".

    Raises RunDirectoryError where the file can't be opened, is damaged or comes from a newer dynguard.
    """

    def __init__(self, path: Path, *, keep: int = 20_000, max_bytes: int = 400_000_000) -> None:
        self.file = history_file(path)
        self.keep, self.max_bytes = max(keep, 2), max_bytes
        self.lost = 0
        self.problem = ""
        self._pid = os.getpid()
        self._records: deque[tuple[str, int | None, float, str]] = deque()
        self._metrics: deque[Metrics] = deque()
        self._bytes = 0
        self._ignored: set[str] = set()
        self._rewinding: set[str] = set()
        self._sources: dict[str, _Source] = {}
        self._saved_lost = 0
        self._tried = monotonic()
        try:
            self._db: sqlite3.Connection | None = self._connect()
        except sqlite3.Error as error:
            raise RunDirectoryError(f"can't write the history {self.file}: {error}. Give another run_dir") from error
        self._lost_before = self._saved_lost
        self._closed = False

    def write(self, record: Record) -> None:
        """Take a record; it is on disk after the next ``flush``. TypeError where it is no record."""
        if isinstance(record, Metrics):
            self._metrics.append(self._checked(record))
        else:
            data = records.encode(record)
            stamp, step = data.get("time"), data.get("step")
            stamp = stamp if isinstance(stamp, float) else time()
            step = step if isinstance(step, int) and abs(step) < _FAR else None
            self._records.append((data["type"], step, stamp, records.write_json(data)))
            if isinstance(record, RunStart):
                self._rewinding = set(self._sources)
        self._limit_pending()
        late = monotonic() - self._tried > _AT_RISK
        if late or (not self.problem and (len(self._metrics) > _PENDING // 2 or self._bytes > _PENDING_BYTES // 2)):
            self.flush()

    def flush(self) -> None:
        """Bring all that waits to the disk, in one transaction. What can't be written waits for the next time."""
        self._tried = monotonic()
        if self._closed or os.getpid() != self._pid:
            return
        if not (self._records or self._metrics or self._lost_before + self.lost != self._saved_lost):
            return
        try:
            self._store()
        except (sqlite3.Error, OSError) as error:
            self._fail(error)
        except Exception:
            self._discard()  # whatever in it can't be stored must not stand in the way of all that follows
            raise

    def close(self) -> None:
        """Flush, fold everything into the one file and let go of it. What still can't be written is lost."""
        if self._closed or os.getpid() != self._pid:
            return
        self.flush()
        self._closed = True
        self._discard()
        if self.lost:
            _log.warning("history %s: %d records lost%s", self.file, self.lost, self.problem and f" ({self.problem})")
        if self._db is not None:
            with suppress(sqlite3.Error):  # a reader is looking: then the -wal file stays beside it, which is as good
                self._db.execute("PRAGMA busy_timeout = 100")
                self._db.execute("PRAGMA journal_mode = DELETE")
            self._db.close()

    def _checked(self, record: Metrics) -> Metrics:
        """A copy of which every number is one; what is none is left out, and said once."""
        values, vectors = {}, {}
        for name, value in record.values.items():
            try:
                values[str(name)] = float(value)
            except (TypeError, ValueError, OverflowError, RuntimeError):
                self._ignore(str(name), f"{value!r:.60} is no number")
        for name, vector in record.vectors.items():
            try:
                with np.errstate(over="ignore", invalid="ignore"):
                    vectors[str(name)] = np.asarray(vector, dtype=np.float32).ravel()
            except (TypeError, ValueError, RuntimeError):
                self._ignore(str(name), f"{type(vector).__name__} is no vector of numbers")
        step, stamp = int(record.step), float(record.time)
        if abs(step) >= _FAR:
            raise ValueError(f"step {step} is out of range")
        self._bytes += sum(vector.nbytes for vector in vectors.values())
        return Metrics(step, values, vectors, str(record.source), stamp if math.isfinite(stamp) else time())

    def _ignore(self, name: str, why: str) -> None:
        if name not in self._ignored and len(self._ignored) < MAX_SCALARS:
            self._ignored.add(name)
            _log.warning("history: the metric %r is left out: %s", name, why)

    def _limit_pending(self) -> None:
        """While nothing can be written, keep the newest in memory and count the rest as lost."""
        while self._metrics and (len(self._metrics) > _PENDING or self._bytes > _PENDING_BYTES):
            self._bytes -= sum(vector.nbytes for vector in self._metrics.popleft().vectors.values())
            self.lost += 1
        while len(self._records) > _PENDING:
            self._records.popleft()
            self.lost += 1

    def _discard(self) -> None:
        self.lost += len(self._records) + len(self._metrics)
        self._records.clear()
        self._metrics.clear()
        self._bytes = 0

    def _fail(self, error: Exception) -> None:
        if not self.problem:
            _log.warning("history %s: can't be written: %s. Training goes on; trying again", self.file, error)
        self.problem = str(error)
        if self._db is not None:
            self._db.close()
        self._db = None

    def _store(self) -> None:
        db = self._db = self._db or self._connect()
        touched = {}
        with _transaction(db):
            db.executemany("INSERT INTO record (type, step, time, json) VALUES (?, ?, ?, ?)", self._records)
            for name in dict.fromkeys(metrics.source for metrics in self._metrics):
                touched[name] = self._add(db, name, [m for m in self._metrics if m.source == name])
            lost = self._lost_before + self.lost
            if lost != self._saved_lost:
                db.execute("INSERT OR REPLACE INTO meta VALUES ('lost', ?)", (lost,))
        if self.problem:
            _log.warning("history %s: can be written again; %d records were lost", self.file, self.lost)
        self._records.clear()
        self._metrics.clear()
        self._bytes, self._saved_lost, self.problem = 0, lost, ""
        self._rewinding -= set(touched)
        for name, new in touched.items():
            self._thin(db, self._sources[name], new)

    def _add(self, db: sqlite3.Connection, name: str, metrics: list[Metrics]) -> int:
        """Store the metrics of one source; the number of new rows."""
        source = self._sources.get(name) or self._new_source(db, name)
        for record in metrics:
            self._new_columns(db, source, record)
        buckets = source.columns.gather(metrics).merge(source.width)
        begin = int(buckets.first[0])
        if name in self._rewinding:  # a resumed run goes over some steps again: what they gave last counts
            gone = db.execute("DELETE FROM bucket WHERE source = ? AND first >= ?", (source.id, begin)).rowcount
            source.rows -= gone
        low, high = begin // source.width * source.width, (int(buckets.first[-1]) // source.width + 1) * source.width
        old = db.execute(
            f"SELECT id, {NUMBERS} FROM bucket WHERE source = ? AND first >= ? AND first < ?", (source.id, low, high)
        ).fetchall()
        if old:
            buckets = Buckets.join([_parse(source, old), buckets]).merge(source.width)
        _replace(db, source, old, buckets)
        return max(len(buckets) - len(old), 0)

    def _new_source(self, db: sqlite3.Connection, name: str) -> _Source:
        row = db.execute(
            "INSERT INTO source (name, width) VALUES (CAST(? AS TEXT), 1) RETURNING id", (from_text(name),)
        )
        source = self._sources[name] = _Source(row.fetchone()[0], 1, 0, Columns())
        return source

    def _new_columns(self, db: sqlite3.Connection, source: _Source, record: Metrics) -> None:
        for name, kind, start, length in source.columns.missing(record.values, record.vectors):
            if kind == "scalar" and len(source.columns.scalars) >= MAX_SCALARS:
                self._ignore(name, f"there are more than {MAX_SCALARS} of them")
                del record.values[name]  # type: ignore[attr-defined]  # the dict that _checked made
            elif kind == "vector" and source.columns.width + length > MAX_VECTOR:
                self._ignore(name, f"the vectors have more than {MAX_VECTOR} entries")
                del record.vectors[name]  # type: ignore[attr-defined]  # the dict that _checked made
            else:
                sql = "INSERT INTO series (source, name, kind, start, length) VALUES (?, CAST(? AS TEXT), ?, ?, ?)"
                db.execute(sql, (source.id, from_text(name), kind, start, length))
                source.columns.add(name, kind, start, length)

    def _thin(self, db: sqlite3.Connection, source: _Source, new: int) -> None:
        """Merge some neighbours where there are too many buckets, four for each that came, in short transactions."""
        if source.width >= _WIDEST:
            return
        row_bytes = 200 + 24 * len(source.columns.scalars) + 8 * source.columns.width
        limit = min(self.keep, max(_MIN_KEEP, self.max_bytes // (len(self._sources) * row_bytes)))
        block = min(128, max(4, _BLOCK_BYTES // row_bytes))
        todo = max(4 * new, block)
        while (source.cursor is not None and todo > 0) or source.rows > limit + limit // 4:
            todo -= self._merge_block(db, source, block)
        if source.cursor is None and source.rows > limit:
            self._merge_block(db, source, block)

    def _merge_block(self, db: sqlite3.Connection, source: _Source, block: int) -> int:
        """Merge the next ``block`` rows of the pass under way, or begin one; the number of rows that were read."""
        with _transaction(db):
            if source.cursor is None:
                source.width *= 2
                source.cursor = -(2**62)
                db.execute("UPDATE source SET width = ? WHERE id = ?", (source.width, source.id))
            sql = f"SELECT id, {NUMBERS} FROM bucket WHERE source = ? AND first >= ? ORDER BY first LIMIT ?"
            rows = db.execute(sql, (source.id, source.cursor, block)).fetchall()
            if len(rows) == block:  # the last bucket may go on in the next block
                last = rows[-1][1] // source.width * source.width
                source.cursor = last if last > rows[0][1] else last + source.width
                rows = [row for row in rows if row[1] < source.cursor]
            else:
                source.cursor = None
            if rows:
                _replace(db, source, rows, _parse(source, rows).merge(source.width))
        return max(len(rows), 1)

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.file, timeout=1.0, isolation_level=None, check_same_thread=False)
        try:
            for pragma in ("journal_mode = WAL", "synchronous = NORMAL", "journal_size_limit = 16000000"):
                db.execute(f"PRAGMA {pragma}").fetchall()
            if check_version(db, self.file) == 0:
                with _transaction(db):
                    for statement in TABLES:
                        db.execute(statement)
            db.text_factory = to_text
            self._load(db)
        except BaseException:
            db.close()
            raise
        return db

    def _load(self, db: sqlite3.Connection) -> None:
        """What the file holds already: of a resumed run, or of this one before a failure."""
        self._sources = {}
        by_id = {}
        for number, name, width in db.execute("SELECT id, name, width FROM source").fetchall():
            rows = db.execute("SELECT count(*) FROM bucket WHERE source = ?", (number,)).fetchone()[0]
            by_id[number] = self._sources[name] = _Source(number, width, rows, Columns())
        for number, *column in db.execute(
            "SELECT source, name, kind, start, length FROM series ORDER BY id"
        ).fetchall():
            by_id[number].columns.add(*column)
        lost = db.execute("SELECT value FROM meta WHERE key = 'lost'").fetchone()
        self._saved_lost = int(lost[0]) if lost else 0


@contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):  # the first error is the one to tell
            db.execute("ROLLBACK")
        raise


def _parse(source: _Source, rows: Sequence[tuple[Any, ...]]) -> Buckets:
    columns = source.columns
    return Buckets.parse([row[1:] for row in rows], np.arange(len(columns.scalars)), np.arange(columns.width))


def _replace(db: sqlite3.Connection, source: _Source, old: Sequence[tuple[Any, ...]], new: Buckets) -> None:
    db.executemany("DELETE FROM bucket WHERE id = ?", [(row[0],) for row in old])
    marks = ", ".join("?" * 11)
    db.executemany(f"INSERT INTO bucket (source, {NUMBERS}) VALUES ({source.id}, {marks})", new.rows())
    source.rows += len(new) - len(old)
