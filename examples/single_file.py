"""The whole method in one file: VCPO on stale rollouts, top to bottom, with nothing but PyTorch and transformers.

    python examples/single_file.py                # VCPO, rollouts 16 optimizer steps old
    python examples/single_file.py --method tis   # truncated importance sampling on the same rollouts

A small transformer learns to sort digits: the prompt is 8 random digits and "=", the answer is the sorted digits, the
reward is 1 if the answer is exact. Every minibatch is sampled from the weights of ``--lag`` steps ago, as in an
asynchronous pipeline. The package itself does the same with packed batches, real asynchrony and any model; here each
line stands beside the formula it implements. Names: B trajectories, T response tokens, V vocabulary.
"""

import argparse
import copy
import random
from collections import deque

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

DIGITS, EQUALS, EOS, VOCABULARY = 8, 10, 11, 12
PROMPTS, GROUP = 8, 8  # prompts in a minibatch, responses to each
RATIO_CAP = 8.0


def make_model(seed: int) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS,
    )
    return Qwen2ForCausalLM(config).eval()


def make_prompts(count: int, rng: random.Random) -> torch.Tensor:
    """(count, DIGITS + 1): digits and the separator."""
    return torch.tensor([[rng.randrange(10) for _ in range(DIGITS)] + [EQUALS] for _ in range(count)])


def answers(prompts: torch.Tensor) -> torch.Tensor:
    """(count, DIGITS + 1): the sorted digits and the end token."""
    digits = prompts[:, :DIGITS].sort(dim=1).values
    return torch.cat([digits, torch.full((len(prompts), 1), EOS)], dim=1)


