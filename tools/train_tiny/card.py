"""The model card: what the checkpoint is, and its measured figures."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tools.train_tiny.evaluate import Results

INTRODUCTION = """\
---
license: mit
library_name: transformers
tags: [deepseek_v4, dspark, speculative-decoding, test-model]
---

# dspark-tiny

A very small DeepSeek-V4 target (6 layers, 16 experts, hidden size 192) with a DSpark drafter of
three stages (block 7), for demonstrations and tests of serving code on a CPU. Every part of the
architecture is there: hyper-connections, window, compressed and indexed attention, hash and scored
experts, Markov and confidence heads. Matrices are bfloat16; hyper-connections, sinks, position
biases and router biases are float32. Tensor names are those of the public checkpoints.

It speaks DeepSeek-V4's chat format without thinking and knows a small, invented curriculum: some
capitals, small sums, months, one-line Python functions. **It is a language model for testing
speculation, not for asking questions.** It was trained in about 1.5 hours on two CPU cores by
`tools/train_tiny`, from the standard library of CPython 3.11 (PSF licence; comments removed,
docstrings cut to one line), generated Python and generated chats. No text of these is included.
"""


def render(results: "Results") -> str:
    """The whole card in Markdown."""
    parts = [INTRODUCTION, "## Held-out results\n", _lengths(results), _confidence(results)]
    parts += ["## Perplexity of the target on held-out text\n", _perplexity(results)]
    parts += [_demo(results), _files()]
    return "\n".join(parts)


def _lengths(results: "Results") -> str:
    block = results.block
    positions = " | ".join(str(k) for k in range(1, block + 1))
    lines = [
        f"Mean accepted length per round with {block} drafts, correction or bonus token included; "
        f"seed {results.seed}. Prompts are unseen: questions whose text is in no training chat, "
        "files that were held out whole, template combinations that were held out. A round counts "
        "up to the end of the answer; *untruncated* counts it as if the text went on. The columns "
        "1.. are the share of rounds that accept at least that many drafts. *library* is held-out "
        "standard-library modules, *tests* its held-out test files, *templates* generated code; "
        "*code mix* pools the three.",
        "",
        f"| set | T | accepted length | untruncated | prompts | rounds | {positions} |",
        "|---" * (6 + block) + "|",
    ]
    for row in results.sets:
        shares = " | ".join(f"{a:.2f}" for a in row.acceptance)
        lines.append(
            f"| {row.name} | {row.temperature:g} | **{row.accepted_length:.2f}** "
            f"| {row.accepted_length_untruncated:.2f} | {row.num_prompts} | {row.num_rounds} "
            f"| {shares} |"
        )
    lines += [
        "",
        "Greedy code is flattered by loops; T=1 is the honest code figure. Standard errors are "
        "about 0.1 to 0.2. Exact greedy answers to the unseen chat questions: "
        f"{results.exact_answers}.",
        "",
    ]
    return "\n".join(lines)


def _confidence(results: "Results") -> str:
    lines = [
        "## Confidence\n",
        "AUC and expected calibration error (15 bins) of the predicted survival of draft prefixes, "
        "all sets pooled. The temperatures in `confidence_temperatures.json` were fitted left to "
        "right on other held-out prompts.",
        "",
        "| sampling | AUC, first draft | AUC, prefixes | ECE raw | ECE with temperatures |",
        "|---|---|---|---|---|",
    ]
    for name, row in results.confidence.items():
        lines.append(
            f"| {name} | {row.auc_first:.3f} | {row.auc_prefix:.3f} | {row.ece_raw:.3f} "
            f"| {row.ece_calibrated:.3f} |"
        )
    return "\n".join([*lines, ""])


def _perplexity(results: "Results") -> str:
    rows = [f"| {name} | {value:.2f} |" for name, value in results.perplexity.items()]
    return "\n".join(["| text | perplexity per token |", "|---|---|", *rows, ""])


def _demo(results: "Results") -> str:
    lines = ["## Greedy answers\n"]
    for question, answer in results.demo.items():
        body = "\n".join(f"> {line}".rstrip() for line in answer.splitlines())
        lines.append(f"**{question}**\n\n{body}\n")
    return "\n".join(lines)


def _files() -> str:
    return (
        "## Files\n\n"
        "`model.safetensors` (target and drafter), `config.json`, `tokenizer.json`, "
        "`confidence_temperatures.json`, `evaluation.json` (the figures above).\n"
    )
