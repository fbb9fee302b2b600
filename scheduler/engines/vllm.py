"""The vLLM engine: `AsyncLLM` behind the engine seam. No other module of this process imports vLLM, and this one only
when it is used.

vLLM is pinned; what this adapter relies on is listed in `_load` and held by tests under `tests/engines/`.

    create          options -> engine arguments
    start           in a thread: configuration, processes, weights (20 s and more); then one warm-up request
    render          vLLM's own renderer: chat template and tokeniser; long prompts on a thread of their own
    generate        one request; vLLM's outputs -> Delta, Finished
    aclose          ends every stream, then every process

The engine proper runs in other processes (EngineCore and its workers). If this process is killed they live on, which
is why `EngineLimits.pids` names them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from scheduler.clock import Clock
from scheduler.core.types import PoolCapacity, StepReport
from scheduler.engines.base import (
    ChatPrompt,
    EngineDeadError,
    EngineEvent,
    EngineLimits,
    EngineRequest,
    EngineStartError,
    JsonFormat,
    PromptError,
    PromptTooLongError,
    Rendered,
    RequestFailedError,
    Sampling,
    StepListener,
    Terms,
    Tools,
    compact,
)
from scheduler.engines.chat import ChatGuard, characters
from scheduler.engines.engine_log import EngineLog
from scheduler.engines.grammar_box import GrammarBox
from scheduler.engines.vllm_answers import AnswerReader, TokenSpeller, ToolRequest, tool_request
from scheduler.engines.vllm_errors import explain
from scheduler.engines.vllm_options import (
    ALIASES,
    SHAPER,
    SHAPER_FAILURE,
    SHAPER_TERMS,
    engine_arguments,
    tool_parser,
    wants_shaper,
)

LONG_PROMPT = 20_000  # characters from which on a prompt must not stand before short ones
SHUTDOWN_SECONDS = 10.0  # that the engine's processes get to end by themselves; they take 5 on the CPU
SEEDS = range(-(2**63), 2**63)
GREEDY_BELOW = 1e-5  # temperatures that vLLM takes for 0

# vLLM's start touches state of the whole process (logging, current configuration, environment): one at a time.
_one_start = threading.Lock()

# For vLLM's processes, set before it is imported; what the operator has set wins.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # models are on disk
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # A forked engine would hold the scheduler's sockets and locks.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


@functools.cache
def _load() -> SimpleNamespace:
    """Import vLLM (5 to 10 s) and answer everything of it that this adapter uses.

    Raises EngineStartError when it is missing or cannot be loaded.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    logging.getLogger("vllm").setLevel(logging.ERROR)  # what it says while it loads is about parts we do not use
    try:
        from vllm import exceptions, platforms, sampling_params
        from vllm.config import StructuredOutputsConfig
        from vllm.config.logging import LoggingConfig
        from vllm.engine import arg_utils
        from vllm.entrypoints.openai.chat_completion import protocol
        from vllm.parser import parser_manager
        from vllm.renderers import params
        from vllm.tool_parsers import ToolParserManager
        from vllm.v1.engine import async_llm
        from vllm.v1.engine import exceptions as engine_exceptions
        from vllm.v1.metrics import loggers
        from vllm.v1.structured_output import backend_xgrammar
        from xgrammar import TokenizerInfo
    except ModuleNotFoundError as error:
        raise EngineStartError(
            f"The engine vllm needs a package that is missing: {error.name}.",
            hint="Run `make setup`, or install the extra `vllm` on a GPU host.",
        ) from error
    except (ImportError, OSError) as error:
        raise EngineStartError(
            f"vLLM cannot be loaded: {error}.", hint="Its build does not fit this machine; install it again."
        ) from error
    # Grammars are tried out in the box: not once more on the loop of the scheduler, for as long as that may take.
    backend_xgrammar.validate_xgrammar_grammar = lambda _: None
    logging.getLogger("transformers").setLevel(logging.ERROR)  # it warns of long prompts, which we refuse
    return SimpleNamespace(
        AsyncEngineArgs=arg_utils.AsyncEngineArgs,
        AsyncLLM=async_llm.AsyncLLM,
        ChatParams=params.ChatParams,
        ClientError=exceptions.VLLMClientError,
        DeadError=engine_exceptions.EngineDeadError,
        Error=exceptions.VLLMError,
        LoggingConfig=LoggingConfig,
        PrometheusStatLogger=loggers.PrometheusStatLogger,
        ChatCompletionRequest=protocol.ChatCompletionRequest,
        ParserManager=parser_manager.ParserManager,
        RequestOutputKind=sampling_params.RequestOutputKind,
        SamplingParams=sampling_params.SamplingParams,
        StructuredOutputsConfig=StructuredOutputsConfig,
        StructuredOutputsParams=sampling_params.StructuredOutputsParams,
        TokenizeParams=params.TokenizeParams,
        TokenizerInfo=TokenizerInfo,
        ToolParserManager=ToolParserManager,
        unsupported_schema=backend_xgrammar.has_xgrammar_unsupported_json_features,
        is_cpu=platforms.current_platform.is_cpu(),
    )


