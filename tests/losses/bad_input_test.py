"""Losses reject numbers out of range and inconsistent shapes."""

import functools

import numpy as np
import pytest

from jaxrl_llm import losses
from jaxrl_llm.methods.hl_gauss import categorical_value_loss

TOKENS, MASK, ROW = np.ones((2, 3)), np.ones((2, 3), bool), np.ones(3)
ONE, TWO = np.ones(1), np.ones(2)
CLIP = dict(clip_low=0.2, clip_high=0.28)
LEVEL = dict(level="token", high=2.0)
RANGE = "expected a number in"

clip = losses.clipped_policy_loss
decoupled = losses.decoupled_policy_loss
value = losses.clipped_value_loss
categorical = functools.partial(categorical_value_loss, np.ones((2, 5)))

# A loss, its arrays and settings, and a part of the error message.
CASES = [
  (clip, [TOKENS, TOKENS, ROW], CLIP, "shape"),
  (clip, [ONE] * 3, CLIP | {"clip_low": -0.1}, RANGE),
  (clip, [ONE] * 3, CLIP | {"clip_high": -0.2}, RANGE),
  (clip, [ONE] * 3, CLIP | {"clip_high": np.nan}, RANGE),
  (clip, [ONE] * 3, CLIP | {"dual_clip": 1.0}, RANGE),
  (decoupled, [TOKENS] * 4, CLIP | {"cap": 0.5}, f"cap=0.5, {RANGE}"),
  (decoupled, [TOKENS] * 4, CLIP | {"floor": 1.5}, f"floor=1.5, {RANGE}"),
  (decoupled, [TOKENS] * 4, CLIP | {"clip_high": -1}, "clip_high=-1"),
  (decoupled, [TOKENS, TOKENS, ROW, TOKENS], CLIP, "shape"),
  (losses.cispo_loss, [ONE] * 3, {"clip_high": -0.1}, "clip_high=-0.1"),
  (losses.cispo_loss, [ONE] * 3, CLIP | {"clip_low": -0.1}, "clip_low=-0.1"),
  (losses.policy_gradient_loss, [TOKENS, TOKENS, ROW], {}, "shape"),
  (losses.rejection_policy_loss, [ONE] * 4, {"cap": 0.0}, "cap=0.0"),
  (losses.binary_kl, [TOKENS, ROW], {}, "shape"),
  (losses.gspo_loss, [*[TOKENS] * 3, MASK], CLIP | {"clip_low": -0.1}, "-0.1"),
  (losses.gspo_loss, [*[TOKENS] * 3, MASK[0]], CLIP, "shape"),
  (
    losses.gspo_loss,
    [*[TOKENS] * 3, MASK],
    CLIP | {"segments": np.zeros(3, int)},
    "shape",
  ),
  (losses.mixed_logprobs, [TOKENS, ROW, TOKENS], {}, "shape"),
  (losses.kl_k1, [TOKENS, ROW], {}, "shape"),
  (losses.kl_k3, [TOKENS, ROW], {}, "shape"),
  (value, [TWO, TWO], {"old_values": TWO}, "only old_values was given"),
  (value, [TWO, TWO], {"clip_value": 0.2}, "only clip_value was given"),
  (value, [TWO] * 2, dict(old_values=TWO, clip_value=-0.2), "clip_value=-0.2"),
  (value, [TWO, np.ones((2, 1))], {}, "shape"),
  (value, [TWO, TWO], {"old_values": ONE, "clip_value": 0.2}, "shape"),
  (categorical, [TWO], {"low": 1.0, "high": -1.0}, "high=-1.0"),
  (categorical, [TWO], {"low": -1.0, "high": 1.0, "sigma": 0.0}, "sigma=0.0"),
  (categorical, [np.ones(3)], {"low": -1.0, "high": 1.0}, "shape"),
  (losses.ewma_update, [TWO, 1.0, TWO], {"decay": 1.5}, "decay=1.5"),
  (losses.ewma_update, [TWO, 1.0, ROW], {"decay": 0.5}, "shape"),
  *(
    (function, [TOKENS, TOKENS, mask], LEVEL | changes, said)
    for function in (losses.truncated_importance, losses.masked_importance)
    for mask, changes, said in (
      (MASK, {"level": "row"}, "level='row', expected one of"),
      (MASK, {"high": 0.5}, f"high=0.5, {RANGE}"),
      (MASK, {"low": 1.5}, "low=1.5"),
      (MASK, {"low": -0.1}, "low=-0.1"),
      (MASK[0], {}, "shape"),
    )
  ),
]


@pytest.mark.parametrize(("loss", "arrays", "settings", "said"), CASES)
def test_raises(loss, arrays, settings, said):
  with pytest.raises((ValueError, AssertionError), match=said):
    loss(*arrays, **settings)
