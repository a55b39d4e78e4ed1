# SPDX-License-Identifier: Apache-2.0
"""Offline jobs: rows that are wrong, jobs that are killed, nodes that come and go."""

import contextlib
import errno
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import BaseModel, Field, ValidationError
from vllm import SamplingParams

from benchmarks.models import gemma3_270m
from tests.harness import (
    STOCK,
    TEST_ENVIRONMENT,
    engine,
    had_rings,
    sampling_params,
    tiny_tokenizer,
    to_output,
)
from vllm_ringwindow.batch.cluster import (
    NO_ENGINE,
    RING_LINE,
    _knows_the_ring,
    _matches,
    last_line,
)
from vllm_ringwindow.batch.job import Job, prepare
from vllm_ringwindow.batch.results import Results
from vllm_ringwindow.batch.rows import (
    ADDED,
    Answer,
    Chunk,
    JobError,
    JobFailed,
    RowError,
    Sampling,
    chunks,
    input_files,
    parse,
    read_rows,
    result_line,
)
from vllm_ringwindow.cli import main

W = 64
DEFAULTS = {"temperature": 0, "max_tokens": 8}


def write_rows(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# -- rows ------------------------------------------------------------------------------

WRONG_ROWS = [
    ("{", "invalid JSON"),
    ("[1]", "expected an object, got list"),
    ("{}", "has neither 'prompt' nor 'messages'"),
    ('{"prompt": ""}', "empty prompt"),
    ('{"prompt": 7}', "prompt: expected text, got int"),
    ('{"prompt": "a\\u0000b"}', "prompt: has NUL bytes"),
    ('{"prompt": "\\ud800"}', "half a surrogate pair"),
    ('{"prompt": "x", "output": "mine"}', "would overwrite: output"),
    ('{"prompt": "x", "max_tokens": 8.5}', "max_tokens: Input should be a valid int"),
    ('{"prompt": "x", "max_tokens": 1e99}', "max_tokens"),
    ('{"prompt": "x", "top_k": true, "stop": 7}', "top_k: .*; stop: "),
    ('{"prompt": "x", "temperature": NaN}', "temperature: Input should be a finite"),
    ('{"prompt": "x", "seed": 99999999999999999999}', "seed"),
    ("[" * 100_000, "invalid JSON"),
    ('{"messages": []}', "expected a list of at least one message"),
    ('{"messages": ["hi"]}', "expected objects"),
    ('{"messages": [{"role": "wizard", "content": "x"}]}', "unknown role 'wizard'"),
    ('{"messages": [{"role": "user", "content": null}]}', "expected text"),
    ('{"messages": [{"role": "user", "content": "\\u0000"}]}', "NUL bytes"),
    ('{"custom_id": "a", "url": "/v1/embeddings", "body": {}}', "expected one of"),
    ('{"custom_id": "a", "url": "/v1/completions"}', "body: expected an object"),
    (
        '{"custom_id": "a", "url": "/v1/completions", "body": '
        '{"prompt": "x", "tools": 1}}',
        "not supported in a batch: tools",
    ),
    (
        '{"custom_id": "a", "url": "/v1/completions", "body": '
        '{"prompt": "x", "model": "other"}}',
        "model 'other': this job answers for m, served",
    ),
    ('{"custom_id": "a", "url": ["/v1/completions"], "body": {}}', "expected one of"),
    (
        '{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x", "n": 2}}',
        "n above 1",
    ),
    (b"caf\xe9", "not UTF-8"),
]
MODELS = ("m", "served")


@pytest.mark.parametrize(("raw", "reason"), WRONG_ROWS, ids=range(len(WRONG_ROWS)))
def test_a_wrong_row_says_why(raw, reason):
    raw = raw if isinstance(raw, bytes) else raw.encode()
    with pytest.raises(RowError, match=reason):
        parse(raw, DEFAULTS, MODELS)
    # It still has a result that is JSON.
    line = json.dumps(result_line(Answer(0, raw, reason)))
    assert reason in str(json.loads(line)["error"])


def test_a_rows_own_sampling_wins():
    raw = b'{"prompt": "x", "max_tokens": 3, "top_p": 0.5, "min_p": null, "tag": []}'
    request = parse(raw, DEFAULTS, MODELS)
    assert request.sampling == {"temperature": 0, "max_tokens": 3, "top_p": 0.5}
    request = parse(b'{"prompt": "x", "max_tokens": 3.0}', DEFAULTS, MODELS)
    assert repr(request.sampling["max_tokens"]) == "3"
    body = {"prompt": "x", "max_completion_tokens": 4, "model": "served", "user": "u"}
    row = {"custom_id": "a", "url": "/v1/completions", "body": body}
    request = parse(("\ufeff" + json.dumps(row) + "\r\n").encode(), DEFAULTS, MODELS)
    assert request.sampling == {"temperature": 0, "max_tokens": 4}


def test_null_is_not_given():
    """Parquet gives each row every field that any row has."""
    body = {"prompt": "x", "messages": None, "tools": None, "max_tokens": 5}
    body["max_completion_tokens"] = None
    row = {"custom_id": "a", "url": "/v1/completions", "body": body}
    request = parse(json.dumps(row).encode(), DEFAULTS, MODELS)
    assert request.sampling == {"temperature": 0, "max_tokens": 5}
    said = {"role": "user", "content": "x"}
    row = {"prompt": None, "messages": [said | {"tool_calls": None, "name": "n"}]}
    request = parse(json.dumps(row).encode(), DEFAULTS, MODELS)
    assert request.messages == [said | {"name": "n"}]


@pytest.mark.parametrize("size", [1, 3, 7, 100])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_every_row_is_in_one_chunk(tmp_path, size, kind):
    """Three files, one without a last newline; blank lines; some rows already done."""
    texts = [f"row {i} é" for i in range(10)]
    rows = [{"prompt": text} for text in texts]
    if kind == "jsonl":
        write_rows(tmp_path / "a.jsonl", rows[:6])
        text = "\n \n".join(json.dumps(row, ensure_ascii=False) for row in rows[6:])
        (tmp_path / "b.jsonl").write_text(text)
        write_rows(tmp_path / "c.jsonl", [])
    else:
        for name, part in (("a", rows[:6]), ("b", rows[6:])):
            table = pa.Table.from_pylist(part)
            pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=4)
    done = {0, 5, 9}
    found = {}
    for chunk in chunks(input_files(tmp_path), size, done):
        for row in read_rows(Chunk(**chunk.__dict__)):
            assert row["row"] not in found
            found[row["row"]] = json.loads(row["raw"])["prompt"]
    assert found == {i: text for i, text in enumerate(texts) if i not in done}


