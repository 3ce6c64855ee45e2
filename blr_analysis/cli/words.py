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

    A model that was trained without such an optimizer: --fit kron --prior-precision D in place
    of -p FILE. Each command explains itself: blr-analysis audit --help.
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

    Writes the tables table (every example), leave_one_out and removals as CSV and Parquet,
    summary.txt, the posterior, and the pictures memory_map, deviations, leave_one_out, suspicious
    and removals, as far as the task allows them.
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
      blr-analysis what-if train.py:make_task -p FILE --remove 'loss>2.5'
      blr-analysis what-if train.py:make_task -p FILE --remove suspicious=true
      blr-analysis what-if train.py:make_task -p FILE --remove 12,40 --out DIR

    Columns are those of the audit's table: index, target, prediction, loss, error, variance,
    deviation, self_influence, leverage, region, left_out_prediction, left_out_loss,
    label_quality, suspicious, and the task's metadata. With --out, the table by class, a picture
    and the posterior without the examples (perturbed.safetensors) are written.
    """
)
