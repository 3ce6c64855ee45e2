"""An index on disk against exact influence, killed builds, and folders of somebody else."""

from __future__ import annotations

import errno
import math
from collections.abc import Callable
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from models import mlp
from oracles import fit_at_rest, relative
from safetensors.torch import load_file, save_file
from scipy.stats import spearmanr
from tiny_lm import sequences, task_of, tiny_lm
from transformers.pytorch_utils import Conv1D

import blr_analysis as blr
from blr_analysis.cli.index import error_in_words
from blr_analysis.errors import InputError, PosteriorError, StorageError
from blr_analysis.sensitivity.index import build as building
from blr_analysis.sensitivity.index import rank as ranking
from blr_analysis.sensitivity.index import stored
from blr_analysis.sensitivity.index.build import check_place, probe
from blr_analysis.sensitivity.index.index import blocks_of_questions
from blr_analysis.sensitivity.index.places import energies, rooms
from blr_analysis.sensitivity.index.projection import DTYPES, Projection, records_of, values_of
from blr_analysis.sensitivity.index.rank import (
    larger_ranks,
    rank_with_error_below,
    smaller_ranks,
    smallest_rank_with_error_below,
)
from blr_analysis.sensitivity.index.sketch import MatrixSketch, Sketch

N = 12


def language(seed: int = 0) -> blr.Task:
    return task_of(tiny_lm(seed, tied=True), sequences(N), metadata={"source": [*"ab"] * (N // 2)})


def posterior(task: blr.Task, structure: str = "diag") -> blr.Posterior:
    if structure == "gram":
        return fit_at_rest(task, structure="gram", prior_precision=1.0)
    return fit_at_rest(task, structure=structure, curvature="empirical_fisher", prior_precision=1.0)


@pytest.mark.parametrize(
    ("structure", "normalize"),
    [("diag", False), ("kron", False), ("gram", False), ("diag", True), ("kron", "cosine")],
)
def test_with_room_for_everything_it_is_exact(
    tmp_path: Path, structure: str, normalize: bool | str
) -> None:
    task = language()
    test = task_of(tiny_lm(tied=True), sequences(4))
    q = posterior(task, structure)
    options: dict[str, Any] = {"normalize": normalize}
    built = blr.Index.build(task, q, tmp_path / "i", rank=10**6, dtype="float64")
    exact = blr.influence(task, q, test, **options).matrix
    assert built.error.relative_rms < 1e-10
    index = blr.Index.open(tmp_path / "i")
    assert relative(index.influence(test, **options), exact) < 1e-10
    assert relative(index.self_influence, blr.sensitivity(task, q).self_influence) < 1e-10
    assert index.examples["source"] == task.metadata["source"]
    top = index.top(test, 3, **options)
    truth = blr.influence(task, q, test, k=3, **options)
    assert torch.equal(top.helpful, truth.helpful)
    assert torch.equal(top.harmful, truth.harmful)
    assert list(top.table) == list(truth.table)
    for column in ("test", "effect", "train", "source"):
        assert top.table[column].equals(truth.table[column])


@pytest.mark.parametrize("n_data", [1, 2, 3])
def test_an_index_of_few_texts_opens_with_the_posterior_it_was_built_of(
    tmp_path: Path, n_data: int
) -> None:
    """The layers' moments are singular, and counts stand on top of eigenvalues of rounding size."""
    task = task_of(tiny_lm(tied=True), sequences(N)[:n_data])
    q = blr.fit_laplace(task, structure="gram", prior_precision=1.0)
    blr.Index.build(task, q, tmp_path / "i", dtype="float64")
    index = blr.Index.open(tmp_path / "i", task=task)
    assert relative(index.influence(task), blr.influence(task, q, task).matrix) < 1e-10


def test_metadata_do_not_replace_what_the_index_computed(tmp_path: Path) -> None:
    """Influence in units of the examples' lengths is that of an index without such columns."""
    plain = language()
    columns = {"self_influence": [1e6] * N, "index": [*range(N)][::-1]}
    task = task_of(tiny_lm(0, tied=True), sequences(N), metadata=columns)
    test = task_of(tiny_lm(tied=True), sequences(4))
    expected = blr.Index.build(plain, posterior(plain), tmp_path / "plain")
    index = blr.Index.build(task, posterior(task), tmp_path / "named")
    assert torch.equal(index.self_influence, expected.self_influence)
    values = index.influence(test, normalize=True)
    assert torch.equal(values, expected.influence(test, normalize=True))
    assert index.examples["index"] == list(range(N))
    assert index.examples["index_metadata"] == columns["index"]


LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "linear": lambda: torch.nn.Linear(6, 3),
    "no bias": lambda: torch.nn.Linear(6, 3, bias=False),
    "convolutions": lambda: torch.nn.Sequential(
        torch.nn.Unflatten(1, (2, 3)),
        torch.nn.Conv1d(2, 4, 2, groups=2),
        torch.nn.Tanh(),
        torch.nn.Flatten(),
        torch.nn.LayerNorm(8),
        torch.nn.Linear(8, 3),
    ),
    "transposed": lambda: torch.nn.Sequential(Conv1D(5, 6), torch.nn.Tanh(), Conv1D(3, 5)),
}


def of_layers(kind: str, n: int = 10) -> blr.Task:
    """A classifier of random rows, in double precision."""
    torch.manual_seed(1)
    x = torch.randn(n, 6, dtype=torch.float64)
    return blr.Task(LAYERS[kind]().double(), (x, torch.arange(n) % 3))


def gradients_by_hand(task: blr.Task) -> dict[str, torch.Tensor]:
    """∇ℓ_i of every example by autograd, ``[N, *shape]``."""
    rows = []
    parameters = dict(task.model.named_parameters())
    for i in range(task.n_data):
        index = torch.tensor([i])
        outputs, targets = task.run(task.fetch(index), parameters, index)
        loss = task.likelihood.at(index).nll(outputs, targets).sum()
        rows.append(torch.autograd.grad(loss, list(parameters.values())))
    return {
        name: torch.stack(list(column)).detach()
        for name, column in zip(parameters, zip(*rows, strict=True), strict=True)
    }


def words() -> blr.Task:
    """A language model whose table reads words and predicts them, in double precision."""
    return task_of(tiny_lm(tied=True), sequences(N))


TASKS: dict[str, Callable[[], blr.Task]] = {"words": words}
TASKS |= {kind: partial(of_layers, kind) for kind in LAYERS}


def sketch_by_hand(sketch: Sketch, q: blr.Posterior, task: blr.Task) -> torch.Tensor:
    """Q Gᵀ P of every matrix in the posterior's basis, from unit vectors and explicit gradients."""
    turned = q.form.forward(gradients_by_hand(task))
    parts = []
    for name, matrix in sketch.matrices.items():
        left, right = [
            torch.diag_embed(side.scale)
            @ torch.eye(side.size, dtype=torch.float64).repeat(
                -(-len(side.scale[0]) // side.size), 1
            )[: len(side.scale[0])]
            for side in (matrix.left, matrix.right)
        ]
        shape = (task.n_data, len(left), left.shape[1], right.shape[1])
        z = left.mT @ turned[name].reshape(shape) @ right
        if matrix.whitening is not None:
            z = z * matrix.whitening
        parts.append(z.flatten(1))
    return torch.cat(parts, 1)


@pytest.mark.parametrize("structure", ["diag", "kron", "gram"])
@pytest.mark.parametrize("kind", TASKS)
def test_sketches_add_up_explicit_gradients_in_the_basis(kind: str, structure: str) -> None:
    task = TASKS[kind]()
    q = posterior(task, structure)
    size = sum(p.numel() for p in q.mean.values())
    for rank in (size // 3, 10 * size):
        sketch = Sketch.of(q, rank)
        assert sketch.size <= max(rank, len(sketch.matrices))
        assert sketch.is_exact == (rank > size)
        z = Projection(task, sketch).whole()
        assert relative(z, sketch_by_hand(sketch, q, task)) < 1e-10


def test_products_of_sketches_are_influence_on_average() -> None:
    """Over random signs, where whitening is a product of the two sides: here Σ = 1."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 20, 1, 9, 30, dtype=torch.float64, generator=generator)
    y = x + 0.5 * y
    ones = torch.ones(1, 9, 30, dtype=torch.float64)
    exact = (x * y).sum((1, 2, 3))
    estimates = []
    for seed in range(400):
        matrix = MatrixSketch.of(2 * ones, 1.0, None, 40, seed)
        assert (matrix.left.size, matrix.right.size) == (3, 13)
        products = matrix.of_matrices(x) * matrix.of_matrices(y)
        estimates.append(2 * products.sum(1))
    stacked = torch.stack(estimates)
    error = stacked.std(0) / 20
    assert ((stacked.mean(0) - exact) / error).square().mean() < 2
    assert stacked.std(0).mean() < exact.mean()


def test_a_matrix_gets_room_by_what_it_holds() -> None:
    mean = {"much": torch.zeros(20, 20), "little": torch.zeros(20, 20), "none": torch.zeros(3)}
    data = {"much": 4.0, "little": 0.25, "none": 0.0}
    precision = {name: torch.full_like(m, 1 + data[name]) for name, m in mean.items()}
    q = blr.Posterior(mean, precision, prior_precision=1.0, n_data=1)
    assert energies(q)["much"] == pytest.approx(400 * 4 / 5)
    assert energies(q)["little"] == pytest.approx(400 / 5)
    shared = rooms({name: m.numel() for name, m in mean.items()}, energies(q), 101)
    assert shared["none"] == 1
    assert shared["much"] == pytest.approx(80)
    assert shared["little"] == pytest.approx(20)
    sizes = {name: matrix.size for name, matrix in Sketch.of(q, 101).matrices.items()}
    assert 60 < sizes["much"] <= 80
    assert 12 < sizes["little"] <= 20
    assert sizes["none"] == 1


@pytest.mark.parametrize(("dtype", "rounding"), [("int8", 0.02), ("float16", 1e-3), ("float64", 0)])
def test_numbers_are_stored_in_a_unit_of_each_example(dtype: str, rounding: float) -> None:
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(7, 300, dtype=torch.float64, generator=generator)
    z *= torch.logspace(-9, 9, 7, dtype=torch.float64).unsqueeze(1)
    z[3] = 0
    questions = torch.randn(5, 300, dtype=torch.float64, generator=generator)
    records = records_of(z, DTYPES[dtype])
    assert records["gradients"].nbytes == 7 * 300 * DTYPES[dtype].itemsize
    lengths = z.norm(dim=1, keepdim=True).clamp_min(1e-300) * questions.norm(dim=1)
    errors = (values_of(records, questions) - z @ questions.mT) / lengths
    assert errors.abs().max() <= max(rounding, 1e-12)
    assert relative(records["self_influence"], z.square().sum(1)) < 1e-12


def test_few_numbers_err_as_they_say_and_are_refined(tmp_path: Path) -> None:
    task = language()
    test = task_of(tiny_lm(tied=True), sequences(4))
    q = posterior(task)
    reported: list[float] = []
    index = blr.Index.build(
        task, q, tmp_path / "i", rank=60, heard=lambda error: reported.append(error.relative_rms)
    )
    assert reported == [index.error.relative_rms]
    assert index.numbers <= 60
    assert 0.02 < index.error.relative_rms < 2
    exact = blr.influence(task, q, test)
    gap = relative(index.influence(test), exact.matrix)
    assert 0.2 < gap / index.error.relative_rms < 5
    for normalize in (False, True, "cosine"):
        estimate = index.influence(test, normalize=normalize)
        actual = index.top(test, 3, normalize=normalize)
        best = estimate.topk(3, dim=0)
        assert torch.equal(actual.helpful, best.indices.mT)
        alone = index.top(test, 3, normalize=normalize, harmful=False)
        assert torch.equal(alone.helpful, actual.helpful)
        assert alone.harmful.shape == (4, 0)
    for normalize in (False, "cosine"):
        refined = index.top(test, 2, refine=N, normalize=normalize)
        truth = blr.influence(task, q, test, normalize=normalize).top(2)
        assert torch.equal(refined.helpful, truth.helpful) or normalize
        if not normalize:
            assert relative(refined.harmful_values, truth.harmful_values) < 1e-10


def test_ranks_are_judged_by_the_error_of_their_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of larger ones the first whose error is below the limit is advised; of smaller ones the last
    is chosen, down to the first whose error is not."""
    task = language()
    q = posterior(task)
    monkeypatch.setattr(ranking, "HALVINGS", 2)
    assert smaller_ranks(80) == larger_ranks(10)[::-1]
    errors = {
        rank: blr.Index.build(task, q, tmp_path / str(rank), rank=rank).error
        for rank in larger_ranks(10)
    }

    def is_enough(rank: int, limit: float) -> bool:
        return errors[rank].relative_rms < limit

    outcomes = set()
    for limit in (errors[40].relative_rms * 1.01, 1e-9):
        enough = [rank for rank in larger_ranks(10) if is_enough(rank, limit)]
        assert rank_with_error_below(limit, task, q, 10) == (enough[0] if enough else None)
        fitting = list(takewhile(partial(is_enough, limit=limit), smaller_ranks(80)))
        chosen = fitting[-1] if fitting else 80
        found = smallest_rank_with_error_below(limit, task, q, 80)
        assert found == (chosen, errors[chosen])
        outcomes.add(len(fitting))
    assert len(outcomes) == 2, outcomes
    with monkeypatch.context() as patch:
        patch.setattr(building, "measured_error", None)  # an error that is known is not measured
        chosen, error = found
        index = blr.Index.build(task, q, tmp_path / "chosen", rank=chosen, error=error)
        assert index.error == error


def test_questions_that_do_not_fit_into_memory_together_are_refined_in_blocks(
    tmp_path: Path,
) -> None:
    """Each block visits the candidates of its own questions."""
    task = language()
    test = task_of(tiny_lm(tied=True), sequences(4))
    q = posterior(task)
    index = blr.Index.build(task, q, tmp_path / "i", rank=60)
    test.memory_budget = 1
    blocks = blocks_of_questions(test, q)
    assert [len(block) for block in blocks] == [1] * 4
    rows = index.top(test, 3, harmful=False).helpful.mT
    exact = blr.influence(task, q, test).matrix
    assert relative(index._exact(test, rows), exact.gather(0, rows)) < 1e-10


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of five examples: three of them for the language model's twelve."""
    monkeypatch.setattr(stored, "SHARD", 5)


@pytest.mark.parametrize(
    ("raised", "error"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt),
        (OSError(errno.ENOSPC, "No space left on device"), StorageError),
    ],
    ids=["killed", "full disk"],
)
def test_a_build_that_ends_early_goes_on_to_the_same_bits(
    raised: BaseException,
    error: type[BaseException],
    small_files: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = of_layers("linear", N)
    q = posterior(task, "kron")
    blr.Index.build(task, q, tmp_path / "whole", rank=10)
    real = stored.save_file

    def ended(tensors: Any, draft: Path, metadata: Any) -> None:
        real(tensors, draft, metadata)
        if list((tmp_path / "i").glob("gradients-*")):
            raise raised

    monkeypatch.setattr(stored, "save_file", ended)
    with pytest.raises(error):
        blr.Index.build(task, q, tmp_path / "i", rank=10)
    with pytest.raises(StorageError, match="not complete"):
        blr.Index.open(tmp_path / "i")
    monkeypatch.setattr(stored, "save_file", real)
    (left,) = (tmp_path / "i").glob("gradients-*")
    written = left.stat().st_mtime_ns
    blr.Index.build(task, q, tmp_path / "i", rank=10)
    assert left.stat().st_mtime_ns == written
    for file in (tmp_path / "whole").iterdir():
        assert (tmp_path / "i" / file.name).read_bytes() == file.read_bytes()


def test_a_build_that_ends_before_its_first_file_leaves_the_folder_free(tmp_path: Path) -> None:
    def stop(error: Any) -> None:
        raise KeyboardInterrupt

    task = of_layers("linear")
    with pytest.raises(KeyboardInterrupt):
        blr.Index.build(task, posterior(task), tmp_path / "i", rank=5, heard=stop)
    assert not (tmp_path / "i").exists()
    blr.Index.build(task, posterior(task, "kron"), tmp_path / "i", rank=6)


@pytest.mark.parametrize("threads", [1, 3])
def test_many_files_answer_as_a_single_one(
    threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = of_layers("linear", N)
    q = posterior(task, "kron")
    single = blr.Index.build(task, q, tmp_path / "single", rank=10)
    influence = single.influence(task)
    expected = single.top(task, 2)
    assert len(single.self_influence) == N
    monkeypatch.setattr(stored, "SHARD", 5)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    many = blr.Index.build(task, q, tmp_path / "many", rank=10)
    assert len(list((tmp_path / "many").glob("gradients-*"))) == 3
    assert many.error.relative_rms == pytest.approx(single.error.relative_rms)
    assert relative(many.influence(task), influence) < 1e-12
    assert relative(many.self_influence, single.self_influence) < 1e-12
    best = many.top(task, 2)
    assert torch.equal(best.helpful, expected.helpful)
    assert relative(best.harmful_values, expected.harmful_values) < 1e-12


@pytest.mark.parametrize("rows", [[0], [11], [0, 4, 5, 11], [1, 2, 3, 6], [*range(12)]])
def test_rows_are_read_from_the_files_that_hold_them(
    rows: list[int], small_files: None, tmp_path: Path
) -> None:
    task = of_layers("linear", N)
    blr.Index.build(task, posterior(task), tmp_path / "i", rank=10**3, dtype="float64")
    store = stored.Store.open(tmp_path / "i")
    parts = list(store.read(lambda records: records["unit"]))
    assert torch.equal(torch.cat([numbers for numbers, _ in parts]), torch.arange(N))
    whole = torch.cat([units for _, units in parts])
    for threads in (1, 2):
        parts = list(store.read(lambda r: r["unit"], torch.tensor(rows), threads=threads))
        assert torch.cat([numbers for numbers, _ in parts]).tolist() == rows
        assert torch.equal(torch.cat([units for _, units in parts]), whole[rows])


def test_a_damaged_file_is_refused_when_most_of_it_is_read(
    small_files: None, tmp_path: Path
) -> None:
    task = of_layers("linear", N)
    index = blr.Index.build(task, posterior(task), tmp_path / "i", rank=10**3)
    file = sorted((tmp_path / "i").glob("gradients-*"))[1]
    content = file.read_bytes()
    gradients = load_file(file)["gradients"].numpy().tobytes()
    place = content.index(gradients)
    changed = bytearray(content)
    changed[place + 3] ^= 1
    file.write_bytes(changed)
    with pytest.raises(StorageError, match=r"00002-of-00003.*damaged"):
        blr.Index.open(tmp_path / "i").influence(task)
    file.write_bytes(content)
    assert torch.equal(blr.Index.open(tmp_path / "i").influence(task), index.influence(task))


def exchange(first: Path, second: Path) -> None:
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


@pytest.mark.parametrize("pair", [(0, 1), (0, 2)], ids=["of five and five", "of five and two"])
@pytest.mark.parametrize("is_complete", [False, True])
def test_files_that_changed_places_are_refused(
    is_complete: bool, pair: tuple[int, int], small_files: None, tmp_path: Path
) -> None:
    """Also in a folder whose last file, with the checksums of the others, is not written yet."""
    task = of_layers("linear", N)
    q = posterior(task)
    blr.Index.build(task, q, tmp_path / "i", rank=10)
    files = sorted((tmp_path / "i").glob("gradients-*"))
    exchange(*(files[place] for place in pair))
    if not is_complete:
        (tmp_path / "i" / stored.CONFIG).unlink()
    with pytest.raises(StorageError, match="another file of an index"):
        blr.Index.build(task, q, tmp_path / "i", rank=10)


@pytest.mark.parametrize("n", [1, 2, 5, 40, 80])
def test_the_error_is_measured_on_pairs_of_different_examples(n: int) -> None:
    rows, columns = probe(n)
    for examples in (rows, columns):
        assert torch.equal(examples, examples.unique())
        assert 0 <= int(examples.min()) <= int(examples.max()) < n
    if n == 1:
        assert torch.equal(rows, columns)
        return
    assert set(rows.tolist()).isdisjoint(columns.tolist())
    assert len(columns) == min(16, n // 2)
    assert len(rows) == min(32, n - len(columns))


@pytest.mark.parametrize("dtype", ["int8", "float64"])
@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_the_measured_error_is_that_of_its_pairs(
    structure: str, dtype: str, tmp_path: Path
) -> None:
    """Against exact influence on all pairs, by NumPy's sums and SciPy's ranks."""
    task = of_layers("convolutions", N)
    q = posterior(task, structure)
    index = blr.Index.build(task, q, tmp_path / "i", rank=20, dtype=dtype)
    rows, columns = probe(N)
    estimate = index.influence(task)[rows][:, columns].double().numpy()
    exact = blr.influence(task, q, task).matrix[rows][:, columns].double().numpy()
    error = index.error
    assert error.pairs == exact.size
    distance = ((estimate - exact) ** 2).sum() / (exact**2).sum()
    assert error.relative_rms == pytest.approx(distance**0.5, rel=1e-6)
    assert error.spearman == pytest.approx(spearmanr(estimate, exact, axis=None)[0])
    assert blr.Index.open(tmp_path / "i").error == error


@pytest.mark.parametrize(("n", "is_measured"), [(2, False), (9, False), (10, True)])
def test_few_pairs_do_not_tell_the_error(
    n: int, is_measured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank is chosen by them either: it is the largest."""
    task = of_layers("linear", n)
    q = posterior(task)
    blr.Index.build(task, q, tmp_path / "i", rank=5)
    error = blr.Index.open(tmp_path / "i").error
    assert error.pairs == (n // 2) * (n - n // 2)
    assert error.is_measured == is_measured
    monkeypatch.setattr(ranking, "HALVINGS", 1)
    assert smallest_rank_with_error_below(math.inf, task, q, 4)[0] == (2 if is_measured else 4)
    expected = "rank correlation" if is_measured else "not measured (too few texts)"
    assert expected in error_in_words(error, "texts")


def test_energies_add_up_the_influence_of_examples_on_themselves() -> None:
    """A diagonal of squared gradients and a prior: Σ_i g_iᵀ Σ g_i, by autograd."""
    task = of_layers("linear")
    q = posterior(task)
    gradients = gradients_by_hand(task)
    energy = energies(q)
    assert energy.keys() == gradients.keys()
    for name, rows in gradients.items():
        by_hand = (rows.square() * q.variance(name)).sum()
        assert energy[name] == pytest.approx(float(by_hand), rel=1e-9)


CHANGES: dict[str, tuple[Callable[[], blr.Task], int, str]] = {
    "rank": (partial(of_layers, "linear"), 6, "rank"),
    "model": (partial(of_layers, "no bias"), 5, "model"),
    "number of examples": (partial(of_layers, "linear", 11), 5, "number of examples"),
    "data": (partial(of_layers, "linear", 11), 5, "data"),
}


@pytest.mark.parametrize("changed", CHANGES)
def test_a_place_is_refused_before_the_long_work(changed: str, tmp_path: Path) -> None:
    task = of_layers("linear")
    check_place(tmp_path / "i", task, 5, at_model=True)
    blr.Index.build(task, posterior(task), tmp_path / "i", rank=5)
    for at_model in (True, False):
        check_place(tmp_path / "i", task, 5, at_model=at_model)
    make, rank, word = CHANGES[changed]
    with pytest.raises(StorageError, match=f"another .*{word}"):
        check_place(tmp_path / "i", make(), rank, at_model=True)
    if changed == "model":
        check_place(tmp_path / "i", make(), rank, at_model=False)


@pytest.mark.parametrize("edited_part", ["input", "target", "metadata"])
def test_one_example_that_was_edited_is_other_data(tmp_path: Path, edited_part: str) -> None:
    """As it stands among those that nobody looks at, in data that are read in another way."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 3, generator=generator)
    y = torch.arange(N) % 3
    model = torch.nn.Linear(3, 3)
    source = [*"ab"] * (N // 2)

    def task() -> blr.Task:
        rows = list(zip(x.clone(), y.clone(), strict=True))
        return blr.Task(model, rows, metadata={"source": list(source)})

    q = posterior(blr.Task(model, (x, y)))
    apart = torch.stack([y, y], 1)[:, 0]
    blr.Index.build(blr.Task(model, (x, apart), metadata={"source": source}), q, tmp_path / "i")
    blr.Index.build(task(), q, tmp_path / "i")
    if edited_part == "input":
        x[5, 1] += 1
    elif edited_part == "target":
        y[5] = (y[5] + 1) % 3
    else:
        source[5] = "c"
    with pytest.raises(StorageError, match="another data"):
        blr.Index.build(task(), q, tmp_path / "i")
    with pytest.raises(PosteriorError, match="other data"):
        blr.Index.open(tmp_path / "i", task=task())


def test_what_does_not_belong_is_refused_by_name(tmp_path: Path) -> None:
    task = language()
    q = posterior(task)
    index = blr.Index.build(task, q, tmp_path / "i", rank=100)
    another_model = language(seed=3)
    with pytest.raises(StorageError, match="another posterior"):
        blr.Index.build(another_model, posterior(another_model), tmp_path / "i", rank=100)
    with pytest.raises(StorageError, match="another rank"):
        blr.Index.build(task, q, tmp_path / "i", rank=101)
    with pytest.raises(PosteriorError, match="another model"):
        index.influence(blr.Task(mlp(), (torch.zeros(2, 4), torch.zeros(2).long())))
    with pytest.raises(InputError, match="task="):
        blr.Index.open(tmp_path / "i").top(task, 2, refine=4)
    with pytest.raises(PosteriorError, match="'gram', not 'lowrank'"):
        blr.Index.build(task, posterior(task, "lowrank"), tmp_path / "j")
    with pytest.raises(PosteriorError, match="examples differ"):
        blr.Index.open(tmp_path / "i", task=task.subset(range(task.n_data)[::-1]))
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").touch()
    with pytest.raises(StorageError, match=r"notes\.txt"):
        blr.Index.build(task, q, tmp_path / "foreign")
    opened = blr.Index.open(tmp_path / "i", task=task)
    file = next((tmp_path / "i").glob("gradients-*"))
    whole = file.read_bytes()
    table = tmp_path / "i" / stored.EXAMPLES
    gradients = load_file(file)
    shortened = {n: t[:-1].contiguous() for n, t in gradients.items()}
    for foreign, first in ((gradients, "256"), (shortened, "0")):
        save_file(foreign, file, {"first": first})
        with pytest.raises(StorageError, match="another file of an index"):
            blr.Index.open(tmp_path / "i")
    file.write_bytes(whole)
    rows = table.read_bytes()
    table.write_bytes(rows[: len(rows) // 2])
    with pytest.raises(StorageError, match=r"examples\.parquet' is damaged"):
        _ = blr.Index.open(tmp_path / "i").self_influence
    table.write_bytes(rows)
    file.write_bytes(whole[:-50])
    with pytest.raises(StorageError, match="is damaged"):
        opened.top(task, 2)
    file.unlink()
    with pytest.raises(StorageError, match="lacks gradients-"):
        blr.Index.open(tmp_path / "i")
    with pytest.raises(StorageError, match="no index"):
        blr.Index.open(tmp_path / "foreign")