def test_an_input_cut_short_meanwhile_is_an_error(tmp_path):
    given = write_rows(tmp_path / "in.jsonl", [{"prompt": "x"}] * 4)
    (chunk,) = chunks([given], 4, set())
    write_rows(given, [{"prompt": "x"}] * 3)
    with pytest.raises(JobError, match="has changed"):
        read_rows(chunk)


def test_chunks_do_not_depend_on_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows(Path("in.jsonl"), [{"prompt": "x"}])
    (chunk,) = chunks(input_files(Path("in.jsonl")), 4, set())
    assert Path(chunk.path) == tmp_path / "in.jsonl"


def run_parquet(tmp_path, *tables: pa.Table) -> pa.Table:
    """Results of a folder of tables, as if an engine had answered."""
    (tmp_path / "in").mkdir()
    for i, table in enumerate(tables):
        pq.write_table(table, tmp_path / "in" / f"{i}.parquet", row_group_size=2)
    results = results_of(tmp_path, input=tmp_path / "in")
    for chunk in chunks(results.files, 2, set()):
        for row in read_rows(chunk):
            error = None
            try:
                parse(row["raw"], DEFAULTS, MODELS)
            except RowError as why:
                error = str(why)
            results.append([Answer(row["row"], row["raw"], error, "out", "stop")])
    results.finish()
    results.close()
    assert results_of(tmp_path, input=tmp_path / "in").finished
    return pq.read_table(results.final)


