# SPDX-License-Identifier: Apache-2.0
"""Rows of a job: where they are in the input, what they ask for, how they are written.

A wrong row is a row with a reason. Nothing that a row holds may stop the job, or reach
an engine with a type that it does not expect (a fractional ``max_tokens`` ends vLLM's
input thread, and with it every answer).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

ROLES = ("system", "developer", "user", "assistant", "tool")
SUFFIXES = {".jsonl", ".parquet"}
URLS = {"/v1/completions": "prompt", "/v1/chat/completions": "messages"}

# Fields of OpenAI's requests that change nothing here.
IGNORED = ("model", "user", "metadata", "n", "stream")

# What a result adds to a row that is not of OpenAI's format, as Arrow types.
ADDED = {
    "row": "int64",
    "output": "string",
    "finish_reason": "string",
    "prompt_tokens": "int64",
    "completion_tokens": "int64",
    "total_tokens": "int64",
    "error": "string",
}

# A value of Parquet that JSON does not have.
NOT_JSON = "not JSON"


class JobError(Exception):
    """The job cannot be run; one line for the user."""


class JobFailed(JobError):
    """It was run and broke off; run again it goes on."""


class RowError(Exception):
    """A row cannot be answered; the reason, for its result."""


def _whole(value: Any) -> Any:
    """3.0 is 3: a column of integers with gaps is one of floats in pandas."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Int = Annotated[int, BeforeValidator(_whole), Field(ge=-(2**31), lt=2**31)]
Seed = Annotated[int, BeforeValidator(_whole), Field(ge=-(2**63), lt=2**63)]


class Sampling(BaseModel):
    """Fields of a request that mean the same to vLLM's ``SamplingParams``.

    The types alone are checked here; ``SamplingParams`` checks the values.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    temperature: float = 1
    top_p: float = 1
    top_k: Int = 0
    min_p: float = 0
    seed: Seed | None = None
    stop: str | list[str] = []
    stop_token_ids: list[Int] = []
    presence_penalty: float = 0
    frequency_penalty: float = 0
    repetition_penalty: float = 1
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    min_tokens: Int = 0
    max_tokens: Int = 16


# Columns of Parquet that a request is made of.
COLUMNS = {
    *("prompt", "messages", "custom_id", "url", "body"),
    *(*Sampling.model_fields, *ADDED),
}


def sampling(fields: dict[str, Any]) -> dict[str, Any]:
    """What of ``fields`` is given, checked; ``None`` is not given.

    Raises:
        ValueError: every field that is wrong, and why.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        return Sampling(**given).model_dump(exclude_unset=True)
    except ValidationError as error:
        wrong = {str(e["loc"][0]): e["msg"] for e in error.errors()}
        raise ValueError("; ".join(f"{k}: {v}" for k, v in wrong.items())) from None


# -- where rows are --------------------------------------------------------------------


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
        JobError: there are none, or both, or one cannot be read.
    """
    files = [path]
    try:
        if not path.exists():
            raise JobError(f"{path}: no such file")
        if path.is_dir():
            files = sorted(p for p in path.iterdir() if p.suffix in SUFFIXES)
    except OSError as error:
        raise JobError(f"{path}: {error.strerror}") from None
    kinds = {file.suffix for file in files}
    if not files or not kinds <= SUFFIXES:
        raise JobError(f"{path}: expected .jsonl or .parquet files")
    if len(kinds) > 1:
        raise JobError(f"{path}: holds both .jsonl and .parquet files; name one kind")
    for file in files:
        if not file.is_file():
            raise JobError(f"{file}: not a file")
    return files


def parquet_schema(files: list[Path]) -> Any:
    """What all of the files have: their rows go into one file of results.

    Raises:
        JobError: a file has another, or is not Parquet.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    schemas = []
    for file in files:
        try:
            schemas.append(pq.read_schema(file))
        except pa.ArrowInvalid as error:
            raise JobError(f"{file}: {error}") from None
        if not schemas[0].equals(schemas[-1]):
            differ = sorted({f.name for f in set(schemas[0]) ^ set(schemas[-1])})
            raise JobError(
                f"{file}: other columns or types than {files[0]} "
                f"({', '.join(differ) or 'their order'})"
            )
    return schemas[0]


