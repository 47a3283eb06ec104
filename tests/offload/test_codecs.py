"""Codecs: raw is exact, the others keep the bounds they state; zstd gives back what it was given."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.codecs import BlockShape, RawCodec, make_codec
from offload.compression import CompressedTier
from offload.disk_store import DiskStore
from offload.errors import TierUnavailable
from offload.tier import Outgoing
from tests.offload.blocks import digest_of, payload_of
from tests.offload.conftest import BLOCK

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}


def round_trip(name: str, dtype: str, values: torch.Tensor) -> torch.Tensor:
    shape = BlockShape(values.shape[0], values.shape[1], dtype)
    codec = make_codec(name, shape)
    block = values.to(DTYPES[dtype]).contiguous().view(torch.uint8).numpy().reshape(-1)
    encoded = codec.encode(block)
    assert encoded is not None
    assert len(encoded) == codec.encoded_bytes
    back = np.zeros_like(block)
    codec.decode(encoded.copy(), back)
    return torch.from_numpy(back).view(DTYPES[dtype]).view(values.shape)


rows = st.integers(0, 2**32 - 1).map(
    lambda seed: torch.randn(6, 16, generator=torch.Generator().manual_seed(seed)) * torch.logspace(-6, 3, 6)[:, None]
)


@settings(max_examples=40, deadline=None)
@given(rows, st.sampled_from(sorted(DTYPES)))
def test_int8_is_off_by_at_most_half_a_step(values: torch.Tensor, dtype: str) -> None:
    given_ = values.to(DTYPES[dtype]).double()
    back = round_trip("int8", dtype, values).double()
    largest = given_.abs().amax(dim=1, keepdim=True)
    bound = largest / 254 * (1 + 1e-5) + (given_.abs() + largest / 254) * ROUNDING[dtype] + 2.0**-24
    assert bool(((back - given_).abs() <= bound).all())
    assert not torch.equal(back, given_)


@settings(max_examples=40, deadline=None)
@given(rows, st.sampled_from(sorted(DTYPES)))
def test_fp8_is_off_by_at_most_a_sixteenth(values: torch.Tensor, dtype: str) -> None:
    given_ = values.to(DTYPES[dtype]).double()
    back = round_trip("fp8", dtype, values).double()
    scale = given_.abs().amax(dim=1, keepdim=True) / 448
    bound = torch.maximum(given_.abs() / 16, scale * 2.0**-10) * (1 + 1e-5) + given_.abs() * 1.1 * ROUNDING[dtype] + 2.0**-24
    assert bool(((back - given_).abs() <= bound).all())
    assert not torch.equal(back, given_)


@pytest.mark.parametrize("dtype", [*DTYPES, "int8"])
def test_raw_is_exact(dtype: str) -> None:
    shape = BlockShape(6, 16, dtype)
    block = payload_of(3, shape.block_bytes)
    back = np.zeros_like(block)
    codec = RawCodec(shape)
    encoded = codec.encode(block)
    assert encoded is block
    codec.decode(encoded, back)
    assert np.array_equal(back, block)


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_rows_of_zeros_stay_zeros_and_what_is_no_number_is_not_kept(name: str) -> None:
    assert torch.equal(round_trip(name, "bfloat16", torch.zeros(4, 8)), torch.zeros(4, 8, dtype=torch.bfloat16))
    for bad in (float("nan"), float("inf"), float("-inf")):
        values = torch.ones(4, 8)
        values[2, 3] = bad
        codec = make_codec(name, BlockShape(4, 8, "float32"))
        assert codec.encode(values.view(torch.uint8).numpy().reshape(-1)) is None


def test_kv_in_int8_is_kept_as_it_is() -> None:
    with pytest.raises(TierUnavailable, match="use the codec raw instead of fp8"):
        make_codec("fp8", BlockShape(4, 8, "int8"))


@pytest.mark.parametrize("payload", ["noise", "numbers", "zeros"])
def test_compressed_blocks_come_back_whole(disk: Callable[..., DiskStore], payload: str) -> None:
    pytest.importorskip("zstandard", reason="the package zstandard is not installed")
    block = 4000
    content = {
        "noise": payload_of(1, block),
        "numbers": torch.randn(block // 2).bfloat16().view(torch.uint8).numpy(),
        "zeros": np.zeros(block, dtype=np.uint8),
    }[payload]
    inner = disk(block=block + 1)
    tier = CompressedTier(inner, block, element_bytes=2)
    assert tier.store([Outgoing(digest_of(1), content)]) == [digest_of(1)]
    into = np.ones(block, dtype=np.uint8)
    assert tier.load(digest_of(1), into)
    assert np.array_equal(into, content)
    used = tier.figures().used_bytes
    assert used == block + 1 if payload == "noise" else used < (0.95 if payload == "numbers" else 0.01) * block
    assert not tier.load(digest_of(2), into)


def test_compression_makes_room_for_more_blocks(disk: Callable[..., DiskStore], tmp_path: object) -> None:
    pytest.importorskip("zstandard", reason="the package zstandard is not installed")
    inner = disk(slots=10, block=BLOCK + 1, overcommit=4)
    tier = CompressedTier(inner, BLOCK, element_bytes=2)
    zeros = np.zeros(BLOCK, dtype=np.uint8)
    tier.store([Outgoing(digest_of(number), zeros) for number in range(30)])
    assert tier.figures().blocks == 30
    for number in range(30, 60):
        tier.store([Outgoing(digest_of(number), payload_of(number, BLOCK))])
    figures = tier.figures()
    assert figures.used_bytes <= figures.max_bytes
    inner.check_integrity()


def test_compression_without_its_library_is_said(disk: Callable[..., DiskStore], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(TierUnavailable, match="needs the package zstandard"):
        CompressedTier(disk(), BLOCK, element_bytes=2)
