"""The methods of configs/ differ exactly as their papers say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.configs import differing, load, resolved, value
from studies import tables

from jaxrl_llm import config as config_lib
from jaxrl_llm.learner import make_algorithm
from jaxrl_llm.trainer.validation import validate

# Each removes one part of VAPO, as in the study.
ABLATIONS = (
  *("value pretraining", "decoupled GAE", "length-adaptive λ", "clip-higher"),
  *("token-level loss", "positive LM loss", "group sampling"),
)
# A method, the method it is based on, and the settings that differ.
RELATIVES = """\
cispo dapo method.use loss.clip_low schedule.dynamic_sampling \
  reward.overlong_buffer
dppo dr_grpo method.use loss.mode off_policy.proximal
dr_grpo grpo estimator.scale loss.mode loss.kl_coefficient
evpo vapo method.use
maxrl grpo method.use loss.kl_coefficient loss.mode reward.incorrect
mc_grpo grpo data.group_size estimator.center method.use \
  estimator.epsilon optimizer.policy.epochs optimizer.policy.mini_batch
ppo_ewma vapo method.use
reinforce_pp_baseline reinforce_pp estimator.center
sapo_gate grpo method.use loss.kl_coefficient
tppo vapo schedule.window
vc_ppo ppo value.pretrain_steps estimator.lambda_value estimator.normalize \
  loss.clip_value
"""


def without(part):
  """Returns the settings that remove a part in the study (built-in task)."""
  variants = {x.name: x.changes for x in tables.STUDIES["credit"].variants}
  own = variants[f"without {part}"].items() - variants["VAPO"].items()
  return {key: value(text) for key, text in own}


class TestAblations:
  @pytest.mark.parametrize("name", ABLATIONS)
  def test_changes_nothing_else(self, name):
    changes, vapo, ablated = without(name), load("vapo"), load("vapo")
    ablated.update_from_flattened_dict(changes)
    validate(ablated)
    before = resolved(vapo)
    changed = {key for key, new in changes.items() if before[key] != new}
    assert changed and differing(before, resolved(ablated)) == changed
    # The same number of responses, updates and rows.
    assert config_lib.batch_size(ablated) == config_lib.batch_size(vapo)

  def test_constant_lambda_is_of_the_paper(self):
    assert resolved(load("vapo"))["estimator.lambda_policy"] == 0.95

  def test_vapo_is_ppo_and_its_parts(self):
    """The defaults are neutral: VAPO's file lists all of its changes."""
    neutral = config_lib.scaled()[0]
    changed = {key for part in ABLATIONS for key in without(part)}
    # The token-level loss and the constant λ are neutral; the first is in the
    # file for the reader.
    changed -= {"loss.mode", "estimator.lambda_policy"}
    assert differing(resolved(load("vapo")), resolved(neutral)) == changed

  def test_ppo_is_the_defaults_up_to_its_habits(self):
    rest = differing(resolved(load("ppo")), resolved(config_lib.scaled()[0]))
    assert rest == {"estimator.normalize", "loss.clip_value", "loss.mode"}

  @pytest.mark.parametrize("row", RELATIVES.splitlines())
  def test_relatives_differ_in_what_their_papers_say(self, row):
    name, base, *keys = row.split()
    one, other = (resolved(load(n)) for n in (name, base))
    assert differing(one, other) == set(keys)


def test_cispo_bounds_its_weight_from_above_alone():
  loss = make_algorithm(load("cispo")).policy_loss
  old, ratio = jnp.zeros(3), jnp.array([0.01, 1.0, 100.0])

  def total(logprobs):
    inputs = {"logprobs": logprobs, "proximal_logprobs": old}
    return jnp.sum(loss(inputs | {"advantages": jnp.ones(3)}).loss)

  weights = -jax.grad(total)(jnp.log(ratio))
  np.testing.assert_allclose(weights, [0.01, 1.0, 1.28], rtol=1e-5)
