"""Storage of Dagster's events: its own SQLite files, opened once instead of for every statement.

Dagster opens a file anew for each of some two thousand statements per nightly run, with a new SQLAlchemy engine that
has no compiled statements, and closing the last connection makes SQLite checkpoint its log and delete it. That was more
than half of a nightly run in which nothing changed (docs/decisions/0017).

`dagster.yaml` names this class. Without it, everything works the same, only slower; the files are the same.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from dagster._core.storage.event_log import SqliteEventLogStorage
from sqlalchemy import event

from rowmill.core.errors import ConfigError

MAX_OPEN_FILES = 16
"""Maximum number of open files, those of the most recently used runs; a webserver reads hundreds."""

LOCK_TIMEOUT_S = 300
"""How long a statement waits for another process, or a thread for another thread."""


_CHECK_EXECUTIONS = sa.table("asset_check_executions", sa.column("run_id"))
"""Dagster's table of the results of all runs."""


def _name_run_file(run_id: str | None) -> str:
    return f"run {run_id}"


def commit_without_waiting(connection: Any, _: Any) -> None:
    """Have commits not wait for the disk where SQLite keeps a log ahead of its file, as it does for Dagster's events.

    After a loss of power such a file is whole, and may lack the last events; outputs and their manifests do not depend
    on events.
    """
    [[mode]] = connection.execute("PRAGMA journal_mode").fetchall()
    if mode == "wal":
        connection.execute("PRAGMA synchronous = NORMAL")


class KeptEventLog(SqliteEventLogStorage):
    """Dagster's event log in SQLite, with one connection to each file that threads take turns with."""

    def __init__(self, base_dir: str, inst_data: Any = None) -> None:
        """Open the log in a folder; an existing log of Dagster is used as it is."""
        self._engines: OrderedDict[str, sa.Engine] = OrderedDict()
        self._engines_lock = threading.Lock()
        self._tables: set[str] = set()
        super().__init__(base_dir, inst_data)

    @classmethod
    def config_type(cls) -> dict[str, Any]:
        """Return an empty schema: there is nothing to configure."""
        return {}

    @classmethod
    def from_config_value(cls, inst_data: Any, config_value: Mapping[str, Any]) -> "KeptEventLog":  # noqa: ARG003
        """Open the log in Dagster's default folder; raises ConfigError if DAGSTER_HOME is not set."""
        home = os.environ.get("DAGSTER_HOME")
        if not home:
            raise ConfigError(
                "DAGSTER_HOME: not set, so Dagster's events have no folder; expected the absolute path of a "
                "folder that holds dagster.yaml; set it, or start with `rowmill ui`"
            )
        return cls(str(Path(home).expanduser() / "history" / "runs"), inst_data)

    def run_connection(self, run_id: str | None = None) -> AbstractContextManager[sa.Connection]:
        """Return the shared connection to a run's file."""
        return self._lend_connection(_name_run_file(run_id), lambda: super(KeptEventLog, self).run_connection(run_id))

    def index_connection(self) -> AbstractContextManager[sa.Connection]:
        """Return the shared connection to the index across runs."""
        return self._lend_connection("index", super().index_connection)

    def has_table(self, table_name: str) -> bool:
        """Return whether the index has a table; cached, since every event asks and tables are never dropped."""
        if table_name not in self._tables and super().has_table(table_name):
            self._tables.add(table_name)
        return table_name in self._tables

    def delete_events(self, run_id: str) -> None:
        """Delete a run's events, its file and its check results; Dagster's own storage leaves the latter two behind."""
        super().delete_events(run_id)
        with self.index_connection() as connection:
            connection.execute(sa.delete(_CHECK_EXECUTIONS).where(_CHECK_EXECUTIONS.c.run_id == run_id))
        with self._engines_lock:
            kept = self._engines.pop(_name_run_file(run_id), None)
            if kept is not None:
                kept.dispose()
            # A later query for the run finds an empty log, as in any other process.
            self._initialized_dbs.discard(run_id)
            for ending in ("", "-wal", "-shm"):
                Path(f"{self.path_for_shard(run_id)}{ending}").unlink(missing_ok=True)

    def wipe(self) -> None:
        """Delete everything."""
        self._close_engines()
        super().wipe()

    def dispose(self) -> None:
        """Close every file."""
        super().dispose()
        self._close_engines()

    @contextmanager
    def _lend_connection(
        self, name: str, first: Callable[[], AbstractContextManager[sa.Connection]]
    ) -> Generator[sa.Connection, None, None]:
        """Lend the connection to a file; `first` is Dagster's own to it, which creates missing tables."""
        with self._engines_lock:
            if name not in self._engines:
                with first() as connection:
                    url = connection.engine.url
                engine = sa.create_engine(
                    url,
                    poolclass=sa.QueuePool,
                    pool_size=1,
                    max_overflow=0,
                    pool_timeout=LOCK_TIMEOUT_S,
                    # The pool gives the connection to one thread at a time.
                    connect_args={"timeout": LOCK_TIMEOUT_S, "check_same_thread": False},
                )
                event.listen(engine, "connect", commit_without_waiting)
                self._engines[name] = engine
            self._engines.move_to_end(name)
            if len(self._engines) > MAX_OPEN_FILES:
                # A connection in use is closed when it is returned.
                self._engines.popitem(last=False)[1].dispose()
            engine = self._engines[name]
        with engine.begin() as connection:
            yield connection

    def _close_engines(self) -> None:
        with self._engines_lock:
            while self._engines:
                self._engines.popitem()[1].dispose()
