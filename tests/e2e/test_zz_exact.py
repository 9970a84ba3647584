import pytest
from tests.e2e.test_distribution import *
from tests.mutants import MUTANTS, applied


@pytest.mark.parametrize(
    "name,rule",
    [
        ("reject_draws_from_target", "standard"),
        ("block_uses_token_residual", "block"),
        ("stale_draft", "self"),
    ],
)
def test_fails(target, next_logits, name, rule):
    (one,) = [m for m in MUTANTS if m.name == name]
    with applied(one):
        engine = make_engine(
            target,
            make_draft_of(target, num_layers=2),
            num_draft_tokens=DRAFTS,
            max_num_seqs=64,
            max_num_batched_tokens=2048,
            num_pages=1024,
            max_model_len=32,
            has_one_shape=True,
        )
        if rule == "self":
            print(
                "RATE",
                acceptance_of(with_draft(engine, target), "block"),
                acceptance_of(engine, "block"),
            )
            return
        print("RATE", acceptance_of(engine, rule))
        with pytest.raises(AssertionError) as e:
            for controls, tokens in zip(
                CONTROLS, sample(engine, rule, 700), strict=True
            ):
                check_law(tokens, laws_of(next_logits, controls), (rule, controls))
        print(name, e.value)
