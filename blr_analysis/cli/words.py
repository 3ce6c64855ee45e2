"""What ``--help`` says: every command explained by examples that can be copied."""

from __future__ import annotations

import textwrap


def flowed(text: str) -> str:
    """Paragraphs as one line each, so that they fill any terminal; indented ones as they stand.

    >>> flowed('''
    ...     Two
    ...     words.
    ...
    ...       an example
    ... ''')
    'Two words.\\n\\n  an example'
    """
    paragraphs = textwrap.dedent(text).strip("\n").split("\n\n")
    return "\n\n".join(p if p.startswith(" ") else " ".join(p.split()) for p in paragraphs)


EXIT_CODES = flowed(
    """
    Exit codes: 0 done; 1 an unexpected fault; 2 a wrong command line, bad input, or files that
    cannot be read or written; 130 interrupted. Findings go to standard output, progress and
    errors to standard error.
    """
)

ROOT = flowed(
    """
    Which data made this model, and what would it be without them?

    Start with the demo, which needs nothing of yours:

      blr-analysis demo

    For a model of your own, save its posterior after training, and write a function that returns
    its task:

      # at the end of training
      posterior = blr.Posterior.from_optimizer(optimizer, model)
      posterior.save("posterior.safetensors")

      # in train.py
      def make_task():
          return blr.Task(model, data, likelihood="categorical")

    Then:

      blr-analysis audit train.py:make_task -p posterior.safetensors

    A model that was trained without such an optimizer: --fit kron in place of -p FILE. Each
    command explains itself: blr-analysis audit --help.

    Fine-tuned models become one, each weight as far as each model is sure of it:

      blr-analysis fisher ./ft1 train.jsonl
      blr-analysis merge recipe.yml merged
    """
)

DEMO = flowed(
    """
    Train a small network on handwritten digits with IVON, and audit its data.

    Needs nothing but this package, and under a minute on two cores:

      blr-analysis demo
      blr-analysis demo --out digits --seed 1

    Shows which digits shape the network most and which labels look wrong, the leave-one-out
    estimate against the test data, the memory map, and what the network would be without each
    class: predicted in one step, and for two classes retrained.
    """
)

AUDIT = flowed(
    """
    The whole audit of your own task: findings printed, tables and pictures written.

    FILE is what posterior.save(FILE) wrote after training:

      blr-analysis audit train.py:make_task -p FILE
      blr-analysis audit train.py:make_task -p FILE --test make_test
      blr-analysis audit train.py:make_task -p FILE --by source --out audit
      blr-analysis audit train.py:make_task --fit kron --prior-precision 5 --calibrate 32

    Or the audit of a causal language model, a folder as save_pretrained leaves it (or a LoRA
    adapter), and of its texts, prompts with answers, or messages:

      blr-analysis audit ./llm train.jsonl
      blr-analysis audit ./adapter train.jsonl --test held-out.jsonl --by source

    Writes the tables table (every example), leave_one_out and removals as CSV and Parquet,
    report.html (one page with all of it, for a browser), summary.txt, the posterior, and the
    pictures memory_map, deviations, leave_one_out, suspicious and removals, as far as the task
    allows them.
    """
)

REPORT = flowed(
    """
    The whole audit as one HTML page, to look at and to hand on: it needs nothing but a browser.

    FILE is what posterior.save(FILE) wrote after training:

      blr-analysis report train.py:make_task -p FILE
      blr-analysis report train.py:make_task -p FILE --test make_test --out digits.html

    The memory map to point at, every example to sort, search and save as CSV, suspicious labels
    to keep, relabel or drop, groups taken out, and what test predictions rest on. What was decided
    there is a question for what-if:

      blr-analysis what-if train.py:make_task -p FILE --decisions decisions.csv
    """
)

MAP = flowed(
    """
    The memory map: regular, uncertain, unpredictable and memorable examples.

    FILE is what posterior.save(FILE) wrote after training:

      blr-analysis map train.py:make_task -p FILE
      blr-analysis map train.py:make_task -p FILE --out map

    Prediction error against prediction variance: an example with much of both is remembered
    rather than predicted (memorable), one with error alone is contradicted by the other data
    (unpredictable), one with variance alone is fitted but little supported (uncertain).
    """
)

LOO = flowed(
    """
    Leave-one-out: the loss and accuracy to expect on new data, from the training data alone.

    FILE is what posterior.save(FILE) wrote after training:

      blr-analysis loo train.py:make_task -p FILE
      blr-analysis loo train.py:make_task -p FILE --test make_test
      blr-analysis loo train.py:make_task -p FILE --calibrate 32

    With --test, the estimate is set beside what test data say. With --out, every left-out
    prediction is written.
    """
)

WHAT_IF = flowed(
    """
    What the model would be without some of its data, without retraining.

    FILE is what posterior.save(FILE) wrote after training:

      blr-analysis what-if train.py:make_task -p FILE --remove target=3
      blr-analysis what-if train.py:make_task -p FILE --remove source=web
      blr-analysis what-if train.py:make_task -p FILE --remove "loss > 2.5 and source != 'web'"
      blr-analysis what-if train.py:make_task -p FILE --remove suspicious=true
      blr-analysis what-if train.py:make_task -p FILE --remove 12,40 --out DIR
      blr-analysis what-if train.py:make_task -p FILE --decisions decisions.csv

    COLUMN=VALUE needs no quotes; everything else is the query of a pandas DataFrame (and, or, not,
    in), without function calls. Columns are those of the audit's table: index, target, prediction,
    loss, error, variance, deviation, self_influence, leverage, region, left_out_prediction,
    left_out_loss, label_quality, suspicious, and the task's metadata. With --out, the table by
    class, a picture and the posterior without the examples (perturbed.safetensors) are written.
    """
)

