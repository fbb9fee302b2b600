"""A row of logits to a token, as the request asks; what it leaves open is the model's own default."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from scheduler.engines.base import PromptError, Sampling

SEEDS = range(-(2**63), 2**63)


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What the model's authors recommend. `top_k` 0: all tokens."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


class Picker:
    """Chooses the tokens of one request and remembers which it has chosen."""

    def __init__(self, sampling: Sampling, defaults: SamplingDefaults) -> None:
        self._sampling = sampling
        self._temperature = defaults.temperature if sampling.temperature is None else sampling.temperature
        self._top_p = defaults.top_p if sampling.top_p is None else sampling.top_p
        self._top_k = defaults.top_k
        self._chosen: Counter[int] = Counter()
        self._generator: Any = None
        if sampling.seed is not None:
            self._generator = torch.Generator().manual_seed(sampling.seed)

    def pick(self, logits: Any) -> int:
        """The next token. `logits`: one float per token of the vocabulary; they are changed."""
        sampling = self._sampling
        for token, bias in sampling.logit_bias.items():
            logits[token] += bias
        if sampling.presence_penalty or sampling.frequency_penalty:
            for token, times in self._chosen.items():
                logits[token] -= sampling.presence_penalty + sampling.frequency_penalty * times
        token = int(logits.argmax()) if self._temperature == 0 else self._draw(logits / self._temperature)
        self._chosen[token] += 1
        return token

    def _draw(self, logits: Any) -> int:
        """A token by its probability, among the `top_k` best and the fewest that hold `top_p` of it."""
        if not self._top_k and self._top_p >= 1.0:
            return int(torch.multinomial(logits.softmax(-1), 1, generator=self._generator))
        values, tokens = logits.topk(min(self._top_k or logits.numel(), logits.numel()))
        probabilities = values.softmax(-1)
        outside = probabilities.cumsum(-1) - probabilities >= self._top_p
        probabilities = probabilities.masked_fill(outside, 0.0)
        return int(tokens[torch.multinomial(probabilities, 1, generator=self._generator)])


def check_sampling(sampling: Sampling, vocabulary: int) -> None:
    """PromptError for what cannot be sampled, before the request waits for its turn."""
    if any(not 0 <= token < vocabulary for token in sampling.logit_bias):
        raise PromptError(f"Token ids of this model are below {vocabulary}.", param="logit_bias")
    if sampling.seed is not None and sampling.seed not in SEEDS:
        raise PromptError("The seed must fit into 64 bits.", param="seed")
    if sampling.temperature is not None and not 0.0 <= sampling.temperature < float("inf"):
        raise PromptError("The temperature must be 0 or more.", param="temperature")
    if sampling.top_p is not None and not 0.0 < sampling.top_p <= 1.0:
        raise PromptError("top_p must be above 0 and at most 1.", param="top_p")
    if "" in sampling.stop:
        raise PromptError("A stop string must not be empty.", param="stop")
    wishes = {
        "n": sampling.n > 1,
        "logprobs": sampling.logprobs is not None,
        "response_format": sampling.format is not None,
        "tools": sampling.tools is not None,
    }
    for param, wished in wishes.items():
        if wished:
            raise PromptError(f"The engine of this model does not know {param!r}.", param=param)
