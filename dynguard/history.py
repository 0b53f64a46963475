"""The run directory and its ``history.sqlite``: all that a run told, readable while it lives and after it was killed.

Schema version 1 (``PRAGMA user_version``); numbers in BLOBs are little-endian:

- ``record(id, type, step, time, json)``: every RunStart, Names, Finding, Intervention, Section and RunEnd, whole, as
  strict JSON (see :mod:`dynguard.records`), in the order in which they came.
- ``source(id, name, width)``: an optimizer or booster, and how many steps share one of its buckets.
- ``series(id, source, name, kind, start, length)``: the columns of a source's rows in the order of ``id``: a
  ``scalar``, or entries ``start`` to ``start + length`` of a ``vector``. Columns are only ever appended; a row that is
  shorter than today's columns is older than the last of them.
- ``bucket(id, source, first, last, time, count, ...)``: one row per source and bucket of steps: first and last step,
  seconds since the epoch of the last, number of Metrics records, then ``scalar_mean``, ``scalar_low``, ``scalar_high``
  (float64) and ``vector_mean``, ``vector_high`` (float32). The mean is that of the finite values (what there was, where
  none is finite), low and high are NaN where a value was; NULL where equal to the mean. ``scalar_counts`` and
  ``vector_counts`` hold, zlib-packed, uint32 counts of finite values of every column, then of non-finite ones; NULL
  where all are finite in each of ``count`` records, or where ``count`` is 1 and the value itself tells.
- ``meta(key, value)``: ``lost``, the number of records that could not be written (full disk).
"""

from __future__ import annotations

import secrets
import sqlite3
import tempfile
import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from dynguard import records
from dynguard.actions import Intervention
from dynguard.decimation import Buckets, Columns
from dynguard.errors import RunDirectoryError
from dynguard.findings import Finding, Names, RunEnd, RunStart, Section
from dynguard.history_file import FILE, NUMBERS, TABLES, check_version, history_file, to_text
from dynguard.history_writer import MAX_VECTOR
from dynguard.history_writer import HistoryWriter as HistoryWriter

RUNS = Path("dynguard-runs")
_SALVAGE = 5_000  # reads that may fail before the rest of a damaged table is given up
_DAMAGE = (ValueError, TypeError, OverflowError, IndexError, zlib.error)
_NO = np.arange(0)
T = TypeVar("T")


def create_run_directory(path: Path | None, *, resume: bool) -> Path:
    """Make the directory of a run, by default ``./dynguard-runs/<YYYYMMDD-HHMMSS>-<4 hex>``; absolute.

    Raises RunDirectoryError where it can't be written to, or holds a run already and ``resume`` is False.
    """
    if path is None:
        if resume:
            raise RunDirectoryError("resume=True needs to know which run: give run_dir=<directory of that run>")
        path = RUNS / f"{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    try:
        path = path.expanduser().absolute()
        if path.exists() and not path.is_dir():
            raise RunDirectoryError(f"run_dir={str(path)!r} is a file. Give a directory that dynguard may fill")
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass  # the only sure test of whether one may write there
    except RunDirectoryError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        why = getattr(error, "strerror", None) or error
        raise RunDirectoryError(f"can't write to run_dir={str(path)!r}: {why}. Give another run_dir") from error
    if not resume and any((path / name).exists() for name in (FILE, "events.jsonl")):
        raise RunDirectoryError(
            f"run_dir={str(path)!r} already holds a run. Give another run_dir, or resume=True to go on with that run"
        )
    return path


@dataclass(frozen=True, slots=True)
class Curve:
    """A scalar over the steps; unpacks as ``steps, values = curve``. All arrays have shape (buckets,).

    Attributes:
        steps: first step of each bucket; ``last`` is the last one in it. The two are equal until the run is so long
            that neighbours are merged.
        values: mean of the finite values; the value itself where none is finite.
        low, high: extremes, NaN where a NaN was among the values.
        nonfinite: how many values were not finite.
        times: seconds since the epoch, of the last step.
    """

    steps: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]
    low: npt.NDArray[np.float64]
    high: npt.NDArray[np.float64]
    nonfinite: npt.NDArray[np.int64]
    last: npt.NDArray[np.int64]
    times: npt.NDArray[np.float64]

    def __iter__(self) -> Iterator[npt.NDArray[Any]]:
        return iter((self.steps, self.values))

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True, slots=True)
class Vectors:
    """A vector over the steps; unpacks as ``steps, mean, high, names = vectors``.

    Attributes:
        steps: (buckets,) first step of each bucket; ``last`` is the last one in it.
        mean: (buckets, entries) float32 mean of the finite values; NaN where the vector was shorter then.
        high: (buckets, entries) float32 maximum, NaN where a NaN was among the values.
        names: of the entries.
        nonfinite: (buckets, entries) how many values were not finite.
    """

    steps: npt.NDArray[np.int64]
    mean: npt.NDArray[np.float32]
    high: npt.NDArray[np.float32]
    names: tuple[str, ...]
    nonfinite: npt.NDArray[np.uint32]
    last: npt.NDArray[np.int64]

    def __iter__(self) -> Iterator[Any]:
        return iter((self.steps, self.mean, self.high, self.names))

    def __len__(self) -> int:
        return len(self.steps)


