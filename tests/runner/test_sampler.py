"""The sampling pipeline: a reference in plain Python, statistics, independence of other rows, edge
cases.

The reference (`reference_token`) samples one row with lists and Python integers, in the order that
the pipeline documents. The fast path must always give the same token.
"""

import math
import random

import numpy as np
import pytest
import torch

from nanoengine.core.plan import AdmittedSequence, Fork
from nanoengine.runner.sampling.draw import (
    DrawParams,
    argmax,
    draw,
    draw_top_p,
    mix,
    top_candidates,
)
from nanoengine.runner.sampling.greedy import is_plain
from nanoengine.runner.sampling.logits_processors import ProcessorStates, standard_processors
from nanoengine.runner.sampling.logprobs import to_records, token_logprobs
from nanoengine.runner.sampling.sampler import Sampler
from nanoengine.settings.params import EDITS, SamplingParams
from tests.support.logits import random_logits, uniforms_of
from tests.support.sampling_fields import sample_values

EOS = (2, 3)


def admitted(row, params, prompt=(1, 2, 3), output=(), seed=0, bad_word_ids=()):
    """A sequence as a plan admits it."""
    return AdmittedSequence(
        row=row,
        seq_id=row,
        token_ids=[*prompt, *output],
        num_prompt_tokens=len(prompt),
        num_cached_tokens=0,
        params=params,
        seed=seed,
        bad_word_ids=bad_word_ids,
    )


def sampler_of(vocab_size, *sequences, eos=EOS, processors=()):
    sampler = Sampler(vocab_size, 1 + max(s.row for s in sequences), eos, processors)
    for sequence in sequences:
        sampler.admit(sequence)
    return sampler


def accept(sampler, rows, token_ids):
    """Passes the sampled tokens of the rows to the processors."""
    for i, processor_states in sampler.states_of(rows).items():
        processor_states.accept(token_ids[i])


def sample_one(params, logits, position=3, **known):
    """The token of a single row, which must be valid."""
    sampler = sampler_of(len(logits), admitted(0, params, **known), eos=())
    fetched = sampler.sample(torch.as_tensor(logits)[None], [0], [position]).fetch()
    assert not fetched.errors
    return fetched.token_ids[0]


# --- the plain-Python reference -----------------------------------------------------------------


def reference_edit(logits, sequence, eos=EOS):
    """One row's logits (numpy, float32) after all processors."""
    x, params = logits.copy(), sequence.params
    tokens = list(sequence.token_ids)
    prompt, output = tokens[: sequence.num_prompt_tokens], tokens[sequence.num_prompt_tokens :]
    for token in range(len(x)):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            x[token] = -np.inf
    for *prefix, last in sequence.bad_word_ids:
        if tokens[len(tokens) - len(prefix) :] == prefix:
            x[last] = -np.inf
    if len(output) < params.min_tokens:
        for token in (() if params.ignore_eos else eos) + (params.stop_token_ids or ()):
            x[token] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        x[token] += np.float32(bias)
    repetition = np.float32(params.repetition_penalty)
    for token in {*prompt, *output}:
        count = output.count(token)
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
        x[token] -= np.float32(
            params.frequency_penalty * count + params.presence_penalty * (count > 0)
        )
    return x


def reference_token(logits, sequence, position, eos=EOS):
    """The token of one row, by the rules that `runner/sampling/draw.py` documents."""
    x, params = reference_edit(logits, sequence, eos), sequence.params
    by_id = list(range(len(x)))
    by_likelihood = sorted(by_id, key=lambda token: (-x[token], token))
    if params.is_greedy:
        return by_likelihood[0]
    gaps = torch.from_numpy(x - x.max())
    relative = (gaps / torch.tensor(params.temperature, dtype=torch.float32)).exp()
    weights = [
        int(value * 2**34) if value >= np.float32(params.min_p) else 0
        for value in relative.tolist()
    ]
    filtered = 0 < params.top_k < len(x) or params.min_p > 0 or params.top_p < 1
    order = by_likelihood if filtered else by_id
    if 0 < params.top_k < len(x):
        order = order[: params.top_k]
    if params.top_p < 1:
        total, before, kept = sum(weights[token] for token in order), 0, []
        for token in order:
            if before < params.top_p * total:
                kept.append(token)
            before += weights[token]
        order = kept
    total = sum(weights[token] for token in order)
    uniform = uniforms_of(np.array([sequence.seed]), np.array([position]))[0]
    target = min(math.floor(uniform * total), total - 1)
    for token in order:
        target -= weights[token]
        if target < 0:
            return token
    raise AssertionError("the weights add up to less than the target")


