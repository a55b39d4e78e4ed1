# SPDX-License-Identifier: Apache-2.0
"""A job: what is missing of its results, asked of Ray Data's LLM processor.

The driver alone writes, as rows come; a re-run reads which rows are there and asks for
the others. So whatever is killed, no row is lost and none is there twice.
"""

import functools
import hashlib
import json
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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

# In the logs of engines.
RING_LINE = r"\] (ring: .*)"
NO_ENGINE = r"ERROR [^]]*\] (\w+(?:Error|Exception): .*)"


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
            reason = _reason(error)
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
        engine["distributed_executor_backend"] = "uni" if workers == 1 else "mp"
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


def _reason(error: BaseException) -> str:
    """The last line that says something, of what happened in a process of Ray's."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = [line for line in lines if "https://errors.pydantic.dev/" not in line]
    if len(lines) > 1 and " [type=" in lines[-1]:  # pydantic's; the option's name first
        return f"{lines[-2]}: {lines[-1].partition(' [type=')[0]}"
    return lines[-1] if lines else type(error).__name__


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


@contextmanager
def ray_of(address: str | None) -> Iterator[str]:
    """A cluster of this machine alone, or the one at ``address``; gives its logs.

    Raises:
        JobError: there is none.
    """
    import ray

    host, _, port = (address or "").rpartition(":")
    if host and port.isdigit() and "/" not in host:
        # Ray would try for minutes, and then end the process.
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except OSError as error:
            reason = error.strerror or error
            raise JobError(f"--ray-address {address}: {reason}") from None
    if address is None:
        # Engines inherit it. What they say about rings is not an error.
        os.environ["VLLM_LOGGING_LEVEL"] = "INFO"
    try:
        context = ray.init(
            address=address or "local",
            log_to_driver=False,
            logging_level=logging.ERROR,
            include_dashboard=False if address is None else None,
        )
    except (OSError, ValueError, RuntimeError) as error:
        where = f"--ray-address {address}" if address else "Ray does not start"
        raise JobError(f"{where}: {first_line(error)}") from error
    try:
        yield f"{context.address_info['session_dir']}/logs"
    finally:
        ray.shutdown()


def _on_every_node(ask: Callable[..., Any], *args: Any) -> list[tuple[str, Any]]:
    """(address, answer) of each node that is alive; one that cannot, its RayError."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = [node for node in ray.nodes() if node["Alive"]]
    task = ray.remote(num_cpus=0)(ask)
    asked = []
    for node in nodes:
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        asked.append(task.options(scheduling_strategy=there).remote(*args))
    answers: list[tuple[str, Any]] = []
    for node, ref in zip(nodes, asked):
        try:
            answer = ray.get(ref)
        except ray.exceptions.RayError as error:
            answer = error
        answers.append((node["NodeManagerAddress"], answer))
    return answers


def check_nodes() -> None:
    """Every node has the plugin, or the one that has not is named.

    Raises:
        JobError: a node cannot load it.
    """
    for address, problem in _on_every_node(_knows_the_ring):
        if problem is not None:
            reason = problem if isinstance(problem, str) else _reason(problem)
            raise JobError(f"node {address}: {reason}")


def what_engines_say(logs: str, since: float) -> tuple[str, ...]:
    """The lines about rings that engines have logged, each once.

    Args:
        logs: the folder of Ray's logs, the same on every node.
        since: time of day, in seconds; older files are other jobs'.
    """
    return _logged(RING_LINE, logs, since) or ("ring: not a word in the engines' logs",)


def why_no_engine(logs: str, since: float) -> str | None:
    """The last exception that an engine's core has logged."""
    found = _logged(NO_ENGINE, logs, since)
    return found[-1] if found else None


def _logged(pattern: str, logs: str, since: float) -> tuple[str, ...]:
    found: list[str] = []
    for _, lines in _on_every_node(_matches, pattern, logs, since):
        found += lines if isinstance(lines, list) else []  # the node is gone
    return tuple(dict.fromkeys(found))


def _matches(pattern: str, logs: str, since: float) -> list[str]:
    found = []
    for file in sorted(Path(logs).glob("worker-*")):
        if file.stat().st_mtime >= since:
            found += re.findall(pattern, file.read_text(errors="replace"))
    return found


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
