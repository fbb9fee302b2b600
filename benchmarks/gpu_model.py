"""A dense model with grouped-query attention and random weights, and its steps, for `benchmarks/gpu_steps.py`.

On a GPU the small operations are fused by torch.compile and decoding sequences have an attention kernel of their own;
on a CPU the same functions run as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

TOP_P, TEMPERATURE = 0.9, 0.8
BISECTIONS = 20
THETA = 500_000.0


@dataclass(frozen=True, slots=True)
class Shape:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int

    @property
    def width(self) -> int:
        return self.hidden // self.heads

    @property
    def layer_weights(self) -> int:
        """Weights of all layers."""
        return self.layers * self.hidden * (2 * self.hidden + 2 * self.kv_heads * self.width + 3 * self.ffn)

    @property
    def kv_bytes(self) -> int:
        """Of one token of context, in bfloat16."""
        return 4 * self.layers * self.kv_heads * self.width


SHAPES = {
    "8b": Shape(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128_256),
    "tiny": Shape(layers=2, hidden=64, heads=4, kv_heads=2, ffn=128, vocabulary=256),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A step: `prompts` chunks of `chunk` tokens after `earlier` ones, and `decodes` sequences of `context` tokens."""

    decodes: int = 0
    context: int = 0
    prompts: int = 0
    chunk: int = 0
    earlier: int = 0

    @property
    def features(self) -> tuple[float, ...]:
        """1, P, P c, D, K."""
        tokens = self.prompts * self.chunk
        return 1.0, tokens, tokens * (self.earlier + self.chunk / 2), self.decodes, self.decodes * self.context

    @property
    def kv_tokens(self) -> int:
        return self.decodes * self.context + self.prompts * (self.earlier + self.chunk)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x (tokens, heads, width) by cos and sin (tokens, width / 2)."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    left, right = x.float().chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1).to(x.dtype)


def add_and_norm(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    residual = residual + x
    wide = residual.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype), residual