MERGE = flowed(
    """
    Merge fine-tuned models into one, each weight as far as each model is sure of it.

    The recipe is YAML, as mergekit writes it:

      merge_method: gradient_matching   # fisher | task_arithmetic | linear
      base_model: ./base                # paths start at the recipe's folder
      models:
        - model: ./ft1                  # its precision: ./ft1/precision
          parameters: {weight: 1.0}     # a number, [0.2, 0.8] over the layers,
        - model: ./ft2                  # or [{filter: mlp, value: 0.5}, ...]
      parameters: {delta: 1.0e-8, missing_precision: error}  # base | zero
      out_dtype: bfloat16

    Look first, then merge:

      blr-analysis merge recipe.yml --dry-run
      blr-analysis merge recipe.yml OUT --max-memory 1GB

    Weights are read from this machine only, piece by piece, and OUT appears when it is whole: the
    weights, configuration and tokenizer, a model card (README.md), the recipe (merge_recipe.yml),
    and the fate of every tensor (merge_report.csv, merge_report.json). The recipes that mergekit
    has for linear and task_arithmetic run unchanged.
    """
)

INDEX = flowed(
    """
    An index of what a model was trained on: asked later without another pass.

    Of your own task; FILE is what posterior.save(FILE) wrote after training:

      blr-analysis index train.py:make_task -p FILE --out INDEX
      blr-analysis index train.py:make_task --fit kron --out INDEX

    Or of a causal language model. MODEL is a folder as save_pretrained leaves it, or a LoRA adapter
    on its base; DATA has a text per row, a prompt and an answer, or messages; of the last two the
    answers alone count:

      blr-analysis index ./llm train.jsonl --out INDEX
      blr-analysis index ./adapter chats.parquet --out INDEX --max-length 512
      blr-analysis index ./llm train.jsonl --out INDEX -p POSTERIOR

    Of these a Kronecker posterior is fitted without -p: labels drawn from the model, both factors
    of every layer but the vocabulary's. A diagonal one (--fit diag) takes less time and memory, and
    is weak for influence.

    Kept of every example: its gradient in the leading directions of the posterior, K numbers. How
    far their influence is from the exact one is measured and said. A run that was killed goes on
    where it was.
    """
)

QUERY = flowed(
    """
    Which training examples a model's answers rest on.

    Of a script's task, whose index knows where the training task is:

      blr-analysis query INDEX train.py:make_test --top 20
      blr-analysis query INDEX train.py:make_test --out DIR --refine 50

    Of a language model:

      blr-analysis query INDEX questions.jsonl --top 20
      blr-analysis query INDEX questions.jsonl --out DIR --tokens
      blr-analysis query INDEX questions.jsonl --refine 50

    A row of QUESTIONS has a prompt and an answer, or a text. Shown are the examples without which
    the loss of the question would rise most, by how many nats, to first order; with --out, the
    table sources names their metadata too. --tokens writes how much of that each token of these
    texts makes up; it and --refine read the training data again, where the index was told they are.
    """
)

FISHER = flowed(
    """
    The precision of a fine-tuned model, from its data: what a merge weighs it by.

    MODEL is a folder as save_pretrained leaves it, with a sequence classifier or a causal language
    model; DATA is what it was fine-tuned on:

      blr-analysis fisher ./ft1 train.csv
      blr-analysis fisher ./ft1 train.jsonl --text premise --text hypothesis
      blr-analysis fisher ./ft1 train.parquet --examples 2000 --samples 4
      blr-analysis fisher ./ft1 train.csv --kind emp --label sentiment
      blr-analysis fisher ./llm corpus.txt --max-length 256 --out PRECISION

    Writes MODEL/precision, which blr-analysis merge finds there: for every weight the sum over all
    examples of its squared gradients, each example by itself. With --kind mc, the Fisher, labels
    are drawn from the model's own predictions, so that DATA needs none; --kind ggn is the same
    without the noise of drawing, for classifiers with few labels; --kind emp takes the labels of
    DATA. --kind squared-minibatch squares the mean gradient of B examples (--batch-size), as
    published scripts do: its expectation is not the Fisher, and its size depends on B.

    Sums, not averages: the record beside the numbers says n_data, and the merge counts on it.
    """
)

ALGORITHMS = flowed(
    """
    The algorithms that are one rule: Table 1 of the Bayesian learning rule.

      blr-analysis algorithms
      blr-analysis algorithms Adam
      blr-analysis algorithms --out DIR

    Each algorithm is a posterior family, a place where the loss is looked at, an estimate of the
    Hessian, and named departures from the rule. The last column says through what its posterior
    comes to be analysed: the optimizer itself, a Laplace approximation fitted after training, or
    the sites of a fitted model. With NAME, all of that for one algorithm, and the module that
    runs it.
    """
)
