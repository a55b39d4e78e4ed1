# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 270M on real text, as users start it: spawned engines and ``vllm serve``."""

import pytest

from benchmarks.models import gemma3_270m, token_prompts
from tests.harness import (
    RING,
    STOCK,
    assert_equals_reference,
    assert_same,
    complete,
    run_spawned,
    server,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow]

W = 512
OPTIONS = dict(
    dtype="float32",
    enforce_eager=True,
    max_model_len=4096,
    kv_cache_memory_bytes=1 << 30,
)


@pytest.fixture(scope="module")
def gemma():
    return gemma3_270m()


@pytest.fixture(scope="module")
def prompts(gemma):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gemma)
    return token_prompts([40, W, 700, 4 * W], tokenizer)


@pytest.fixture(scope="module")
def stock(gemma, prompts):
    return run_spawned(gemma, STOCK, prompts, 24, **OPTIONS)


@pytest.mark.long
def test_spawned_engines_equal_stock(gemma, prompts, stock):
    """In chunks of half a window; the tiny models have every other chunk size."""
    ring = run_spawned(
        gemma, RING, prompts, 24, **OPTIONS, max_num_batched_tokens=W // 2
    )
    assert_same(stock, ring)


def test_stock_equals_transformers_here(gemma, prompts, stock):
    """So the ring does: what both are compared with is not both being wrong."""
    assert_equals_reference(gemma, prompts[:3], stock[:3])


SERVE = (
    "--dtype=float32",
    "--enforce-eager",
    "--max-model-len=4096",
    "--kv-cache-memory-bytes=1073741824",
)


@pytest.mark.feature("`vllm serve`, spawned engines", "works")
def test_vllm_serve_answers_like_stock(gemma, prompts, stock, tmp_path):
    log = tmp_path / "log"
    body = dict(model=str(gemma), ignore_eos=True, return_token_ids=True)
    with server(gemma, *SERVE, "--attention-backend", "ring", log=log) as url:
        answers = [complete(url, prompt=p, **body) for p in prompts[1:3]]
    assert "ring: on rings: 15 layers" in log.read_text()
    for expected, answer in zip(stock[1:3], answers, strict=True):
        assert tuple(answer["token_ids"]) == expected.tokens
        assert answer["logprobs"]["token_logprobs"] == pytest.approx(
            expected.logprobs, abs=1e-4
        )
