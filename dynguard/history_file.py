"""The file ``history.sqlite``: its tables, and how to open and understand it. See :mod:`dynguard.history`."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from dynguard.errors import RunDirectoryError

FILE = "history.sqlite"
SCHEMA = 1
NUMBERS = (
    "first, last, time, count, scalar_mean, scalar_low, scalar_high, scalar_counts,"
    " vector_mean, vector_high, vector_counts"
)
TABLES = (
    "CREATE TABLE record (id INTEGER PRIMARY KEY AUTOINCREMENT, type TEXT NOT NULL, step INTEGER, time REAL NOT NULL,"
    " json TEXT NOT NULL)",
    "CREATE TABLE source (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, width INTEGER NOT NULL)",
    "CREATE TABLE series (id INTEGER PRIMARY KEY, source INTEGER NOT NULL REFERENCES source(id), name TEXT NOT NULL,"
    " kind TEXT NOT NULL CHECK (kind IN ('scalar', 'vector')), start INTEGER NOT NULL, length INTEGER NOT NULL)",
    "CREATE TABLE bucket (id INTEGER PRIMARY KEY AUTOINCREMENT, source INTEGER NOT NULL REFERENCES source(id),"
    " first INTEGER NOT NULL, last INTEGER NOT NULL, time REAL NOT NULL, count INTEGER NOT NULL,"
    " scalar_mean BLOB NOT NULL, scalar_low BLOB, scalar_high BLOB, scalar_counts BLOB,"
    " vector_mean BLOB NOT NULL, vector_high BLOB, vector_counts BLOB)",
    "CREATE INDEX bucket_step ON bucket (source, first)",
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value)",
    f"PRAGMA user_version = {SCHEMA}",
)


def history_file(path: Path) -> Path:
    """The history of a run directory, or the path itself where it is no directory."""
    return path / FILE if path.is_dir() else path


def check_version(db: sqlite3.Connection, file: Path) -> int:
    """The schema version, 0 where the file is still empty. Raises RunDirectoryError where it is newer than SCHEMA."""
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    if version > SCHEMA:
        raise RunDirectoryError(
            f"the history {file} was written by a newer dynguard (schema {version}, this one knows up to {SCHEMA})."
            " Type: pip install -U dynguard"
        )
    return version


def to_text(data: bytes) -> str:
    """Text as it was stored, lone surrogates too; what was damaged is replaced."""
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return data.decode("utf-8", "replace")


def from_text(text: str) -> bytes:
    """What to store for a text; bind it as ``CAST(? AS TEXT)``."""
    return text.encode("utf-8", "surrogatepass")
