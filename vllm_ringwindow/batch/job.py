# SPDX-License-Identifier: Apache-2.0
"""A job: what is missing of its results, asked of Ray Data's LLM processor.

The driver alone writes, as rows come; a re-run reads which rows are there and asks for
the others. So whatever is killed, no row is lost and none is there twice.
"""

import functools
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_ringwindow.batch.cluster import (
    check_nodes,
    last_line,
    ray_of,
    what_engines_say,
    why_no_engine,
)
from vllm_ringwindow.batch.results import Results
from vllm_ringwindow.batch.rows import (
    Answer,
    Chunk,
    JobError,
    JobFailed,
    Request,
    RowError,
    chunks,
    input_files,
    parse,
    read_rows,
)
from vllm_ringwindow.cli.common import first_line

# What Ray counts, not what is used: where every CPU has an engine, rows must still be
# read beside it.
ENGINE_CPUS = 0.75
TASK = {"num_cpus": 0.1, "concurrency": 2}


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
        digests = []
        for path in input_files(self.input):
            try:
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "blake2b").hexdigest()
            except OSError as error:
                raise JobError(f"{path}: {error.strerror}") from None
            digests.append([path.name, digest[:32]])
        return {
            "input": digests,
            "engine": self.engine,
            "sampling": self.sampling,
            "chat_template": self.chat_template,
        }

    def models(self) -> tuple[str, ...]:
        """Names that a row may ask for, as ``vllm serve`` takes them."""
        names = self.engine.get("served_model_name") or self.engine["model"]
        return (names,) if isinstance(names, str) else tuple(names)


@dataclass
class Progress:
    """How far a job is."""

    total: int
    done: int = 0
    errors: int = 0
    resumed: int = 0  # of the done, those of earlier runs
    prompt_tokens: int = 0
    output_tokens: int = 0
    engines: tuple[str, ...] = ()  # what they logged about rings


def run_job(job: Job, report: Callable[[Progress], None]) -> Results:
    """Run what is missing of a job; calls ``report`` whenever rows are finished.

    Raises:
        JobError: the job or the cluster cannot run it.
    """
    files = input_files(job.input)
    if job.output.resolve() == job.input.resolve():
        raise JobError(f"{job.output} is the input; name another folder")
    results = Results(job.output, job.identity(), files, keep_order=job.keep_order)
    try:
        _run(job, results, report)
    finally:
        results.close()
    return results


def _run(job: Job, results: Results, report: Callable[[Progress], None]) -> None:
    done = len(results.done)
    progress = Progress(done, done, len(results.errors), done)
    if results.finished:
        results.finish()  # in the order that is asked for now
        report(progress)
        return
    todo = list(chunks(list(results.files), job.batch_size, results.done))
    progress.total += sum(len(chunk.wanted) for chunk in todo)
    report(progress)
    if todo:
        for answers in _answers(job, todo, progress):
            for answer in results.append(answers):
                progress.done += 1
                progress.errors += bool(answer.error)
                progress.prompt_tokens += answer.prompt_tokens
                progress.output_tokens += answer.completion_tokens
            report(progress)
    if missing := progress.total - progress.done:
        raise JobFailed(f"{missing} rows have no result; run it again")
    results.finish()


def _answers(job: Job, todo: list[Chunk], progress: Progress) -> Iterator[list[Answer]]:
    """Finished rows, as they come, from Ray Data's LLM processor."""
    import ray

    started = time.time()
    max_model_len = _model_config(job.engine).max_model_len
    with ray_of(job.ray_address) as logs:
        check_nodes()
        processor = _processor(job, max_model_len)
        parts = ray.data.from_items(
            [{"chunk": asdict(chunk)} for chunk in todo], override_num_blocks=len(todo)
        )
        rows = processor(parts.flat_map(_read, **TASK))
        try:
            for batch in rows.iter_batches(batch_size=None, batch_format="pyarrow"):
                if not progress.engines:
                    progress.engines = what_engines_say(logs, started)
                # The processor leaves rows with an error as they are.
                yield [
                    Answer(**(row.get("answer") or _answer(row, max_model_len)))
                    for row in batch.to_pylist()
                ]
        except ray.exceptions.RayError as error:
            reason = last_line(error)
            if "root cause above" in reason:  # of an engine that does not start
                reason = why_no_engine(logs, started) or reason
            raise JobFailed(f"{reason} (what led to it: {logs})") from error