def chunks(files: list[Path], size: int, done: set[int]) -> Iterator[Chunk]:
    """Cut the input into chunks of ``size`` rows, without those that are ``done``."""
    before = 0
    for file in files:
        cut = _parquet_chunks if file.suffix == ".parquet" else _jsonl_chunks
        first = before
        for place, count in cut(file, size):
            wanted = tuple(r for r in range(first, first + count) if r not in done)
            if wanted:
                # Ray's workers may be in another folder.
                yield Chunk(str(file.absolute()), place, first, count, wanted)
            first += count
        before = first


def _jsonl_chunks(file: Path, size: int) -> Iterator[tuple[int, int]]:
    start = offset = count = 0
    with file.open("rb") as lines:
        for line in lines:
            offset += len(line)
            count += bool(line.strip())
            if count == size:
                yield start, count
                start, count = offset, 0
    if count:
        yield start, count


def _parquet_chunks(file: Path, size: int) -> Iterator[tuple[int, int]]:
    import pyarrow.parquet as pq

    meta = pq.ParquetFile(file).metadata
    for group in range(meta.num_row_groups):
        if count := meta.row_group(group).num_rows:
            yield group, count


def read_rows(chunk: Chunk) -> list[dict[str, Any]]:
    """``row`` number and ``raw`` bytes of JSON of each wanted row of a chunk.

    Of Parquet what a request is made of: other columns may not even have a value that
    Python knows, and are the file's to the end.

    Raises:
        JobError: the file is not what it was.
    """
    wanted = [r - chunk.first_row for r in chunk.wanted]
    if chunk.path.endswith(".parquet"):
        import pyarrow.parquet as pq

        file = pq.ParquetFile(chunk.path)
        names = [name for name in file.schema_arrow.names if name in COLUMNS]
        table = file.read_row_group(chunk.place, columns=names)
        raws = [_json(table.slice(i, 1)) for i in wanted]
    else:
        texts: list[bytes] = []
        with open(chunk.path, "rb") as lines:
            lines.seek(chunk.place)
            while len(texts) < chunk.num_rows:
                if not (line := lines.readline()):
                    raise JobError(f"{chunk.path} has changed since the job began")
                if line.strip():
                    texts.append(line)
        raws = [texts[i] for i in wanted]
    return [{"row": r, "raw": raw} for r, raw in zip(chunk.wanted, raws)]


def _json(row: Any) -> bytes:
    """The only row of an Arrow table."""
    try:
        (values,) = row.to_pylist()
    except UnicodeDecodeError:
        return b"\xff"  # as little UTF-8 as the row is
    return json.dumps(
        values, default=lambda value: {NOT_JSON: type(value).__name__}
    ).encode()


# -- what a row asks for ---------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """What a row asks for: a ``prompt`` or ``messages``."""

    prompt: str | None
    messages: list[dict[str, Any]] | None
    sampling: dict[str, Any]


def parse(raw: bytes, defaults: dict[str, Any], models: tuple[str, ...]) -> Request:
    """A row's request.

    Args:
        raw: a line of JSON.
        defaults: sampling where the row says nothing.
        models: names that a row of OpenAI's format may ask for.

    Raises:
        RowError: why it cannot be answered.
    """
    row = _object(raw)
    if is_openai(row):
        url = row.get("url")
        field = URLS.get(url) if isinstance(url, str) else None
        if field is None:
            raise RowError(f"url {url!r}: expected one of {', '.join(URLS)}")
        body = row.get("body")
        if not isinstance(body, dict):
            raise RowError("body: expected an object")
        fields = _openai_sampling(body, field, models)
    else:
        body = row
        field = "messages" if row.get("messages") is not None else "prompt"
        if taken := sorted(set(ADDED) & set(row)):
            raise RowError(f"the result would overwrite: {', '.join(taken)}")
        # Other columns are the user's.
        fields = {k: v for k, v in row.items() if k in Sampling.model_fields}
    try:
        chosen = defaults | sampling(fields)
    except ValueError as error:
        raise RowError(str(error)) from None
    content = body.get(field)
    if field == "prompt":
        _check_prompt(content)
        return Request(content, None, chosen)
    return Request(None, _checked_messages(content), chosen)