def test_parquets_columns_come_back_as_they_are(tmp_path):
    """Also those that Python cannot hold; a prompt that is not text is a wrong row."""
    broken = [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"\xffa")]
    table = pa.table(
        {
            "prompt": pa.Array.from_buffers(pa.utf8(), 2, broken),
            "late": pa.array([2**62, None], pa.timestamp("us")),
            "bytes": [b"\xff", None],
            "nothing": pa.nulls(2),
            "label": pa.array(["x", "y"]).dictionary_encode(),
            "nested": [{"a": [1, 2]}, None],
            "nan": [float("nan"), 1.0],
        }
    )
    found = run_parquet(tmp_path, table.slice(0, 0), table)
    assert found.select(table.schema.names).schema == table.schema
    assert found["late"].equals(table["late"]) and found["bytes"].equals(table["bytes"])
    assert found["error"].to_pylist() == ["not UTF-8", None]
    assert found["output"].to_pylist() == [None, "out"]


def test_parquet_of_openais_rows_has_the_answers(tmp_path):
    rows = [
        {"custom_id": str(i), "url": url, "body": {"prompt": "x", "messages": None}}
        for i, url in enumerate(("/v1/completions", "/v1/embeddings"))
    ]
    found = run_parquet(tmp_path, pa.Table.from_pylist(rows))
    assert found["custom_id"].to_pylist() == ["0", "1"]
    assert found["output"].to_pylist() == ["out", None]
    error, wrong = found["error"].to_pylist()
    assert error is None and "expected one of" in wrong


