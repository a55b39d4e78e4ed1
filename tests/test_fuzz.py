# SPDX-License-Identifier: Apache-2.0
"""A fixed set of ``fuzz`` cases; ``make fuzz`` runs more. And it can fail."""

import pytest

from tests.fuzz import run_case
from tests.test_simulated_scheduler import one_ring_block_short


@pytest.mark.engine
@pytest.mark.parametrize("seed", range(5))
def test_ring_and_stock_engines_agree(models, seed):
    assert run_case(f"engine:{seed}", models)["requests"]


@pytest.mark.parametrize("first", [0, 25, 50, 75, 375])
def test_schedulers_find_what_they_wrote(models, first):
    assert all(
        run_case(f"scheduler:{seed}", models)["reads"]
        for seed in range(first, first + 25)
    )


def test_a_ring_one_block_short_is_noticed(models, monkeypatch):
    one_ring_block_short(monkeypatch)
    with pytest.raises(AssertionError):
        for seed in range(20):
            run_case(f"scheduler:{seed}", models)
