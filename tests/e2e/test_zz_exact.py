import pytest
from tests.e2e import test_distribution as td
from tests.e2e.test_distribution import target, next_logits, DRAFTS, CONTROLS, sample, check_law, laws_of
from tests.engines import *
from tests.mutants import MUTANTS, applied
@pytest.mark.parametrize("name,rule",[("block_uses_token_residual","block"),("reject_draws_from_target","standard"),("uniforms_keyed_by_position_only","block")])
def test_fails(target, next_logits, name, rule):
    (one,)=[m for m in MUTANTS if m.name==name]
    with applied(one):
        engine=make_engine(target, make_draft_of(target, num_layers=2), num_draft_tokens=DRAFTS, max_num_seqs=64,
        max_num_batched_tokens=2048, num_pages=1024, max_model_len=32, has_one_shape=True)
        other=make_micro(seed=8)
        for label, e, n in (("other", with_draft(engine, other),1000),("adverse", with_draft(engine, make_draft_of(target,num_layers=2,sign=-1.0)),1000),("near", engine,4000)):
            for controls, tokens in zip(CONTROLS, sample(e, rule, n), strict=True):
                try: check_law(tokens, laws_of(next_logits, controls), ""); r="survived"
                except AssertionError as err: r=str(err.args[0])
                print(name,label,n,controls,r, e.stats.acceptance_rate, flush=True)
