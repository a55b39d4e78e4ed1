# SPDX-License-Identifier: Apache-2.0
"""The go-live checklist: a model's ring against stock, on the machine at hand.

Each engine runs in a process of its own (:func:`probe` there): stock, ring, stock
again. They answer the same prompts; :func:`compare` makes checks of the answers. Only
vLLM's own outputs and block lists are looked at, so that any attention backend will do.
"""

import contextlib
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NEW_TOKENS = 24  # generated where only the first steps matter
FAULTS = ("window", "ring", "copy-out")

Answer = dict[str, Any]


@dataclass(frozen=True)
class Check:
    """One line of the checklist."""

    name: str
    passed: bool
    found: str  # the number, as shown
    allowed: str
    hint: str = ""  # what to look at first, if it failed


@dataclass
class Verification:
    """What :func:`compare` found, and what the plots are drawn from."""

    model: str
    dtype: str
    window: int
    block_size: int
    ring_blocks: int
    tolerance: float
    decision: list[str]
    checks: list[Check] = field(default_factory=list)
    differences: list[float] = field(default_factory=list)  # by position, long prompt
    memory: dict[str, list[int]] = field(default_factory=dict)  # blocks, by step

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)


class EngineFailed(Exception):
    """An engine's process did not finish; the message is its last error."""


