"""Cutting tensors into blocks and spreading them over threads changes no bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blr_analysis.learning_rule.optim import IVON
from blr_analysis.learning_rule.optim.blocks import BLOCK, PIECE, blocks


@given(st.lists(st.integers(0, 40), max_size=8), st.integers(1, 30), st.integers(1, 30))
def test_every_element_is_visited_once_and_in_step(
    counts: list[int], size: int, piece: int
) -> None:
    sums = [torch.zeros(count) for count in counts]
    terms = [torch.arange(float(count)) for count in counts]
    for left, right in blocks([sums, terms], size=size, piece=piece):
        assert sum(view.numel() for view in left) <= max(size, piece)
        assert all(view.numel() <= piece for view in left)
        for view, twin in zip(left, right, strict=True):
            view += twin + 1
    for left, right in zip(sums, terms, strict=True):
        assert torch.equal(left, right + 1)
    (block,) = blocks([[torch.zeros(10, 10).t()], [torch.zeros(10, 10)]], piece=5)
    assert [column[0].shape for column in block] == [(10, 10), (10, 10)]  # no view is flat: uncut


@pytest.mark.parametrize("draws", [1, 2])
def test_threads_change_no_bit(draws: int) -> None:
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        generator = torch.Generator().manual_seed(0)
        sizes = (5 * BLOCK + 77, 3, 1000)
        params = [torch.nn.Parameter(torch.ones(size)) for size in sizes]
        optimizer = IVON(params, lr=0.1, ess=10, beta2=0.9, generator=generator)
        for _ in range(2):
            for _ in range(draws):
                with optimizer.sampled_params(train=True):
                    for param in params:
                        param.grad = param.detach().clone()
            optimizer.step()
        state = [optimizer.state[param] for param in params]
        results.append([*params, *(s["hess"] for s in state), *(s["momentum"] for s in state)])
    assert all(map(torch.equal, *results))
    assert not (results[0][0] == 1).any()


def test_large_noise_is_drawn_in_streams_that_differ() -> None:
    """Every stream is N(0, 1/(ess·(hess_init + δ))); no two are alike, but for the same seed."""
    drawn = []
    for seed in (0, 0, 1):
        param = torch.nn.Parameter(torch.zeros(4 * PIECE))
        generator = torch.Generator().manual_seed(seed)
        optimizer = IVON([param], lr=0.1, ess=100, hess_init=0.25, generator=generator)
        with optimizer.sampled_params(train=True):
            param.grad = torch.zeros_like(param)
        optimizer.step()  # from here on hess has memory of its own, cut into pieces
        with optimizer.sampled_params():
            drawn.append(param.detach().view(4, PIECE).clone())
    assert torch.equal(drawn[0], drawn[1])
    pieces = torch.cat([drawn[0], drawn[2]])
    std = (100 * (0.25 + 1e-4)) ** -0.5
    torch.testing.assert_close(pieces.std(dim=1), torch.full((8,), std), rtol=0.02, atol=0)
    assert pieces.mean(dim=1).abs().max() < 4 * std / PIECE**0.5
    assert (torch.corrcoef(pieces) - torch.eye(8)).abs().max() < 5 / PIECE**0.5
