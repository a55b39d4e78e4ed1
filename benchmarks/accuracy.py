# SPDX-License-Identifier: Apache-2.0
"""Teacher-forced accuracy of Gemma 3 270M on real text, far beyond the window.

Measured: the log-probability (nats) that each engine gives to every token of the text,
by ``prompt_logprobs``; from it perplexity (exp of the mean negative logprob, no unit)
and the error against transformers (mean absolute difference of logprobs, nats).
Counted: only positions after ``4W`` = 2048 tokens of context, where the ring has turned
several times. The text is read in chunks of 1024 tokens, twice the window, which the
ring attends to in staging, and of 64, which it attends to in place as it does decode.

transformers in float32 with eager attention is the reference. In float32 the engines'
perplexities must agree with it; in bfloat16 the ring may err no more than stock does.
A control, stock with a window one token short, says what the smallest mistake in the
window would look like: the ring's float32 error must be far below it.
"""

import os
import sys
from pathlib import Path

if not __package__:  # run as a file
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

# Read by vLLM at import.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gc
import itertools
import math
import warnings
from contextlib import redirect_stdout
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from transformers import AutoTokenizer
from vllm import LLM, SamplingParams

from benchmarks.common import finish, parser
from benchmarks.models import gemma3_270m, load_reference, token_prompts

W = 512  # Gemma 3 270M's window
FIRST = 4 * W  # first position that counts
BACKENDS: dict[str, dict[str, Any]] = {
    "stock": {},
    "ring": {"attention_backend": "RING"},
}
CONTROL = "stock, W - 1"
ENGINES = BACKENDS | {CONTROL: {"hf_overrides": {"sliding_window": W - 1}}}
CHUNKS = (2 * W, 64)  # tokens
PERPLEXITY_BAR = 1e-3  # relative difference to transformers, float32
ERROR_BAR = 1.1  # ring's error in bfloat16, in units of stock's
CONTROL_BAR = 0.1  # ring's error in float32, in units of the control's

Logprobs = list[torch.Tensor]  # per text, float64 [tokens after FIRST]


@torch.inference_mode()
def reference_logprobs(model_dir: Path, texts: list[list[int]]) -> Logprobs:
    """transformers; logits of 256 positions at a time, the vocabulary is large."""
    model = load_reference(model_dir)
    result = []
    for text in texts:
        hidden = model.model(torch.tensor([text]), use_cache=False).last_hidden_state
        target = torch.tensor(text[FIRST:])
        parts = []
        for states, tokens in zip(
            hidden[0, FIRST - 1 : -1].split(256), target.split(256)
        ):
            logprobs = model.lm_head(states).double().log_softmax(-1)
            parts.append(logprobs.gather(1, tokens[:, None])[:, 0])
        result.append(torch.cat(parts))
    return result