def random_params(rng, vocab_size):
    """Random parameters that use every feature sometimes; ids are within the vocabulary."""

    def some_ids(max_count):
        return [rng.randrange(vocab_size) for _ in range(rng.randint(1, max_count))]

    def now_and_then(value, otherwise=None, chance=0.25):
        return value if rng.random() < chance else otherwise

    return SamplingParams(
        temperature=rng.choice((0, 1e-3, 0.6, 1.0, 3.0)),
        top_k=rng.choice((0, -1, 1, 2, 7, 50, 10**6)),
        top_p=rng.choice((1.0, 1.0, 1e-6, 0.5, 0.95)),
        min_p=rng.choice((0.0, 0.0, 0.05, 1.0)),
        repetition_penalty=now_and_then(rng.uniform(0.5, 2), 1.0),
        presence_penalty=now_and_then(rng.uniform(-2, 2), 0.0),
        frequency_penalty=now_and_then(rng.uniform(-2, 2), 0.0),
        max_tokens=100,
        min_tokens=now_and_then(rng.randint(1, 8), 0),
        ignore_eos=rng.random() < 0.5,
        stop_token_ids=now_and_then(some_ids(3)),
        logit_bias=now_and_then({i: rng.uniform(-9, 9) for i in some_ids(5)}),
        allowed_token_ids=now_and_then([0, *some_ids(60)], chance=0.15),
    )


def random_sequence(rng, row, vocab_size):
    def ids(max_count):
        return [rng.randrange(vocab_size) for _ in range(rng.randint(0, max_count))]

    prompt, output = [1, *ids(20)], ids(10)
    ends = [(*prompt, *output)[-n:] for n in range(3)]
    words = [(*rng.choice(ends), rng.randrange(1, vocab_size)) for _ in range(4)]
    return admitted(
        row,
        random_params(rng, vocab_size),
        prompt,
        output,
        seed=rng.randrange(2**63),
        bad_word_ids=tuple(words) if rng.random() < 0.3 else (),
    )


@pytest.mark.parametrize("vocab_size", [5, 64, 131, 1000, 9000])
def test_every_row_gets_the_token_of_the_python_reference(vocab_size):
    rng = random.Random(vocab_size)
    num_rows = 60 if vocab_size < 5000 else 16
    sequences = [random_sequence(rng, row, vocab_size) for row in range(num_rows)]
    logits = random_logits(vocab_size, num_rows, vocab_size)
    logits[:, 0] = 0.0  # no row bans this token, so each row has one
    positions = [len(s.token_ids) for s in sequences]
    sampler = sampler_of(vocab_size, *sequences)
    fetched = sampler.sample(logits, range(num_rows), positions).fetch()
    for row, sequence in enumerate(sequences):
        if row in fetched.errors:  # stop ids, bad words and allowed ids exclude all tokens
            assert np.isinf(reference_edit(logits[row].numpy(), sequence)).all()
            continue
        expected = reference_token(logits[row].numpy(), sequence, positions[row])
        assert fetched.token_ids[row] == expected, sequence.params
    assert len(fetched.errors) < num_rows / 10


class Capture:
    """A last processor that stores the logits of each row after the other processors."""

    class State:
        def accept(self, token_id):
            """Ignores the token."""

        def fork(self):
            return self

    def __init__(self):
        self.seen = []

    def admit(self, sequence):
        return self.State()

    def apply(self, logits, lines, states):
        self.seen += logits[torch.tensor(lines)].clone()


def test_flat_lines_get_more_candidates_until_the_filters_are_covered():
    vocab_size = 9000
    flat = torch.rand(8, vocab_size, generator=torch.Generator().manual_seed(0)) / 10
    sequences = [
        admitted(row, SamplingParams(top_p=p, min_p=q), seed=row)
        for row, (p, q) in enumerate(
            ((0.01, 0), (0.1, 0), (0.5, 0), (0.999, 0), (1, 0.99), (1, 0.93), (1, 0.5), (0.4, 0.91))
        )
    ]
    fetched = sampler_of(vocab_size, *sequences).sample(flat, range(8), [3] * 8).fetch()
    for row, sequence in enumerate(sequences):
        assert fetched.token_ids[row] == reference_token(flat[row].numpy(), sequence, 3)


