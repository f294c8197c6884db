"""How much memory a run would take, from the sizes of its model and its configuration.

What the optimizer and the caches hold is exact. Activations and temporaries of single operations are estimates, and
what the allocator cannot use again and the device's own context are left out: the sum is a guide, not a promise.

Letters in the formulas: P parameters, T those of the adapters where these are trained, H hidden size, I intermediate
size, L layers, Q and K widths of all query and of all key heads, V vocabulary, a bytes per number of the model, N
tokens of one pass, k ``max_staleness``.
"""

from __future__ import annotations

import torch

from vcpo.config import ModelSection, RunConfig
from vcpo.learner.gradient import WAITING_ELEMENTS
from vcpo.learner.head import CHUNK_ELEMENTS
from vcpo.learner.packing import default_microbatch
from vcpo.models.sizes import ModelSizes
from vcpo.report.plan import MemoryLine, RoleMemory
from vcpo.sampler.kv_cache import GROWTH
from vcpo.sampler.torch_engine import PREFILL_TOKENS

_PASS, _UPDATE, _EVALUATION, _SAMPLING = "pass", "update", "evaluation", "sampling"
_Phases = tuple[str, ...]


def number_bytes(section: ModelSection) -> int:
    """Bytes of one number of the model (a)."""
    return 4 if section.dtype == "float32" else 2


def planned_device(section: ModelSection) -> torch.device:
    """What the run is planned for. ``auto`` is a GPU where there is one, and for bfloat16, which is meant for one."""
    if section.device != "auto":
        return torch.device(section.device)
    return torch.device("cuda" if torch.cuda.is_available() or section.dtype == "bfloat16" else "cpu")


def longest_trajectory(config: RunConfig) -> int:
    """Tokens of the longest prompt with the longest response."""
    return config.sampling.max_prompt_length + config.sampling.max_completion_length


def microbatch_tokens(config: RunConfig, sizes: ModelSizes | None) -> int | None:
    """The limit on a pass of the learner, before a longer trajectory raises it; ``None`` if the model decides."""
    limit = config.training.max_tokens_per_microbatch
    device = planned_device(config.model)
    if limit is not None or (sizes is None and device.type == "cpu"):
        return limit
    return default_microbatch(sizes.hidden if sizes else 1, device)


def letters(config: RunConfig, sizes: ModelSizes) -> str:
    """What the letters in the formulas stand for."""
    adapters = "" if sizes.trained == sizes.parameters else f"T = {sizes.trained:,} parameters of the adapters, "
    return (
        f"P = {sizes.parameters:,} parameters, {adapters}"
        f"a = {number_bytes(config.model)} bytes per number of the model, H ="
        f" {sizes.hidden:,} hidden size, I = {sizes.intermediate:,} intermediate size, L = {sizes.layers} layers, Q ="
        f" {sizes.query_width:,} and K = {sizes.key_width:,} widths of all query and of all key heads, V ="
        f" {sizes.vocabulary:,} vocabulary, N tokens of one pass, k = {config.runtime.max_staleness} max_staleness."
    )


def keeps_gradient(config: RunConfig) -> bool:
    """Whether the learner keeps a step's gradient until the next one."""
    return config.training.gradient_cosine or config.method.spec.gradient_control is not None


def device_memory(config: RunConfig, sizes: ModelSizes) -> tuple[RoleMemory, ...]:
    """The device memory of every role of the configured runtime."""
    runtime, sampling = config.runtime, config.sampling
    evaluates = bool(config.eval.eval_steps)
    phases: _Phases = (_PASS, _UPDATE, *((_EVALUATION,) if evaluates and not config.eval.background else ()))
    weights = number_bytes(config.model) * sizes.parameters
    if runtime.name == "local":
        sampler = [
            MemoryLine("weights", weights, (_SAMPLING,), "a P", is_exact=True),
            *_decoding(config, sizes, sampling.slots, (_SAMPLING,), _SAMPLING),
        ]
        roles = [
            RoleMemory("learner", 1, tuple(_learner(config, sizes, phases))),
            RoleMemory("sampler", runtime.samplers, tuple(sampler)),
        ]
        if evaluates and config.eval.background:
            beside = [
                MemoryLine("weights", weights, (_EVALUATION,), "a P", is_exact=True),
                *_decoding(config, sizes, sampling.slots, (_EVALUATION,), _EVALUATION),
            ]
            roles.append(RoleMemory("evaluation", 1, tuple(beside)))
        return tuple(roles)
    phases = (_SAMPLING, *phases)
    minibatch = config.training.prompts_per_step * sampling.num_generations
    lines = [
        *_learner(config, sizes, phases),
        MemoryLine("weights of the engine", weights, phases, "a P", is_exact=True),
        MemoryLine(
            "earlier weights",
            (runtime.max_staleness + 1) * number_bytes(config.model) * sizes.trained,
            phases,
            f"(k + 1) a {_trained(sizes)}",
            is_exact=True,
        ),
        *_decoding(config, sizes, minibatch, phases, _SAMPLING),
    ]
    return (RoleMemory("process", 1, tuple(lines)),)


