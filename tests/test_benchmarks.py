# SPDX-License-Identifier: Apache-2.0
"""The benchmarks that need no model: shapes, capacity and the scheduler's traces."""

import json

import pytest

from benchmarks import capacity, scheduler
from benchmarks.shapes import GIB, SHAPES, engine_config


@pytest.mark.parametrize(
    ("key", "layers", "sliding", "window", "kv_heads", "head_size", "longest"),
    [
        ("gemma3-1b", 26, 22, 512, 1, 256, 32768),
        ("gemma3-4b", 34, 29, 1024, 4, 256, 131072),
        ("gemma3-27b", 62, 52, 1024, 16, 128, 131072),
        ("gpt-oss-20b", 24, 12, 128, 8, 64, 131072),
        ("gpt-oss-120b", 36, 18, 128, 8, 64, 131072),
        ("mistral-7b", 32, 32, 4096, 8, 128, 32768),
        ("ministral-8b", 36, 27, 32768, 8, 128, 131072),
        ("phi3-mini-4k", 32, 32, 2047, 32, 96, 4096),
        ("command-a", 64, 48, 4097, 8, 128, 131072),
        ("olmo3-7b", 32, 24, 4096, 32, 128, 65536),
    ],
)
def test_shapes_are_what_vllm_reads(
    key, layers, sliding, window, kv_heads, head_size, longest
):
    shape = SHAPES[key]
    config = engine_config(shape)
    model = config.model_config
    for read in (
        (shape.num_layers, shape.num_kv_heads, shape.head_size, shape.max_model_len),
        (
            model.get_num_layers(config.parallel_config),
            model.get_num_kv_heads(config.parallel_config),
            model.get_head_size(),
            model.max_model_len,
        ),
    ):
        assert read == (layers, kv_heads, head_size, longest)
    assert [w for w in shape.windows if w] == [window] * sliding
    assert model.get_sliding_window() == window - (key == "command-a")
    # vLLM gives every layer this window, and where it is None asks the model.
    everywhere = config.cache_config.sliding_window
    assert everywhere == (window if sliding == layers else None)


def test_capacity_is_what_the_arithmetic_says_and_never_below_stock(capsys):
    models = ("gemma3-27b", "mistral-7b")
    assert capacity.main(["--json", "-", "--models", *models]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["model"] for row in rows} == set(models)
    assert len(rows) == 2 * (6 + 4)
    assert all(row["ring requests"] == row["by arithmetic"] for row in rows)
    assert all(row["ring/stock"] >= 1 for row in rows)
    barred = [row["result"] for row in rows if ">=" in row.get("result", "")]
    assert len(barred) == 4 and all("pass" in result for result in barred)


def test_a_configuration_that_does_not_start_is_said():
    args = ["--models", "gemma3-27b", "--kv-gib", "4"]
    options = capacity.options(args)
    rows = {
        (row["max_model_len"], row["caching"]): row
        for row in capacity.rows_of("gemma3-27b", options)
    }
    assert "does not start: stock, hybrid off" in rows[16384, "on"]["result"]
    assert "ring/stock" not in rows[16384, "on"]
    assert capacity.wrong(rows[16384, "on"]) is None


@pytest.mark.parametrize("trace", [scheduler.long_prompt, scheduler.chat])
def test_a_short_trace_is_served_by_both(trace):
    """That all requests finish is checked by ``serve``."""
    turns = trace(3, steps_between=5)
    setting = scheduler.Setting("limited", 11 * GIB, 256, rounds=1)
    runs = scheduler.compare("gemma3-27b", turns, setting)
    (stock,), (ring,) = runs["stock"], runs["ring"]
    assert stock.finished == ring.finished == sum(map(len, turns))
    assert ring.running >= stock.running > 1
    assert ring.steps <= stock.steps