# --- search and draw ----------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [3, 64, 500, 20_000])
def test_top_candidates_are_a_stable_descending_sort(vocab_size):
    x = random_logits(1, 6, vocab_size)
    x[0], x[1, ::2] = 0.0, -0.0  # -0.0 equals 0.0
    order = x.sort(dim=-1, descending=True, stable=True).indices
    for width in {1, 2, 50, 300, vocab_size}:
        if width <= vocab_size:
            values, ids = top_candidates(x, width)
            assert torch.equal(ids, order[:, :width])
            assert torch.equal(values, x.gather(-1, ids))
            assert torch.equal(top_candidates(x.double(), width)[1], ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("vocab_size", [1, 63, 200, 1024])
def test_greedy_ties_take_the_lowest_id(dtype, vocab_size):
    x = torch.randint(0, 3, (40, vocab_size)).to(dtype)
    ids, largest = argmax(x)
    expected = [row.index(max(row)) for row in x.tolist()]
    assert ids.tolist() == expected
    assert largest.tolist() == [max(row) for row in x.tolist()]
    greedy = admitted(0, SamplingParams(temperature=0))
    rows = [0] * len(x)
    assert (
        sampler_of(vocab_size, greedy, eos=()).sample(x, rows, rows).token_ids.tolist() == expected
    )


def test_float64_logits_are_compared_in_float64():
    x = torch.tensor([1.0, 1.0 + 1e-12, 1.0], dtype=torch.float64)
    assert sample_one(SamplingParams(temperature=0), x) == 1
    assert sample_one(SamplingParams(temperature=0, logit_bias={0: 1e-13}), x) == 1


def test_random_numbers_are_splitmix64_and_uniform():
    first = mix(np.array([0x9E3779B97F4A7C15], dtype=np.uint64).view(np.int64))
    assert int(first.view(np.uint64)[0]) == 0xE220A8397B1DCDAF
    for u in (
        uniforms_of(np.full(100_000, 7), np.arange(100_000)),
        uniforms_of(np.arange(100_000), np.full(100_000, 7)),
    ):
        assert 0 <= u.min() <= u.max() < 1
        assert len(np.unique(u)) == len(u)
        counts = np.histogram(u, bins=64, range=(0, 1))[0]
        assert chi_square(counts, np.full(64, 1 / 64)) < limit(63)
        assert abs(np.corrcoef(u[1:], u[:-1])[0, 1]) < 0.015
    seeds, positions = np.meshgrid(np.arange(300), np.arange(300))
    assert len(np.unique(uniforms_of(seeds.ravel(), positions.ravel()))) == 90_000
    far = np.array([7 + 0x9E3779B97F4A7C15], dtype=np.uint64)  # one step of the generator away
    assert not np.isin(uniforms_of(far, np.array([5])), uniforms_of(np.full(99, 7), np.arange(99)))
    assert uniforms_of(np.array([2**63 - 1]), np.array([2**40])).shape == (1,)


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2.0**-53])
@pytest.mark.parametrize(
    ("draw_one", "min_p"), [(draw, 0.0), (draw_top_p, 0.0), (draw_top_p, 1e-15)]
)
def test_tokens_without_probability_are_never_drawn(uniform, draw_one, min_p):
    x = torch.full((1, 640), -torch.inf)
    likely = [70, 71, 300, 513]
    x[0, likely] = torch.tensor([-0.5, 0.0, -30.0, -1.0])  # -30: rounds to no weight
    columns = np.array([[1.0], [640.0], [0.99], [min_p]])
    params = DrawParams.pack(columns, np.array([uniform]), x.device)
    assert draw_one(x, x.amax(-1, keepdim=True), params).item() in (70, 71, 513)


def chi_square(counts, probabilities):
    expected = probabilities * counts.sum()
    assert (counts[expected == 0] == 0).all(), "an impossible token was drawn"
    held = expected > 0
    return float(((counts[held] - expected[held]) ** 2 / expected[held]).sum())


