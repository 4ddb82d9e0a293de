"""How far float32 log-probs are from float64's: sampler (vLLM), trainer, transformers, and what rounding alone does.

    python benchmarks/log_prob_error.py --model FOLDER --rows 256
    python benchmarks/log_prob_error.py                               # the model that ships with hybridflow

All compute log-probs of the same sampled tokens. *Rounded* is transformers' float64 model whose linear layers, norms,
attentions and MLPs each have their outputs moved by a random relative error of one float32 rounding (6e-8): what is
left when every operation is as good as float32 allows. Below it, each vLLM operation against a float64 computation of
the same inputs: relative error in the 2-norm, and the largest in units of the largest output.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hybridflow.engines.rollout.environment import unset, variables

for _name, _value in variables("vllm", "cpu").items():
    os.environ.setdefault(_name, _value)
for _name in unset("vllm", "cpu"):
    os.environ.pop(_name, None)

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from hybridflow.batch.batch import Batch
from hybridflow.config.actor import RolloutConfig
from hybridflow.config.model import FSDPConfig, ModelConfig
from hybridflow.data.builtin import model_folder
from hybridflow.engines.rollout.base import Completion, Request, SamplingParams, generate
from hybridflow.engines.train.base import MicroBatching
from hybridflow.engines.train.fsdp import FSDPEngine
from hybridflow.topology.parallel import ParallelDims
from hybridflow.utils.seeding import derive_seed

ROUNDING = 2.0**-24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="Hugging Face folder; default: the embedded one")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--cpu-gemm", default="packed", help="how the CPU build holds weights")
    chosen = parser.parse_args()
    folder = chosen.model or model_folder("builtin:arithmetic")
    double = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    draw = torch.Generator().manual_seed(0)
    size = double.config.get_text_config().vocab_size
    prompts = torch.randint(2, size, (chosen.rows, chosen.prompt_tokens), generator=draw).tolist()
    engine = _engine(str(folder), chosen, plain)
    done = generate(engine, _requests(prompts, chosen.tokens))
    truth = _forward(double, prompts, done)
    found = {
        "vLLM": torch.tensor([one.log_probs for one in done]).double(),
        "trainer": _trainer(str(folder), prompts, done),
        "transformers, eager": _forward(plain, prompts, done),
        "rounded": _rounded(double, prompts, done),
    }
    print(f"{truth.numel()} tokens, log-probs from {float(truth.min()):.1f}\n")
    print("| pair | largest | mean | signed mean |\n|---|---|---|---|")
    pairs = [(name, "float64", value - truth) for name, value in found.items()]
    pairs.append(("vLLM", "trainer", found["vLLM"] - found["trainer"]))
    pairs.append(("transformers, eager", "trainer", found["transformers, eager"] - found["trainer"]))
    for one, other, off in pairs:
        print(f"| {one} - {other} | {float(off.abs().max()):.1e} | {float(off.abs().mean()):.1e} | {off.mean():+.0e} |")
    print("\n| operation in vLLM | 2-norm | largest | calls |\n|---|---|---|---|")
    for name, (norm, largest, calls) in _operations(engine, prompts, done).items():
        print(f"| {name} | {norm / calls:.1e} | {largest:.1e} | {calls} |")


def _engine(folder: str, chosen: argparse.Namespace, model: nn.Module):
    from hybridflow.engines.rollout.vllm import VLLMEngine

    engine = VLLMEngine(
        model_path=folder,
        config=RolloutConfig(max_num_seqs=64, engine_kwargs={"vllm": {"cpu_gemm": chosen.cpu_gemm}}),
        max_prompt_tokens=chosen.prompt_tokens + chosen.tokens,
        max_response_tokens=chosen.tokens,
        tp=1,
        device="cpu",
        eos_token_ids=(),
    )
    weights = dict(model.named_parameters())
    for part in engine.parameters().parts:
        part.view.copy_(weights[part.hf_name].data)
    engine.weights_written(0)
    return engine


def _requests(prompts: list[list[int]], tokens: int) -> list[Request]:
    sampling = SamplingParams(max_tokens=tokens)
    return [
        Request(request_id=str(i), prompt_ids=prompt, sampling=sampling, seed=derive_seed(0, i))
        for i, prompt in enumerate(prompts)
    ]


@torch.no_grad()
def _forward(model: nn.Module, prompts: list[list[int]], done: list[Completion]) -> Tensor:
    rows = []
    for prompt, one in zip(prompts, done, strict=True):
        logits = model(torch.tensor([[*prompt, *one.token_ids]])).logits[0, len(prompt) - 1 : -1]
        rows.append(logits.log_softmax(-1).gather(1, torch.tensor(one.token_ids)[:, None])[:, 0].double())
    return torch.stack(rows)


def _trainer(folder: str, prompts: list[list[int]], done: list[Completion]) -> Tensor:
    rows = Batch(
        {
            "prompt_ids": torch.tensor(prompts),
            "prompt_length": torch.full((len(done),), len(prompts[0])),
            "response_ids": torch.tensor([one.token_ids for one in done]),
            "response_length": torch.full((len(done),), len(done[0].token_ids)),
        }
    )
    engine = FSDPEngine(
        model=ModelConfig(path=folder), head="lm", sharding=FSDPConfig(), dims=ParallelDims(), optim=None
    )
    micro = MicroBatching(max_tokens=4096)
    return engine.forward(rows, frozenset({"log_probs"}), temperature=1.0, micro=micro)["log_probs"].double()


def _rounded(model: nn.Module, prompts: list[list[int]], done: list[Completion]) -> Tensor:
    draw = torch.Generator().manual_seed(0)

    def shake(module: nn.Module, inputs: object, output: object) -> object:
        if isinstance(output, tuple):
            return (shake(module, inputs, output[0]), *output[1:])
        assert isinstance(output, Tensor)
        return output * (1 + ROUNDING * (2 * torch.rand(output.shape, generator=draw, dtype=output.dtype) - 1))

    shaken = (nn.Linear,)
    named = ("RMSNorm", "MLP", "Attention")
    hooks = [
        module.register_forward_hook(shake)
        for module in model.modules()
        if isinstance(module, shaken) or any(name in type(module).__name__ for name in named)
    ]
    found = _forward(model, prompts, done)
    for hook in hooks:
        hook.remove()
    return found


def _operations(engine, prompts: list[list[int]], done: list[Completion]) -> dict[str, tuple[float, float, int]]:
    """Sum of relative 2-norms, largest error in units of the largest output, and calls, by operation."""
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.linear import LinearBase

    found: dict[str, tuple[float, float, int]] = {}
    length = 0

    def judge(name: str, output: Tensor, truth: Tensor) -> None:
        off, (norm, largest, calls) = output.double() - truth, found.get(name, (0.0, 0.0, 0))
        norm += float(off.norm() / truth.norm())
        found[name] = norm, max(largest, float(off.abs().max() / truth.abs().max())), calls + 1

    def linear(module, inputs, output) -> None:
        bias = None if module.bias is None else module.bias.double()
        got = output[0] if isinstance(output, tuple) else output
        judge("linear", got, functional.linear(inputs[0].double(), module.weight.double(), bias))

    def gate(module, inputs, output) -> None:
        first, second = inputs[0].double().chunk(2, dim=-1)
        judge("silu and multiply", output, functional.silu(first) * second)

    def before_norm(module, inputs) -> None:
        module.seen = sum(x.double() for x in inputs if isinstance(x, Tensor))

    def norm(module, inputs, output) -> None:
        scale = torch.rsqrt(module.seen.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
        got = output[0] if isinstance(output, tuple) else output
        judge("norm", got, module.seen * scale * module.weight.double())

    def attention(module, inputs, output) -> None:
        if inputs[0].shape[0] != length:
            return
        query, key, value = (
            x.double().view(length, heads, -1)
            for x, heads in zip(inputs[:3], (module.num_heads, module.num_kv_heads, module.num_kv_heads), strict=True)
        )
        copies = module.num_heads // module.num_kv_heads
        key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * module.impl.scale
        weights = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf")).softmax(-1)
        judge("attention", output, torch.einsum("hqk,khd->qhd", weights, value).reshape(output.shape))

    hooks: dict[type, Callable] = {LinearBase: linear, SiluAndMul: gate, RMSNorm: norm, Attention: attention}
    for module in engine._model().modules():
        for kind, hook in hooks.items():
            if isinstance(module, kind):
                module.register_forward_hook(hook)
        if isinstance(module, RMSNorm):
            module.register_forward_pre_hook(before_norm)
    for prompt, one in list(zip(prompts, done, strict=True))[:8]:
        length = len(prompt) + len(one.token_ids)
        engine.clear_caches()
        generate(engine, _requests([[*prompt, *one.token_ids]], 1))
    return found


if __name__ == "__main__":
    main()
