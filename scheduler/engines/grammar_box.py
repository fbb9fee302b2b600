"""Grammars are tried out in a process of their own before an engine compiles them.

A schema of a few bytes can describe a grammar that takes minutes or all memory to compile. Here each is compiled once
in a child process with bounds on time and memory: what does not pass is refused, and harms neither the scheduler's
loop nor the engine. The child ends itself when a bound is passed, and when this process is gone; the next grammar gets
a new one.

    parent ──► {"tokenizer": …}                       once; the answer is {} when the child is ready
    parent ──► {"kind": "json" | "tag", "spec": …}    the answer is {"error": text or null}
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import resource
import signal
import sys
from collections import OrderedDict
from typing import Any, TextIO

START_SECONDS = 60.0  # in which a child must have loaded its library, on a busy machine
COMPILE_SECONDS = 1.0  # of the processor, for one grammar: a busy machine refuses no other grammars than an idle one
ANSWER_SECONDS = 10.0  # of the wall clock, after which a child is given up
MEMORY_BYTES = 512 * 1024 * 1024  # above what the child has when it is ready
KEPT = 1024  # verdicts
TOO_COMPLEX = "it takes too long or too much memory to compile"


class GrammarBox:
    """Asks a child process whether grammars compile. `tokenizer`: as `TokenizerInfo.serialize_json` writes it."""

    def __init__(self, tokenizer: str) -> None:
        self._tokenizer = tokenizer
        self._child: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()

    async def refusal(self, kind: str, spec: str) -> str | None:
        """Why the grammar is refused, in words for its author; None if it compiles. One is tried at a time."""
        key = hashlib.sha256(f"{kind} {spec}".encode()).digest()
        async with self._turn:
            if key not in self._verdicts:
                self._verdicts[key] = await self._ask(kind, spec)
                if len(self._verdicts) > KEPT:
                    self._verdicts.popitem(last=False)
        return self._verdicts[key]

    async def start(self) -> None:
        """Have a child ready. Raises OSError or TimeoutError."""
        async with self._turn:
            await self._ready()

    async def aclose(self) -> None:
        """End the child."""
        child, self._child = self._child, None
        if child is not None and child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()

    async def _ask(self, kind: str, spec: str) -> str | None:
        child = await self._ready()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                answer = await _exchange(child, {"kind": kind, "spec": spec})
        except (TimeoutError, OSError, EOFError):
            await self.aclose()
            return TOO_COMPLEX
        error: str | None = answer["error"]
        return error

    async def _ready(self) -> asyncio.subprocess.Process:
        if self._child is not None and self._child.returncode is None:
            return self._child
        pipe = asyncio.subprocess.PIPE
        self._child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "scheduler.engines.grammar_box",
            stdin=pipe,
            stdout=pipe,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # a terminal's signal is not for it
        )
        try:
            async with asyncio.timeout(START_SECONDS):
                await _exchange(self._child, {"tokenizer": self._tokenizer})
        except BaseException:
            await self.aclose()
            raise
        return self._child


async def _exchange(child: asyncio.subprocess.Process, message: dict[str, Any]) -> dict[str, Any]:
    """Say something and hear the answer. Raises EOFError when the child has ended."""
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(json.dumps(message).encode() + b"\n")
    await child.stdin.drain()
    line = await child.stdout.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    answer: dict[str, Any] = json.loads(line)
    return answer


# --- the child ------------------------------------------------------------------------------------------------------


def serve(lines: TextIO, answers: TextIO) -> None:
    """Compile what comes, one line each, until there is no more."""
    import xgrammar

    tokenizer = xgrammar.TokenizerInfo.deserialize_json(json.loads(lines.readline())["tokenizer"])
    # No threads: the bounds are those of one.
    compiler = xgrammar.GrammarCompiler(tokenizer, max_threads=1, cache_enabled=False)
    _bound_memory()
    print("{}", file=answers, flush=True)
    for line in lines:
        message = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, COMPILE_SECONDS)  # ends the process, whatever the library is doing
        error = _error(xgrammar, compiler, message["kind"], message["spec"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps({"error": error}), file=answers, flush=True)


def _error(xgrammar: Any, compiler: Any, kind: str, spec: str) -> str | None:
    grammar = xgrammar.Grammar
    try:
        if kind == "json":
            made = grammar.from_json_schema(spec, any_whitespace=False, separators=(",", ":"))
        else:
            made = grammar.from_structural_tag(spec)
        compiler.compile_grammar(made)
    except MemoryError:
        return TOO_COMPLEX
    except Exception as error:  # noqa: BLE001 - whatever the library raises is its verdict on the grammar
        return str(error).splitlines()[0][:300] if str(error) else type(error).__name__
    return None


def _bound_memory() -> None:
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - pathlib would load more
        pages = int(file.read().split()[0])
    bound = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))


if __name__ == "__main__":
    serve(sys.stdin, sys.stdout)
