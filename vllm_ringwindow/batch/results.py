# SPDX-License-Identifier: Apache-2.0
"""A job's output folder: which rows are there, and what is added.

``job.json`` says which job it is. ``results.jsonl.partial`` holds finished rows, and
becomes ``results.jsonl`` or ``results.parquet`` at the end.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_ringwindow.batch.rows import (
    ADDED,
    Answer,
    JobError,
    JobFailed,
    parquet_schema,
    result_line,
)


@contextmanager
def _writing(path: Path, kind: type[JobError] = JobFailed) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise kind(f"{path}: {error.strerror or error}") from error


class Results:
    """Finished rows of one job; this process alone adds to them.

    Args:
        output: a folder, made if there is none.
        identity: as JSON; the same for every run of this job.
        files: the input.
        keep_order: give JSONL the input's order at the end; Parquet has it anyway.

    Raises:
        JobError: the folder is another job's, or another run is writing to it.
    """

    def __init__(
        self,
        output: Path,
        identity: dict[str, Any],
        files: list[Path],
        *,
        keep_order: bool = False,
    ) -> None:
        self.files = files
        self.keep_order = keep_order
        self.parquet = files[0].suffix == ".parquet"
        name = "results.parquet" if self.parquet else "results.jsonl"
        self.final = output / name
        self.partial = output / "results.jsonl.partial"
        self.done: set[int] = set()
        self.errors: dict[int, str] = {}
        if self.parquet:
            self.schema = parquet_schema(files)
        with _writing(output, JobError):
            output.mkdir(parents=True, exist_ok=True)
            self._lock = (output / "job.json").open("a+")
        try:
            with _writing(output, JobError):
                self._identify(json.loads(json.dumps(identity)))
                for line in self._lines():
                    self._note(line)
        except JobError:
            self.close()
            raise

    @property
    def finished(self) -> bool:
        return self.final.exists()

    def _identify(self, identity: dict[str, Any]) -> None:
        folder = self.final.parent
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JobError(f"{folder}: another run is writing to it") from None
        some = self.final.exists() or self.partial.exists()
        self._lock.seek(0)
        text = self._lock.read()
        if some and not text:
            raise JobError(f"{folder} holds results without a job.json")
        try:
            before = json.loads(text or "{}")
        except ValueError:
            raise JobError(
                f"{folder}/job.json is damaged; name another folder"
            ) from None
        known = before if isinstance(before, dict) else {}
        if not some and (not text or known.keys() == identity.keys()):
            # An engine that could not start is no reason to name another folder.
            self._lock.truncate(0)
            self._lock.write(json.dumps(identity, indent=1) + "\n")
            self._lock.flush()
            os.fsync(self._lock.fileno())
        elif before != identity:
            differs = [key for key in identity if known.get(key) != identity[key]]
            raise JobError(
                f"{folder} holds the results of another job (differs in: "
                f"{', '.join(differs)}); name another folder"
            )

    def close(self) -> None:
        """Let other runs write."""
        self._lock.close()

    def _note(self, line: dict[str, Any]) -> None:
        self.done.add(line["row"])
        if (error := line["error"]) is not None:
            text = error["message"] if isinstance(error, dict) else error
            self.errors[line["row"]] = text

    def _lines(self) -> Iterator[dict[str, Any]]:
        """Whole lines only: the last one may have been cut off by a kill."""
        if self.finished and self.parquet:
            import pyarrow as pa
            import pyarrow.parquet as pq

            columns = ["row", "error"]
            try:
                yield from pq.read_table(self.final, columns=columns).to_pylist()
            except pa.ArrowInvalid as error:
                raise JobError(f"{self.final}: {error}") from None
            return
        file = self.final if self.finished else self.partial
        if not file.exists():
            return
        good = 0
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if file == self.partial and not line.endswith(b"\n"):
                    break
                good += len(line)
                try:
                    found = json.loads(line)
                    found["row"], found["error"]
                except (ValueError, KeyError, TypeError):
                    raise JobError(f"{file}: line {number} is damaged") from None
                yield found
        if good != file.stat().st_size:
            os.truncate(file, good)

    def append(self, answers: Sequence[Answer]) -> list[Answer]:
        """Write rows that are not there yet; returns those."""
        new = [answer for answer in answers if answer.row not in self.done]
        lines = [result_line(answer, columns=self.parquet) for answer in new]
        with _writing(self.partial), self.partial.open("a") as out:
            for line in lines:
                out.write(json.dumps(line, ensure_ascii=True) + "\n")
            out.flush()
            os.fsync(out.fileno())
        for line in lines:
            self._note(line)
        return new

    def finish(self) -> None:
        """Every row is there: give the file its name, and its order."""
        with _writing(self.final):
            if self.parquet:
                if not self.finished:
                    self._write_parquet()
                self.partial.unlink(missing_ok=True)
                return
            if not self.finished:
                self.partial.touch()
            if self.keep_order:
                self._sort(self.final if self.finished else self.partial)
            if not self.finished:
                os.replace(self.partial, self.final)

    def _sort(self, file: Path) -> None:
        places: list[tuple[int, int]] = []
        offset = 0
        with file.open("rb") as lines:
            for line in lines:
                places.append((json.loads(line)["row"], offset))
                offset += len(line)
        if places == sorted(places):
            return
        ordered = self.final.with_suffix(".ordering")
        with file.open("rb") as lines, ordered.open("wb") as out:
            for _, place in sorted(places):
                lines.seek(place)
                out.write(lines.readline())
        os.replace(ordered, file)

    def _write_parquet(self) -> None:
        """The input's columns and ours, in the input's order."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        ours = {name: pa.type_for_alias(kind) for name, kind in ADDED.items()}
        found = {line["row"]: line for line in self._lines()}
        kept = [name for name in self.schema.names if name not in ours]
        schema = pa.schema(
            [*(self.schema.field(name) for name in kept), *ours.items()],
            self.schema.metadata,
        )
        temporary = self.final.with_suffix(".writing")
        row = 0
        with pq.ParquetWriter(temporary, schema) as writer:
            for file in self.files:
                source = pq.ParquetFile(file)
                for group in range(source.metadata.num_row_groups):
                    table = source.read_row_group(group, columns=kept)
                    lines = [found[row + i] for i in range(table.num_rows)]
                    row += table.num_rows
                    for name, kind in ours.items():
                        values = pa.array([line.get(name) for line in lines], kind)
                        table = table.append_column(name, values)
                    writer.write_table(table)
        os.replace(temporary, self.final)