def engine_logprobs(
    model_dir: Path, texts: list[list[int]], engine: str, dtype: str, chunk: int
) -> Logprobs:
    """vLLM, one engine in this process."""
    llm = LLM(
        str(model_dir),
        dtype=dtype,
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=8192,
        max_num_seqs=1,
        max_num_batched_tokens=chunk,
        kv_cache_memory_bytes=1 << 30,
        use_tqdm_on_load=False,
        **ENGINES[engine],
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    rings = any(type(m).__name__ == "RingBlockManager" for m in managers)
    if rings != (engine == "ring"):
        raise RuntimeError(f"{engine}: rings in use: {rings}")
    params = SamplingParams(
        max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False
    )
    result = []
    for text in texts:
        prompt = {"prompt_token_ids": text}
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        found = zip(text[FIRST:], output.prompt_logprobs[FIRST:], strict=True)
        result.append(
            torch.tensor([each[token].logprob for token, each in found]).double()
        )
    llm.llm_engine.engine_core.shutdown()
    del llm, scheduler, managers
    gc.collect()
    return result


def perplexity(logprobs: Logprobs) -> float:
    return math.exp(-torch.cat(logprobs).mean().item())


def error(logprobs: Logprobs, reference: Logprobs) -> float:
    """Mean absolute difference, nats."""
    return (torch.cat(logprobs) - torch.cat(reference)).abs().mean().item()


def measure(texts: list[list[int]], model_dir: Path) -> list[dict]:
    """One row per engine and dtype."""
    reference = reference_logprobs(model_dir, texts)
    gc.collect()
    rows: list[dict] = []

    def add(engine: str, dtype: str, chunk: int, logprobs: Logprobs) -> None:
        rows.append(
            dict(
                engine=engine,
                dtype=dtype,
                chunk=chunk,
                perplexity=perplexity(logprobs),
                relative=perplexity(logprobs) / perplexity(reference) - 1,
                error=error(logprobs, reference),
                texts=len(texts),
                tokens_each=len(texts[0]),
                counted_each=len(reference[0]),
            )
        )

    add("transformers", "float32", len(texts[0]), reference)
    dtypes = ("float32", "bfloat16")
    runs = list(itertools.product(dtypes, CHUNKS, BACKENDS))
    runs.append(("float32", CHUNKS[0], CONTROL))
    for dtype, chunk, engine in track(runs, "engines", console=Console(stderr=True)):
        logprobs = engine_logprobs(model_dir, texts, engine, dtype, chunk)
        add(engine, dtype, chunk, logprobs)
    return rows


def verdicts(rows: list[dict]) -> list[tuple[bool, str]]:
    """Whether each bar is met, and the figures."""
    by = {(row["engine"], row["dtype"], row["chunk"]): row for row in rows}
    result = []
    for chunk in CHUNKS:
        for backend in BACKENDS:
            off = abs(by[backend, "float32", chunk]["relative"])
            text = f"{backend} float32 perplexity off by {off:.1e}"
            text += f", bar {PERPLEXITY_BAR} (chunks of {chunk})"
            result.append((off <= PERPLEXITY_BAR, text))
        ring, stock = (by[b, "bfloat16", chunk]["error"] for b in ("ring", "stock"))
        text = f"ring's bfloat16 error is {ring / stock:.4f} of stock's"
        text += f", bar {ERROR_BAR} (chunks of {chunk})"
        result.append((ring <= ERROR_BAR * stock, text))
        ring = by["ring", "float32", chunk]["error"]
        control = by[CONTROL, "float32", CHUNKS[0]]["error"]
        text = f"ring's float32 error is {ring / control:.4f} of the control's"
        text += f", bar {CONTROL_BAR} (chunks of {chunk})"
        result.append((ring <= CONTROL_BAR * control, text))
    return result


def main() -> int:
    options = parser("Perplexity and bfloat16 error beyond 4W, stock and ring")
    options.add_argument("--check", action="store_true", help="exit 1 on a missed bar")
    options.add_argument("--tokens", type=int, help="of each text (default 6000)")
    options.add_argument("--texts", type=int, help="how many (default 4)")
    args = options.parse_args()
    length = args.tokens or (3000 if args.quick else 6000)
    number = args.texts or (1 if args.quick else 4)
    if not FIRST < length < 8192:
        options.error(f"--tokens {length}: expected {FIRST + 1} to 8191")
    warnings.filterwarnings("ignore", category=FutureWarning)
    with redirect_stdout(sys.stderr):
        model_dir = gemma3_270m()
        tokenizer = AutoTokenizer.from_pretrained(model_dir)
        rows = measure(token_prompts([length] * number, tokenizer), model_dir)
    finish(args, "accuracy", rows, model="gemma3-270m")
    passed = True
    for ok, text in verdicts(rows):
        passed &= ok
        print(f"{'pass' if ok else 'FAIL'}: {text}", file=sys.stderr)
    return 1 if args.check and not passed else 0


if __name__ == "__main__":
    sys.exit(main())
