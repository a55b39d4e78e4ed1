# SPDX-License-Identifier: Apache-2.0
"""Offline jobs of any size: rows of a file through vLLM engines, by Ray Data.

Ray Data's LLM processor owns the engines; here is what surrounds it: rows that know
their number, rows that are wrong without stopping the job, and a result that is exact
whatever was killed. The driver alone writes, one line per finished row, to
``results.jsonl.partial``; a re-run reads which rows are there and asks for the others.
"""

import functools
import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool")
URLS = {"/v1/completions": "prompt", "/v1/chat/completions": "messages"}

# Fields of a request that mean the same to SamplingParams.
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
    "min_tokens",
    "max_tokens",
)
# Fields that change nothing here.
IGNORED = ("model", "user", "metadata", "n", "stream")


class JobError(Exception):
    """The job cannot be run; one line for the user."""


class RowError(Exception):
    """A row cannot be answered; the reason, for its result."""


# -- rows ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of one input file; what is asked for at a time.

    ``place``: a byte offset in JSONL, a row group's number in Parquet. ``wanted``: row
    numbers of the whole input, those already answered left out.
    """

    path: str
    place: int
    first_row: int
    num_rows: int
    wanted: tuple[int, ...]


def input_files(path: Path) -> list[Path]:
    """The file itself, or a directory's JSONL or Parquet files in order of name.

    Raises:
        JobError: there are none, or both.
    """
    if not path.exists():
        raise JobError(f"{path}: no such file")
    if path.is_file():
        files = [path]
    else:
        files = sorted(p for p in path.iterdir() if p.suffix in (".jsonl", ".parquet"))
    kinds = {file.suffix for file in files}
    if not files or not kinds <= {".jsonl", ".parquet"}:
        raise JobError(f"{path}: expected .jsonl or .parquet files")
    if len(kinds) > 1:
        raise JobError(f"{path}: holds both .jsonl and .parquet files; name one kind")
    return files


def chunks(files: list[Path], size: int, done: set[int]) -> Iterator[Chunk]:
    """Cut the input into chunks of ``size`` rows, without those that are ``done``."""
    row = 0
    for file in files:
        cut = _parquet_chunks if file.suffix == ".parquet" else _jsonl_chunks
        for place, first, count in cut(file, size):
            first += row
            wanted = tuple(r for r in range(first, first + count) if r not in done)
            if wanted:
                yield Chunk(str(file), place, first, count, wanted)
            last = first + count
        row = last if file.stat().st_size else row


def _jsonl_chunks(file: Path, size: int) -> Iterator[tuple[int, int, int]]:
    start = offset = first = count = 0
    with file.open("rb") as lines:
        for line in lines:
            offset += len(line)
            count += 1
            if count == size:
                yield start, first, count
                start, first, count = offset, first + count, 0
    if count:
        yield start, first, count


def _parquet_chunks(file: Path, size: int) -> Iterator[tuple[int, int, int]]:
    import pyarrow.parquet as pq

    first = 0
    meta = pq.ParquetFile(file).metadata
    for group in range(meta.num_row_groups):
        count = meta.row_group(group).num_rows
        yield group, first, count
        first += count


def read_rows(chunk: Chunk) -> list[dict[str, Any]]:
    """``row`` number and ``raw`` JSON text of each wanted row of a chunk."""
    if chunk.path.endswith(".parquet"):
        import pyarrow.parquet as pq

        table = pq.ParquetFile(chunk.path).read_row_group(chunk.place)
        texts = [json.dumps(row, default=str) for row in table.to_pylist()]
    else:
        with open(chunk.path, "rb") as lines:
            lines.seek(chunk.place)
            texts = [
                lines.readline().decode("utf-8", "surrogateescape")
                for _ in range(chunk.num_rows)
            ]
    return [{"row": r, "raw": texts[r - chunk.first_row]} for r in chunk.wanted]


# -- one row's request -----------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """What a row asks for."""

    prompt: str | None
    messages: list[dict[str, Any]] | None
    sampling: dict[str, Any]


def parse(raw: str, defaults: dict[str, Any]) -> tuple[dict[str, Any], Request]:
    """The row itself, and its request.

    Raises:
        RowError: why it cannot be answered.
    """
    try:
        raw.encode()
    except UnicodeEncodeError:
        raise RowError("not UTF-8") from None
    try:
        row = json.loads(raw)
    except ValueError as error:
        raise RowError(f"invalid JSON: {error}") from None
    if not isinstance(row, dict):
        raise RowError(f"expected an object, got {type(row).__name__}")
    if "body" in row or "custom_id" in row:
        field = URLS.get(row.get("url", ""))
        if field is None:
            raise RowError(f"url {row.get('url')!r}: expected one of {', '.join(URLS)}")
        body = row.get("body")
        if not isinstance(body, dict):
            raise RowError("body: expected an object")
        fields = {k: v for k, v in body.items() if k != field}
        unknown = [k for k in fields if k not in (*SAMPLING, *IGNORED)]
        if "max_completion_tokens" in unknown:
            unknown.remove("max_completion_tokens")
            fields["max_tokens"] = fields.pop("max_completion_tokens")
        if unknown:
            raise RowError(f"not supported in a batch: {', '.join(sorted(unknown))}")
        if fields.get("n") not in (None, 1) or fields.get("stream"):
            raise RowError("not supported in a batch: n above 1, stream")
    else:
        body = row
        field = "messages" if row.get("messages") is not None else "prompt"
        fields = row
    sampling = defaults | {k: fields[k] for k in SAMPLING if fields.get(k) is not None}
    content = body.get(field)
    if field == "prompt":
        _check_prompt(content)
        return row, Request(content, None, sampling)
    _check_messages(content)
    return row, Request(None, content, sampling)


def _check_prompt(prompt: Any) -> None:
    if prompt is None:
        raise RowError("has neither 'prompt' nor 'messages'")
    if not isinstance(prompt, str):
        raise RowError(f"prompt: expected text, got {type(prompt).__name__}")
    if not prompt:
        raise RowError("empty prompt")
    if "\0" in prompt:
        raise RowError("NUL bytes in the prompt")


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise RowError("messages: expected a list of at least one message")
    for message in messages:
        if not isinstance(message, dict):
            raise RowError("messages: expected objects with 'role' and 'content'")
        if message.get("role") not in ROLES:
            raise RowError(
                f"unknown role {message.get('role')!r}: expected one of "
                f"{', '.join(ROLES)}"
            )
        content = message.get("content")
        if not isinstance(content, str):
            raise RowError("content of a message: expected text")
        if "\0" in content:
            raise RowError("NUL bytes in a message")


@functools.lru_cache(maxsize=1)
def _tokenizer(model: str, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)


def prepare(
    row: dict[str, Any],
    *,
    model: str,
    defaults: dict[str, Any],
    chat_template: str | None,
    trust_remote_code: bool,
) -> dict[str, Any]:
    """A row for Ray Data's vLLM stage; a wrong one with an empty prompt.

    The stage refuses an empty prompt at once, and carries ``error`` on.
    """
    result = row | {"prompt": "", "sampling_params": {}, "error": ""}
    try:
        _, request = parse(row["raw"], defaults)
        result["sampling_params"] = request.sampling
        if request.prompt is not None:
            result["prompt"] = request.prompt
        else:
            tokenizer = _tokenizer(model, trust_remote_code)
            if not (chat_template or tokenizer.chat_template):
                raise RowError("the model has no chat template; give --chat-template")
            try:
                result["prompt"] = tokenizer.apply_chat_template(
                    request.messages,
                    chat_template=chat_template,
                    tokenize=False,
                    add_generation_prompt=True,
                )
            except Exception as error:  # a template raises what it likes
                raise RowError(f"chat template: {error}") from None
            result["tokenized_prompt"] = tokenizer(
                result["prompt"], add_special_tokens=False
            ).input_ids
        return result
    except RowError as error:
        return result | {"error": str(error)}


def result_line(answer: dict[str, Any]) -> dict[str, Any]:
    """A finished row as it is written, in the input's format.

    Args:
        answer: ``row``, ``raw``, ``error``, and the engine's ``text``, ``finish`` and
            token counts.
    """
    error = answer["error"] or None
    try:
        row = json.loads(answer["raw"])
        if not isinstance(row, dict):
            row = {}
    except ValueError:
        row = {}
    usage = {
        "prompt_tokens": answer["prompt_tokens"],
        "completion_tokens": answer["completion_tokens"],
        "total_tokens": answer["prompt_tokens"] + answer["completion_tokens"],
    }
    if "body" in row or "custom_id" in row:
        chat = row.get("url") == "/v1/chat/completions"
        text = (
            {"message": {"role": "assistant", "content": answer["text"]}}
            if chat
            else {"text": answer["text"]}
        )
        choice = {"index": 0, **text, "finish_reason": answer["finish"]}
        response = {
            "status_code": 200,
            "request_id": f"row-{answer['row']}",
            "body": {
                "object": "chat.completion" if chat else "text_completion",
                "choices": [choice],
                "usage": usage,
            },
        }
        return {
            "id": f"row-{answer['row']}",
            "row": answer["row"],
            "custom_id": row.get("custom_id"),
            "response": None if error else response,
            "error": error and {"code": "invalid_request", "message": error},
        }
    return {
        "row": answer["row"],
        **row,
        "output": None if error else answer["text"],
        "finish_reason": None if error else answer["finish"],
        **({} if error else usage),
        "error": error,
    }


# -- the job ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """What is run. ``engine``: options of ``EngineArgs`` as JSON, with ``model``."""

    input: Path
    output: Path
    engine: dict[str, Any]
    sampling: dict[str, Any]  # where a row does not say
    replicas: int = 1
    batch_size: int = 32
    ray_address: str | None = None
    chat_template: str | None = None
    keep_order: bool = False

    def identity(self) -> dict[str, Any]:
        """What must be the same for a re-run to go on where the last one stopped."""
        return {
            "input": [[f.name, f.stat().st_size] for f in input_files(self.input)],
            "engine": self.engine,
            "sampling": self.sampling,
            "chat_template": self.chat_template,
        }


@dataclass
class Progress:
    """How far a job is."""

    total: int
    done: int = 0
    errors: int = 0
    resumed: int = 0  # of the done, those of earlier runs
    prompt_tokens: int = 0
    output_tokens: int = 0


class Results:
    """The output folder: what is there, and what is added.

    ``job.json`` says which job it is, ``results.jsonl.partial`` holds finished rows and
    becomes ``results.jsonl`` or ``results.parquet`` at the end.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.files = input_files(job.input)
        self.parquet = self.files[0].suffix == ".parquet"
        name = "results.parquet" if self.parquet else "results.jsonl"
        self.final = job.output / name
        self.partial = job.output / "results.jsonl.partial"
        self.done: set[int] = set()
        self.errors: dict[int, str] = {}
        self._open()

    def _open(self) -> None:
        self.job.output.mkdir(parents=True, exist_ok=True)
        about = self.job.output / "job.json"
        identity = json.loads(json.dumps(self.job.identity()))
        if about.exists():
            try:
                before = json.loads(about.read_text())
            except ValueError:
                before = None
            if before != identity:
                differs = [
                    key
                    for key in identity
                    if not isinstance(before, dict) or before.get(key) != identity[key]
                ]
                raise JobError(
                    f"{self.job.output} holds the results of another job (differs in: "
                    f"{', '.join(differs)}); name another folder"
                )
        elif self.final.exists() or self.partial.exists():
            raise JobError(f"{self.job.output} holds results without a job.json")
        else:
            _write_whole(about, json.dumps(identity, indent=1))
        for line in self._lines():
            self._note(line)

    @property
    def finished(self) -> bool:
        return self.final.exists()

    def _note(self, line: dict[str, Any]) -> None:
        self.done.add(line["row"])
        if line["error"] is not None:
            error = line["error"]
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

    def append(self, answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Write rows that are not there yet; returns those."""
        new = [a for a in answers if a["row"] not in self.done]
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
            self._finish_parquet()
            self.partial.unlink()
            return
        if self.job.keep_order:
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
        os.replace(self.partial, self.final)

    def _finish_parquet(self) -> None:
        """The input's columns and ours, in the input's order."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        ours = {
            "row": pa.int64(),
            "output": pa.string(),
            "finish_reason": pa.string(),
            "prompt_tokens": pa.int64(),
            "completion_tokens": pa.int64(),
            "error": pa.string(),
        }
        found = {line["row"]: line for line in self._lines()}
        temporary = self.final.with_suffix(".writing")
        writer = None
        row = 0
        for file in self.files:
            source = pq.ParquetFile(file)
            for group in range(source.metadata.num_row_groups):
                table = source.read_row_group(group)
                table = table.drop_columns([c for c in ours if c in table.column_names])
                lines = [found[row + i] for i in range(table.num_rows)]
                row += table.num_rows
                for name, kind in ours.items():
                    values = pa.array([line.get(name) for line in lines], kind)
                    table = table.append_column(name, values)
                writer = writer or pq.ParquetWriter(temporary, table.schema)
                writer.write_table(table)
        if writer is not None:
            writer.close()
            os.replace(temporary, self.final)