def create(
    model: str, options: Mapping[str, Any], *, clock: Clock, on_step: StepListener, data_dir: Path
) -> VllmEngine:
    """Build (not start) the engine of a deployment. Blocks while vLLM is imported.

    EngineStartError names a bad option, or the package that is missing.
    """
    api = _load()
    known = [field.name for field in dataclasses.fields(api.AsyncEngineArgs)]
    arguments = engine_arguments(options, known, data_dir, cpu=api.is_cpu)
    log = EngineLog(data_dir / "run", model)
    parser = tool_parser(options, api.ToolParserManager.list_registered())
    return VllmEngine(arguments, log, clock=clock, on_step=on_step, shaped=wants_shaper(options), tool_parser=parser)


class VllmEngine:
    """An `Engine` (`scheduler/engines/base.py`)."""

    def __init__(
        self,
        arguments: Mapping[str, Any],
        log: EngineLog,
        *,
        clock: Clock,
        on_step: StepListener,
        shaped: bool = False,
        tool_parser: str | None = None,
    ) -> None:
        self._api = _load()
        self._arguments = arguments
        self._shaped = shaped
        self._tool_parser = tool_parser
        self._parser: Any = None  # vLLM's class of that name, with what it needs around it
        self._log = log
        self._clock = clock
        self._on_step = on_step
        self._started = False
        self._building: Future[Any] | None = None
        self._older: set[BaseProcess] | None = None  # while it builds: our children that are not its
        self._closed = False
        self._llm: Any = None
        self._defaults: Mapping[str, Any] = {}  # the model's own sampling defaults
        self._guard = ChatGuard(())
        self._speller: Any = None
        self._box: GrammarBox | None = None
        self._long = ThreadPoolExecutor(1, thread_name_prefix="vllm-long-prompts")
        self._work = _Work(clock)
        self._pids: tuple[int, ...] = ()

    # --- the Engine protocol ------------------------------------------------------------------------------------

    async def start(self) -> EngineLimits:
        if self._building is not None or self._closed:
            raise EngineStartError("The engine was started before.", hint="Build a new one.")
        starter = ThreadPoolExecutor(1, thread_name_prefix="vllm-start")
        self._building = starter.submit(self._build)
        starter.shutdown(wait=False)
        built = asyncio.wrap_future(self._building)
        built.add_done_callback(lambda done: done.cancelled() or done.exception())  # heard, even if we are cancelled
        try:
            self._adopt(await asyncio.shield(built))
            self._box = await asyncio.to_thread(self._grammar_box)
            await asyncio.gather(self._warm_up(), self._box.start())
        except EngineStartError:
            raise
        except Exception as error:  # whatever a start raises, the operator gets a sentence for it
            names = {theirs: ours for ours, theirs in ALIASES.items()}
            raise explain(error, await asyncio.to_thread(self._log.text), names) from error
        self._started = True
        return EngineLimits(self._capacity(), self._llm.model_config.get_vocab_size(), self._pids, resumes=True)

    async def render(self, prompt: ChatPrompt, sampling: Sampling) -> Rendered:
        llm = self._alive()
        if prompt.simulate is not None:
            raise PromptError("Only the simulated engine takes `simulate`.", param="simulate")
        limit = llm.model_config.max_model_len - 1  # one token of output must fit
        length = characters(prompt.messages) + len(sampling.tools.functions if sampling.tools else "")
        most = llm.renderer.tokenizer.max_chars_per_token
        if length > most * limit:  # tokenising it would take seconds to learn the same
            raise PromptTooLongError(-(-length // most), limit, param="messages", at_least=True)
        await self._check(sampling)
        engine_input = await self._tokenise(prompt, sampling.tools, long=length > LONG_PROMPT)
        tokens = len(engine_input["prompt_token_ids"])
        if tokens > limit:
            raise PromptTooLongError(tokens, limit, param="messages")
        engine_input["prompt_token_ids"] = compact(engine_input["prompt_token_ids"])
        return Rendered(tokens, limit + 1 - tokens, engine_input)

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineEvent]:
        llm = self._alive()
        tools = self._tool_request(request.sampling)
        stream = llm.generate(
            self._engine_input(request),
            self._sampling_params(request.sampling, tools, len(request.produced), request.terms),
            request.id,
            priority=request.priority,
        )
        answers = [
            AnswerReader(
                index, request.sampling, len(request.produced), self._speller, tools.reader() if tools else None
            )
            for index in range(request.sampling.n)
        ]
        cached = 0
        over = False
        self._work.handed_over()
        try:
            async for output in stream:
                if output.outputs and output.outputs[0].index == 0:  # the others find what the first has computed
                    cached = output.num_cached_tokens or cached
                over = output.finished
                prompt = len(output.prompt_token_ids) - len(request.produced)
                for answer in output.outputs:
                    for event in answers[answer.index].read(answer, prompt, cached):
                        yield event
        except self._api.DeadError as error:
            over = True
            raise EngineDeadError("The engine has died.") from error
        except self._api.Error as error:
            raise RequestFailedError(f"The engine could not run the request: {error}") from error
        finally:
            self._work.came_back()
            if not over:
                # By the outer id: vLLM knows no inner one yet if we are cancelled while it takes the request in.
                await llm.abort(request.id)
            await stream.aclose()

    async def abort(self, request_id: str) -> None:
        if self._llm is not None:
            await self._llm.abort(request_id)

    async def aclose(self) -> None:
        self._closed = True
        if self._llm is not None:  # streams end first: what follows takes its time
            self._llm.output_processor.propagate_error(self._api.DeadError())
        await self._stop_building()
        if self._box is not None:
            await self._box.aclose()
        llm, self._llm = self._llm, None
        if llm is not None:
            await asyncio.to_thread(llm.shutdown, SHUTDOWN_SECONDS)
        await asyncio.to_thread(_end, self._pids)
        self._long.shutdown(wait=False)
        self._building = None  # it holds on to all of vLLM

    # --- start and stop -----------------------------------------------------------------------------------------

    def _build(self) -> Any:
        """Configuration, processes, weights. Runs in a thread; vLLM has no asynchronous way to do it."""
        api = self._api
        with _one_start:
            self._log.open("vllm")
            log = api.LoggingConfig(configure_logging=True, pylogging_config_file=str(self._log.configuration))
            # The one compiler whose grammars are tried out in the box, and no other in its place. Without blanks: a
            # model that likes them would write nothing else.
            outputs = api.StructuredOutputsConfig(backend="xgrammar", disable_any_whitespace=True)
            config = api.AsyncEngineArgs(
                **self._arguments, logging_config=log, structured_outputs_config=outputs
            ).create_engine_config()
            if self._shaped:
                _shape(config)
            step_logger = _step_logger(api, self._work, self._stepped)
            self._older = set(multiprocessing.active_children())
            try:
                if self._closed:
                    raise EngineStartError("The engine was closed while it started.")
                return api.AsyncLLM.from_vllm_config(config, stat_loggers=[step_logger], disable_log_stats=True)
            finally:
                self._older = None

    def _adopt(self, llm: Any) -> None:
        """Take over what the thread has built."""
        self._llm = llm
        self._defaults = llm.model_config.get_diff_sampling_param()
        tokenizer = llm.renderer.tokenizer
        special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._guard = ChatGuard([*special, *tokenizer.all_special_tokens])
        self._speller = TokenSpeller(tokenizer)
        self._parser = self._api.ParserManager.get_parser(
            tool_parser_name=self._tool_parser,
            enable_auto_tools=True,
            tokenizer=tokenizer,
            tool_strict_level="parameter",  # arguments obey their schema, whether `strict` is given or not
        )
        self._pids = _family(process.pid for process in llm.engine_core.resources.engine_manager.processes)

    def _grammar_box(self) -> GrammarBox:
        """Where grammars for this model's tokenizer are tried out."""
        llm = self._llm
        size = llm.model_config.get_vocab_size()
        return GrammarBox(
            self._api.TokenizerInfo.from_huggingface(llm.renderer.tokenizer, vocab_size=size).serialize_json()
        )

    async def _warm_up(self) -> None:
        """One short answer, and both ways of rendering: the first call of each costs up to half a second."""
        prompt = ChatPrompt(({"role": "user", "content": "Hello"},))
        await self._tokenise(prompt, None, long=True)
        sampling = Sampling(max_tokens=1)
        rendered = await self.render(prompt, sampling)
        async for _ in self.generate(EngineRequest("warm-up", rendered, sampling, 0, self._clock.now())):
            pass

    async def _stop_building(self) -> None:
        """Cut a start short: without its processes it fails at once."""
        if self._building is None:
            return
        while not self._building.done():
            older = self._older
            if older is not None:
                for process in set(multiprocessing.active_children()) - older:
                    process.kill()
            await asyncio.sleep(0.05)
        if self._llm is None and self._building.exception() is None:
            self._adopt(self._building.result())

    def _capacity(self) -> PoolCapacity:
        llm = self._llm
        cache, scheduler = llm.vllm_config.cache_config, llm.vllm_config.scheduler_config
        return PoolCapacity(
            max_seqs=scheduler.max_num_seqs,
            step_tokens=scheduler.max_num_batched_tokens,
            kv_tokens=cache.kv_cache_size_tokens - cache.block_size,  # one block is vLLM's own, for padding
            block_size=cache.block_size,
            max_model_len=llm.model_config.max_model_len,
        )

    def _stepped(self, report: StepReport) -> None:
        if self._started:  # the steps of the warm-up are nobody's
            self._on_step(report)

    # --- requests -----------------------------------------------------------------------------------------------

    def _alive(self) -> Any:
        if self._llm is None:
            raise EngineDeadError("The engine is not running.")
        if self._llm.errored:
            raise EngineDeadError("The engine has died.")
        return self._llm

    async def _tokenise(self, prompt: ChatPrompt, tools: Tools | None, *, long: bool) -> dict[str, Any]:
        """vLLM's rendered input. PromptError when the template does not take the conversation."""
        messages = self._guard.clean(prompt.messages)
        renderer = self._alive().renderer
        more = {} if tools is None else {"tools": self._guard.clean_tools(json.loads(tools.functions))}
        chat = self._api.ChatParams(chat_template_kwargs={"add_generation_prompt": True, **more})
        # No limit here: a prompt that is too long is to be counted, not cut.
        tokens = self._api.TokenizeParams(max_total_tokens=None, add_special_tokens=False)
        try:
            if long:
                render = functools.partial(renderer.render_chat, [messages], chat, tokens)
                _, (engine_input,) = await asyncio.get_running_loop().run_in_executor(self._long, render)
            else:
                _, (engine_input,) = await renderer.render_chat_async([messages], chat, tokens)
        except (self._api.ClientError, ValueError, TypeError) as error:
            raise PromptError(f"The model's chat template does not take this: {error}", param="messages") from error
        engine_input.pop("prompt", None)  # the text has done its duty; nothing may log it
        return dict(engine_input)

    def _engine_input(self, request: EngineRequest) -> dict[str, Any]:
        """The rendered prompt with what belongs to this request: a wall-clock arrival and a cache of its own.

        What an earlier run has produced is prompt to vLLM; only the answer's counts and text must know better.
        """
        waited = self._clock.now() - request.arrival
        engine_input = {**request.rendered.payload, "arrival_time": time.time() - waited}
        engine_input["prompt_token_ids"] = [*engine_input["prompt_token_ids"], *request.produced]
        if request.cache_salt:
            engine_input["cache_salt"] = request.cache_salt
        return engine_input

    def _sampling_params(
        self, sampling: Sampling, tools: ToolRequest | None, produced: int = 0, terms: Terms | None = None
    ) -> Any:
        """vLLM's sampling; what the request leaves open is the model's own default. Raises vLLM's ClientError.

        `produced`: tokens of the answer that are there already.
        """
        defaults = self._defaults
        temperature = defaults.get("temperature", 1.0) if sampling.temperature is None else sampling.temperature
        top_k = defaults.get("top_k", 0)
        if sampling.n > 1 and temperature < GREEDY_BELOW:
            temperature, top_k = 1.0, 1  # vLLM samples several answers only; among one token that is greedy
        return self._api.SamplingParams.from_optional(
            n=sampling.n,
            max_tokens=(sampling.max_tokens or 1) - produced,
            temperature=temperature,
            top_p=defaults.get("top_p", 1.0) if sampling.top_p is None else sampling.top_p,
            top_k=top_k,
            min_p=defaults.get("min_p", 0.0),
            repetition_penalty=defaults.get("repetition_penalty", 1.0),
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            stop=list(sampling.stop),
            seed=sampling.seed,
            logit_bias=dict(sampling.logit_bias) or None,
            ignore_eos=sampling.ignore_eos,
            logprobs=sampling.logprobs,
            structured_outputs=tools.constraint if tools else self._constraint(sampling.format),
            skip_special_tokens=not (tools and tools.keeps_special_tokens),
            output_kind=self._api.RequestOutputKind.DELTA,
            extra_args={SHAPER_TERMS: [terms.rank, terms.tpot, terms.whole]} if terms and self._shaped else None,
        )

    async def _check(self, sampling: Sampling) -> None:
        """PromptError for what vLLM would only refuse, or choke on, when the request has waited its turn."""
        vocabulary = self._llm.model_config.get_vocab_size()
        if any(not 0 <= token < vocabulary for token in sampling.logit_bias):
            raise PromptError(f"Token ids of this model are below {vocabulary}.", param="logit_bias")
        if sampling.seed is not None and sampling.seed not in SEEDS:
            raise PromptError("The seed must fit into 64 bits.", param="seed")
        if "" in sampling.stop:
            raise PromptError("A stop string must not be empty.", param="stop")
        tools = self._tool_request(sampling)
        try:
            params = self._sampling_params(sampling, tools)
        except self._api.ClientError as error:
            parameter = getattr(error, "parameter", None)
            raise PromptError(str(error.args[0]), param=parameter or "messages") from error
        if params.structured_outputs is not None:
            await self._check_grammar(params.structured_outputs, "tools" if tools else "response_format")

    async def _check_grammar(self, wanted: Any, param: str) -> None:
        """PromptError for a grammar that cannot be compiled, or not within bounds."""
        assert self._box is not None, "a started engine has one"
        refusal: str | None = "it uses what the model's grammar compiler does not know"
        if wanted.structural_tag is not None:
            refusal = await self._box.refusal("tag", wanted.structural_tag)
        elif wanted.json is None:  # any object
            refusal = None
        elif not self._api.unsupported_schema(json.loads(wanted.json) if isinstance(wanted.json, str) else wanted.json):
            text = wanted.json if isinstance(wanted.json, str) else json.dumps(wanted.json)
            refusal = await self._box.refusal("json", text)
        if refusal is not None:
            raise PromptError(f"The schema is refused: {refusal}.", param=param)

    def _tool_request(self, sampling: Sampling) -> ToolRequest | None:
        """The tools of the request in vLLM's words; None without any. PromptError: they cannot be used."""
        if sampling.tools is None:
            return None
        if self._parser is None:
            message = "This model calls no tools: its deployment names no `tool_parser`."
            raise PromptError(message, param="tools")
        try:
            constraint = self._constraint(sampling.format)
            return tool_request(self._api, self._parser, self._llm.renderer.tokenizer, sampling.tools, constraint)
        except (self._api.ClientError, ValueError, TypeError) as error:
            raise PromptError(f"The tools are refused: {error}", param="tools") from error

    def _constraint(self, wanted: JsonFormat | None) -> Any:
        """vLLM's constraint of a format; None: text."""
        if wanted is None:
            return None
        params = self._api.StructuredOutputsParams
        return params(json=wanted.schema) if wanted.schema else params(json_object=True)


def _shape(config: Any) -> None:
    """Put the step shaper around the scheduler that vLLM has chosen. EngineStartError: it does not go with the rest."""
    if config.lora_config or config.speculative_config or config.kv_transfer_config or config.ec_transfer_config:
        raise EngineStartError(
            f"Option {SHAPER!r} is refused: it does not go with adapters, speculative decoding or KV transfer.",
            hint="Remove one of them from the deployment.",
        )
    scheduler = config.scheduler_config
    name = "ShapedAsyncScheduler" if scheduler.async_scheduling else "ShapedScheduler"
    scheduler.scheduler_cls = f"scheduler.engines.vllm_shaper.{name}"


class _Work:
    """Since when the engine has had work without a pause: what a step's time is read off.

    vLLM's own `elapsed_ms` leaves out its scheduling and the way between its processes, about a fifth of a short step;
    and since it schedules ahead, it leaves out nearly all of the first step after a pause.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._requests = 0
        self._since: float | None = None

    def handed_over(self) -> None:
        """A request is on its way to the engine."""
        if not self._requests:
            self._since = self._clock.now()
        self._requests += 1

    def came_back(self) -> None:
        """A request is over, and so is its way back."""
        self._requests -= 1
        if not self._requests:
            self._since = None

    def step(self) -> tuple[float, float]:
        """Now, at a report, and the seconds since the one before it or since work came."""
        now = self._clock.now()
        before, self._since = self._since, now if self._requests else None
        return now, 0.0 if before is None else now - before


def _step_logger(api: Any, work: _Work, on_step: StepListener) -> type:
    """vLLM's listener for step statistics, in the place of its Prometheus one.

    vLLM adds its own Prometheus logger unless it is given one; by being one, ours saves every step that work.
    """

    class StepLogger(api.PrometheusStatLogger):  # type: ignore[misc]  # its type is unknown here
        def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
            self.engine_indexes = engine_indexes or [0]

        def log_engine_initialized(self) -> None:
            pass

        def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
            pass

        def record_admission_rejection(self, reason: str) -> None:
            pass

        def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
            if scheduler_stats is not None:
                on_step(_report(scheduler_stats, iteration_stats, *work.step()))

    return StepLogger


def _report(scheduler: Any, iteration: Any, now: float, passed: float) -> StepReport:
    """A step. One that only cleans up after aborts has no details: it took no time worth counting."""
    details = scheduler.iteration_details
    return StepReport(
        at=now,
        elapsed=max(details.elapsed_ms / 1000, passed) if details else 0.0,
        prefill_tokens=details.num_ctx_tokens if details else 0,
        decode_seqs=details.num_generation_requests if details else 0,
        running=scheduler.num_running_reqs,
        waiting=scheduler.num_waiting_reqs + scheduler.num_skipped_waiting_reqs,
        kv_usage=scheduler.kv_cache_usage,
        preemptions=iteration.num_preempted_reqs if iteration else 0,
        shaper_failure=(scheduler.kv_connector_stats or {}).get(SHAPER_FAILURE),
    )


def _family(roots: Any) -> tuple[int, ...]:
    """The processes and all below them."""
    pids: list[int] = []
    for pid in roots:
        pids.append(pid)
        pids.extend(child.pid for child in psutil.Process(pid).children(recursive=True))
    return tuple(pids)


def _end(pids: tuple[int, ...]) -> None:
    """Kill what is left of the engine's processes. They were children of ours, so their pids are not reused yet."""
    left = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    for process in left:
        process.kill()
    psutil.wait_procs(left, timeout=SHUTDOWN_SECONDS)
