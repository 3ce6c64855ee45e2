"""Which α? Merges over a range of weights, tried on validation tasks; nothing is written."""

from __future__ import annotations

from typing import Any

import torch

from blr_analysis.checks import one_of, positive_int
from blr_analysis.errors import ModelError
from blr_analysis.merging.at_weights import named_states, named_tasks, state_of
from blr_analysis.merging.curve import CRITERIA, MergeCurve, MergePoint, rank
from blr_analysis.merging.grids import Grid, Weights, read_grid
from blr_analysis.merging.trial import Trial, read_mergers
from blr_analysis.merging.weighting import in_order
from blr_analysis.progress import track


@torch.inference_mode(False)
def merge_curve(
    base: Any,
    models: Any,
    tasks: Any,
    *,
    method: Any = "gradient_matching",
    weights: Any = None,
    search: str = "grid",
    precisions: Any = None,
    base_precision: Any = None,
    criterion: str = "nll",
    max_sweeps: int = 3,
    progress: bool | None = None,
    **options: Any,
) -> MergeCurve:
    """Merge with many weights α, look at each on validation tasks, and say which is best.

    Every merge is made in memory, run, and let go of: no checkpoint is written, and no more than
    one merge is held at a time.

    Args:
        base: θ_0: a state dict, a module, or a folder of safetensors, which is read into memory.
        models: the θ_t, a list or a dict by name, of the same.
        tasks: validation tasks, a list or a dict by name, with the names that tables shall show.
            Held-out data: on training data, the largest α wins too often. They may be as many as
            one likes, and share one model; the model gives the architecture, not the weights.
        method: the name of a merge method, or a list of several, compared in one call; or a dict
            name → method or function ``(base, models, weights=[α, …]) -> state dict`` of your own.
        weights: which α are tried.

            * numbers: one α for all models, each in turn;
            * rows of T numbers: as listed, such as :func:`blr_analysis.merging.simplex_grid`;
            * a dict model → numbers: all combinations (at most 2,000);
            * None: 0, 0.1, …, 1.5 for all models, and the method's own default.
        search: "grid", or "coordinates": from the method's
            :func:`~blr_analysis.merging.default_weights`, the α_t of
            one model after the other is moved to the best of its numbers, until a sweep over the
            models changes nothing: T · K merges a sweep instead of K^T.
        precisions, base_precision: H_t and H_0 as :func:`blr_analysis.merge` takes them.
        criterion: what "best" is: "nll" (smallest) or "accuracy" (largest); means over the tasks,
            each counting the same. Accuracy is a step function of α: with few validation examples
            the NLL chooses better.
        max_sweeps: of the coordinate search.
        options: what :func:`blr_analysis.merge` takes beside these: ``delta``, ``normalize``,
            ``missing_precision``, ``n_data``, ``dtype``.

    Where H_0 + δ is small beside the H_t, only the ratios of the α_t matter to gradient matching
    (as to "fisher" and "linear" anyhow): one α for all draws a flat line, and there is nothing to
    choose. Rows, or a search, then show what does matter.

    A merge that overflows (a negative α can bring H̄ close to 0) gets an infinite NLL and the reason
    in the table; only if none can be run is it an error.

    Returns:
        ``best`` (a point: method, weights, nll, accuracy), ``weights`` of it by model, ``table``,
        and ``plot()``: curves, or a map for two models.

    Raises:
        InputError: no weights, weights of another number than the models, NaN or inf, an unknown
            method or option, state dicts that do not belong to the tasks' models, ``out=``.
        ModelError: no merge could be run; as :meth:`Task.run`.

    Example:
        >>> import blr_analysis as blr
        >>> X, y = torch.eye(2), torch.tensor([1.0, 2.0])
        >>> task = blr.Task(torch.nn.Linear(2, 1, bias=False), (X, y), likelihood="gaussian")
        >>> base, a, b = ({"weight": torch.tensor([w])} for w in ([0., 0.], [1., 0.], [0., 2.]))
        >>> curve = merge_curve(base, [a, b], task, method="task_arithmetic",
        ...                     weights=[0.0, 0.5, 1.0, 1.5], progress=False)
        >>> curve.best.weights, curve.at_edge
        ((1.0, 1.0), False)
    """
    judges = named_tasks(tasks)
    start, states = state_of(base, "base"), named_states(models, "models")
    names = tuple(states)
    one_of("criterion", criterion, CRITERIA)
    one_of("search", search, ("grid", "coordinates"))
    positive_int("max_sweeps", max_sweeps)
    grid = read_grid(weights, names, search=search == "coordinates")
    curved = None if precisions is None else in_order(precisions, names)
    mergers = read_mergers(
        method, {"precisions": curved, "base_precision": base_precision, **options}
    )
    trial = Trial(start, list(states.values()), judges, mergers)
    trial.check()
    points: list[MergePoint] = []
    for name in mergers:
        if grid.shape == "search":
            points += _searched(trial, name, grid, criterion, max_sweeps, progress)
        else:
            own = () if weights is not None else (trial.default(name),)
            rows = sorted({*grid.rows, *own}) if own else grid.rows
            steps = track(rows, total=len(rows), label=f"merges: {name}", show=progress)
            points += [trial.point(name, row) for row in steps]
    if all(p.failure for p in points):
        raise ModelError(
            f"none of the {len(points)} merges could be run; the first: {points[0].failure}"
        )
    return MergeCurve(tuple(points), names, tuple(judges), criterion, grid.shape)


def _searched(
    trial: Trial, name: str, grid: Grid, criterion: str, max_sweeps: int, progress: bool | None
) -> list[MergePoint]:
    """Every point looked at on the way down, one coordinate after the other."""
    best = trial.point(name, trial.default(name))
    seen: dict[Weights, MergePoint] = {best.weights: best}
    for sweep in range(1, max_sweeps + 1):
        before = best
        axes = list(enumerate(grid.axes))
        label = f"merges: {name}, sweep {sweep}"
        for t, axis in track(axes, total=len(axes), label=label, show=progress):
            line = [(*best.weights[:t], alpha, *best.weights[t + 1 :]) for alpha in axis]
            for row in line:
                if row not in seen:
                    seen[row] = trial.point(name, row)
            best = min((best, *(seen[row] for row in line)), key=lambda p: rank(p, criterion))
        if best is before:
            break
    return list(seen.values())