def _write_whole(path: Path, text: str) -> None:
    temporary = path.with_suffix(".writing")
    temporary.write_text(text)
    os.replace(temporary, path)


def run_job(job: Job, report: Callable[[Progress], None]) -> Results:
    """Run what is missing of a job; calls ``report`` whenever rows are finished.

    Raises:
        JobError: the job or the cluster cannot run it.
    """
    results = Results(job)
    if results.finished:
        total = len(results.done)
        report(Progress(total, total, len(results.errors), total))
        return results
    todo = list(chunks(results.files, job.batch_size, results.done))
    missing = sum(len(chunk.wanted) for chunk in todo)
    progress = Progress(
        total=missing + len(results.done),
        done=len(results.done),
        errors=len(results.errors),
        resumed=len(results.done),
    )
    report(progress)
    if todo:
        for answers in _answers(job, todo):
            for answer in results.append(answers):
                progress.done += 1
                progress.errors += bool(answer["error"])
                progress.prompt_tokens += answer["prompt_tokens"]
                progress.output_tokens += answer["completion_tokens"]
            report(progress)
    if progress.done != progress.total:
        raise JobError(
            f"{progress.total - progress.done} rows have no result; run it again"
        )
    results.finish()
    return results


def _answers(job: Job, todo: list[Chunk]) -> Iterator[list[dict[str, Any]]]:
    """Finished rows, as they come, from Ray Data's LLM processor."""
    import ray
    from ray.data.llm import build_processor, vLLMEngineProcessorConfig

    start_ray(job.ray_address)
    check_nodes()
    context = ray.data.DataContext.get_current()
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    logging.getLogger("ray.llm").setLevel(logging.ERROR)
    context.enable_progress_bars = False
    context.enable_rich_progress_bars = False
    engine = {k: v for k, v in job.engine.items() if k != "model"}
    on_gpus = ray.cluster_resources().get("GPU", 0) > 0
    tensor = engine.get("tensor_parallel_size", 1)
    if not on_gpus:
        engine["distributed_executor_backend"] = "uni" if tensor == 1 else "mp"
    model = job.engine["model"]
    config = vLLMEngineProcessorConfig(
        model_source=model,
        engine_kwargs=engine,
        batch_size=job.batch_size,
        concurrency=(job.replicas, job.replicas),
        # Where there is no GPU the stage would wait for one.
        placement_group_config=None if on_gpus else {"bundle_per_worker": {"CPU": 1}},
        should_continue_on_error=True,
        chat_template_stage=False,
        tokenize_stage=False,
        detokenize_stage=False,
        prepare_multimodal_stage=False,
        log_engine_metrics=False,
    )
    processor = build_processor(
        config,
        preprocess=functools.partial(
            prepare,
            model=model,
            defaults=job.sampling,
            chat_template=job.chat_template,
            trust_remote_code=bool(engine.get("trust_remote_code")),
        ),
        postprocess=_answer,
    )
    parts = ray.data.from_items(
        [{"chunk": chunk.__dict__} for chunk in todo], override_num_blocks=len(todo)
    )
    rows = parts.flat_map(_read)
    for batch in processor(rows).iter_batches(batch_size=None, batch_format="pyarrow"):
        # Rows with an error come as they are: the processor does not postprocess them.
        yield [
            row if row.get("completion_tokens") is not None else _answer(row)
            for row in batch.to_pylist()
        ]


