"""How quick the torch engine samples beside transformers' own ``generate``: the same requests, tokens per second.

    python benchmarks/sampling.py --out results/sampling
    python benchmarks/sampling.py table results/sampling

Both sides run the same weights with the same prompts and draw every token at temperature 1 from the full vocabulary.
Their responses have the same lengths, because the model decides them: a hook on the model makes all other tokens
improbable after each token, so that the ids count down to the end-of-sequence token from the last one of the prompt.
Every logit is still computed and every token drawn; neither side knows a length before its response ends.

The engine keeps ``slots`` responses going and fills a free slot at once. ``generate`` (key/value cache, PyTorch's fused
attention) takes the requests in their order in batches of one size; of the sizes in ``--batches``, the quickest for
the lengths at hand counts. Rounds alternate between the two, with lengths and prompts of their own; the ratio is the
median of those within a round. The engine also returns the log-probability of every token, which ``generate`` need not.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from harness.cells import SEED, SIZES, Cell
from harness.record import load_average, markdown_table, read_result, write_result
from harness.workload import make_model, sharing_weights
from numpy.typing import NDArray
from transformers import GenerationConfig, PreTrainedModel

from vcpo.records import GenerationRequest, SamplingParams
from vcpo.sampler.protocol import generate
from vcpo.sampler.torch_engine import TorchEngine

BAR = 2.0  # at long-tailed lengths
EOS = 1
_SURE = 1e4  # a logit beside which all others have probability 0

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Load:
    """What is to be sampled.

    requests: responses, ``group`` of them to a prompt of ``prompt`` tokens. mean: of their lengths before the cut-off
        at ``longest``.
    """

    requests: int
    group: int
    prompt: int
    mean: int
    longest: int


def lengths(shape: str, load: Load, seed: int) -> NDArray[np.int64]:
    """Response lengths in tokens. ``uniform``: all the same. ``long-tailed``: log-normal with sigma 1.2, cut off."""
    if shape == "uniform":
        return np.full(load.requests, load.mean, dtype=np.int64)
    sigma = 1.2
    drawn = np.random.default_rng([SEED, seed]).lognormal(np.log(load.mean) - sigma**2 / 2, sigma, load.requests)
    return np.clip(np.round(drawn), 1, load.longest).astype(np.int64)


def make_requests(shape: str, load: Load, vocabulary: int, seed: int) -> list[GenerationRequest]:
    """Prompts of random tokens whose last one says how long the response becomes."""
    rng = np.random.default_rng([SEED, seed, 1])
    shared = rng.integers(2, vocabulary, (-(-load.requests // load.group), load.prompt - 1))
    return [
        GenerationRequest(i // load.group, i % load.group, np.append(shared[i // load.group], length + 1), i)
        for i, length in enumerate(lengths(shape, load, seed).tolist())
    ]


def count_down(model: PreTrainedModel) -> None:
    """After token n the model draws n - 1, and the end token (id 1) after 2."""

    def hook(_: object, __: tuple[Any, ...], given: dict[str, Any], output: Any) -> None:
        newest = given["input_ids"][:, -1]
        following = (newest - 1).clamp(min=EOS)
        output.logits[torch.arange(len(newest)), -1, following] = _SURE

    model.register_forward_hook(hook, with_kwargs=True)


def by_engine(model: PreTrainedModel, requests: Sequence[GenerationRequest], slots: int, longest: int) -> list[int]:
    """Lengths of the responses, in the order of the requests."""
    params = SamplingParams(max_tokens=longest, stop_token_ids=(EOS,))
    engine = TorchEngine(model, params, slots, longest + max(len(r.prompt_ids) for r in requests))
    return [len(trajectory.response_ids_T) for trajectory in generate(engine, requests)]


def by_generate(model: PreTrainedModel, requests: Sequence[GenerationRequest], batch: int, longest: int) -> list[int]:
    """The same through ``generate``, ``batch`` requests at a time."""
    config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=longest, eos_token_id=EOS, pad_token_id=0
    )
    found: list[int] = []
    for first in range(0, len(requests), batch):
        ids = torch.from_numpy(np.stack([request.prompt_ids for request in requests[first : first + batch]]))
        generating: Any = model
        output = generating.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        responses = output[:, ids.shape[1] :]
        found += ((responses == EOS).int().argmax(dim=1) + 1).tolist()
    return found


def measure(size: str, shape: str, load: Load, slots: int, batches: Sequence[int], rounds: int) -> dict[str, Any]:
    """Seconds of both sides in every round, at the batch size that was quickest in a round before them."""
    cell = Cell(size, load.prompt + load.longest, 1, 1)
    ours = make_model(cell)
    theirs = sharing_weights(ours, "sdpa")
    count_down(ours)
    count_down(theirs)

    def seconds(way: Callable[..., list[int]], model: PreTrainedModel, seed: int, at_once: int) -> float:
        requests = make_requests(shape, load, SIZES[size].vocabulary, seed)
        begin = time.perf_counter()
        found = way(model, requests, at_once, load.longest)
        elapsed = time.perf_counter() - begin
        if found != lengths(shape, load, seed).tolist():
            raise RuntimeError(f"{way.__name__} gave responses of other lengths than those asked for")
        return elapsed

    warm_up = seconds(by_engine, ours, 0, slots)
    tried = {batch: seconds(by_generate, theirs, 0, batch) for batch in batches}
    best = min(tried, key=lambda batch: tried[batch])
    engine, other = [], []
    for seed in range(1, rounds + 1):
        engine.append(seconds(by_engine, ours, seed, slots))
        other.append(seconds(by_generate, theirs, seed, best))
    tokens = [int(lengths(shape, load, seed).sum()) for seed in range(1, rounds + 1)]
    return {
        "size": size,
        "shape": shape,
        **asdict(load),
        "slots": slots,
        "warm_up_seconds": warm_up,
        "generate_seconds_by_batch": {str(batch): value for batch, value in tried.items()},
        "generate_batch": best,
        "tokens": tokens,
        "engine_seconds": engine,
        "generate_seconds": other,
        **rates(tokens, engine, other),
    }


def rates(tokens: Sequence[int], engine: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """Tokens per second of both sides and how many times as many the engine makes; medians over rounds."""
    return {
        "engine_tokens_per_second": statistics.median(n / s for n, s in zip(tokens, engine, strict=True)),
        "generate_tokens_per_second": statistics.median(n / s for n, s in zip(tokens, other, strict=True)),
        "ratio": statistics.median(b / a for a, b in zip(engine, other, strict=True)),
    }


@app.callback(invoke_without_command=True)
def run(
    context: typer.Context,
    sizes: Annotated[str, typer.Option(help=f"comma-separated: {', '.join(SIZES)}")] = "S",
    requests: Annotated[int, typer.Option(min=1, help="responses")] = 256,
    group: Annotated[int, typer.Option(min=1, help="responses to one prompt")] = 8,
    prompt: Annotated[int, typer.Option(min=2, help="tokens of a prompt")] = 32,
    mean: Annotated[int, typer.Option(min=1, help="mean response length, before the cut-off")] = 64,
    longest: Annotated[int, typer.Option(min=1, help="the longest response")] = 512,
    slots: Annotated[int, typer.Option(min=1, help="responses that the engine decodes at once")] = 64,
    batches: Annotated[str, typer.Option(help="batch sizes to try for generate")] = "16,32,64,128,256",
    rounds: Annotated[int, typer.Option(min=1, help="timed rounds")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="torch's CPU threads")] = 1,
    out: Annotated[Path, typer.Option(help="directory of the result")] = Path("results/sampling"),
) -> None:
    """Measure, write OUT/sampling.json, and exit with 1 if a ratio at long-tailed lengths is below the bar."""
    if context.invoked_subcommand is not None:
        return
    names, load, before = sizes.split(","), Load(requests, group, prompt, mean, longest), load_average()
    for name in names:
        if name not in SIZES:
            raise typer.BadParameter(f"--sizes: unknown size {name!r}; allowed: {', '.join(SIZES)}")
        if longest + 2 > SIZES[name].vocabulary:
            raise typer.BadParameter(f"--longest: lengths are told by ids, of which {name} has too few")
    torch.set_num_threads(threads)
    at_once = [int(batch) for batch in batches.split(",")]
    cells = []
    for name in names:
        for shape in ("uniform", "long-tailed"):
            cells.append(measure(name, shape, load, slots, at_once, rounds))
            typer.echo(f"{name}, {shape}: {cells[-1]['ratio']:.2f} times generate's tokens per second")
    write_result(out, "sampling", {"bar": BAR, "threads": threads, "seed": SEED, "cells": cells}, before)
    if any(cell["ratio"] < BAR for cell in cells if cell["shape"] == "long-tailed"):
        raise typer.Exit(1)


@app.command()
def table(out: Annotated[Path, typer.Argument(help="directory of the result")]) -> None:
    """Print the result as a Markdown table."""
    head = ("model, lengths", "mean tokens", "engine (tokens/s)", "generate (tokens/s)", "its batch", "ratio")
    rows = [
        (
            f"{cell['size']}, {cell['shape']}",
            f"{sum(cell['tokens']) / len(cell['tokens']) / cell['requests']:.0f}",
            f"{cell['engine_tokens_per_second']:,.0f}",
            f"{cell['generate_tokens_per_second']:,.0f}",
            str(cell["generate_batch"]),
            f"{cell['ratio']:.2f}",
        )
        for cell in read_result(out, "sampling")["cells"]
    ]
    typer.echo(markdown_table(head, rows), nl=False)


if __name__ == "__main__":
    app()