def gate(x: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return functional.silu(left) * right


def narrow(weights: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Half the interval in which each row's threshold lies: what is at or above `low` has TOP_P of the mass."""
    middle = (low + high) / 2
    enough = torch.where(weights >= middle, weights, 0.0).sum(-1, keepdim=True) >= TOP_P
    return torch.where(enough, middle, low), torch.where(enough, high, middle)


def draw(weights: torch.Tensor, least: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """A column of each row by its weight, among those at or above the threshold."""
    return torch.where(weights >= least, weights / noise, -1.0).argmax(-1)


class Model:
    def __init__(self, shape: Shape, device: str, most_kv: int) -> None:
        self.shape, self.device = shape, device
        self.cuda = device == "cuda"
        compiled: Callable[[Any], Any] = torch.compile(dynamic=True) if self.cuda else lambda function: function
        torch._dynamo.config.recompile_limit = 64  # over all cases; beyond it functions run unfused
        self.rotate, self.add_and_norm, self.gate = map(compiled, (rotate, add_and_norm, gate))
        self.narrow, self.draw = map(compiled, (narrow, draw))
        width = shape.width
        self.layers = [
            (
                self._random(shape.hidden + 2 * shape.kv_heads * width, shape.hidden),
                self._random(shape.hidden, shape.hidden),
                self._random(2 * shape.ffn, shape.hidden),
                self._random(shape.hidden, shape.ffn),
            )
            for _ in range(shape.layers)
        ]
        self.embedding = self._random(shape.vocabulary, shape.hidden)
        self.head = self._random(shape.vocabulary, shape.hidden)
        self.kv = [self._random(2, most_kv, shape.kv_heads, width, scale=1.0) for _ in range(shape.layers)]
        self.decode_attention = self._decode_attention()

    def _decode_attention(self) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        """Of q (sequences, heads, width) over k and v (sequences, context, key heads, width)."""
        if not self.cuda:
            return lambda q, k, v: prefill_attention(q.unsqueeze(1), k, v).squeeze(1)
        from benchmarks.gpu_attention import decode_attention  # needs Triton

        programs = 4 * torch.cuda.get_device_properties(0).multi_processor_count
        return lambda q, k, v: decode_attention(q, k, v, programs)

    def _random(self, *size: int, scale: float = 0.02) -> torch.Tensor:
        return torch.empty(size, dtype=torch.bfloat16, device=self.device).normal_(std=scale)

    def step(self, case: Case) -> Callable[[], torch.Tensor]:
        """A function that runs the step on inputs of its own and answers a token for each sequence."""
        shape, device = self.shape, self.device
        tokens = case.decodes + case.prompts * case.chunk
        places = torch.arange(case.earlier, case.earlier + case.chunk, device=device).repeat(case.prompts)
        places = torch.cat((torch.full((case.decodes,), case.context - 1, device=device), places)).float()
        angles = places.unsqueeze(1) * THETA ** -torch.arange(0, 1, 2 / shape.width, device=device)
        cos, sin = angles.cos(), angles.sin()
        inputs = torch.randint(shape.vocabulary, (tokens,), device=device)
        ends = (case.decodes + (number + 1) * case.chunk - 1 for number in range(case.prompts))
        answers = torch.tensor([*range(case.decodes), *ends], device=device)

        def run() -> torch.Tensor:
            residual = functional.embedding(inputs, self.embedding)
            x = torch.zeros_like(residual)
            for (qkv, out, up, down), kv in zip(self.layers, self.kv, strict=True):
                x, residual = self.add_and_norm(x, residual)
                x = functional.linear(self._attend(case, functional.linear(x, qkv), kv, cos, sin), out)
                x, residual = self.add_and_norm(x, residual)
                x = functional.linear(self.gate(functional.linear(x, up)), down)
            x, _ = self.add_and_norm(x[answers], residual[answers])
            return self.sample(functional.linear(x, self.head))

        return run

    def _attend(
        self, case: Case, qkv: torch.Tensor, kv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        shape, n = self.shape, case.decodes
        heads = qkv.view(len(qkv), -1, shape.width)
        q, k, v = heads.split((shape.heads, shape.kv_heads, shape.kv_heads), 1)
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        cached = kv[:, : n * case.context].view(2, n, -1, *k.shape[1:]) if n else None
        rest = kv[:, n * case.context : case.kv_tokens]
        parts = []
        if cached is not None:
            cached[0, :, -1], cached[1, :, -1] = k[:n], v[:n]
            parts.append(self.decode_attention(q[:n], cached[0], cached[1]))
        if case.prompts:
            prompts = rest.view(2, case.prompts, -1, *k.shape[1:])
            new = (case.prompts, case.chunk)
            prompts[0, :, case.earlier :], prompts[1, :, case.earlier :] = (
                x[n:].view(*new, *x.shape[1:]) for x in (k, v)
            )
            parts.append(prefill_attention(q[n:].view(*new, *q.shape[1:]), *prompts).flatten(0, 1))
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        """A token of each row: temperature, then the fewest tokens that have TOP_P of the mass."""
        weights = torch.softmax(logits.float() / TEMPERATURE, -1)
        low = torch.zeros_like(weights[:, :1])
        high = weights.amax(-1, keepdim=True)
        for _ in range(BISECTIONS):
            low, high = self.narrow(weights, low, high)
        return self.draw(weights, low, torch.empty_like(weights).exponential_())


def prefill_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q (prompts, chunk, heads, width), the last of the context k and v; causal -> like q."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if q.is_cuda:  # aligned to the end of the context, which the public function does not offer for shared keys
        out, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
    else:
        chunk, context = q.shape[2], k.shape[2]
        seen = torch.ones(chunk, context, dtype=torch.bool).tril(context - chunk)
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    return out.transpose(1, 2)
