"""The share of FLOPs of published configurations that ``swjax.quantized(fn, "llm")`` puts into int8.

It runs in tunix's environment and prints a row for each; nothing is allocated.
"""

import sys
import warnings

import jax
import jax.numpy as jnp
from flax import nnx
from tunix.models.gemma3 import model as gemma3
from tunix.models.llama3 import model as llama3
from tunix.models.qwen3 import model as qwen3

import swjax

LENGTH = 4096
MODELS = {
    "Llama-3.2-1B": (llama3.Llama3, llama3.ModelConfig.llama3p2_1b),
    "Qwen3-30B-A3B": (qwen3.Qwen3, qwen3.ModelConfig.qwen3_30b_a3b),
    "Gemma3-1B": (gemma3.Gemma3, gemma3.ModelConfig.gemma3_1b_pt),
}


def report_of(name: str):
    """The report of one sequence of `LENGTH` tokens."""
    model, config = MODELS[name]
    graph, state = nnx.split(nnx.eval_shape(lambda: model(config(), rngs=nnx.Rngs(0))))
    tokens = jax.ShapeDtypeStruct((1, LENGTH), jnp.int32)
    mask = jax.ShapeDtypeStruct((1, LENGTH, LENGTH), jnp.bool_)

    def apply(state, tokens, positions, mask):
        return nnx.merge(graph, state)(tokens, positions, None, mask)[0]

    return swjax.quantized(apply, "llm").report(state, tokens, tokens, mask)


def main() -> int:
    print(
        "| model | of eligible products, forward and input gradient | of all, forward | input gradient "
        "| weight gradient | the rest of forward |\n|---|---|---|---|---|---|"
    )
    for name in MODELS:
        report = report_of(name)
        total = sum(p.flops for p in report)
        kept = {}
        for p in report:
            if not p.quantized:
                kept[p.reason] = kept.get(p.reason, 0) + p.flops
        eligible = [p for p in report if p.path and "stays in 16 bits" not in p.reason and p.flops]
        share = sum(p.flops for p in eligible if p.recipe) / sum(p.flops for p in eligible)
        rest = "; ".join(
            f"{reason}: {flops / total:.1%}" for reason, flops in kept.items() if flops
        )
        shares = report.share, report.input_gradient_share, report.weight_gradient_share
        print(
            f"| {name} | {share:.1%} | {' | '.join(f'{s:.1%}' for s in shares)} | {rest} |",
            flush=True,
        )
        if "-v" in sys.argv:
            print(report)
    return 0


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())