def test_wrong_parquet_is_named_before_anything_runs(tmp_path):
    raw = pa.table({"prompt": [b"bytes"]})
    assert "got bytes" in run_parquet(tmp_path, raw)["error"][0].as_py()
    pq.write_table(pa.table({"prompt": ["x"]}), tmp_path / "in" / "1.parquet")
    with pytest.raises(JobError, match=r"1.parquet: other columns .*\(prompt\)"):
        results_of(tmp_path, input=tmp_path / "in", output=tmp_path / "new")
    (tmp_path / "in" / "0.parquet").write_bytes(b"")
    with pytest.raises(JobError, match="0.parquet: "):
        results_of(tmp_path, input=tmp_path / "in", output=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def answer(row: int, raw: str, error: str | None = None) -> Answer:
    return Answer(row, raw.encode(), error, "out", "stop", 2, 1)


def test_results_have_the_inputs_format():
    line = result_line(answer(3, '{"prompt": "x", "tag": 5}'))
    assert set(line) == {"prompt", "tag", *ADDED}
    assert (line["row"], line["tag"], line["output"]) == (3, 5, "out")
    assert line["error"] is None and line["total_tokens"] == 3
    row = {"custom_id": "c", "url": "/v1/chat/completions", "body": {}}
    line = result_line(answer(4, json.dumps(row)))
    assert line["custom_id"] == "c" and line["error"] is None
    (choice,) = line["response"]["body"]["choices"]
    assert choice["message"]["content"] == "out"
    line = result_line(answer(4, json.dumps(row), error="why"))
    assert line["response"] is None and line["error"]["message"] == "why"


def results_of(tmp_path, rows=3, **fields) -> Results:
    given = tmp_path / "in.jsonl"
    if not given.exists():
        write_rows(given, [{"prompt": f"p{i}"} for i in range(rows)])
    values = dict(input=given, output=tmp_path / "out", engine={"model": "m"})
    job = Job(**(values | dict(sampling=DEFAULTS) | fields))
    files = input_files(job.input)
    return Results(job.output, job.identity(), files, keep_order=job.keep_order)


def test_a_line_cut_off_by_a_kill_is_asked_for_again(tmp_path):
    results = results_of(tmp_path)
    results.append([answer(i, json.dumps({"prompt": f"p{i}"})) for i in (2, 0)])
    results.close()
    whole = results.partial.read_bytes()
    for cut in range(len(whole)):
        results.partial.write_bytes(whole[: len(whole) - cut])
        again = results_of(tmp_path)
        again.close()
        assert again.done == ({2, 0} if cut == 0 else {2} if again.done else set())
        assert results.partial.read_bytes().endswith(b"\n") or not again.done
    results.partial.write_bytes(whole)
    again = results_of(tmp_path, keep_order=True)
    new = again.append([answer(i, json.dumps({"prompt": f"p{i}"})) for i in (0, 1, 2)])
    assert [a.row for a in new] == [1]
    again.finish()
    lines = [json.loads(line) for line in again.final.read_text().splitlines()]
    assert [line["row"] for line in lines] == [0, 1, 2]
    again.close()
    assert results_of(tmp_path, keep_order=True).finished


def test_the_order_can_be_asked_for_later(tmp_path):
    results = results_of(tmp_path)
    results.append([answer(i, "{}") for i in (2, 0, 1)])
    results.finish()
    results.close()
    assert list(by_row(results.final)) == [2, 0, 1]
    again = results_of(tmp_path, keep_order=True)
    assert again.finished
    again.finish()
    assert list(by_row(results.final)) == [0, 1, 2]


def test_damaged_files_are_named(tmp_path, monkeypatch):
    results = results_of(tmp_path)
    results.append([answer(i, "{}") for i in (0, 1)])

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as m, pytest.raises(JobFailed, match="No space left"):
        m.setattr(os, "fsync", full)
        results.append([answer(2, "{}")])
    results.close()
    first, *rest = results.partial.read_text().splitlines(keepends=True)
    results.partial.write_text(first + "garbage\n" + "".join(rest))
    with pytest.raises(JobError, match="partial: line 2 is damaged"):
        results_of(tmp_path)
    (tmp_path / "out" / "job.json").write_text("{")
    with pytest.raises(JobError, match="job.json is damaged"):
        results_of(tmp_path)


def test_another_jobs_results_are_not_added_to(tmp_path):
    first = results_of(tmp_path)
    with pytest.raises(JobError, match="another run is writing"):
        results_of(tmp_path)
    first.close()
    other = results_of(tmp_path, sampling={"max_tokens": 9})
    other.close()  # there was nothing yet
    results = results_of(tmp_path)
    results.append([answer(0, "{}")])
    results.close()
    with pytest.raises(JobError, match="another job .differs in: sampling"):
        results_of(tmp_path, sampling={"max_tokens": 9})
    (tmp_path / "in.jsonl").write_text('{"prompt": "as long"}\n' * 3)
    with pytest.raises(JobError, match="another job .differs in: input"):
        results_of(tmp_path)
    (tmp_path / "out" / "job.json").unlink()
    (tmp_path / "out" / "results.jsonl").write_text("")
    with pytest.raises(JobError, match="without a job.json"):
        results_of(tmp_path)
    (tmp_path / "out" / "results.jsonl").unlink()
    (tmp_path / "taken").write_text("")
    with pytest.raises(JobError, match="taken: File exists"):
        results_of(tmp_path, output=tmp_path / "taken")


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda p: None, "no such file"),
        (lambda p: p.mkdir(), r"expected .jsonl or .parquet"),
        (lambda p: p.write_text("x"), r"expected .jsonl or .parquet"),
        (os.mkfifo, r"expected .jsonl or .parquet"),
        (lambda p: (p / "a.jsonl").mkdir(parents=True), "a.jsonl: not a file"),
    ],
)
def test_wrong_inputs_are_named(tmp_path, make, told):
    make(tmp_path / "input")
    with pytest.raises(JobError, match=told):
        input_files(tmp_path / "input")