def token_logprobs(model: Qwen2ForCausalLM, prompts: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
    """log pi of every response token, (B, T). All sequences have the same length here, so nothing is padded."""
    ids = torch.cat([prompts, responses], dim=1)
    logits = model(input_ids=ids).logits[:, prompts.shape[1] - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, responses[..., None]).squeeze(-1)


@torch.no_grad()
def sample(model: Qwen2ForCausalLM, prompts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sampled responses (B, T), log mu of their tokens (B, T), and which tokens are before or at the end (B, T)."""
    ids, logprobs = prompts, []
    for _ in range(DIGITS + 1):
        logprobs_V = model(input_ids=ids).logits[:, -1].float().log_softmax(-1)
        token = torch.multinomial(logprobs_V.exp(), 1)
        logprobs.append(logprobs_V.gather(-1, token))
        ids = torch.cat([ids, token], dim=1)
    responses = ids[:, prompts.shape[1] :]
    mask = (responses == EOS).cumsum(1) - (
        responses == EOS
    ).long() == 0  # everything after the first end is no response
    return responses, torch.cat(logprobs, dim=1), mask


def reward(prompts: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
    return (responses == answers(prompts)).all(dim=1).double()


def effective_sample_size(log_ratio_B: torch.Tensor) -> float:
    """rho = (sum w)^2 / (B sum w^2) of the un-truncated sequence ratios, computed in log space."""
    log_rho = 2 * log_ratio_B.logsumexp(0) - (2 * log_ratio_B).logsumexp(0)
    return float((log_rho - torch.tensor(float(len(log_ratio_B))).log()).exp())


def optimal_baseline(log_ratio_B: torch.Tensor, squared_norm_B: torch.Tensor, reward_B: torch.Tensor) -> torch.Tensor:
    """b* = sum w^2 n R / sum w^2 n: the baseline of least variance for an importance-weighted policy gradient."""
    weight_B = (2 * log_ratio_B + squared_norm_B.log()).softmax(0)
    return (weight_B * reward_B).sum()


def score_gradients(
    model: Qwen2ForCausalLM, prompts: torch.Tensor, responses: torch.Tensor, mask: torch.Tensor
) -> list[tuple[torch.Tensor, ...]]:
    """s_i = grad of trajectory i's log-probability, one pass each (the package needs one for the whole batch)."""
    scores = []
    for i in range(len(prompts)):
        logprobs = token_logprobs(model, prompts[i : i + 1], responses[i : i + 1])
        scores.append(torch.autograd.grad(logprobs[0][mask[i]].sum(), list(model.parameters())))
    return scores


def update(
    model: Qwen2ForCausalLM,
    optimizer: torch.optim.Optimizer,
    learning_rate: float,
    method: str,
    prompts: torch.Tensor,
    responses: torch.Tensor,
    sampler_logprobs: torch.Tensor,
    mask: torch.Tensor,
) -> dict[str, float]:
    """One optimizer step on a minibatch of whole groups. The order is that of the method's definition."""
    reward_B = reward(prompts, responses)
    logprobs = token_logprobs(model, prompts, responses)

    # sequence importance ratios: mask in log space, then sum, then exponentiate
    log_ratio_B = torch.where(mask, logprobs.detach() - sampler_logprobs, 0.0).double().sum(1)
    weight_B = log_ratio_B.exp().clamp(max=RATIO_CAP)
    length_B = mask.sum(1)
    logprob_B = torch.where(mask, logprobs, 0.0).sum(1)

    scores = score_gradients(model, prompts, responses, mask) if method == "vcpo" else None
    advantage_B = torch.zeros_like(reward_B)
    for first in range(0, len(reward_B), GROUP):
        group = slice(first, first + GROUP)
        deviation = reward_B[group].std(unbiased=False)
        if deviation < 1e-6:
            continue  # equal rewards carry no signal: exactly zero, not noise divided by noise
        if scores is None:
            baseline = reward_B[group].mean()
        else:
            squared_norm_B = torch.stack([sum(g.double().pow(2).sum() for g in score) for score in scores[group]])
            baseline = optimal_baseline(log_ratio_B[group], squared_norm_B, reward_B[group])
        advantage_B[group] = (reward_B[group] - baseline) / deviation

    # G = 1/B sum_i w_i (R_i - b) / sigma * s_i / T_i; the optimizer descends on -G
    coefficient_B = (weight_B * advantage_B / length_B / len(reward_B)).float()
    optimizer.zero_grad()
    if scores is None:
        (-(coefficient_B * logprob_B).sum()).backward()
    else:
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = -sum(c * score[number] for c, score in zip(coefficient_B, scores, strict=True))

    ess = effective_sample_size(log_ratio_B)
    for parameter_group in optimizer.param_groups:
        parameter_group["lr"] = learning_rate * (ess**0.5 if method == "vcpo" else 1.0)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return {"reward": float(reward_B.mean()), "ess": ess, "grad_norm": float(norm)}


def warm_start(model: Qwen2ForCausalLM, rng: random.Random, steps: int, noise: float) -> None:
    """Supervised phase on demonstrations with wrong digits in them: a model that is right sometimes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 3e-3 * (1 - step / steps)
        prompts = make_prompts(128, rng)
        responses = answers(prompts)
        wrong = torch.rand(responses.shape) < noise
        wrong[:, -1] = False
        responses = torch.where(wrong, torch.randint(0, 10, responses.shape), responses)
        loss = -token_logprobs(model, prompts, responses).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def accuracy(model: Qwen2ForCausalLM) -> float:
    """Share of exact answers at temperature 1 on always the same problems, without touching the run's random state."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        prompts = make_prompts(256, random.Random(-1))
        return float(reward(prompts, sample(model, prompts)[0]).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=["vcpo", "tis"], default="vcpo")
    parser.add_argument("--lag", type=int, default=16, help="policy lag in optimizer steps")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.set_num_threads(1)  # the model is too small to be worth more
    rng = random.Random(args.seed)
    model = make_model(args.seed)
    warm_start(model, rng, steps=400, noise=0.08)
    print(f"after the warm start: accuracy {accuracy(model):.3f}")

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.1)
    snapshots: deque[dict[str, torch.Tensor]] = deque(maxlen=args.lag + 1)  # the oldest one is `lag` steps old
    sampler = copy.deepcopy(model)
    for step in range(1, args.steps + 1):
        snapshots.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        sampler.load_state_dict(snapshots[0])
        prompts = make_prompts(PROMPTS, rng).repeat_interleave(GROUP, dim=0)
        learning_rate = args.learning_rate * min(1.0, step / 10)
        metrics = update(model, optimizer, learning_rate, args.method, prompts, *sample(sampler, prompts))
        if step % 10 == 0:
            shown = "  ".join(f"{name} {value:.3f}" for name, value in metrics.items())
            print(f"step {step:4d}  {shown}  accuracy {accuracy(model):.3f}", flush=True)


if __name__ == "__main__":
    main()
