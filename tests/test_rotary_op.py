"""Why every MLA model here is served with custom_ops none: the CPU build's rotary operator.

It takes queries and keys as [tokens, heads * size] and reads the last stride but one as that from
token to token. MLA hands it views of [tokens, heads, size], where that stride is another. Should
this fail on a new release, the operator is mended, and the beds can use vLLM's defaults there.
"""

from __future__ import annotations

import pytest
import torch

TOKENS, HEADS, SIZE = 5, 2, 64


@pytest.fixture(scope="module")
def parts() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Positions, cosines and sines, and queries and keys as MLA cuts them out of wider tensors."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(32, SIZE, generator=generator)
    queries = torch.randn(TOKENS, HEADS, 96, generator=generator)[..., -SIZE:]
    keys = torch.randn(TOKENS, 576, generator=generator)[:, None, -SIZE:]
    return torch.arange(TOKENS), table, queries, keys


def right(positions: torch.Tensor, table: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The rotation of neighbouring pairs, for ``x`` [tokens, heads, size]."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    turns = torch.complex(*table[positions].chunk(2, dim=-1))
    return torch.view_as_real(pairs * turns[:, None]).flatten(-2)


def wrong(parts: tuple[torch.Tensor, ...], queries: torch.Tensor, keys: torch.Tensor) -> list[bool]:
    """Whether the operator rotates queries and keys wrongly; it works in place."""
    from vllm import _custom_ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    positions, table, *given = parts
    _custom_ops.rotary_embedding(positions, queries, keys, SIZE, table, False)
    return [
        not torch.allclose(done.reshape(x.shape), right(positions, table, x), atol=1e-5)
        for done, x in zip((queries, keys), given, strict=True)
    ]


def test_flat_queries_and_keys_are_rotated_right(
    installed_release: str, parts: tuple[torch.Tensor, ...]
) -> None:
    *_, queries, keys = parts
    assert wrong(parts, queries.flatten(1).clone(), keys.flatten(1).clone()) == [False, False]


def test_what_mla_hands_over_is_rotated_wrong(
    installed_release: str, parts: tuple[torch.Tensor, ...]
) -> None:
    *_, queries, keys = parts
    # The operator works in place, so the keys are cut out of another wide tensor.
    wide = torch.zeros(TOKENS, 576)
    wide[:, -SIZE:] = keys[:, 0]
    assert wrong(parts, queries.clone(), wide[:, -SIZE:].unsqueeze(1)) == [True, True]