def limit(degrees):
    """A chi-square value that is exceeded with probability below 1e-5 (Wilson and Hilferty)."""
    return degrees * (1 - 2 / (9 * degrees) + 4.27 * math.sqrt(2 / (9 * degrees))) ** 3


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 6},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"temperature": 1.5, "top_k": 9, "top_p": 0.85, "min_p": 0.02},
    ],
    ids=str,
)
@pytest.mark.parametrize("vary", ["positions", "seeds"])
def test_drawn_frequencies_match_the_probabilities(params, vary):
    num_draws, vocab_size = 40_000, 24
    x = (
        torch.randn(vocab_size, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        * 1.5
    )
    p = (x / params.get("temperature", 1.0)).softmax(-1).numpy()
    p[p < params.get("min_p", 0) * p.max()] = 0
    order = np.argsort(-p)
    p[order[params.get("top_k", vocab_size) :]] = 0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= params.get("top_p", 1.0)]] = 0
    p /= p.sum()
    num_rows = 1 if vary == "positions" else num_draws // 4  # four tokens per seed
    sampling = SamplingParams(**params)
    sampler = sampler_of(
        vocab_size, *(admitted(row, sampling, seed=row) for row in range(num_rows)), eos=()
    )
    rows = np.arange(num_draws) % num_rows
    positions = np.arange(num_draws) // num_rows
    drawn = sampler.sample(x.float().expand(num_draws, -1), rows, positions).token_ids
    counts = np.bincount(drawn.numpy(), minlength=vocab_size)
    assert chi_square(counts, p) < limit((p > 0).sum() - 1)


# --- other rows, forks, preemption --------------------------------------------------------------


def test_results_do_not_depend_on_other_rows(monkeypatch):
    rng = random.Random(0)
    vocab_size, num_rows = 3000, 32
    sequences = [random_sequence(rng, row, vocab_size) for row in range(num_rows)]
    logits = random_logits(2, num_rows, vocab_size)
    positions = [len(s.token_ids) for s in sequences]
    together = sampler_of(vocab_size, *sequences).sample(logits, range(num_rows), positions)
    shuffled = rng.sample(range(num_rows), num_rows)
    monkeypatch.setattr("nanoengine.runner.sampling.draw.CPU_CHUNK", 7 * vocab_size)
    again = sampler_of(vocab_size, *sequences).sample(
        logits[shuffled], shuffled, [positions[row] for row in shuffled]
    )
    assert torch.equal(again.token_ids, together.token_ids[shuffled])
    for row, sequence in enumerate(sequences):
        alone = sampler_of(vocab_size, sequence._replace(row=0))
        token = alone.sample(logits[row : row + 1], [0], [positions[row]]).token_ids[0]
        assert token == together.token_ids[row]