class History:
    """Reads the history of a run, alive or dead, whole or damaged: what can be read is read.

    Each answer is of the moment in which it is asked for. Close it, or use it in ``with``.

    Args:
        path: a run directory, or its ``history.sqlite``.

    Attributes:
        problems: what could not be read, and what the run itself lost.

    Raises RunDirectoryError where there is no history, or one from a newer dynguard.
    """

    def __init__(self, path: Path | str) -> None:
        self.file = history_file(Path(path))
        self.problems: list[str] = []
        if not self.file.is_file():
            raise RunDirectoryError(f"there is no run in {str(path)!r}: no {FILE}. Give the directory of a run")
        self._db = self._open()
        lost = self.lost
        if lost:
            self._note(f"{lost} records were lost while the run could not write (full disk or I/O error)")

    def __enter__(self) -> History:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()

    @property
    def run(self) -> RunStart | None:
        """The record that the run began with; of a resumed run, the last such."""
        return next(reversed(self._records(RunStart)), None)

    @property
    def end(self) -> RunEnd | None:
        """The record that the run ended with; None where it is alive or was killed."""
        last = next(reversed(self._records(RunStart, RunEnd)), None)
        return last if isinstance(last, RunEnd) else None

    @property
    def steps(self) -> int:
        """Steps that the run took, as far as is known."""
        last = max((row[1] for row in self._rows("id, last", "bucket") if isinstance(row[1], int)), default=-1)
        end = self.end
        return max(last + 1, end.steps if end else 0)

    @property
    def lost(self) -> int:
        """Records that the run could not write."""
        rows = self._rows("rowid, value", "meta", "key = 'lost'")
        return rows[0][1] if rows and isinstance(rows[0][1], int) else 0

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the optimizers or boosters that gave metrics."""
        return tuple(str(row[1]) for row in self._rows("id, name", "source"))

    def findings(self) -> list[Finding]:
        """All findings, in order."""
        return self._records(Finding)

    def interventions(self) -> list[Intervention]:
        """All interventions, in order."""
        return self._records(Intervention)

    def sections(self) -> list[Section]:
        """All report sections, in order."""
        return self._records(Section)

    def scalars(self, source: str = "") -> tuple[str, ...]:
        """Names of the scalars of a source."""
        return tuple(self._columns(source)[1].scalars)

    def vector_names(self, source: str = "") -> tuple[str, ...]:
        """Names of the vectors of a source."""
        return tuple(self._columns(source)[1].segments)

    def metrics(self, name: str, source: str = "") -> Curve:
        """A scalar over the steps; empty where there is none of that name."""
        number, columns = self._columns(source)
        at = columns.scalars.get(name)
        buckets = self._buckets(
            number, NUMBERS.replace("vector_", "NULL AS v"), np.array([] if at is None else [at]), _NO
        )
        cells = buckets.scalars
        seen = ((cells.finite > 0) | (cells.bad > 0)).any(axis=1)
        mean, low, high = (part[seen].reshape(-1) for part in (cells.mean, cells.low, cells.high))
        bad = cells.bad[seen].reshape(-1).astype(np.int64)
        return Curve(buckets.first[seen], mean, low, high, bad, buckets.last[seen], buckets.time[seen])

    def vectors(self, name: str, source: str = "") -> Vectors:
        """A vector over the steps; empty where there is none of that name."""
        number, columns = self._columns(source)
        at = columns.place(name) if name in columns.segments else _NO
        buckets = self._buckets(number, NUMBERS.replace("scalar_", "NULL AS s"), _NO, at)
        cells = buckets.vectors
        seen = ((cells.finite > 0) | (cells.bad > 0)).any(axis=1)
        names = self._entry_names(name, source, len(at))
        return Vectors(
            buckets.first[seen], cells.mean[seen], cells.high[seen], names, cells.bad[seen], buckets.last[seen]
        )

    def _open(self) -> sqlite3.Connection:
        where = self.file.absolute().as_uri() + "?mode=ro"
        for query in (where, where + "&immutable=1"):  # the latter where the directory can't be written to
            db = sqlite3.connect(query, uri=True, timeout=5.0, isolation_level=None, check_same_thread=False)
            db.text_factory = to_text
            try:
                if check_version(db, self.file):
                    return db
                self._note("the file holds no history yet")
                break
            except RunDirectoryError:
                db.close()
                raise
            except sqlite3.OperationalError as error:
                self._note(str(error))
            except sqlite3.DatabaseError as error:
                self._note(str(error))
                if _opens_shortened(db):
                    return db
            db.close()
        return _nothing()

    def _note(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)

    def _rows(self, columns: str, table: str, where: str = "1", args: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """Rows in the order of the row id, which is the first of the columns."""
        sql = f"SELECT {columns} FROM {table} NOT INDEXED WHERE rowid BETWEEN ? AND ? AND {where} ORDER BY rowid"
        try:
            return self._db.execute(sql, (0, 2**62, *args)).fetchall()
        except sqlite3.DatabaseError as error:
            self._note(f"table {table}: {error}")
            return sorted(self._salvage(table, sql, args), key=lambda row: int(row[0]))

    def _salvage(self, table: str, sql: str, args: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        """Halve the range of row ids until what can be read and what can't are told apart."""
        ranges, failures = deque([(0, self._last_id(table))]), 0
        while ranges and failures < _SALVAGE:  # breadth first: what is found late is small
            low, high = ranges.popleft()
            try:
                yield from self._db.execute(sql, (low, high, *args)).fetchall()
            except sqlite3.DatabaseError:
                failures += 1
                if low < high:
                    middle = (low + high) // 2
                    ranges += [(low, middle), (middle + 1, high)]

    def _last_id(self, table: str) -> int:
        for sql in (f"SELECT seq FROM sqlite_sequence WHERE name = '{table}'", f"SELECT max(rowid) FROM {table}"):
            with suppress(sqlite3.DatabaseError):
                row = self._db.execute(sql).fetchone()
                if row and isinstance(row[0], int):
                    return row[0]
        return _SALVAGE

    def _records(self, *kinds: type[T]) -> list[T]:
        found: list[T] = []
        names = ", ".join(repr(name) for name, kind in records.TYPES.items() if kind in kinds)
        for number, text in self._rows("id, json", "record", f"type IN ({names})"):
            try:
                record = records.loads(text)
            except (ValueError, TypeError, RecursionError):
                self._note(f"record {number} is damaged")
                continue
            if type(record) in kinds:
                found.append(cast(T, record))
        return found

    def _columns(self, source: str) -> tuple[int, Columns]:
        """Number of a source, and where its rows hold what."""
        number = next((row[0] for row in self._rows("id, name", "source") if row[1] == source), -1)
        columns = Columns()
        for expected, row in enumerate(self._rows("id, source, name, kind, start, length", "series"), start=1):
            key, owner, name, kind, start, length = row
            if key != expected or kind not in ("scalar", "vector") or not _lengths(start, length):
                self._note(f"table series: damaged at {expected}; what follows can't be told apart")
                break
            if owner == number:
                columns.add(str(name), kind, start, length)
        return number, columns

    def _buckets(self, source: int, sql: str, scalars: npt.NDArray[Any], vectors: npt.NDArray[Any]) -> Buckets:
        rows = [row[1:] for row in self._rows(f"id, {sql}", "bucket", "source = ?", (source,))]
        rows.sort(key=lambda row: row[0] if isinstance(row[0], int) else 0)
        try:
            return Buckets.parse(rows, scalars, vectors)
        except _DAMAGE:
            return Buckets.parse([row for row in rows if self._is_whole(row, scalars, vectors)], scalars, vectors)

    def _is_whole(self, row: tuple[Any, ...], scalars: npt.NDArray[Any], vectors: npt.NDArray[Any]) -> bool:
        try:
            Buckets.parse([row], scalars, vectors)
        except _DAMAGE:
            self._note(f"the metrics of step {row[0]!r:.20} are damaged")
            return False
        return True

    def _entry_names(self, vector: str, source: str, length: int) -> tuple[str, ...]:
        told = [r.names for r in self._records(Names) if r.vector == vector and r.source == source]
        names = told[-1][:length] if told else ()
        return names + tuple(f"[{i}]" for i in range(len(names), length))


def _lengths(*values: Any) -> bool:
    return all(isinstance(value, int) and 0 <= value <= MAX_VECTOR for value in values)


def _opens_shortened(db: sqlite3.Connection) -> bool:
    """Whether what is left of a file that was cut off can be opened: without sqlite's check of its own schema."""
    try:
        db.execute("PRAGMA writable_schema = ON")
        return bool(db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0])
    except sqlite3.DatabaseError:
        return False


def _nothing() -> sqlite3.Connection:
    db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    for statement in TABLES:
        db.execute(statement)
    return db
