"""Estimators reject numbers out of range and inconsistent shapes."""

import numpy as np
import pytest

from jaxrl_llm import estimators

TOKENS, MASK, ROW = np.ones((2, 3)), np.ones((2, 3), bool), np.ones(3)
TWO, CUT = np.ones(2), np.ones(2, bool)
GAE = dict(gamma=1.0, lambda_=1.0)
GROUPS, ONE = np.zeros(3, np.int32), dict(num_groups=1)
UNIT = r"expected a number in \[0, 1\]"
CLIP = dict(clip_low=0.2, clip_high=0.2)

gae, egae = estimators.gae, estimators.egae
group, tokens = estimators.group_relative, estimators.token_group_relative
pivot, baseline = estimators.median_pivot, estimators.optimal_baseline
overlong = estimators.soft_overlong_punishment
lambda_of = estimators.length_adaptive_lambda
code_of = estimators.entropy_code
statistics = estimators.EntropyStatistics(*[np.float32(0.0)] * 4)

# An estimator, its arrays and settings, and a part of the error message.
CASES = [
  (gae, [TOKENS, np.ones((2, 4)), MASK], GAE, "shape"),
  (gae, [TOKENS, TOKENS, ROW], GAE, "shape"),
  (gae, [TOKENS, TOKENS, MASK], GAE | {"bootstrap_value": ROW}, "shape"),
  (gae, [TOKENS, TOKENS, MASK], GAE | {"gamma": TWO}, "not one number"),
  *(
    (gae, [TOKENS, TOKENS, MASK], GAE | {"lambda_": np.ones(shape)}, "lambda_")
    for shape in [(3,), (2, 2), (3, 1), (1, 2, 3)]
  ),
  (gae, [TOKENS, TOKENS, MASK], GAE | {"gamma": 1.1}, UNIT),
  (gae, [TOKENS, TOKENS, MASK], GAE | {"gamma": "1"}, f"gamma='1', {UNIT}"),
  (gae, [TOKENS * 1j, TOKENS, MASK], GAE, "token_rewards has complex numbers"),
  (gae, [TWO, TOKENS, MASK], GAE, "values has shape"),
  (gae, [TOKENS, TWO, MASK], GAE, "repeat values along the last axis"),
  (gae, [TOKENS, TWO[:, None], MASK], GAE, "repeat values along the last"),
  (gae, [TOKENS, TOKENS, MASK], GAE | {"lambda_": -0.1}, UNIT),
  (egae, [TOKENS, TOKENS, MASK, CUT], GAE | {"gamma": 1.5}, "gamma=1.5, exp"),
  (egae, [TOKENS, TOKENS, MASK, CUT], GAE | {"boundary": "last"}, "one of"),
  (
    egae,
    [TOKENS, TOKENS, MASK, CUT],
    GAE | {"boundary": "bootstrap"},
    "'bootstrap' needs next_values",
  ),
  (egae, [TOKENS, TOKENS, MASK, np.ones(3, bool)], GAE, "shape"),
  (egae, [TOKENS, TOKENS, MASK, CUT], GAE | {"next_values": ROW}, "shape"),
  (estimators.drop_tail, [MASK, CUT], {"tokens": -1}, "tokens=-1"),
  (estimators.drop_tail, [MASK, np.ones(3, bool)], {"tokens": 1}, "shape"),
  (estimators.boundary_error, [TOKENS, MASK, CUT, TOKENS], {}, "shape"),
  (group, [ROW, GROUPS], ONE | {"center": "max"}, "center='max', expected one"),
  (group, [ROW, GROUPS], ONE | {"scale": "var"}, "scale='var', expected one"),
  (group, [ROW, GROUPS], ONE | {"epsilon": -1.0}, "epsilon=-1.0"),
  (group, [ROW, GROUPS], {"num_groups": 0}, "num_groups=0"),
  (group, [TWO, GROUPS], ONE, "shape"),
  (group, [ROW, GROUPS], {"num_groups": 2.0}, "num_groups=2.0, expected a w"),
  (group, [ROW[:, None], GROUPS[:, None]], ONE, "rewards has shape"),
  (group, [ROW, np.zeros(3, np.float32)], ONE, "groups has float32, not int"),
  (tokens, [ROW, GROUPS, GROUPS], ONE | {"epsilon": -1.0}, "epsilon=-1.0"),
  (tokens, [ROW, GROUPS, GROUPS], ONE | {"limit": 0.0}, "limit=0.0"),
  (tokens, [ROW, GROUPS, GROUPS], {"num_groups": 0}, "num_groups=0"),
  (tokens, [ROW, GROUPS[:-1], GROUPS], ONE, "shape"),
  (pivot, [ROW, GROUPS], {"num_groups": 0}, "num_groups=0"),
  (pivot, [TWO, GROUPS], ONE, "shape"),
  (pivot, [ROW, ROW], ONE, "groups has float32, not integers"),
  (baseline, [ROW, ROW, ROW, GROUPS], {"num_groups": 0}, "num_groups=0"),
  (baseline, [ROW, TWO, ROW, GROUPS], ONE, "shape"),
  (overlong, [TWO], {"max_length": 10, "buffer": 0}, "buffer=0"),
  (overlong, [TWO], {"max_length": 10, "buffer": 11}, "buffer=11"),
  (overlong, [TWO], dict(max_length=10, buffer=5, factor=-1.0), "factor=-1.0"),
  *((lambda_of, [ROW], {"alpha": x}, "number in") for x in (0, -0.05, np.nan)),
  (estimators.penalize_kl, [TOKENS] * 4, {"coefficient": -0.1}, "nt=-0.1"),
  (
    estimators.penalize_kl,
    [TOKENS, TOKENS, ROW, MASK],
    {"coefficient": 0.1},
    "shape",
  ),
  (estimators.whiten, [ROW, MASK[0]], {"epsilon": -1.0}, "epsilon=-1.0"),
  (estimators.whiten, [TOKENS, MASK[0]], {"center": False}, "shape"),
  (estimators.entropy_statistics, [ROW, MASK[0]], {"quantile": 1.2}, "e=1.2"),
  (code_of, [ROW, MASK[0], statistics], {"sign": "other"}, "expected one of"),
  (code_of, [ROW, np.ones(4, bool), statistics], {}, "shape"),
  (estimators.adaptive_clip, [TWO], CLIP | {"clip_low": -0.1}, "low=-0.1"),
  (estimators.adaptive_clip, [TWO], CLIP | {"clip_high": -0.1}, "high=-0.1"),
  (estimators.redistribute, [TOKENS] * 3, CLIP | {"clip_high": -1.0}, "=-1.0"),
  (estimators.redistribute, [TOKENS] * 3, CLIP | {"clip_low": -1.0}, "=-1.0"),
  (estimators.redistribute, [TOKENS, ROW, TOKENS], CLIP, "shape"),
  (
    estimators.adaptive_temperature,
    [TWO],
    {"temperature": 1.0, "tau": 1.0},
    "tau=1.0",
  ),
]


@pytest.mark.parametrize(("estimator", "arrays", "settings", "said"), CASES)
def test_raises(estimator, arrays, settings, said):
  with pytest.raises((ValueError, AssertionError), match=said):
    estimator(*arrays, **settings)
