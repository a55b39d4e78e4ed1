# SPDX-License-Identifier: Apache-2.0
"""A job's output folder: which rows are there, and what is added.

``job.json`` says which job it is. ``results.jsonl.partial`` holds finished rows, and
becomes ``results.jsonl`` or ``results.parquet`` at the end.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vllm_ringwindow.batch.rows import Answer, JobError, result_line


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
        files: Sequence[Path],
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
        try:
            output.mkdir(parents=True, exist_ok=True)
            self._identify(output / "job.json", json.loads(json.dumps(identity)))
        except OSError as error:
            raise JobError(f"{output}: {error.strerror}") from None
        for line in self._lines():
            self._note(line)

    @property
    def finished(self) -> bool:
        return self.final.exists()

    def _identify(self, about: Path, identity: dict[str, Any]) -> None:
        if not about.exists():
            if self.final.exists() or self.partial.exists():
                raise JobError(f"{about.parent} holds results without a job.json")
            temporary = about.with_suffix(".writing")
            temporary.write_text(json.dumps(identity, indent=1) + "\n")
            os.replace(temporary, about)
        self._lock = about.open()
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JobError(f"{about.parent}: another run is writing to it") from None
        try:
            before = json.load(self._lock)
        except ValueError:
            before = None
        if before != identity:
            known = before if isinstance(before, dict) else {}
            differs = [key for key in identity if known.get(key) != identity[key]]
            raise JobError(
                f"{about.parent} holds the results of another job (differs in: "
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
            import pyarrow.parquet as pq

            columns = ["row", "error"]
            yield from pq.read_table(self.final, columns=columns).to_pylist()
            return
        file = self.final if self.finished else self.partial
        if not file.exists():
            return
        good = 0
        with file.open("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                good += len(line)
                yield json.loads(line)
        if good != file.stat().st_size:
            os.truncate(file, good)

    def append(self, answers: Sequence[Answer]) -> list[Answer]:
        """Write rows that are not there yet; returns those."""
        new = [answer for answer in answers if answer.row not in self.done]
        lines = [result_line(answer) for answer in new]
        with self.partial.open("a") as out:
            for line in lines:
                out.write(json.dumps(line, ensure_ascii=True) + "\n")
            out.flush()
            os.fsync(out.fileno())
        for line in lines:
            self._note(line)
        return new

    def finish(self) -> None:
        """Every row is there: give the file its name, and its order."""
        self.partial.touch()
        if self.parquet:
            self._write_parquet()
            self.partial.unlink()
            return
        if self.keep_order:
            self._sort()
        os.replace(self.partial, self.final)

    def _sort(self) -> None:
        places: list[tuple[int, int]] = []
        offset = 0
        with self.partial.open("rb") as lines:
            for line in lines:
                places.append((json.loads(line)["row"], offset))
                offset += len(line)
        ordered = self.final.with_suffix(".ordering")
        with self.partial.open("rb") as lines, ordered.open("wb") as out:
            for _, place in sorted(places):
                lines.seek(place)
                out.write(lines.readline())
        os.replace(ordered, self.partial)

    def _write_parquet(self) -> None:
        """The input's columns and ours, in the input's order."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        ours = {
            "row": pa.int64(),
            "output": pa.string(),
            "finish_reason": pa.string(),
            "prompt_tokens": pa.int64(),
            "completion_tokens": pa.int64(),
            "total_tokens": pa.int64(),
            "error": pa.string(),
        }
        found = {line["row"]: line for line in self._lines()}
        temporary = self.final.with_suffix(".writing")
        writer = None
        row = 0
        for file in self.files:
            source = pq.ParquetFile(file)
            schema = source.schema_arrow
            kept = [name for name in schema.names if name not in ours]
            for group in range(source.metadata.num_row_groups):
                table = source.read_row_group(group, columns=kept)
                lines = [found[row + i] for i in range(table.num_rows)]
                row += table.num_rows
                for name, kind in ours.items():
                    values = pa.array([line.get(name) for line in lines], kind)
                    table = table.append_column(name, values)
                writer = writer or pq.ParquetWriter(temporary, table.schema)
                writer.write_table(table)
        if writer is None:  # no rows
            empty = pa.table({name: pa.array([], kind) for name, kind in ours.items()})
            writer = pq.ParquetWriter(temporary, empty.schema)
        writer.close()
        os.replace(temporary, self.final)