def _processor(job: Job, max_model_len: int) -> Any:
    """Ray Data's LLM processor around the engines of this job."""
    import ray
    from ray.data.llm import build_processor, vLLMEngineProcessorConfig

    context = ray.data.DataContext.get_current()
    for name in ("ray.data", "ray.llm"):
        # What stops the job is raised too, and told in one line.
        logging.getLogger(name).setLevel(logging.CRITICAL)
    context.enable_progress_bars = False
    context.enable_rich_progress_bars = False
    # A row has a Request in it, so Ray Data pickles rows. As Arrow columns they would
    # be given one type for all, and what a row leaves out would become NaN.
    context.enable_fallback_to_arrow_object_ext_type = True

    engine = {k: v for k, v in job.engine.items() if k != "model"}
    workers = engine.get("tensor_parallel_size", 1)
    workers *= engine.get("pipeline_parallel_size", 1)
    kind = "GPU" if ray.cluster_resources().get("GPU") else "CPU"
    if kind == "CPU":
        executor = "uni" if workers == 1 else "mp"
        engine.setdefault("distributed_executor_backend", executor)
        # Ray Data keeps half of all CPUs for the other stages: too few are left for
        # the engines, and one that has no place yet would stop the others.
        context.op_resource_reservation_enabled = False
    there = int(ray.cluster_resources().get(kind, 0))
    if job.ray_address is None and job.replicas * workers > there:
        raise JobError(
            f"--replicas {job.replicas}: needs {job.replicas * workers} {kind}s, this "
            f"machine has {there}"
        )
    config = vLLMEngineProcessorConfig(
        model_source=job.engine["model"],
        engine_kwargs=engine,
        batch_size=job.batch_size,
        concurrency=(job.replicas, job.replicas),
        # Where there is no GPU the stage would wait for one.
        placement_group_config=(
            {"bundle_per_worker": {"CPU": ENGINE_CPUS}} if kind == "CPU" else None
        ),
        should_continue_on_error=True,
        chat_template_stage=False,
        tokenize_stage=False,
        detokenize_stage=False,
        prepare_multimodal_stage=False,
        log_engine_metrics=False,
    )
    return build_processor(
        config,
        preprocess=functools.partial(prepare, job=job),
        preprocess_map_kwargs=TASK,
        postprocess=lambda row: {"answer": _answer(row, max_model_len)},
        postprocess_map_kwargs=TASK,
    )


def _read(item: dict[str, Any]) -> list[dict[str, Any]]:
    return read_rows(Chunk(**item["chunk"]))


def _model_config(engine: dict[str, Any]) -> Any:
    """What an engine would make of the model's files.

    Raises:
        JobError: it would not.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    try:
        return EngineArgs(**engine).create_model_config()
    except (ValueError, OSError) as error:
        raise JobError(first_line(error)) from error


@functools.lru_cache(maxsize=1)
def _tokenizer(engine: str) -> Any:
    """The engine's own, in a process that has no engine."""
    from vllm.tokenizers import cached_tokenizer_from_config

    return cached_tokenizer_from_config(_model_config(json.loads(engine)))


def prepare(row: dict[str, Any], *, job: Job) -> dict[str, Any]:
    """A row for Ray Data's vLLM stage; a wrong one with an empty prompt.

    The stage refuses an empty prompt at once, and carries ``error`` on.
    """
    result = row | {"prompt": "", "sampling_params": {}, "error": None, "request": None}
    try:
        request = parse(row["raw"], job.sampling, job.models())
        # What _answer() needs of it: messages may be nested too deep to be pickled.
        kept = Request(None, None, request.sampling)
        result |= {"request": kept, "sampling_params": request.sampling}
        if request.prompt is not None:
            return result | {"prompt": request.prompt}
        return result | _chat(request, job)
    except RowError as error:
        # Not None: what makes Ray Data pickle the row must be in every row.
        return result | {"request": Request("", None, {}), "error": str(error)}


def _chat(request: Request, job: Job) -> dict[str, Any]:
    tokenizer = _tokenizer(json.dumps(job.engine, sort_keys=True))
    if not (job.chat_template or getattr(tokenizer, "chat_template", None)):
        raise RowError("the model has no chat template; give --chat-template")
    try:
        text = tokenizer.apply_chat_template(
            request.messages,
            chat_template=job.chat_template,
            tokenize=False,
            add_generation_prompt=True,
        )
        # A template writes the special tokens itself.
        tokens = tokenizer(text, add_special_tokens=False).input_ids
    except Exception as error:  # a template raises what it likes
        raise RowError(f"chat template: {error}") from None
    return {"prompt": text, "tokenized_prompt": list(tokens)}


def _answer(row: dict[str, Any], max_model_len: int) -> dict[str, Any]:
    """What of the stage's output is kept.

    The stage does not say why an answer ended: one that ends with the very last token
    it may have reads "length".
    """
    error = row.get("error") or row["__inference_error__"] or None
    given = int(row.get("num_input_tokens") or 0)
    made = int(row.get("num_generated_tokens") or 0)
    most = row["request"].sampling.get("max_tokens", 16)
    answer = Answer(
        row=row["row"],
        raw=row["raw"],
        error=error,
        text="" if error else row["generated_text"],
        finish="length" if made >= most or given + made >= max_model_len else "stop",
        prompt_tokens=given,
        completion_tokens=made,
    )
    return asdict(answer)