def host_memory(config: RunConfig, sizes: ModelSizes) -> tuple[tuple[str, int, str], ...]:
    """Main memory and disk that the weights take beside the device: (name, bytes, formula)."""
    a, runtime = number_bytes(config.model), config.runtime
    masters = 4 if a < 4 else 0
    ring = (runtime.max_staleness + 1) * a if runtime.name == "lockstep" else 0
    previous = 4 if keeps_gradient(config) else 0
    each = (a + 8 + masters + previous + ring) * sizes.trained
    content = ", ".join(
        ["model, moments"]
        + ["masters"] * bool(masters)
        + ["gradient"] * bool(previous)
        + ["earlier weights"] * bool(ring)
    )
    kept = config.checkpoint.save_total_limit
    lines = [
        ("disk: checkpoints", kept * each, f"at most {kept} of {each / 1e9:.3g} GB ({content})"),
        ("disk: final model", a * sizes.parameters, "a P"),
    ]
    if runtime.name == "local":
        merged = config.sampling.merges_adapters
        published, letter = (sizes.parameters, "P") if merged else (sizes.trained, _trained(sizes))
        size = 2 * a * published
        lines.insert(0, ("shared memory", size, f"2 a {letter}: buffers from learner to samplers"))
        if config.eval.eval_steps and config.eval.background:
            lines.insert(1, ("shared memory of evaluation", size, f"2 a {letter}: buffers of its own"))
            lines.append(("disk: weights under evaluation", a * published, f"a {letter}: for a resumed run"))
    return tuple(lines)


def activation_bytes(sizes: ModelSizes, a: int) -> int:
    """What autograd keeps of one token in one layer of the Llama and Qwen2 kind.

    In the model's dtype: what the two norms normalise and put out (4 H), queries, keys, values and the output of
    attention twice, before and after it is unpacked (3 Q + 2 K), and four times the width of the gated layer (4 I). In
    float32: the inputs of the two norms (2 H).
    """
    return a * (4 * sizes.hidden + 3 * sizes.query_width + 2 * sizes.key_width + 4 * sizes.intermediate) + (
        8 * sizes.hidden
    )