@pytest.mark.parametrize(
    ("allowed", "told"),
    [
        (None, None),
        ("ringwindow,other", None),
        ("other", "VLLM_PLUGINS='other' there leaves out 'ringwindow'"),
        ("", "VLLM_PLUGINS='' there leaves out 'ringwindow'"),
    ],
)
def test_a_node_says_why_it_has_no_ring(monkeypatch, allowed, told):
    if allowed is None:
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    else:
        monkeypatch.setenv("VLLM_PLUGINS", allowed)
    assert _knows_the_ring() == told
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [])
    assert _knows_the_ring() == "vllm-ringwindow is not installed there"


# -- jobs ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gemma(models):
    return tiny_tokenizer(models("gemma3", W, vocab_size=320))


OPTIONS = [
    *("--enforce-eager", "--dtype", "float32", "--block-size", "32"),
    *("--max-model-len", "512", "--kv-cache-memory-bytes", str(1 << 27)),
    *("--sampling", '{"temperature": 0, "max_tokens": 8, "ignore_eos": true}'),
]


def executable() -> str:
    return str(Path(sys.executable).parent / "vllm-ringwindow")


def command(gemma, given: Path, out: Path, *more: str) -> list[str]:
    return [
        *(executable(), "batch", str(given), str(out), "--model", str(gemma)),
        *OPTIONS,
        *more,
    ]


def environment() -> dict[str, str]:
    keep = {k: v for k, v in os.environ.items() if "MULTIPROCESSING" not in k}
    return keep | {"OMP_NUM_THREADS": "1"}


def run_batch(gemma, given: Path, out: Path, *more: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(gemma, given, out, *more),
        capture_output=True,
        text=True,
        env=environment(),
        timeout=500,
    )


def texts(count: int) -> list[str]:
    """Prompts shorter and longer than the window."""
    rng = random.Random(0)
    words = "ring window block slot prompt token batch wrap".split()
    return [
        f"{i} " + " ".join(rng.choice(words) for _ in range(rng.randint(1, 50)))
        for i in range(count)
    ]


def by_row(file: Path) -> dict[int, dict]:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    found = {line["row"]: line for line in lines}
    assert len(found) == len(lines), "a row is there twice"
    return found


def stock_answers(gemma, prompts: list[str], max_tokens: int = 8) -> list[str]:
    options = dict(skip_tokenizer_init=False, max_model_len=512)
    with engine(gemma, STOCK, **options) as e:
        params = sampling_params(max_tokens, detokenize=True, logprobs=None)
        done = e.llm.generate(prompts, params, use_tqdm=False)
        assert all(len(to_output(o).tokens) == max_tokens for o in done)
        return [o.outputs[0].text for o in done]


@pytest.mark.long
@pytest.mark.engine
def test_gemma_on_real_text_equals_stock(tmp_path):
    """``tests/data/prompts.jsonl`` on Gemma 3 270M, some prompts beyond its window."""
    model = gemma3_270m()
    given = Path(__file__).parent / "data" / "prompts.jsonl"
    rows = [json.loads(line) for line in given.read_text().splitlines()]
    options = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "4096")
    sampling = json.dumps({"temperature": 0, "max_tokens": 32})
    subprocess.run(
        [
            *(executable(), "batch", given, tmp_path / "out", "--model", model),
            *(*options, "--kv-cache-memory-bytes", str(1 << 30)),
            *("--sampling", sampling),
        ],
        check=True,
        env=environment(),
    )
    found = by_row(tmp_path / "out" / "results.jsonl")
    assert sorted(found) == list(range(len(rows)))
    more = dict(skip_tokenizer_init=False, max_model_len=4096)
    with engine(model, STOCK, **more, kv_cache_memory_bytes=1 << 30) as e:
        lengths = []
        for i, row in enumerate(rows):
            asked = row.get("body", row)
            params = SamplingParams(
                temperature=0, max_tokens=asked.get("max_tokens", 32)
            )
            (done,) = e.llm.generate([asked["prompt"]], params, use_tqdm=False)
            lengths.append(len(done.prompt_token_ids))
            line = found[i]
            answer = (
                line["response"]["body"]["choices"][0]["text"]
                if "body" in row
                else line["output"]
            )
            assert answer == done.outputs[0].text, row
    assert max(lengths) > 2 * 512 and min(lengths) < 512


