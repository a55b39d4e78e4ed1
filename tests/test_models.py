# SPDX-License-Identifier: Apache-2.0
"""The tiny models can tell a right window from one that is off by one token."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks.models import (
    TINY_KINDS,
    gemma3_270m,
    load_reference,
    long_text,
    random_prompts,
    reference_greedy,
    reference_logits,
    tiny_model,
    token_prompts,
)

WINDOW = 48
SECOND_WINDOW = 20
(PROMPT,) = random_prompts([3 * WINDOW], seed=7)


def _windows(kind):
    return (WINDOW, SECOND_WINDOW) if kind == "two_windows" else WINDOW


def _neighbours(kind):
    if kind == "two_windows":
        w, v = WINDOW, SECOND_WINDOW
        return [(w - 1, v), (w + 1, v), (w, v - 1), (w, v + 1)]
    return [WINDOW - 1, WINDOW + 1]


def _weights(model_dir):
    return (model_dir / "model.safetensors").read_bytes()


class CharTokenizer:
    """One token per character, after a first token 2."""

    def __call__(self, text):
        return SimpleNamespace(input_ids=[2, *map(ord, text)])

    def decode(self, token_ids, skip_special_tokens):
        return "".join(map(chr, token_ids[1:]))


@pytest.fixture(scope="module", params=TINY_KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def model_dir(kind, tmp_path_factory):
    return tiny_model(kind, tmp_path_factory.mktemp(kind), window=_windows(kind))


def test_window_off_by_one_changes_logits(kind, model_dir, tmp_path):
    logits = reference_logits(load_reference(model_dir), PROMPT)
    for windows in _neighbours(kind):
        other = load_reference(tiny_model(kind, tmp_path, window=windows))
        difference = (reference_logits(other, PROMPT) - logits).abs().amax(-1)
        # Nothing differs before the smaller window is full, and then it does.
        assert difference[: SECOND_WINDOW - 1].max() < 1e-5
        assert difference.max() > 0.1, windows
        assert difference[-1] > 1e-3, windows


def test_same_seed_same_weights(kind, model_dir, tmp_path):
    again = tiny_model(kind, tmp_path / "again", window=_windows(kind))
    other = tiny_model(kind, tmp_path / "other", window=_windows(kind), seed=1)
    assert _weights(again) == _weights(model_dir)
    assert _weights(other) != _weights(model_dir)


def test_greedy_tokens_vary_and_survive_rounding(model_dir):
    tokens = reference_greedy(load_reference(model_dir), PROMPT, 200)
    exact = reference_greedy(load_reference(model_dir, torch.float64), PROMPT, 200)
    assert len(set(tokens[:100])) > 20
    assert tokens == exact


@pytest.mark.parametrize(
    ("kind", "window", "message"),
    [
        ("gemma9", 16, "kind='gemma9'"),
        ("two_windows", 16, "window=16"),
        ("mistral", (16, 8), "window=\\(16, 8\\)"),
    ],
)
def test_tiny_model_rejects(kind, window, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        tiny_model(kind, tmp_path, window=window)


def test_token_prompts_have_exact_lengths_and_are_reproducible():
    lengths = [1, 300, 40_000]
    prompts = token_prompts(lengths, CharTokenizer(), seed=3)
    assert [len(prompt) for prompt in prompts] == lengths
    assert prompts == token_prompts(lengths, CharTokenizer(), seed=3)
    assert prompts[1] != token_prompts(lengths, CharTokenizer(), seed=4)[1]


def test_long_text_decodes_the_prompt():
    assert len(long_text(500, CharTokenizer())) == 499


def test_built_model_is_found_in_the_cache_folder(monkeypatch, tmp_path):
    (tmp_path / "gemma3-270m").mkdir()
    monkeypatch.setenv("RINGWINDOW_CACHE", str(tmp_path))
    assert gemma3_270m() == tmp_path / "gemma3-270m"
