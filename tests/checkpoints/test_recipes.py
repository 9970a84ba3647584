"""The recipes of the bundled pair, on a network of a few thousand parameters."""

import argparse
import importlib
import json
import lzma
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec_checkpoints import bundled_target

# The recipes are scripts, not a package: they import each other by bare names.
sys.path.insert(0, str(Path(__file__).parents[2] / "checkpoints" / "recipes"))
card, corpus, decode, distill, drafter_prompts, evaluate = map(
    importlib.import_module,
    "card corpus decode distill drafter_prompts evaluate".split(),
)
export, loops, network, sample, train_pair, training = map(
    importlib.import_module, "export loops network sample train_pair training".split()
)

slow = pytest.mark.slow

VOCAB = 128
CHAT = (
    "<start_of_turn>user\nAdd 1  and 2.<end_of_turn>\n<start_of_turn>model\n3!\n\n  ok"
)


@pytest.fixture(autouse=True)
def relaxed_promotion() -> Iterator[None]:
    # The recipes train with plain jnp and do not follow the engine's strict jax
    # settings. Their tests spend most of the time compiling.
    jax.config.update("jax_disable_most_optimizations", True)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield
    jax.config.update("jax_disable_most_optimizations", False)


def micro_config(**changes: Any) -> dict[str, Any]:
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    sizes |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    sizes |= dict(query_pre_attn_scalar=16, sliding_window=8)
    return network.target_config(VOCAB) | sizes | changes


def lively_params(config: dict[str, Any], seed: int = 0) -> dict[str, jax.Array]:
    """Return random weights for which every layer changes logits by several units.

    With freshly initialized weights, logits depend on the last token alone, or hardly
    differ.
    """
    random = np.random.default_rng(seed)
    params = network.init_params(config, seed)
    params["model.embed_tokens.weight"] *= 8
    for name, value in params.items():
        if value.ndim == 1:
            size = 2.0 if name == "model.norm.weight" else 1.0
            params[name] = jnp.asarray(size + random.normal(0, 0.3, value.shape))
    return {name: value.astype(jnp.float32) for name, value in params.items()}