def odd_rows(prompt: str) -> dict[str, str]:
    """Lines of other formats and wrong ones -> a word of what is said of them."""
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
    openai = {"custom_id": "c", "url": "/v1/completions", "body": body}
    chat = {"messages": [{"role": "user", "content": "hello"}]}
    wizard = {"messages": [{"role": "wizard", "content": "x"}]}
    return {
        json.dumps(openai): "",
        json.dumps(chat): "no chat template",
        json.dumps({"prompt": "x" * 2000}): "512",
        '{"prompt": ': "invalid JSON",
        json.dumps({"prompt": ""}): "empty prompt",
        json.dumps({"prompt": "a\0b"}): "NUL bytes",
        json.dumps(wizard): "unknown role 'wizard'",
    }


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.feature("offline jobs on Ray Data, killed and resumed", "works")
def test_killed_actor_and_killed_driver_lose_no_row(gemma, tmp_path):
    """500 rows and some odd ones; an engine's actor and later the driver die of kill
    -9; run again."""
    prompts = texts(500)
    rows = [{"prompt": prompt, "n_th": i} for i, prompt in enumerate(prompts)]
    given = write_rows(tmp_path / "in.jsonl", rows)
    odd = odd_rows(prompts[0])
    with given.open("a") as file:
        file.write("\n".join(odd))
    out = tmp_path / "out"
    process = start_batch(gemma, given, out, "--batch-size", "10")
    partial = out / "results.jsonl.partial"
    try:
        wait_until(lambda: num_lines(partial) >= 40, process)
        (victim,) = engine_actors(process.pid)
        victim.kill()
        before = num_lines(partial)
        wait_until(lambda: num_lines(partial) >= before + 120, process)
        assert victim.pid not in [p.pid for p in engine_actors(process.pid)]
    finally:
        kill(process)
    assert 0 < num_lines(partial) < 500, "the driver was killed too late"

    more = ("--batch-size", "10", "--keep-order")
    done = run_batch(gemma, given, out, *more)
    assert done.returncode == 3, done.stderr[-3000:]
    had_rings.append("ring: on rings: 5 layers" in done.stderr)
    found = by_row(out / "results.jsonl")
    assert list(found) == list(range(500 + len(odd)))
    expected = stock_answers(gemma, prompts)
    assert [found[i]["output"] for i in range(500)] == expected
    assert [found[i]["n_th"] for i in range(500)] == list(range(500))
    (choice,) = found[500]["response"]["body"]["choices"]
    assert choice["text"] == expected[0]
    for row, reason in enumerate(odd.values(), start=500):
        assert reason in str(found[row]["error"]), found[row]
        assert (found[row]["error"] is None) == (reason == "")
    assert "row 503: invalid JSON" in done.stderr

    # A finished job does nothing: no engine is started.
    again = run_batch(gemma, given, out, *more)
    assert again.returncode == 3 and "ring: " not in again.stderr
    assert by_row(out / "results.jsonl") == found


def start_batch(gemma, given: Path, out: Path, *more: str) -> subprocess.Popen:
    with (out.parent / "stderr").open("w") as errors:
        return subprocess.Popen(
            command(gemma, given, out, *more),
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=environment(),
            start_new_session=True,
        )