def test_results_do_not_depend_on_the_number_of_threads():
    rng = random.Random(4)
    sequences = [random_sequence(rng, row, 40_000) for row in range(12)]
    logits = random_logits(5, 12, 40_000)
    before = torch.get_num_threads()
    tokens = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            tokens.append(sampler_of(40_000, *sequences).sample(logits, range(12), range(12)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(tokens[0].token_ids, tokens[1].token_ids)


def run(sampler, row, position, num_tokens, vocab_size):
    """Samples and accepts tokens one by one; the logits depend on the position only."""
    tokens = []
    for place in range(position, position + num_tokens):
        logits = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(place)) / 2
        tokens += sampler.sample(logits, [row], [place]).fetch().token_ids
        accept(sampler, [row], [tokens[-1:]])
    return tokens


STATEFUL = SamplingParams(
    temperature=1.2,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.7,
    min_tokens=12,
    max_tokens=30,
)


def test_a_preempted_sequence_continues_as_without_preemption():
    """The sequence has more tokens than the initial capacity of a penalty state."""
    words = ((6, 7), (8,), (9, 1, 2))
    known = {"params": STATEFUL, "prompt": range(100), "seed": 11, "bad_word_ids": words}
    expected = run(sampler_of(300, admitted(1, **known)), 1, 100, 120, 300)
    sampler = sampler_of(300, admitted(0, **known), admitted(3, SamplingParams()))
    first = run(sampler, 0, 100, 60, 300)
    sampler.release(0)
    sampler.admit(admitted(2, **known, output=first))
    assert first + run(sampler, 2, 160, 60, 300) == expected


def test_a_fork_continues_its_parent_with_its_own_seed_and_history():
    vocab_size = 20
    known = {"params": STATEFUL, "prompt": (4, 5, 6), "bad_word_ids": ((6, 7), (8,))}
    sampler = sampler_of(vocab_size, admitted(0, **known, seed=1), admitted(4, SamplingParams()))
    shared = run(sampler, 0, 3, 5, vocab_size)
    sampler.fork(Fork(row=2, parent_row=0, seq_id=9, seed=77))
    child = run(sampler, 2, 8, 12, vocab_size)
    parent = run(sampler, 0, 8, 12, vocab_size)
    assert child != parent
    for seed, tokens in ((1, parent), (77, child)):
        fresh = sampler_of(vocab_size, admitted(0, **known, seed=seed, output=shared))
        assert run(fresh, 0, 8, 12, vocab_size) == tokens


def test_a_reused_row_keeps_no_state():
    x = torch.tensor([[0.0, 5.0, 4.0]])
    sampler = sampler_of(3, admitted(0, SamplingParams(temperature=0, logit_bias={1: -9})), eos=())
    assert sampler.sample(x, [0], [3]).token_ids.tolist() == [2]
    sampler.release(0)
    sampler.admit(admitted(0, SamplingParams(temperature=0)))
    assert sampler.sample(x, [0], [3]).token_ids.tolist() == [1]


def test_lines_after_drafts_are_sampled_as_if_the_drafts_were_accepted():
    vocab_size, drafts = 60, (7, 9, 7)
    known = {
        "params": STATEFUL,
        "prompt": (4, 5, 6),
        "seed": 5,
        "bad_word_ids": ((9, 7, 1), (7, 7), (7, 9)),
    }
    logits = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(8))
    together = Capture()
    sampler = sampler_of(
        vocab_size,
        admitted(1, **known),
        admitted(0, SamplingParams(seed=3)),
        processors=(together,),
    )
    sampled = sampler.sample(logits, [1, 1, 1, 1, 0], [3, 4, 5, 6, 3], {1: drafts})
    edited = [x for x in together.seen if x.isinf().any()]  # row 0 bans no token
    assert len(edited) == 4
    for line in range(4):
        alone = Capture()
        sequence = admitted(0, **known, output=drafts[:line])
        one = sampler_of(vocab_size, sequence, processors=(alone,))
        token = one.sample(logits[line : line + 1], [0], [3 + line]).token_ids[0]
        assert torch.equal(edited[line], alone.seen[0])
        assert sampled.token_ids[line] == token
    again = sampler.sample(logits[:1], [1], [3])
    assert again.token_ids[0] == sampled.token_ids[0], "sampling alone remembers nothing"


# --- edge cases ---------------------------------------------------------------------------------


def test_top_k_and_min_p_at_a_tie():
    x = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.5]).expand(200, -1)

    def drawn(**params):
        sampler = sampler_of(5, admitted(0, SamplingParams(**params)))
        return set(sampler.sample(x, [0] * 200, range(200)).token_ids.tolist())

    assert drawn(top_k=2) == {1, 2}, "of equals, top_k keeps the lower ids"
    assert drawn(top_p=0.5) == {1, 2}, "of equals, top_p keeps the lower ids"
    assert drawn(min_p=1.0) == {1, 2, 3}, "min_p is a threshold: it keeps all equals"


def test_huge_temperature_is_uniform_and_keeps_bans():
    x = torch.tensor([0.0, -torch.inf, 50.0, -50.0])
    params = SamplingParams(temperature=1e300)
    assert {sample_one(params, x, position) for position in range(100)} == {0, 2, 3}


def test_a_vocabulary_of_one_token():
    assert sample_one(SamplingParams(), torch.tensor([0.3])) == 0
    assert sample_one(SamplingParams(top_p=0.3, logprobs=5), torch.tensor([0.3])) == 0