def _read(item: dict[str, Any]) -> list[dict[str, Any]]:
    return read_rows(Chunk(**item["chunk"]))


def _answer(row: dict[str, Any]) -> dict[str, Any]:
    """What of the stage's output is kept."""
    error = row.get("error") or row["__inference_error__"]
    made = int(row.get("num_generated_tokens") or 0)
    most = (row.get("sampling_params") or {}).get("max_tokens", 16)
    return {
        "row": row["row"],
        "raw": row["raw"],
        "error": error,
        "text": "" if error else row["generated_text"],
        "finish": "length" if made >= most else "stop",
        "prompt_tokens": int(row.get("num_input_tokens") or 0),
        "completion_tokens": made,
    }


def start_ray(address: str | None) -> None:
    """A cluster of this machine alone, or the one at ``address``.

    Raises:
        JobError: there is none.
    """
    import socket

    import ray

    if ray.is_initialized():
        return
    host, _, port = (address or "").rpartition(":")
    if host and port.isdigit() and "/" not in host:
        # Ray would try for minutes, and then end the process.
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except OSError as error:
            raise JobError(f"--ray-address {address}: {error.strerror}") from None
    try:
        ray.init(
            address=address or "local",
            log_to_driver=False,
            logging_level=logging.ERROR,
            include_dashboard=False if address is None else None,
        )
    except (ConnectionError, ValueError, TimeoutError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise JobError(f"--ray-address {address}: {reason}") from error


def check_nodes() -> None:
    """Every node has the plugin, or the one that has not is named.

    Raises:
        JobError: a node cannot load it.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = [node for node in ray.nodes() if node["Alive"]]
    ask = ray.remote(num_cpus=0)(_knows_the_ring)
    asked = {}
    for node in nodes:
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        asked[node["NodeManagerAddress"]] = ask.options(
            scheduling_strategy=there
        ).remote()
    for address, answer in asked.items():
        if (problem := ray.get(answer)) is not None:
            raise JobError(f"node {address}: {problem}")


def _knows_the_ring() -> str | None:
    """Runs on a node: why it could not run an engine with rings, or None."""
    import importlib.metadata

    group = importlib.metadata.entry_points(group="vllm.general_plugins")
    if not any(e.name == "ringwindow" for e in group):
        return "vllm-ringwindow is not installed there"
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "ringwindow" not in allowed.split(","):
        return f"VLLM_PLUGINS={allowed!r} there leaves out 'ringwindow'"
    return None