def kill(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_until(done: Callable[[], bool], process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 300
    while not done():
        assert process.poll() is None, "the job has ended"
        assert time.monotonic() < deadline
        time.sleep(0.1)


def num_lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def engine_actors(parent: int) -> list[psutil.Process]:
    """Ray's actors that own an engine, below a process."""
    below = psutil.Process(parent).children(recursive=True)
    found = []
    for process in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            name = " ".join(process.cmdline())
            if name.startswith("ray::") and "vLLMEngine" in name:
                found.append(process)
    return found


@pytest.mark.long
@pytest.mark.engine
@pytest.mark.feature("offline jobs on a Ray cluster, nodes that come and go", "works")
def test_nodes_come_and_go(gemma, tmp_path, monkeypatch):
    """A node without the plugin is refused; one is added, and one dies, in mid-job.

    Two replicas and one CPU at first: the second engine starts on the node that comes.
    Parquet in, Parquet out.
    """
    from ray.cluster_utils import Cluster

    def raylet(node) -> int:
        return node.all_processes["raylet"][0].process.pid

    prompts = texts(240)
    expected = stock_answers(gemma, prompts, 96)
    for name in TEST_ENVIRONMENT:  # nodes are started by this process
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    given = tmp_path / "in.parquet"
    label = [str(i) for i in range(len(prompts))]
    most = [96] * len(prompts)
    table = pa.table({"prompt": prompts, "label": label, "max_tokens": most})
    pq.write_table(table, given, row_group_size=10)
    out = tmp_path / "out"
    one = dict(num_cpus=1, include_dashboard=False, object_store_memory=1 << 28)
    cluster = Cluster(initialize_head=True, head_node_args=one)
    more = ("--ray-address", cluster.address, "--batch-size", "4", "--replicas", "2")
    more += ("--max-num-seqs", "2")  # long enough for nodes to come and go
    try:
        bare = cluster.add_node(**one, env_vars={"VLLM_PLUGINS": "other"})
        done = run_batch(gemma, given, out, *more)
        assert done.returncode == 2
        assert "VLLM_PLUGINS='other' there leaves out 'ringwindow'" in done.stderr
        cluster.remove_node(bare)

        partial = out / "results.jsonl.partial"
        process = start_batch(gemma, given, out, *more)
        try:
            wait_until(lambda: num_lines(partial) >= 20, process)
            assert len(engine_actors(raylet(cluster.head_node))) == 1
            added = cluster.add_node(**one)
            wait_until(lambda: len(engine_actors(raylet(added))) == 1, process)
            before = num_lines(partial)
            wait_until(lambda: num_lines(partial) >= before + 20, process)
            assert num_lines(partial) < len(prompts), "the node is killed too late"
            cluster.remove_node(added, allow_graceful=False)
            assert process.wait(300) == 0
            told = (tmp_path / "stderr").read_text()
            had_rings.append("ring: on rings: 5 layers" in told)
        finally:
            kill(process)
    finally:
        cluster.shutdown()
    found = pq.read_table(out / "results.parquet")
    assert found["row"].to_pylist() == list(range(len(prompts)))
    assert found["label"].to_pylist() == label
    assert found["output"].to_pylist() == expected
    assert set(found["error"].to_pylist()) == {None}


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("none.jsonl out --model MODEL", "none.jsonl: no such file"),
        ("IN out", "the following arguments are required: --model"),
        ("IN out --model nosuch/model", "outgoing traffic has been disabled"),
        ("IN out --model MODEL --bogus 1", "unrecognized arguments: --bogus 1"),
        (f"{'x' * 300}.jsonl out --model MODEL", "File name too long"),
        ("IN out --model MODEL --replicas 0", "'0' is not a number of at least 1"),
        ("IN out --model MODEL --sampling {", "--sampling"),
        ("IN out --model MODEL --sampling []", "--sampling: expected an object"),
        ('IN out --model MODEL --sampling {"heat":1}', "--sampling: heat: "),
        ('IN out --model MODEL --sampling {"top_k":0.5}', "--sampling: top_k: "),
        ('IN out --model MODEL --sampling {"top_p":7}', "--sampling: top_p must be"),
        ("IN in.jsonl --model MODEL", "in.jsonl is the input; name another"),
        ("IN out --model MODEL --max-model-len 99999999", "max_model_len (99999999)"),
        ("IN out --model MODEL --chat-template binary", "--chat-template binary: not"),
        ("IN out --model MODEL --replicas 99", "--replicas 99: needs 99 CPUs"),
        ("IN out --model MODEL --chat-template no.jinja", "--chat-template no.jinja"),
        ("IN out --model MODEL --ray-address localhost:1", "--ray-address"),
    ],
)
def test_wrong_use(gemma, tmp_path, monkeypatch, capsys, typed, told):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "in.jsonl", [{"prompt": "x"}])
    (tmp_path / "binary").write_bytes(b"\xff")
    typed = typed.replace("MODEL", str(gemma)).replace("IN", "in.jsonl")
    try:
        code = main(["batch", *typed.split()])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    written = capsys.readouterr().err
    assert told in written
    assert len(written.splitlines()) < 20  # no usage of 250 lines, no traceback


