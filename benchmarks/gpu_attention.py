"""Attention of decoding sequences on a GPU: one query token each, over a long context, in Triton.

Every sequence, group of heads that shares its keys, and part of the context has a program of its own; the parts are
joined afterwards by their sums of exponentials (flash decoding). Without the parts a small batch would leave most of
the GPU idle.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS = 16  # of a matrix unit: the heads of a group are padded to it
BLOCK = 64  # context tokens that are read at once
LEAST_PART = 256  # context tokens


def decode_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, programs: int) -> torch.Tensor:
    """q (sequences, heads, width), k and v (sequences, context, key heads, width) -> like q.

    `programs`: how many keep the GPU busy.
    """
    sequences, heads, width = q.shape
    context, key_heads = k.shape[1:3]
    parts = max(1, min(triton.cdiv(programs, sequences * key_heads), context // LEAST_PART))
    part = triton.cdiv(triton.cdiv(context, parts), BLOCK) * BLOCK
    parts = triton.cdiv(context, part)
    out = torch.empty((parts, sequences, heads, width), dtype=torch.float32, device=q.device)
    log_sums = torch.empty((parts, sequences, heads), dtype=torch.float32, device=q.device)
    _part[(sequences, key_heads, parts)](
        q.contiguous(), k, v, out, log_sums, context, part, k.stride(0), k.stride(1), width**-0.5,
        HEADS=heads, GROUP=heads // key_heads, WIDTH=width, ROWS=ROWS, BLOCK=BLOCK, num_warps=4, num_stages=3,
    )  # fmt: skip
    return join(out, log_sums).to(q.dtype)


def join(out: torch.Tensor, log_sums: torch.Tensor) -> torch.Tensor:
    """The mean of the parts by their sums of exponentials."""
    if len(out) == 1:
        return out[0]
    return (out * torch.softmax(log_sums, 0).unsqueeze(-1)).sum(0)


@triton.jit  # type: ignore[untyped-decorator]
def _part(  # type: ignore[no-untyped-def]
    q, k, v, out, log_sums, context, part, sequence_stride, token_stride, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    key_head = tl.program_id(1)
    number = tl.program_id(2)
    row, column, place = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, BLOCK)
    head = sequence * HEADS + key_head * GROUP + row
    real = row < GROUP
    query = tl.load(q + head[:, None] * WIDTH + column[None, :], mask=real[:, None], other=0.0)
    base = sequence * sequence_stride + key_head * WIDTH + column[None, :]
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    end = tl.minimum(context, (number + 1) * part)
    for start in range(number * part, end, BLOCK):
        token = start + place
        there = token < end
        where = base + token[:, None] * token_stride
        keys = tl.load(k + where, mask=there[:, None], other=0.0)
        values = tl.load(v + where, mask=there[:, None], other=0.0)
        score = tl.where(there[None, :], tl.dot(query, tl.trans(keys)) * scale, float("-inf"))
        peak = tl.maximum(most, tl.max(score, 1))
        weight = tl.exp(score - peak[:, None])
        shrink = tl.exp(most - peak)
        total = total * shrink + tl.sum(weight, 1)
        sums = sums * shrink[:, None] + tl.dot(weight.to(values.dtype), values)
        most = peak
    place_out = number * tl.num_programs(0) * HEADS + head
    tl.store(out + place_out[:, None] * WIDTH + column[None, :], sums / total[:, None], mask=real[:, None])
    tl.store(log_sums + place_out, most + tl.log(total), mask=real)