def _object(raw: bytes) -> dict[str, Any]:
    try:
        row = json.loads(raw.decode().removeprefix("\ufeff"))
    except UnicodeDecodeError:
        raise RowError("not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise RowError(f"invalid JSON: {error}") from None
    if not isinstance(row, dict):
        raise RowError(f"expected an object, got {type(row).__name__}")
    return row


def is_openai(row: dict[str, Any]) -> bool:
    """Whether a row is a line of OpenAI's batch format."""
    return "body" in row or "custom_id" in row


def _openai_sampling(
    body: dict[str, Any], field: str, models: tuple[str, ...]
) -> dict[str, Any]:
    model = body.get("model")
    if model is not None and model not in models:
        raise RowError(f"model {model!r}: this job answers for {', '.join(models)}")
    if body.get("n") not in (None, 1) or body.get("stream"):
        raise RowError("not supported in a batch: n above 1, stream")
    fields = {
        k: v
        for k, v in body.items()
        if v is not None and k != field and k not in IGNORED
    }
    if "max_completion_tokens" in fields:
        fields["max_tokens"] = fields.pop("max_completion_tokens")
    if unknown := sorted(set(fields) - set(Sampling.model_fields)):
        raise RowError(f"not supported in a batch: {', '.join(unknown)}")
    return fields


def _check_prompt(prompt: Any) -> None:
    if prompt is None:
        raise RowError("has neither 'prompt' nor 'messages'")
    if not prompt and isinstance(prompt, str):
        raise RowError("empty prompt")
    _check_text(prompt, "prompt")


def _checked_messages(messages: Any) -> list[dict[str, Any]]:
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
        _check_text(message.get("content"), "content of a message")
    # Parquet gives every message what any message has, and templates ask for
    # "tool_calls is defined".
    return [{k: v for k, v in m.items() if v is not None} for m in messages]


def _check_text(text: Any, what: str) -> None:
    if not isinstance(text, str):
        kind = type(text).__name__
        if isinstance(text, dict):
            kind = text.get(NOT_JSON, kind)
        raise RowError(f"{what}: expected text, got {kind}")
    if "\0" in text:
        raise RowError(f"{what}: has NUL bytes")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RowError(f"{what}: half a surrogate pair is not text") from None


# -- what is written -------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """What an engine made of a row, or why none could."""

    row: int
    raw: bytes
    error: str | None
    text: str = ""
    finish: str = ""  # "stop" or "length"
    prompt_tokens: int = 0
    completion_tokens: int = 0


def result_line(answer: Answer, *, columns: bool = False) -> dict[str, Any]:
    """A finished row as it is written, in the input's format.

    ``columns``: of Parquet, where OpenAI's rows get the same columns as others.
    """
    error = answer.error
    try:
        row = _object(answer.raw)
    except RowError:
        row = {}
    usage = {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }
    if columns or not is_openai(row):
        return {
            **row,
            "row": answer.row,
            "output": None if error else answer.text,
            "finish_reason": None if error else answer.finish,
            **({} if error else usage),
            "error": error,
        }
    chat = row.get("url") == "/v1/chat/completions"
    text = (
        {"message": {"role": "assistant", "content": answer.text}}
        if chat
        else {"text": answer.text}
    )
    response = {
        "status_code": 200,
        "request_id": f"row-{answer.row}",
        "body": {
            "object": "chat.completion" if chat else "text_completion",
            "choices": [{"index": 0, **text, "finish_reason": answer.finish}],
            "usage": usage,
        },
    }
    return {
        "id": f"row-{answer.row}",
        "row": answer.row,
        "custom_id": row.get("custom_id"),
        "response": None if error else response,
        "error": error and {"code": "invalid_request", "message": error},
    }