def test_sampling_fields_are_vllms():
    """Names and defaults; None and nothing given are the same to vLLM."""
    from vllm import SamplingParams

    ours = Sampling().model_dump()
    SamplingParams(**ours)
    theirs = SamplingParams()
    for name, value in ours.items():
        assert (getattr(theirs, name) or None) == (value or None), name


def test_options_of_engines_are_kept(gemma, tmp_path, monkeypatch):
    """Also a backend; a model's folder is found from other folders."""
    jobs = []

    def only_note(job, report):
        jobs.append(job)
        raise JobFailed("noted [/bold]")

    monkeypatch.setattr("vllm_ringwindow.batch.job.run_job", only_note)
    monkeypatch.chdir(gemma.parent)
    typed = ["batch", "in.jsonl", "out", "--model", gemma.name]
    assert main(typed) == 1
    assert main([*typed, "--attention-backend", "cpu_attn"]) == 1
    assert [job.engine["attention_backend"] for job in jobs] == ["RING", "cpu_attn"]
    assert jobs[0].engine["model"] == str(gemma)
    assert jobs[0].models() == (gemma.name,)


def test_the_option_that_pydantic_refuses_is_named():
    class Options(BaseModel):
        max_num_seqs: int = Field(ge=1)

    with pytest.raises(ValidationError) as error:
        Options(max_num_seqs=0)
    assert last_line(error.value).startswith("max_num_seqs: Input should be greater")


def test_why_an_engine_did_not_start_is_in_its_log(tmp_path):
    (tmp_path / "worker-1.err").write_text(
        "INFO 11-30 09:30:57 [report.py:144] ring: on rings: 5 layers\n"
        "(EngineCore pid=1) ERROR 11-30 09:30:57 [core.py:1510]     raise ValueError(\n"
        "(EngineCore pid=1) ERROR 11-30 09:30:57 [core.py:1510] ValueError: No room.\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    assert _matches(NO_ENGINE, str(tmp_path), 0) == ["ValueError: No room."]
    assert _matches(RING_LINE, str(tmp_path), 0) == ["ring: on rings: 5 layers"]
    assert _matches(RING_LINE, str(tmp_path), time.time() + 60) == []


def test_reasons_are_not_markup(gemma, tmp_path, monkeypatch, capsys):
    given = write_rows(tmp_path / "in.jsonl", [{}])
    results = results_of(tmp_path)
    results.append([answer(0, "{}", "unknown role '[/INST]'")])
    monkeypatch.setattr("vllm_ringwindow.batch.job.run_job", lambda *_: results)
    assert main(["batch", str(given), "out", "--model", str(gemma)]) == 3
    assert "row 0: unknown role '[/INST]'" in capsys.readouterr().err


def test_what_a_template_does_is_its_rows_error(gemma):
    """It may write what is no text; what it does not read may be of any depth."""
    job = Job(Path("in"), Path("out"), {"model": str(gemma)}, DEFAULTS)
    deep = "[" * 900 + "]" * 900
    message = f'{{"role": "user", "content": "x", "name": "\\ud800", "more": {deep}}}'
    row = {"row": 0, "raw": f'{{"messages": [{message}]}}'.encode()}
    templates = {
        "{{ messages[0].name }}": "chat template: ",
        "{{ 1 / 0 }}": "chat template: ",
        "{% if %}": "chat template: ",
        "{{ messages[0].content }}": None,
    }
    for template, error in templates.items():
        done = prepare(row, job=replace(job, chat_template=template))
        assert (done["error"] or "").startswith(error or ""), done
        assert bool(done["error"]) == bool(error)
        pickle.dumps(done)
