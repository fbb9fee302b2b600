"""A model in memory: tokenizer, weights, sampling defaults. Everything here blocks and belongs on a thread."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from jinja2 import TemplateError

from scheduler.engines.base import EngineStartError, PromptError
from scheduler.engines.chat import ChatGuard
from scheduler.engines.transformers.options import Options
from scheduler.engines.transformers.sampling import SamplingDefaults


class LoadedModel:
    """A causal language model with a chat template. Raises EngineStartError if the folder does not hold one."""

    def __init__(self, options: Options) -> None:
        transformers.utils.logging.disable_progress_bar()
        # One core stays with the event loop, as vLLM leaves one.
        torch.set_num_threads(max((os.cpu_count() or 2) - 1, 1))
        try:
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(options.path, local_files_only=True)
            self.network = transformers.AutoModelForCausalLM.from_pretrained(
                options.path, dtype=getattr(torch, options.dtype), local_files_only=True
            ).eval()
        except (OSError, ValueError, RuntimeError) as error:
            raise EngineStartError(
                f"The model cannot be loaded: {str(error).splitlines()[0]}",
                hint=f"{options.path} must be the folder of a causal language model with its tokenizer.",
            ) from error
        if not self._tokenizer.chat_template:
            raise EngineStartError(
                "The model has no chat template.", hint="Use an instruction-tuned model, or add chat_template.jinja."
            )
        self.max_model_len = options.model_len(self.network.config.max_position_embeddings)
        self.vocabulary: int = self.network.config.vocab_size
        self.longest_token = max(map(len, self._tokenizer.get_vocab()))
        self.defaults, self.ends = _generation(self.network.generation_config)
        special = [str(token) for token in self._tokenizer.added_tokens_decoder.values() if token.special]
        self._guard = ChatGuard([*special, *self._tokenizer.all_special_tokens])

    def tokens(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """A conversation as the model reads it. PromptError when the template does not take it."""
        clean = self._guard.clean(messages)
        try:
            ids = self._tokenizer.apply_chat_template(clean, add_generation_prompt=True, return_dict=False)
        except (TemplateError, ValueError, TypeError) as error:
            raise PromptError(f"The model's chat template does not take this: {error}", param="messages") from error
        return list(ids)

    def text(self, ids: Sequence[int]) -> str:
        """What a reader sees of these tokens."""
        decoded = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(decoded)


def _generation(config: Any) -> tuple[SamplingDefaults, frozenset[int]]:
    """Sampling defaults, and the tokens that end an answer."""
    ends = config.eos_token_id
    given = config.to_diff_dict()  # what the library itself would fill in is no recommendation
    names = [field.name for field in dataclasses.fields(SamplingDefaults)]
    defaults = SamplingDefaults(**{name: given[name] for name in names if given.get(name) is not None})
    return defaults, frozenset(ends if isinstance(ends, list) else () if ends is None else (ends,))
