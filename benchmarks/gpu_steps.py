"""What an engine step costs a GPU: the kernels of a dense model with grouped-query attention, without an engine.

    model       random weights in bfloat16; matrix products of cuBLAS, the small operations fused by torch.compile
    decode      split-context attention in Triton (`benchmarks/gpu_attention.py`), one contiguous cache per sequence
    prefill     flash attention of PyTorch, chunks with earlier context too
    sampling    temperature and top-p over the vocabulary by bisection, without a sort, for every row that has an answer
    timing      a step is one CUDA graph; medians of replays between two events, rounds over all cases
    fit         T = b0 + b1 P + b2 P c + b3 D + b4 K, non-negative, relative errors (scheduler/core/step_model.py)

What an engine adds (scheduling, input preparation, the way to and from its process) is not in these figures. On a CPU
the same code runs with a tiny model, for tests: its times mean nothing.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

import torch

from benchmarks.gpu_model import SHAPES, Case, Model, Shape, prefill_attention
from benchmarks.report import keep, show

MOST_KV = 540_000  # tokens of context in one step: 71 GB of an 8B model
NAMES = ("b0", "b1", "b2", "b3", "b4")


def cases(model: str) -> list[Case]:
    if model == "tiny":
        return [Case(2, 40), Case(3, 20), Case(prompts=2, chunk=16), Case(2, 40, 1, 8, earlier=24)]
    decode = [Case(d, c) for d in (1, 2, 4, 8, 16, 32, 64, 128, 192, 256) for c in (256, 1024, 2048, 4096, 8192)]
    prefill = [
        Case(prompts=1, chunk=p, earlier=e) for p in (128, 256, 512, 1024, 2048, 4096, 8192) for e in (0, 2048, 8192)
    ]
    several = [Case(prompts=n, chunk=p) for n, p in ((8, 128), (8, 256), (4, 512), (8, 512), (4, 1024), (8, 1024))]
    mixed = [Case(d, 1024, 1, p, e) for d in (16, 64, 160) for p, e in ((256, 0), (1024, 2048), (4096, 0), (8000, 0))]
    return [case for case in (*decode, *prefill, *several, *mixed) if case.kv_tokens <= MOST_KV]


# --- timing -----------------------------------------------------------------------------------------------------------


@torch.inference_mode()  # type: ignore[untyped-decorator]  # of torch nothing is typed here
def seconds(run: Callable[[], Any], repeats: int, *, cuda: bool) -> list[float]:
    """Of each of `repeats` runs: on a GPU, replays of one graph."""
    if not cuda:
        return [_seconds_on_cpu(run) for _ in range(repeats)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(2):
        graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in itertools.pairwise(events)]


def _seconds_on_cpu(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def ceilings(repeats: int) -> dict[str, float]:
    """What this GPU copies (bytes read and written) and multiplies a second, at best."""
    source = torch.empty(2**31, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    copy = median(seconds(lambda: torch.neg(source, out=target), repeats, cuda=True))
    left, right = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    product = median(seconds(lambda: left @ right, repeats, cuda=True))
    return {"bytes_per_second": 2**33 / copy, "flops": 2 * 8192**3 / product}


def check_attention(model: Model) -> dict[str, float]:
    """Relative errors of both kinds of attention on the GPU against the same in float32 on the CPU."""
    shape, kv = model.shape, model.kv[0]
    k, v = kv[:, : 3 * 1000].view(2, 3, 1000, shape.kv_heads, shape.width)
    q = torch.randn(3, 200, shape.heads, shape.width, dtype=torch.bfloat16, device=model.device)
    wide = [x.float().cpu() for x in (q, k, v)]
    pairs = {
        "decode": (model.decode_attention(q[:, -1], k, v), prefill_attention(wide[0][:, -1:], *wide[1:])[:, 0]),
        "prefill": (prefill_attention(q, k, v), prefill_attention(*wide)),
    }
    return {name: float((x.float().cpu() - y).norm() / y.norm()) for name, (x, y) in pairs.items()}


# --- what comes of it -------------------------------------------------------------------------------------------------


def fit(features: Sequence[Sequence[float]], times: Sequence[float]) -> tuple[list[float], list[float]]:
    """Non-negative least squares of relative errors; and the relative error of each row.

    What comes out negative is held at zero and the rest solved again.
    """
    rows = torch.tensor(features, dtype=torch.float64) / torch.tensor(times, dtype=torch.float64).unsqueeze(1)
    scale = rows.amax(0).clamp(min=1e-30)
    free = list(range(rows.shape[1]))
    while True:
        found = torch.linalg.lstsq(rows[:, free] / scale[free], torch.ones(len(rows), 1, dtype=torch.float64)).solution
        positive = [column for column, value in zip(free, found, strict=True) if value > 0]
        if len(positive) == len(free):
            break
        free = positive
    weights = torch.zeros(len(scale), dtype=torch.float64)
    weights[free] = found.squeeze(1) / scale[free]
    return weights.tolist(), (rows @ weights - 1).tolist()


def work(shape: Shape, case: Case) -> tuple[float, float]:
    """The least bytes that the step must move, and its floating-point operations."""
    _, prompt_tokens, products, decodes, context = case.features
    head = shape.vocabulary * shape.hidden
    pairs = products + context  # of a query and a key
    flops = 2 * shape.layer_weights * (prompt_tokens + decodes) + 2 * head * (decodes + case.prompts)
    moved = 2 * (shape.layer_weights + head) + shape.kv_bytes * case.kv_tokens
    return moved, flops + 4 * shape.layers * shape.hidden * pairs


def measure(name: str, device: str, repeats: int, rounds: int) -> dict[str, Any]:
    shape, chosen, cuda = SHAPES[name], cases(name), device == "cuda"
    torch.manual_seed(1)
    best = ceilings(repeats) if cuda else {}
    model = Model(shape, device, max(max(case.kv_tokens for case in chosen), 3000))
    errors = check_attention(model)
    samples: list[list[float]] = [[] for _ in chosen]
    for _ in range(rounds):
        for case, times in zip(chosen, samples, strict=True):
            times += seconds(model.step(case), repeats, cuda=cuda)
    sampling = {
        rows: median(seconds(_sampling(model, rows), repeats, cuda=cuda))
        for rows in ((1, 16, 64, 256) if cuda else (2,))
    }
    middles = [median(times) for times in samples]
    weights, off = fit([case.features for case in chosen], middles)
    return {
        "model": asdict(shape),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
        "ceilings": best,
        "attention_errors": errors,
        "coefficients": dict(zip(NAMES, weights, strict=True)),
        "median_error": median(map(abs, off)),
        "sampling": sampling,
        "steps": [
            {**asdict(case), "seconds": middle, "samples": times, "fitted_over_measured": 1 + error}
            | dict(zip(("bytes", "flops"), work(shape, case), strict=True))
            for case, middle, times, error in zip(chosen, middles, samples, off, strict=True)
        ],
    }


def _sampling(model: Model, rows: int) -> Callable[[], torch.Tensor]:
    logits = torch.randn(rows, model.shape.vocabulary, dtype=torch.bfloat16, device=model.device)
    return lambda: model.sample(logits)


def print_results(results: dict[str, Any]) -> None:
    steps = results["steps"]
    alone = {step["context"]: step["seconds"] for step in steps if step["decodes"] == 1 and not step["prompts"]}
    rows = []
    for step in steps:
        base = alone.get(step["context"]) if not step["prompts"] else None
        rows.append(
            [
                f"{step['decodes']} x {step['context']} + {step['prompts']} x {step['chunk']} after {step['earlier']}",
                f"{step['seconds'] * 1e3:.2f}",
                f"{step['fitted_over_measured']:.2f}",
                f"{step['decodes'] * base / step['seconds']:.1f}" if base else "-",
                f"{step['bytes'] / step['seconds'] / 1e9:.0f}",
                f"{step['flops'] / step['seconds'] / 1e12:.0f}",
            ]
        )
    show("Steps: decodes + prefill", ["", "ms", "fitted", "S(n)", "GB/s", "TFLOP/s"], rows)
    print({name: value for name, value in results.items() if name != "steps"})


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--model", choices=sorted(SHAPES), default="8b" if cuda else "tiny")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if cuda else "cpu")
    parser.add_argument("--repeats", type=int, default=7, help="of each case in a round")
    parser.add_argument("--rounds", type=int, default=2, help="over all cases")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    results = measure(options.model, options.device, options.repeats, options.rounds)
    print_results(results)
    keep("gpu_steps", results)


if __name__ == "__main__":
    main()