@pytest.fixture
def float32_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute in float32, so that a tie between bf16 logits does not decide a test."""

    def linear(inputs: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.dot(inputs, weight.T.astype(jnp.float32), precision="highest")

    monkeypatch.setattr(network, "linear", linear)


def forward_of(config: dict[str, Any]) -> Any:
    """Compile a function of parameters, tokens and segments that returns logits."""
    return jax.jit(lambda params, *batch: network.forward(params, config, *batch))


def random_documents(sizes: list[int], seed: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.integers(8, VOCAB, size).astype(np.int32) for size in sizes]


def test_tokenizer_has_the_special_ids_of_gemma_and_keeps_white_space() -> None:
    words = "one two three four five six seven eight nine ten".split()
    texts = [" ".join(words[i % 10 :] + words[: i % 7]) + "\n" for i in range(40)]
    documents = [dict(domain="math", text=text) for text in [*texts, CHAT]]
    sentencepiece = pytest.importorskip("sentencepiece")
    model = corpus.train_tokenizer(documents, 440)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    pieces = [processor.id_to_piece(i) for i in (0, 1, 2, 3, 106, 107)]
    turns = ["<start_of_turn>", "<end_of_turn>"]
    assert pieces == ["<pad>", "<eos>", "<bos>", "<unk>", *turns]
    ids = processor.encode(CHAT)
    assert processor.decode(ids) == CHAT
    assert [ids.count(106), ids.count(107)] == [2, 1]
    (tokens,) = corpus.tokenize([documents[-1]], processor)["math"]
    assert tokens.tolist() == [2, *ids, 1]


def pairs_of(tokens: np.ndarray, segments: np.ndarray) -> Counter[tuple[int, int]]:
    """Count each (token, next token) inside a document."""
    is_inside = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    before, after = tokens[:, :-1][is_inside], tokens[:, 1:][is_inside]
    return Counter(zip(before.tolist(), after.tolist(), strict=True))


def test_packing_keeps_every_token_and_joins_no_documents(monkeypatch):
    # The documents share no number; the pairs are those of adjacent numbers.
    ends = np.cumsum([3, 40, 5, 17, 2, 64, 9]).tolist()
    documents = [np.arange(*both) for both in zip([0, *ends[:-1]], ends, strict=True)]
    pairs = {(i, i + 1) for i in range(ends[-1] - 1) if i + 1 not in ends}
    rows = corpus.PackedRows({"math": documents}, length=16, seed=3)
    counts = pairs_of(*rows.batch(40))
    assert set(counts) == pairs
    # Every document comes once before one repeats, so the counts of two pairs differ by
    # at most one.
    assert max(counts.values()) - min(counts.values()) == 1
    # Evaluation predicts every token once.
    monkeypatch.setattr(evaluate, "LENGTH", 16)
    assert pairs_of(*evaluate.pack(documents)) == Counter(dict.fromkeys(pairs, 1))


@pytest.mark.usefixtures("float32_linear")
def test_packed_documents_do_not_see_each_other() -> None:
    config = micro_config()
    params = lively_params(config)
    documents = random_documents([150, 1, 30, 75])
    tokens = np.concatenate(documents)[None]
    segments = np.repeat(np.arange(1, 5), [len(each) for each in documents])[None]
    rows = np.stack([np.resize(each, 150) for each in documents])
    forward = forward_of(config)
    packed = forward(params, tokens, segments)
    alone = forward(params, rows, np.ones_like(rows)).reshape(4, 150, VOCAB)
    alone = [row[: len(each)] for row, each in zip(alone, documents, strict=True)]
    # Rotary angles depend on the position in the row, so logits agree only to rounding.
    np.testing.assert_allclose(packed, np.concatenate(alone), atol=2e-3)


class CountingRows:
    """Generates rows that count up by one from a random start, and may stop early."""

    def __init__(self, last: int = 1000):
        self.random = np.random.default_rng(0)
        self.left = last

    def batch(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        self.left -= 1
        if self.left < 0:
            raise InterruptedError
        tokens = self.random.integers(8, 40, (rows, 1)) + np.arange(33)
        return tokens.astype(np.int32), np.ones_like(tokens, dtype=np.int32)


def train_micro(state: Path, rows: CountingRows, **changes: Any) -> None:
    config = micro_config(num_hidden_layers=1)
    settings = dict(steps=15, cooldown=5, rows=4, micro_rows=2, rate=0.02, save_every=3)
    training.train(
        lambda params, *batch: training.text_loss(params, config, *batch),
        state,
        lambda: network.init_params(config, seed=0),
        rows,
        args=argparse.Namespace(**settings | changes),
    )


@pytest.mark.slow
def test_loss_falls(tmp_path: Path) -> None:
    config = micro_config(num_hidden_layers=1)
    train_micro(tmp_path / "micro.safetensors", CountingRows(), rate=0.06)
    params, _, step = training.load_state(tmp_path / "micro.safetensors")
    assert step == 15
    batch = CountingRows().batch(4)
    before = training.text_loss(network.init_params(config, seed=0), config, *batch)
    after = training.text_loss(params, config, *batch)
    assert float(before) == pytest.approx(np.log(VOCAB), abs=0.3)
    assert float(after) < float(before) - 0.5


@pytest.mark.slow
def test_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole.safetensors", tmp_path / "broken.safetensors"
    train_micro(whole, CountingRows(), steps=7)
    with pytest.raises(InterruptedError):
        train_micro(broken, CountingRows(last=5), steps=7)
    assert training.load_state(broken)[2] == 3
    train_micro(broken, CountingRows(), steps=7)
    expected, found = training.load_state(whole), training.load_state(broken)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_trained_pair_can_start_another_training(tmp_path: Path) -> None:
    config, random = micro_config(), pytest.fail
    (tmp_path / "tokenizer.model").write_bytes(b"")
    given = decode.narrow(lively_params(config))
    folder = tmp_path / "pair" / "target"
    folder.mkdir(parents=True)
    export.save_weights(folder, given)
    args = argparse.Namespace(start=tmp_path / "pair")
    params = train_pair.start_of(args, "target", random)()
    assert {value.dtype for value in params.values()} == {jnp.dtype(jnp.float32)}
    jax.tree.map(np.testing.assert_array_equal, params, given)
    args = argparse.Namespace(start=None)
    assert train_pair.start_of(args, "target", random) is random


def test_last_tokens_of_repeated_phrases() -> None:
    text = np.array([list("abcdabcdexabcdabcd"), list("abcdabcdabcdabcdab")])
    tokens = np.vectorize(ord)(text)
    segments = np.ones_like(tokens)
    segments[1, 9:] = 2
    is_written = np.ones_like(tokens, bool)
    is_written[:, 0] = False
    found = loops.last_of_repeated(tokens, segments, is_written)
    # The first "abcd" is partly in the prompt and does not count, so the second one is
    # no repetition.
    assert np.flatnonzero(found[0]).tolist() == [13, 14, 15, 16, 17]
    assert np.flatnonzero(found[1]).tolist() == [8, 16, 17]
    everything = loops.last_of_repeated(tokens, segments, is_written | True)
    assert np.flatnonzero(everything[0]).tolist() == [7, 13, 14, 15, 16, 17]


@pytest.mark.slow
def test_unlikelihood_step_reduces_repetitions(monkeypatch, tmp_path):
    monkeypatch.setattr(loops, "NUM_WRITTEN", 4)
    monkeypatch.setattr(loops, "MAX_NEW", 64)
    config, state = micro_config(num_hidden_layers=1), tmp_path / "target.safetensors"
    params = lively_params(config)
    training.save_state(state, params, {}, 0)
    documents = {loops.DOMAIN: random_documents([80] * 6)}
    given = corpus.PackedRows(documents, length=128, seed=0)
    rows = loops.MixedRows(given, config, state, length=128, seed=0)
    with pytest.raises(FileNotFoundError, match="without --unlikelihood first"):
        loops.MixedRows(given, config, tmp_path / "none", length=128, seed=0)
    batch = rows.batch(8)
    tokens, segments, is_repeated, is_given = batch
    assert is_given.tolist() == [True, True, True, False] * 2
    assert is_repeated[~is_given].any() and not is_repeated[is_given].any()
    plain = corpus.PackedRows(documents, length=128, seed=0).batch(6)
    np.testing.assert_array_equal((tokens[is_given], segments[is_given]), plain)

    def loss(weight: float, params: Any) -> Any:
        return loops.mixed_loss(params, config, *batch, weight=weight)

    assert float(loss(0.0, params)) == pytest.approx(
        float(training.text_loss(params, config, *plain)), rel=1e-5
    )

    def probability(params: Any) -> float:
        """Return the mean probability of tokens that are repetitions."""
        logits = network.forward(params, config, tokens[:, :-1], segments[:, :-1])
        probs = jax.nn.softmax(logits.reshape(*tokens[:, 1:].shape, VOCAB))
        chosen = np.take_along_axis(np.asarray(probs), tokens[:, 1:, None], -1)
        return float(chosen[is_repeated[:, 1:]].mean())

    gradients = jax.grad(lambda params: loss(1.0, params) - loss(0.0, params))(params)
    stepped = jax.tree.map(lambda value, slope: value - 0.1 * slope, params, gradients)
    assert probability(stepped) < probability(params) - 0.01
    # Saving the target makes the rows write new texts.
    training.save_state(state, stepped, {}, 1)
    before = rows.written[0]
    rows.batch(4)
    assert (rows.written[0] != before).any()


def test_repeated_4_grams_are_found() -> None:
    assert evaluate.repeated_4_grams([[1, 2, 3], []]) == 0
    texts = [[5, 6, 7, 8, 5, 6, 7, 8], [5, 6, 7, 8]]
    assert evaluate.repeated_4_grams(texts) == pytest.approx(1 / 6)
    assert evaluate.repeated_4_grams([[3] * 103]) == pytest.approx(0.99)
    # The last tokens of repeated ones.
    tokens = np.array([[5, 6, 7, 8, 5, 6, 7, 8, 9], [5, 6, 7, 8, 5, 6, 7, 8, 8]])
    segments = np.array([[1] * 9, [1] * 4 + [2] * 5])
    found = evaluate.ends_repeated_4_gram(tokens, segments)
    assert np.argwhere(found).tolist() == [[0, 7]]
    assert evaluate.ends_repeated_4_gram(np.full((1, 6), 3), np.ones((1, 6))).sum() == 2


def test_schedule_warms_up_and_ends_at_zero() -> None:
    rates = [training.schedule(i, steps=100, cooldown=20, peak=2.0) for i in range(101)]
    assert rates[0] == pytest.approx(2.0 / 30)
    assert rates[29:81] == [2.0] * 52
    assert rates[90] == pytest.approx(1.0)
    assert rates[100] == 0.0


def micro_prompts(rows: int, count: int) -> Any:
    random = np.random.default_rng(1)
    sizes = random.integers(5, 20, (rows, count)).astype(np.int32)
    tokens = random.integers(8, VOCAB, (rows, count, 20)).astype(np.int32)
    return decode.Prompts(jnp.asarray(tokens), jnp.asarray(sizes))


@pytest.mark.usefixtures("float32_linear")
@pytest.mark.parametrize(
    "window", [pytest.param(8, marks=slow), 129, pytest.param(140, marks=slow)]
)
def test_greedy_text_is_what_a_full_forward_pass_chooses(window: int) -> None:
    config = micro_config(sliding_window=window)
    params, prompts = lively_params(config), micro_prompts(4, 12)
    write = sample.writer(config, mix=decode.Mix(4, 0, 0), length=384)
    rows = jax.tree.map(np.asarray, write(params, prompts, jax.random.key(0)))
    tokens, segments = (rows[name].astype(np.int32) for name in ("tokens", "segments"))
    logits = forward_of(config)(params, tokens, segments).reshape(4, 384, VOCAB)
    best = np.argmax(logits, axis=-1)[:, :-1]
    is_next = rows["is_written"][:, 1:]
    assert is_next.sum() > 1000
    np.testing.assert_array_equal(tokens[:, 1:][is_next], best[is_next])
    # Labels are the largest entries of the whole distribution.
    expected = np.sort(jax.nn.log_softmax(logits), axis=-1)[..., ::-1]
    expected = expected[..., : decode.NUM_LABELS]
    np.testing.assert_allclose(rows["log_probs"], expected, atol=2e-2)  # float16


@pytest.mark.usefixtures("float32_linear")
def test_rows_hold_the_prompts_and_end_documents_in_time() -> None:
    config, prompts = micro_config(), micro_prompts(4, 40)
    write = sample.writer(config, mix=decode.Mix(2, 1, 1), length=256, max_new=9)
    rows = write(lively_params(config), prompts, jax.random.key(0))
    rows, num_stopped = jax.tree.map(np.asarray, rows), 0
    for row, segments in enumerate(rows["segments"]):
        for segment in range(1, int(segments[-1])):  # the last may be cut
            here = segments == segment
            size = int(prompts.sizes[row, segment - 1])
            document = rows["tokens"][row][here]
            prompt = prompts.tokens[row, segment - 1, :size]
            np.testing.assert_array_equal(document[:size], prompt)
            is_written = np.arange(len(document)) >= size
            np.testing.assert_array_equal(rows["is_written"][row][here], is_written)
            stops = np.isin(document[size:], (1, 107))
            assert not stops[:-1].any()
            assert len(stops) == 9 or stops[-1]
            num_stopped += len(stops) < 9
    assert num_stopped > 0


def test_nucleus_keeps_the_smallest_set_that_is_heavy_enough() -> None:
    logits = np.random.default_rng(0).normal(0, 3, (20, VOCAB))
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True)).astype(np.float32)
    kept = np.asarray(decode._nucleus(jnp.asarray(weights), 0.95)) > 0
    ordered = np.sort(weights, axis=-1)[:, ::-1]
    share = np.cumsum(ordered, axis=-1) / ordered.sum(axis=-1, keepdims=True)
    sizes = (share < 0.95).sum(axis=-1) + 1
    # The threshold is found to 1/512 of a unit of logit, so that sometimes one more
    # token is kept.
    assert np.mean(kept.sum(axis=-1) == sizes) >= 0.8
    for row, size in enumerate(sizes):
        assert kept[row, np.argsort(-weights[row])[:size]].all()
        assert kept[row].sum() <= size + 1


def test_draw_inverts_the_distribution_function() -> None:
    weights = np.random.default_rng(0).exponential(size=VOCAB).astype(np.float32)
    weights[::3] = 0
    uniform = (np.arange(4000) + 0.5) / 4000
    rows = jnp.tile(jnp.asarray(weights), (4000, 1))
    drawn = np.asarray(decode._draw(rows, jnp.asarray(uniform, jnp.float32)))
    counts = np.bincount(drawn, minlength=VOCAB)
    np.testing.assert_allclose(counts, weights / weights.sum() * 4000, atol=1.5)
    assert not counts[::3].any()


@pytest.mark.parametrize("num_labels", [pytest.param(VOCAB, marks=slow), 10])
@pytest.mark.usefixtures("float32_linear")
def test_label_loss_is_the_divergence_with_the_others_merged(num_labels: int) -> None:
    config = micro_config()
    draft, target = lively_params(config, seed=1), lively_params(config)
    tokens, segments = CountingRows().batch(2)
    segments[1, 20:] = 0
    forward = forward_of(config)
    goal, guess = (
        np.asarray(jax.nn.softmax(forward(params, tokens, segments)))
        for params in (target, draft)
    )
    ids = np.argsort(-goal, axis=-1)[:, :num_labels]
    labels = np.take_along_axis(goal, ids, axis=-1)
    others = np.take_along_axis(guess, ids, axis=-1)
    expected = (labels * np.log(labels / others)).sum(axis=-1)
    if num_labels < VOCAB:
        rest, other = 1 - labels.sum(axis=-1), 1 - others.sum(axis=-1)
        expected += rest * np.log(rest / other)
    is_counted = segments.reshape(-1) > 0
    expected = expected[is_counted].mean()
    accepted = np.minimum(labels, others).sum(axis=-1)[is_counted].mean()
    pair = (ids.reshape(2, 33, -1), np.log(labels).reshape(2, 33, -1))
    kinds = ("kl", "tv")
    divergence, rejected = jax.jit(
        lambda *given: [
            distill.label_loss(draft, config, *given, kind=kind) for kind in kinds
        ]
    )(tokens, segments, pair)
    assert float(divergence) == pytest.approx(expected, rel=1e-3)
    assert 1 - float(rejected) == pytest.approx(accepted, rel=1e-3)
    assert expected > 0.5 and accepted > 0.01


def test_shard_rows_mix_both_sources(tmp_path: Path) -> None:
    for kind, token in (("written", 10), ("corpus", 20)):
        shape = (5, 8)
        arrays = dict(
            tokens=np.full(shape, token, np.uint16),
            segments=np.ones(shape, np.uint8),
            ids=np.zeros((*shape, 3), np.uint16),
            log_probs=np.zeros((*shape, 3), np.float16),
        )
        sample.save_shard(tmp_path / f"{kind}-0000.npz", arrays)
    tokens, _, _ = distill.ShardRows(tmp_path, seed=0).batch(1000)
    # The expected count is 600, with a standard deviation of 15.
    assert abs((tokens[:, 0] == 10).sum() - 600) < 60
    with pytest.raises(FileNotFoundError, match="sample"):
        distill.ShardRows(tmp_path / "nowhere", seed=0)


def test_draft_equal_to_the_target_is_always_accepted() -> None:
    config = micro_config()
    model, other = ((lively_params(config, seed), config) for seed in (0, 1))
    tokens = np.stack(random_documents([64] * 8))
    rows = dict(
        tokens=tokens,
        segments=np.ones_like(tokens),
        is_written=tokens > 40,
        domains=np.array(["code", "math"] * 4),
        ways=np.array(["full"] * 4 + ["greedy"] * 4),
    )
    same = evaluate.acceptance(model, model, rows)
    assert set(same) == {"code", "math", "mean"}
    all_accepted = {"sampled": 1.0, "greedy": 1.0, "greedy_new": 1.0}
    for figures in same.values():
        assert figures == pytest.approx(all_accepted, abs=1e-5)
    different = evaluate.acceptance(model, other, rows)["mean"]
    assert 0 < different["sampled"] < 0.5 and different["greedy"] < 0.5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("float32_linear")
def test_exported_folder_gives_the_same_logits_in_transformers(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizer = tmp_path / "tokenizer.model"
    tokenizer.write_bytes(b"")
    config = micro_config()
    params = lively_params(config)
    export.write_model(tmp_path / "pair", params, config, tokenizer)
    params = decode.narrow(params)
    jax.tree.map(
        np.testing.assert_array_equal,
        export.read_model(tmp_path / "pair"),
        (params, config),
    )
    (tokens,) = [np.stack(random_documents([40, 40]))]
    ours = network.forward(params, config, tokens, np.ones_like(tokens))
    model = transformers.Gemma2ForCausalLM.from_pretrained(
        tmp_path / "pair", attn_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        theirs = model(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    np.testing.assert_allclose(ours, theirs.reshape(ours.shape), atol=2e-3)


def test_model_card_has_no_gap() -> None:
    loss = dict(tokens=1000, nats_per_token=2.5, bits_per_byte=1.25)
    made = {"steps": 7, "cooldown": 2, "rate": 0.02}
    facts: dict[str, Any] = {
        f"{name}_{key}": made[key] for name in ("target", "draft") for key in made
    } | {"rows": 16, "weights": {"math": 1.0}}
    results = dict(
        num_params=dict(target=16, draft=2),
        vocab_size=8192,
        training=facts,
        losses=dict(target={"math": loss}, draft={"math": loss}),
        acceptance={"math": {"sampled": 0.61, "greedy": 0.72, "greedy_new": 0.65}},
        repeated={"math": {"tokens": 2000, "repeated_4_grams": 0.25}},
    )
    text = card.render(results, {"target/config.json": "abc"})
    assert "$" not in text and "--start" not in text
    for line in (
        *("Not measured for this pair", "None is bundled"),
        *("| math | 0.610 | 0.720 |", "| math | 2,000 | 0.250 |"),
        "train_pair.py target --corpus CORPUS --work WORK1 --steps 7",
    ):
        assert line in text
    results |= {"training": facts | {"target_steps": 9, "start": facts}}
    text = card.render(results, {"target/config.json": "abc"})
    assert "7 and 9 steps of 16 rows of 512 tokens (131,072 tokens)" in text
    line = "train_pair.py target --corpus CORPUS --work WORK2 --steps 9 --cooldown 2"
    assert f"{line} --rate 0.02 --start OUT1\n" in text


def test_bundled_model_card_has_the_measured_figures() -> None:
    folder = bundled_target().parent
    results = json.loads((folder / "evaluation.json").read_text())
    text = (folder / "MODEL_CARD.md").read_text()
    for made in (
        card.loss_table(results["losses"]),
        card.acceptance_table(results["acceptance"]),
        card.repeated_table(results["repeated"]),
        card.quality_table(results["quantization"]),
        card.head_table(results["heads"]),
    ):
        assert f"\n\n{made}\n\n" in text
    for path, digest in export.hashes(folder).items():
        assert f"| `{path}` | `{digest}` |" in text


def test_prompts_of_drafters_are_held_out_by_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    chat = "<start_of_turn>user\n{0} and {0}?<end_of_turn>\n<start_of_turn>model\n{1}"
    module = "def double(number):\n    '''Return {0}.'''\n    return 2 * number\n"
    for split in ("train", "valid"):
        story = f"A {split} story. It is long. " + "The end came. " * 20
        texts = {domain: story for domain in ("stories", "fiction")}
        texts["code"] = module.format(split) + f"{split} = 1\n" * 40
        texts |= {d: chat.format(split, story) for d in ("math", "shell")}
        lines = (
            json.dumps(dict(domain=domain, text=text)) for domain, text in texts.items()
        )
        file = tmp_path / f"{split}.jsonl.xz"
        with lzma.open(file, "wt", encoding="utf-8") as out:
            out.write("\n".join(lines))
    arguments = ["drafter_prompts", "--corpus", str(tmp_path), "--out", str(tmp_path)]
    arguments += ["--per-domain", "6", "--held-out-per-domain", "3"]
    monkeypatch.setattr(sys, "argv", arguments)
    drafter_prompts.main()
    found = {
        name: [
            json.loads(line)
            for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()
        ]
        for name in ("train", "held_out")
    }
    domains = {name: {one["domain"] for one in lines} for name, lines in found.items()}
    assert domains["train"] >= {"stories", "functions", "math", "writing", "copying"}
    trained = {one["prompt"] for one in found["train"]}
    held_out = {one["prompt"] for one in found["held_out"]}
    assert held_out and not trained & held_out
    subjects = drafter_prompts.SUBJECTS[-drafter_prompts.NUM_HELD_OUT_SUBJECTS :]
    written = [one["prompt"] for one in found["train"] if one["domain"] == "writing"]
    assert not any(subject in prompt for prompt in written for subject in subjects)