# -- in the engine's process -----------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """Lengths in tokens that a model's window asks for."""

    window: int
    block_size: int
    short: int  # < W
    long: int  # > W, past the ring's wrap
    chunks: tuple[int, ...]  # of the long prompt
    flat: int  # new tokens of the long generation

    @classmethod
    def of(cls, window: int, block_size: int, max_model_len: int) -> "Sizes":
        """Raises ValueError if no prompt can be longer than the window."""
        room = max_model_len - NEW_TOKENS - 1
        long = min(3 * window + block_size // 2 + 7, room)
        if long <= window + 1:
            raise ValueError(
                f"--max-model-len {max_model_len} leaves no room for a prompt longer "
                f"than the window of {window} tokens: nothing to verify"
            )
        return cls(
            window=window,
            block_size=block_size,
            short=max(window // 2, 2),
            long=long,
            chunks=tuple(
                n for n in (window // 2 + 1, window, 2 * window - 1) if 1 < n < long
            ),
            flat=min(3 * block_size, max_model_len - window - 1),
        )


def probe(job: dict[str, Any], say: Callable[[str], None]) -> Answer:
    """Start the engine that ``job`` describes and ask it everything.

    Args:
        job: ``engine`` options of ``EngineArgs``, ``ring`` whether it must have rings,
            ``text`` file or None, ``fault`` of ``FAULTS`` or None, ``brief`` for the
            logits and one generation only.
        say: told what comes next.
    """
    from vllm import LLM

    if job["fault"]:
        _break(job["fault"])
    say("starting")
    llm = LLM(**job["engine"])
    try:
        return Probe(llm, job).answers(say)
    finally:
        llm.llm_engine.engine_core.shutdown()


class Probe:
    """One engine, in this process, and what is asked of it."""

    def __init__(self, llm: Any, job: dict[str, Any]) -> None:
        from vllm_ringwindow.core.manager import RingBlockManager

        self.llm = llm
        self.brief = job["brief"]
        self.config = llm.llm_engine.vllm_config
        self.scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        self.kv = self.scheduler.kv_cache_manager
        managers = self.kv.coordinator.single_type_managers
        self.rings = [m for m in managers if isinstance(m, RingBlockManager)]
        self.windowed = [m for m in managers if hasattr(m, "sliding_window")]
        if not self.windowed:
            raise ValueError("no layer of this model has a sliding window")
        window = min(m.sliding_window for m in self.windowed)
        block_size = self.windowed[0].block_size
        self.sizes = Sizes.of(
            window, block_size, self.config.model_config.max_model_len
        )
        self.tokens, self.repeated = self._tokens(job["text"])

    def _tokens(self, text: str | None) -> tuple[list[int], bool]:
        """Enough token ids for eight long prompts; whether the text was repeated."""
        need = self.sizes.long + 8 * 97
        model = self.config.model_config
        if model.skip_tokenizer_init:
            import random

            rng = random.Random(0)
            return [
                rng.randrange(3, model.get_vocab_size()) for _ in range(need)
            ], False
        tokenizer = self.llm.get_tokenizer()
        tokens: list[int] = []
        for document in [Path(text).read_text()] if text else _built_in_text():
            tokens += tokenizer.encode(document)
            if len(tokens) >= need:
                return tokens[:need], False
        if not tokens:
            raise ValueError(f"--prompts {text}: no text in it")
        return (tokens * -(-need // len(tokens)))[:need], True

    def answers(self, say: Callable[[str], None]) -> Answer:
        sizes = self.sizes
        lengths = {"short": sizes.short, "equal": sizes.window, "long": sizes.long}
        result: Answer = {
            "rings": len(self.rings),
            "window": sizes.window,
            "block_size": sizes.block_size,
            "ring_blocks": [m.num_ring_blocks for m in self.rings],
            "dtype": str(self.config.model_config.dtype).removeprefix("torch."),
            "repeated": self.repeated,
            "decision": self._decision(),
        }
        result["logits"] = {}
        for name, length in lengths.items():
            say(f"logits of {length} tokens")
            result["logits"][name] = self.logits(self.tokens[:length])
        say("decode across the window's edge")
        edge = max(sizes.window - NEW_TOKENS // 2, 1)
        result["alone"] = self.generate([self.tokens[:edge]])
        if self.brief:
            return result
        result["chunks"] = {}
        for chunk in sizes.chunks:
            say(f"prefill in chunks of {chunk} tokens")
            with self.chunked(chunk):
                result["chunks"][chunk] = self.logits(self.tokens[: sizes.long])
        say("eight requests at once")
        step = max((sizes.long - sizes.short) // 8, 1)
        prompts = [self.tokens[97 * i :][: sizes.short + step * i] for i in range(8)]
        result["together"] = self.generate(prompts)
        say("the same prefix again")
        result["prefix"] = [self.generate([self.tokens[: sizes.long]])[0] for _ in "12"]
        say("preemption")
        result["preempted"] = self.generate(prompts[-3:], preempt_after=NEW_TOKENS // 2)
        say(f"memory over {sizes.flat} generated tokens")
        result["memory"], result["long"] = self.long_generation()
        return result

    def _decision(self) -> list[str]:
        from vllm_ringwindow.report import decision

        return decision(self.config, self.kv.kv_cache_config)

    @contextlib.contextmanager
    def chunked(self, size: int) -> Iterator[None]:
        """Prefill in chunks of ``size`` tokens, and in no others.

        Raises:
            ValueError: the scheduler did otherwise.
        """
        scheduler = self.scheduler
        budget = scheduler.max_num_scheduled_tokens
        scheduler.max_num_scheduled_tokens = size
        steps: list[int] = []
        schedule = scheduler.schedule

        def counted(*args, **kwargs):
            output = schedule(*args, **kwargs)
            steps.append(output.total_num_scheduled_tokens)
            return output

        scheduler.schedule = counted
        try:
            yield
        finally:
            del scheduler.schedule
            scheduler.max_num_scheduled_tokens = budget
        if max(steps) > size:
            raise ValueError(f"a step of {max(steps)} tokens, in chunks of {size}")

    def logits(self, prompt: Sequence[int]) -> list[float]:
        """Log-probability of each prompt token but the first."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False
        )
        (output,) = self.llm.generate(
            [{"prompt_token_ids": list(prompt)}], params, use_tqdm=False
        )
        return [
            of[token].logprob for token, of in zip(prompt, output.prompt_logprobs) if of
        ]

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        new: int = NEW_TOKENS,
        preempt_after: int | None = None,
    ) -> list[Answer]:
        """Greedy tokens, their log-probabilities and how far the second best was."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0,
            max_tokens=new,
            logprobs=2,
            ignore_eos=True,
            detokenize=False,
        )
        engine = self.llm.llm_engine
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), {"prompt_token_ids": list(prompt)}, params)
        outputs: dict[str, Any] = {}
        steps = preemptions = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    outputs[output.request_id] = output
            steps += 1
            if steps == preempt_after:
                running = list(self.scheduler.running)
                engine.reset_prefix_cache(reset_running_requests=True)
                preemptions = sum(r not in self.scheduler.running for r in running)
        return [
            self._answer(outputs[str(i)]) | {"preemptions": preemptions}
            for i in range(len(prompts))
        ]

    @staticmethod
    def _answer(output: Any) -> Answer:
        best = output.outputs[0]
        logprobs = [of[t].logprob for t, of in zip(best.token_ids, best.logprobs)]
        margins = [
            min(abs(lp - other.logprob) for k, other in of.items() if k != t)
            for t, lp, of in zip(best.token_ids, logprobs, best.logprobs)
        ]
        return {
            "tokens": list(best.token_ids),
            "logprobs": logprobs,
            "margins": margins,
            "cached": output.num_cached_tokens or 0,
            "prompt_tokens": len(output.prompt_token_ids),
        }

    def long_generation(self) -> tuple[list[int], list[Answer]]:
        """Several blocks of new tokens, across the ring's wrap.

        Returns:
            The most blocks that one windowed group holds, after each scheduled step;
            and the answer.
        """
        held: list[int] = []
        schedule = self.scheduler.schedule

        def watched(*args, **kwargs):
            output = schedule(*args, **kwargs)
            held.append(max(map(_held, self.windowed)))
            return output

        self.scheduler.schedule = watched
        try:
            prompt = self.tokens[97:][: self.sizes.window]
            return held, self.generate([prompt], self.sizes.flat)
        finally:
            del self.scheduler.schedule


def _held(manager: Any) -> int:
    return len(
        {
            b.block_id
            for bs in manager.req_to_blocks.values()
            for b in bs
            if not b.is_null
        }
    )


def _built_in_text() -> Iterator[str]:
    """Python's own sources: on every machine that runs this."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        yield path.read_text(encoding="utf-8", errors="replace")


def _break(fault: str) -> None:
    """Damage the ring, to see that the checks notice."""
    from vllm_ringwindow.attention import builder
    from vllm_ringwindow.attention.impl import RingImplMixin
    from vllm_ringwindow.core.manager import RingBlockManager

    if fault == "window":
        init = RingImplMixin.__init__

        def one_token_short(self, *args, **kwargs):
            init(self, *args, **kwargs)
            window = self.sliding_window
            if isinstance(window, int):
                self.sliding_window = window - 1
            else:
                self.sliding_window = (window[0] - 1, *window[1:])
            if "window_left" in vars(self):  # FlashInfer's: compared with its plan
                self.window_left -= 1

        RingImplMixin.__init__ = one_token_short  # type: ignore[method-assign]
    elif fault == "ring":
        init = RingBlockManager.__init__

        def one_block_short(self, *args, **kwargs):
            init(self, *args, **kwargs)
            self.num_ring_blocks -= 1

        RingBlockManager.__init__ = one_block_short  # type: ignore[method-assign]
    else:
        view = builder.staged_view

        def reversed_order(*args):
            made, copies, num_blocks = view(*args)
            copies["copy_out_to"] = copies["copy_out_to"].flip(0)
            return made, copies, num_blocks

        builder.staged_view = reversed_order


def child() -> None:
    """``python -m vllm_ringwindow.verification``: a job on stdin, lines on stdout."""
    from vllm.plugins import load_general_plugins

    job = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints goes to stderr
    load_general_plugins()  # LLM() reads an attention_config before it does so itself

    def line(**what: Any) -> None:
        out.write(json.dumps(what) + "\n")
        out.flush()

    try:
        line(result=probe(job, lambda text: line(progress=text)))
    except Exception as error:
        import traceback

        traceback.print_exc()
        line(error=f"{type(error).__name__}: {error}")


# -- in the user's process -------------------------------------------------------------


def ask(job: dict[str, Any], say: Callable[[str], None]) -> Answer:
    """Run :func:`probe` in a fresh process.

    Raises:
        EngineFailed: it did not answer; the message says why.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm_ringwindow.verification"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Read by vLLM at import: in this process the scheduler can be looked into.
        env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    )
    assert process.stdin and process.stdout and process.stderr
    import threading

    log: list[str] = []
    reader = threading.Thread(target=log.extend, args=(process.stderr,))
    reader.start()
    process.stdin.write(json.dumps(job))
    process.stdin.close()
    result = error = None
    for text in process.stdout:
        line = json.loads(text)
        if "progress" in line:
            say(line["progress"])
        result, error = line.get("result"), line.get("error")
    process.wait()
    reader.join()
    if result is None:
        if error is None:
            last = [text.strip() for text in log if text.strip()][-1:]
            error = f"exit code {process.returncode}: {''.join(last)}"
        raise EngineFailed(error)
    return result


def compare(
    model: str,
    stock: Answer,
    ring: Answer,
    again: Answer,
    tolerance: float | None = None,
) -> Verification:
    """The checklist, from what the three engines answered.

    Args:
        model: for the report.
        stock, ring, again: answers of :func:`probe`; ``again`` a brief one.
        tolerance: largest allowed difference of a log-probability. Default: 1e-3 in
            float32; in other types three times as much as stock differs from itself
            when it prefills in other chunks, at least 0.02.
    """
    noise = max(
        (
            _worst(stock["logits"]["long"], chunked)
            for chunked in stock["chunks"].values()
        ),
        default=0.0,
    )
    if tolerance is None:
        tolerance = 1e-3 if stock["dtype"] == "float32" else max(0.02, 3 * noise)
    found = Verification(
        model=model,
        dtype=stock["dtype"],
        window=stock["window"],
        block_size=stock["block_size"],
        ring_blocks=max(ring["ring_blocks"], default=0),
        tolerance=tolerance,
        decision=ring["decision"],
    )
    checks = found.checks
    checks.append(
        Check(
            "layers are on rings",
            ring["rings"] > 0,
            f"{ring['rings']} groups",
            "at least 1",
            "the start-up lines above say why not",
        )
    )
    W = found.window
    names = {"short": "<", "equal": "=", "long": ">"}
    for name, sign in names.items():
        a, b = stock["logits"][name], ring["logits"][name]
        checks.append(
            _logits(f"logits, prompt of {len(a) + 1} tokens ({sign} W)", a, b, found)
        )
    a, b = stock["logits"]["long"], ring["logits"]["long"]
    found.differences = [abs(x - y) for x, y in zip(a, b)]
    # Log-probability i is of token i + 1, after the query at position i.
    near = slice(W - 1, W + found.block_size)
    checks.append(
        _logits(
            f"the window's edge, positions {near.start} to {near.stop - 1}",
            a[: near.stop],
            b[: near.stop],
            found,
            first=near.start,
        )
    )
    checks.append(
        _tokens("decode across the edge, batch 1", stock, ring, "alone", found)
    )
    checks.append(_tokens("decode, batch 8", stock, ring, "together", found))
    for chunk in stock["chunks"]:
        checks.append(
            _logits(
                f"prefill in chunks of {chunk} tokens",
                stock["chunks"][chunk],
                ring["chunks"][chunk],
                found,
                chunk=int(chunk),
            )
        )
    checks.append(_prefix(stock, ring, found))
    checks.append(_preempted(stock, ring, found))
    new = len(stock["long"][0]["tokens"])
    checks.append(_tokens(f"decode of {new} tokens", stock, ring, "long", found))
    checks.append(_memory(stock, ring, found))
    worst = max(_worst(stock["logits"][name], again["logits"][name]) for name in names)
    checks.append(
        Check(
            "restart with the ring off",
            again["rings"] == 0 and worst <= tolerance,
            f"{worst:.2g}",
            f"{tolerance:.2g}",
            "stock does not repeat itself: compare with --dtype float32",
        )
    )
    return found


def _worst(a: Sequence[float], b: Sequence[float]) -> float:
    return max((abs(x - y) for x, y in zip(a, b, strict=True)), default=0.0)


def _logits(
    name: str,
    a: Sequence[float],
    b: Sequence[float],
    about: Verification,
    *,
    first: int = 0,
    chunk: int | None = None,
) -> Check:
    differences = [abs(x - y) for x, y in zip(a, b, strict=True)]
    worst = max(differences[first:], default=0.0)
    return Check(
        name,
        worst <= about.tolerance,
        f"{worst:.2g}",
        f"{about.tolerance:.2g}",
        diagnosis(differences, about, chunk) if worst > about.tolerance else "",
    )


def diagnosis(
    differences: Sequence[float], about: Verification, chunk: int | None = None
) -> str:
    """Where the first difference is says what to look at.

    Args:
        differences: of log-probabilities, by query position.
        about: window, block size, ring.
        chunk: prefill chunk size, if the prompt was cut.
    """
    small = about.tolerance / 20
    at = next((i for i, d in enumerate(differences) if d > small), None)
    W, bs = about.window, about.block_size
    if at is None:
        return ""
    where = f"first differs at position {at}: "
    if at == 0:
        return where + "from the first token on: weights, dtype or the wrong model"
    if chunk is not None and at >= chunk and at % chunk < bs:
        return where + (
            "just after a chunk begins: what is copied to and from staging and in what "
            "order, or a ring of too few blocks"
        )
    if W // 2 < at < W:
        return where + (
            f"the window ends {W - at} token{'s' if W - at > 1 else ''} early: it acts "
            f"like sliding_window {at}, not {W}; look at sliding_window (it counts the "
            "current token) and how the backend passes it on"
        )
    if at < W:
        return where + (
            "inside the first window: positions (RoPE must see absolute ones), the "
            "mask, or the order of K/V in a block"
        )
    if at == W:
        return where + (
            f"a token beyond sliding_window {W} is still visible: look at the window "
            "that the kernel was given"
        )
    if at >= about.ring_blocks * bs - bs:
        return where + (
            "where the ring wraps: its number of blocks (R), or the order of copy-out"
        )
    return where + "inside the ring: the block table's order"


def _tokens(
    name: str, stock: Answer, ring: Answer, key: str, about: Verification
) -> Check:
    """Same greedy tokens; a token may differ where stock was undecided."""
    worst, hint = 0.0, ""
    for a, b in zip(stock[key], ring[key], strict=True):
        differences = []  # by query position
        for i, (x, y) in enumerate(zip(a["tokens"], b["tokens"], strict=True)):
            if x != y:
                # From here on the two read different texts.
                if a["margins"][i] > 2 * about.tolerance:
                    differences.append(a["margins"][i])
                break
            differences.append(abs(a["logprobs"][i] - b["logprobs"][i]))
        before = [0.0] * (a["prompt_tokens"] - 1)
        worst = max([worst, *differences])
        if not hint and max(differences, default=0.0) > about.tolerance:
            hint = diagnosis(before + differences, about)
    return Check(name, not hint, f"{worst:.2g}", f"{about.tolerance:.2g}", hint)


def _prefix(stock: Answer, ring: Answer, about: Verification) -> Check:
    check = _tokens("the same prefix again", stock, ring, "prefix", about)
    cached = [answers["prefix"][1]["cached"] for answers in (stock, ring)]
    hint = check.hint
    if cached[1] < cached[0] and not hint:
        hint = (
            f"the ring found {cached[1]} cached tokens, stock {cached[0]}: less KV "
            "memory is free than it needs to keep a prefix"
        )
    return Check(
        f"{check.name}, {cached[1]} tokens cached",
        check.passed and cached[1] >= cached[0],
        check.found,
        check.allowed,
        hint,
    )


def _preempted(stock: Answer, ring: Answer, about: Verification) -> Check:
    check = _tokens("preempted and resumed", stock, ring, "preempted", about)
    times = min(answers["preempted"][0]["preemptions"] for answers in (stock, ring))
    return Check(
        f"{check.name}, {times} requests",
        check.passed and times > 0,
        check.found,
        check.allowed,
        check.hint or ("" if times else "no request was preempted"),
    )


def _memory(stock: Answer, ring: Answer, about: Verification) -> Check:
    about.memory = {"stock": stock["memory"], "ring": ring["memory"]}
    most = max(ring["memory"])
    # A prompt of W tokens, then decode. R throughout, and no trend.
    flat = most <= about.ring_blocks
    return Check(
        f"memory flat over {len(ring['memory']) - 1} steps of decode",
        flat,
        f"{most} blocks in a group",
        f"R = {about.ring_blocks}",
        "" if flat else "blocks are not recycled: look at num_behind and retained ones",
    )


if __name__ == "__main__":
    child()