def cache_bytes(config: RunConfig, sizes: ModelSizes, slots: int) -> int:
    """Keys and values of every slot, up to the longest sequence that can be decoded, in whole blocks of positions."""
    longest = min(longest_trajectory(config), sizes.positions or longest_trajectory(config))
    positions = -(-(longest - 1) // GROWTH) * GROWTH  # the last token drawn is never read
    return 2 * number_bytes(config.model) * sizes.layers * slots * positions * sizes.key_width


def _trained(sizes: ModelSizes) -> str:
    """The letter for the number of trained parameters."""
    return "P" if sizes.trained == sizes.parameters else "T"


def _learner(config: RunConfig, sizes: ModelSizes, phases: _Phases) -> list[MemoryLine]:
    a, trained, t = number_bytes(config.model), sizes.trained, _trained(sizes)
    lines = [MemoryLine("weights", a * sizes.parameters, phases, "a P", is_exact=True)]
    if trained != sizes.parameters:
        lines.append(MemoryLine("adapters", a * trained, phases, "a T", is_exact=True))
    if a < 4:
        lines.append(MemoryLine("float32 masters", 4 * trained, phases, f"4 {t}", is_exact=True))
    lines += [
        MemoryLine("AdamW moments", 8 * trained, phases, f"8 {t}", is_exact=True),
        MemoryLine("gradient", 4 * trained, (_PASS, _UPDATE), f"4 {t}: summed in float32", is_exact=True),
    ]
    if keeps_gradient(config):
        words = f"4 {t}: which the cosine is taken with (training.gradient_cosine=false keeps none)"
        lines.append(MemoryLine("previous gradient", 4 * trained, phases, words, is_exact=True))
        lines.append(MemoryLine("its successor", 4 * trained, (_UPDATE,), f"4 {t}: copied before it takes the place"))
    if config.method.spec.needs_norms:
        lines.append(_waiting_for_baselines(config, sizes))
    else:
        if a < 4:
            lines.append(MemoryLine("gradient of one pass", a * trained, (_PASS,), f"a {t}"))
        if trained == sizes.parameters:
            head = 4 * sizes.vocabulary * sizes.hidden
            lines.append(MemoryLine("output layer's gradient", head, (_PASS,), "4 V H: of one pass, in float32"))
    lines += _activations(config, sizes)
    if planned_device(config.model).type == "cuda":
        lines.append(MemoryLine("AdamW's temporaries", 4 * trained, (_UPDATE,), f"4 {t}: it goes over all at once"))
    if _EVALUATION in phases:
        lines += _decoding(config, sizes, config.sampling.slots, (_EVALUATION,), _EVALUATION)
    return lines


def _waiting_for_baselines(config: RunConfig, sizes: ModelSizes) -> MemoryLine:
    """What waits for the baselines: per layer either sums of gradients or rows, whichever is quicker there."""
    groups = min(config.training.prompts_per_step, max(1, WAITING_ELEMENTS // sizes.trained))
    sums = 4 * sizes.trained * groups
    rows = _pass_tokens(config, sizes) * sizes.layers * _output_bytes(sizes, number_bytes(config.model))
    mode = "single" if config.model.gradient_checkpointing else config.training.gradient_norm_mode
    if config.method.spec.opob_leave_one_out:
        mode = "gram"
    if mode == "single" or (mode == "auto" and sums >= rows):
        words = f"4 {_trained(sizes)} x {groups}: sums that lack a baseline, one per group in a pass"
        return MemoryLine("gradients for norms", sums, (_PASS,), words)
    words = "N L a (2H + Q + 2K + 2I): rows; where sums are quicker, they need less (gradient_norm_mode=single)"
    return MemoryLine("gradients for norms", rows, (_PASS,), words)


def _pass_tokens(config: RunConfig, sizes: ModelSizes) -> int:
    """N: the tokens of the largest pass, a full microbatch or one trajectory that is longer."""
    longest = longest_trajectory(config)
    minibatch = config.training.prompts_per_step * config.sampling.num_generations * longest
    return min(max(microbatch_tokens(config, sizes) or 0, longest), minibatch)


def _output_bytes(sizes: ModelSizes, a: int) -> int:
    """Gradients by the outputs of the matrices of one layer, of one token."""
    return a * (2 * sizes.hidden + sizes.query_width + 2 * sizes.key_width + 2 * sizes.intermediate)


def _activations(config: RunConfig, sizes: ModelSizes) -> list[MemoryLine]:
    """What one pass of the largest microbatch keeps."""
    a, tokens = number_bytes(config.model), _pass_tokens(config, sizes)
    layer = activation_bytes(sizes, a)
    outputs = _output_bytes(sizes, a)
    if config.model.gradient_checkpointing:
        per_token = sizes.layers * a * sizes.hidden + layer + outputs
        words = "L a H, and one layer as without checkpointing"
    else:
        per_token = sizes.layers * layer + outputs
        words = "L (a (4H + 3Q + 2K + 4I) + 8H), and one layer's gradients"
    lines = [MemoryLine("activations", tokens * per_token, (_PASS,), f"N = {tokens:,} x ({words})")]
    rows = min(max(1, CHUNK_ELEMENTS // sizes.vocabulary), tokens)
    words = f"(8 + a) V x {rows:,} tokens: logits, probabilities, gradient"
    lines.append(MemoryLine("logits of a chunk", (8 + a) * sizes.vocabulary * rows, (_PASS,), words))
    return lines


def _decoding(config: RunConfig, sizes: ModelSizes, slots: int, held: _Phases, working: str) -> list[MemoryLine]:
    """The cache, which exists in the phases ``held``, and what a step of the engine needs beside it."""
    a, sampling = number_bytes(config.model), config.sampling
    truncates = working == _EVALUATION and (config.eval.top_p < 1 or config.eval.top_k > 0)
    draw = slots * sizes.vocabulary * (a + 16 + (40 if truncates else 0))
    prompts = min(max(PREFILL_TOKENS, sampling.max_prompt_length), slots * sampling.max_prompt_length)
    wide = 3 * sizes.hidden + sizes.query_width + 2 * sizes.key_width + 3 * sizes.intermediate
    if draw >= a * prompts * wide:
        words = f"(a + {56 if truncates else 16}) V x {slots} slots: drawing a token each"
    else:
        words = f"a (3H + Q + 2K + 3I) x {prompts:,} tokens: one layer of the prompts"
    cache = cache_bytes(config, sizes, slots)
    of = " of evaluation" if working == _EVALUATION else ""
    return [
        MemoryLine(f"key/value cache{of}", cache, held, f"2 a L K x {slots} slots x all positions", is_exact=True),
        MemoryLine(f"temporaries{of}", max(draw, a * prompts * wide), (working,), words),
    ]