@pytest.mark.parametrize(
    "params",
    [{"temperature": 0}, {}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1, "logprobs": 2},
     {"temperature": 0, "presence_penalty": 1.0}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("bad", ["nan", "all nan", "-inf", "+inf"])
def test_a_line_with_invalid_logits_is_an_error_of_its_row(params, bad):
    num_rows, vocab_size = 5, 500
    sampler = sampler_of(
        vocab_size,
        *(
            admitted(row, SamplingParams(**params), output=(5,), seed=row)
            for row in range(num_rows)
        ),
    )
    logits = random_logits(0, num_rows, vocab_size)
    healthy = sampler.sample(logits, range(num_rows), [4] * num_rows).fetch()
    assert healthy.errors == {}
    if bad in ("nan", "+inf"):
        logits[2, 77] = float(bad)
    else:
        logits[2] = float(bad.removeprefix("all "))
    fetched = sampler.sample(logits, range(num_rows), [4] * num_rows).fetch()
    assert list(fetched.errors) == [2]
    assert "NaN" in fetched.errors[2]
    assert fetched.token_ids == [*healthy.token_ids[:2], 0, *healthy.token_ids[3:]]


def test_sampling_does_not_change_the_logits():
    params = [SamplingParams(temperature=0), SamplingParams(min_p=0.1), SamplingParams(top_p=0.5),
              SamplingParams(top_k=4, logit_bias={3: 5.0}), STATEFUL]  # fmt: skip
    for vocab_size in (64, 70):
        sampler = sampler_of(vocab_size, *(admitted(r, p) for r, p in enumerate(params)))
        logits = random_logits(0, 5, vocab_size)
        before = logits.clone()
        sampler.sample(logits, range(5), [3] * 5)
        assert torch.equal(logits, before)


def test_sizes_out_of_range_raise():
    with pytest.raises(ValueError, match="vocab_size must be in"):
        Sampler(2**19 + 1, 4)


# --- log-probabilities --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logprobs_are_of_the_raw_logits_with_ranks(dtype):
    vocab_size = 700
    bias = {3: 100.0}  # decides the token, and must not affect the log-probabilities
    asked = [None, 0, 5, 2]
    sequences = [
        admitted(row, SamplingParams(temperature=0, logprobs=n, logit_bias=bias))
        for row, n in enumerate(asked)
    ]
    logits = random_logits(9, 4, vocab_size).to(dtype)
    fetched = sampler_of(vocab_size, *sequences).sample(logits, range(4), [3] * 4).fetch()
    assert sorted(fetched.logprobs) == [1, 2, 3]
    for row, num_top in ((1, 0), (2, 5), (3, 2)):
        x = logits[row].double()
        expected = (x - x.logsumexp(-1)).tolist()
        order = sorted(range(vocab_size), key=lambda i: (-logits[row, i].item(), i))
        records = fetched.logprobs[row]
        assert [record.token_id for record in records] == [3, *order[:num_top]]
        for record in records:
            close = 1e-5 if dtype == torch.float32 else 1e-12
            assert record.logprob == pytest.approx(expected[record.token_id], abs=close)
            greater = (logits[row] > logits[row, record.token_id]).sum().item()
            assert record.rank == 1 + greater


def test_prompt_logprobs():
    logits = random_logits(4, 3, 50)
    following = torch.tensor([7, 0, 49])
    lines = [to_records(line) for line in token_logprobs(logits, following, 100).tolist()]
    assert [line[0].token_id for line in lines] == [7, 0, 49]
    for line, x, token in zip(lines, logits.log_softmax(-1), following, strict=True):
        assert len(line) == 1 + 50, "no more than the vocabulary"
        assert line[0].logprob == x[token].item()
        assert sorted(record.token_id for record in line[1:]) == list(range(50))
        assert [r.logprob for r in line[1:]] == x.sort(descending=True).values.tolist()
    assert [len(line) for line in token_logprobs(logits, following, 0).tolist()] == [1, 1, 1]


# --- options --------------------------------------------------------------------------------------

REPORTED = {"n", "temperature", "logprobs", "prompt_logprobs"}
"""Fields that are no option of a plain greedy row for other reasons."""


@pytest.mark.parametrize("name", sorted(sample_values().keys() - REPORTED))
def test_rows_are_plain_unless_a_processor_changes_their_logits(name):
    """A processor whose option is not in EDITS would not run for greedy rows."""
    params = SamplingParams(temperature=0, **{name: sample_values()[name]})
    sequence = admitted(0, params, bad_word_ids=((1,),) if name == "bad_words" else ())
    states = ProcessorStates.admit(standard_processors(EOS), sequence)
    assert (name in EDITS) == (states is not None) == (not is_plain(sequence))
