"""Parts of a recipe: the identity of each, packed rows, and one's own parts."""

import dataclasses
import functools
import importlib.util
import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run

from jaxrl_llm import config as config_lib
from jaxrl_llm import losses, metrics, validation
from jaxrl_llm.train import (
  advantages,
  build,
  experience,
  loop,
  packing,
  policy_losses,
  recipe,
)

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
ROWS, ROOM, GROUP = 12, 9, 4


def make_recipe(**changes):
  return recipe.make_recipe(tiny_run.make_config("none", **changes))


@functools.cache
def make_rollout():
  rollout = tiny_run.random_rollout(
    np.random.default_rng(3), rows=ROWS, room=ROOM, group_size=GROUP
  )
  full = np.arange(ROOM)[None] < rollout.lengths[:, None]
  return rollout.replace(
    behavior_logprobs=np.where(full, rollout.behavior_logprobs - 2.0, 0.0)
  )


def noise(seed):
  rng = np.random.default_rng(seed)
  return rng.normal(size=(ROWS, ROOM)).astype(np.float32)


def make_experience(made, *, old_logprobs=None):
  """Experience of one batch of ended responses, on the host."""
  rollout = make_rollout()
  correct = np.arange(ROWS) % 3 == 0
  if old_logprobs is None:
    old_logprobs = rollout.behavior_logprobs
  scores = experience.Scores(
    old_logprobs=old_logprobs.astype(np.float32),
    entropies=np.abs(noise(4)),
    ref_logprobs=rollout.behavior_logprobs + 0.1 * noise(5),
    values=noise(6),
    next_values=noise(7)[:, 0],
  )
  make = jax.jit(functools.partial(experience.make_experience, recipe=made))
  rewards = np.where(correct, 1.0, -1.0).astype(np.float32)
  judged = np.ones(ROWS, bool)
  return jax.device_get(make(rewards, correct, judged, rollout, scores))


@functools.cache
def make_batch():
  """One mini-batch whose rows hold several responses each."""
  (batch,) = packing.mini_batches(
    make_rollout(), size=ROWS, rng=None, capacity=40, rows=2
  )
  per_row = [np.unique(x[x > 0]).size for x in flat(batch.packed.segments)]
  assert max(per_row) > 2
  return batch


def flat(packed):
  """All rows of all micro-batches, [M, r, C] -> [M r, C]."""
  return np.reshape(packed, (-1, packed.shape[-1]))


def policy_batch(made, **settings):
  return experience.policy_batch(
    make_experience(made, **settings), make_batch(), recipe=made
  )


class TestIdentities:
  @pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
  @pytest.mark.parametrize("kind", ["truncate", "mask"])
  def test_correction_of_equal_logprobs(self, kind, level):
    made = make_recipe(off_policy__correction=kind, off_policy__level=level)
    plain = policy_batch(make_recipe())
    assert made.correction is not None
    chex.assert_trees_all_equal(policy_batch(made), plain)
    # And it is something else as soon as they differ.
    other = make_rollout().behavior_logprobs + 0.5
    changed = policy_batch(made, old_logprobs=other).columns["weights"]
    assert not np.array_equal(changed, plain.columns["weights"])

  @pytest.mark.parametrize("name", ["nll", "kl", "entropy"])
  def test_a_term_without_weight_is_absent(self, name):
    key = f"loss__{name}_coefficient"
    off = {"loss__nll_coefficient": 0.0}
    on = make_recipe(**off | {key: 0.25})
    assert list(on.terms) == [name]
    made = make_recipe(**off | {key: 0.0})
    assert made.terms == {}
    assert made.columns == ("old_logprobs", "advantages", "weights")
    assert not made.reference

  @pytest.mark.parametrize(
    ("part", "on"),
    [
      ("shape_rewards", {"reward__overlong_buffer": 4}),
      ("normalize", {"estimator__normalize": "whiten"}),
      ("normalize", {"estimator__normalize": "scale"}),
      ("kl_reward_coefficient", {"loss__kl_reward_coefficient": 0.1}),
      ("policy_masks", {"loss__overlong_filter": True}),
      ("policy_masks", {"estimator__tail_drop": 2}),
      ("correction", {"off_policy__correction": "truncate"}),
      ("step_scale", {"off_policy__ess_scale": True}),
      ("entropy_code", {"loss__name": "hapo"}),
    ],
  )
  def test_a_part_that_is_off_is_absent(self, part, on):
    assert getattr(make_recipe(**on), part)
    assert not getattr(make_recipe(), part)

  @pytest.mark.parametrize(
    "zero",
    [
      {"reward__overlong_factor": 0.0, "reward__overlong_buffer": 4},
      # Nothing was cut, nothing is overlong.
      {"estimator__tail_drop": 3},
      {"loss__overlong_filter": True},
    ],
  )
  def test_a_part_that_does_nothing_changes_no_bit(self, zero):
    chex.assert_trees_all_equal(
      make_experience(make_recipe(**zero)), make_experience(make_recipe())
    )

  def test_step_scale_of_equal_weights_is_one(self):
    made = make_recipe(off_policy__ess_scale=True)
    scale = policy_batch(made).step_scale
    assert scale.dtype == np.float32 and scale == 1.0
    other = make_rollout().behavior_logprobs + noise(8)
    assert 0 < policy_batch(made, old_logprobs=other).step_scale < 1
    assert policy_batch(make_recipe()).step_scale is None

  @pytest.mark.parametrize("correction", ["none", "truncate"])
  def test_interpolation_of_fresh_tokens_is_stored(self, correction):
    made = make_recipe(
      off_policy__proximal="interpolate", off_policy__correction=correction
    )
    stored = make_recipe(off_policy__proximal="stored")
    batch, plain = policy_batch(made), policy_batch(stored)
    assert not batch.columns["blend"].any()
    for name, column in plain.columns.items():
      np.testing.assert_array_equal(batch.columns[name], column)
    logprobs = flat(batch.columns["old_logprobs"])
    logprobs = jnp.asarray(logprobs + 0.3 * np.sin(np.arange(40.0))[None])

    def outputs(chosen, batch):
      columns = {k: flat(v) for k, v in batch.columns.items()}
      segments, mask = flat(batch.packed.segments), flat(batch.packed.mask)

      def loss(x):
        out = chosen.policy_loss(x, columns, segments, mask)
        return jnp.sum(columns["weights"] * out.loss), out

      return jax.jit(jax.grad(loss, has_aux=True))(logprobs)

    # Per token: the sum for the log may be formed in another order.
    one, other = outputs(made, batch), outputs(stored, plain)
    assert np.asarray(one[0]).any()
    chex.assert_trees_all_equal(one, other)

  def test_interpolation_moves_with_age(self):
    version = np.asarray([[2, 2, 1], [0, 2, 2]])
    mask = np.asarray([[True, True, True], [True, True, False]])
    np.testing.assert_allclose(
      experience.blend(version, mask),
      [[0.0, 0.0, 1 / 2], [2 / 3, 0.0, 0.0]],
      rtol=1e-6,
    )


class TestPackedRows:
  """A loss may not mix the responses that share a row."""

  @pytest.mark.parametrize(
    "name", [*policy_losses.POLICY_LOSSES, "interpolate"]
  )
  def test_equal_padded_rows(self, name):
    changes = {"loss__name": name}
    if name == "interpolate":
      changes = {"off_policy__proximal": name}
    made, batch = make_recipe(**changes), make_batch()
    mask = make_rollout().mask
    old = make_rollout().behavior_logprobs
    padded = {
      "old_logprobs": old,
      "advantages": noise(10),
      "blend": np.where(mask, 0.4, 0.0).astype(np.float32),
      "entropy_code": np.clip(noise(11), -1, 1) * mask,
    }
    logprobs = (old + 0.6 * noise(12)).astype(np.float32)
    scatter = lambda x: jnp.asarray(flat(batch.layout.scatter(x)))
    packed = {k: scatter(v[batch.rows]) for k, v in padded.items()}

    @jax.jit
    def on_rows(x):
      out = made.policy_loss(x, padded, None, mask)
      return jnp.sum(jnp.where(mask, out.loss, 0.0)), out

    @jax.jit
    def on_packed(x):
      here, segments = flat(batch.packed.mask), flat(batch.packed.segments)
      out = made.policy_loss(x, packed, segments, scatter(mask[batch.rows]))
      return jnp.sum(jnp.where(here, out.loss, 0.0)), out

    (_, expected), slope = jax.value_and_grad(on_rows, has_aux=True)(logprobs)
    (_, out), packed_slope = jax.value_and_grad(on_packed, has_aux=True)(
      scatter(logprobs[batch.rows])
    )
    rows = np.argsort(batch.rows)
    unpack = lambda x: batch.layout.gather(x)[rows]
    for field in ("loss", "ratio", "clipped_high", "clipped_low"):
      np.testing.assert_allclose(
        np.where(mask, unpack(getattr(out, field)), 0),
        np.where(mask, getattr(expected, field), 0),
        rtol=2e-6,
        atol=1e-6,
      )
    np.testing.assert_allclose(
      np.where(mask, unpack(packed_slope), 0),
      np.where(mask, slope, 0),
      rtol=2e-6,
      atol=1e-6,
    )
    assert np.asarray(expected.clipped_high)[mask].any() == (
      name != "policy_gradient"
    )

  def test_gspo_would_differ_without_segments(self):
    made, batch = make_recipe(loss__name="gspo"), make_batch()
    columns = {k: flat(v) for k, v in policy_batch(made).columns.items()}
    segments, mask = flat(batch.packed.segments), flat(batch.packed.mask)
    logprobs = columns["old_logprobs"] + 0.3 * np.sin(np.arange(40.0))[None]
    loss = jax.jit(made.policy_loss)
    mixed = loss(logprobs, columns, None, mask).ratio
    own = loss(logprobs, columns, segments, mask).ratio
    assert np.abs(own - mixed)[mask].max() > 0.01


@pytest.fixture
def registries(monkeypatch):
  """What a test registers is gone afterwards."""
  monkeypatch.setattr(validation, "_CHOICES", dict(validation._CHOICES))
  registries = (advantages.ADVANTAGES, policy_losses.POLICY_LOSSES)
  before, critics = [dict(r) for r in registries], set(validation.CRITICS)
  yield
  for registry, known in zip(registries, before):
    registry.clear()
    registry.update(known)
  validation.CRITICS.intersection_update(critics)


def centered(settings):
  """An estimator of one's own: the reward less the mean of the batch."""
  del settings
  return lambda episodes: advantages.per_token(
    advantages.outcome(episodes) - advantages.outcome(episodes).mean(),
    episodes,
  )


def unclipped(settings):
  """A loss of one's own: the surrogate without a bound."""
  del settings
  inf = float("inf")
  return lambda logprobs, columns, segments, mask: losses.clipped_policy_loss(
    logprobs,
    columns["old_logprobs"],
    columns["advantages"],
    clip_low=inf,
    clip_high=inf,
  )


@pytest.mark.usefixtures("registries")
class TestRegister:
  def test_own_parts_train(self, tmp_path):
    recipe.register_advantages("centered", centered)
    recipe.register_policy_loss("unclipped", unclipped)
    model = tiny_run.write_model(tmp_path / "tiny")
    job = build.make_job(
      tiny_run.make_config(
        model,
        estimator__name="centered",
        loss__name="unclipped",
        loss__nll_coefficient=0.0,
        value__pretrain_steps=0,
        run__samples_every=0,
      )
    )
    assert job.value is None
    seen = []

    def estimate(*arguments):
      seen.append((arguments[0], jax.device_get(job.estimate(*arguments))))
      return seen[-1][1]

    state = loop.start(job, None, None, None)
    before = jax.device_get(state.policy.params)
    row = loop.iterate(
      dataclasses.replace(job, estimate=estimate),
      state,
      metrics.PhaseTimer(),
      None,
    )
    ((rewards, credit),) = seen
    assert np.ptp(rewards) > 0
    np.testing.assert_allclose(
      credit.advantages[:, 0], rewards - rewards.mean(), atol=1e-6
    )
    moved = jax.tree.map(
      lambda a, b: np.abs(a - b).max(),
      before,
      jax.device_get(state.policy.params),
    )
    assert max(jax.tree.leaves(moved)) > 0
    assert row["policy/clip_fraction_high"] == 0
    assert row["policy/grad_norm"] > 0 and row["policy/skipped"] == 0

  def test_with_a_critic(self):
    recipe.register_advantages(
      "less_value",
      lambda settings: lambda e: e.token_rewards - e.values,
      critic=True,
    )
    made = make_recipe(estimator__name="less_value")
    assert made.returns is not None
    # The critic of a windowed run is what makes it possible.
    changes = {
      "estimator__name": "less_value",
      "schedule__name": "window",
      "schedule__window": 3,
    }
    config_lib.validate(tiny_run.make_config("none", **changes))

  @pytest.mark.parametrize(
    ("register", "name"),
    [
      (recipe.register_advantages, "gae"),
      (recipe.register_policy_loss, "clip"),
    ],
  )
  def test_a_taken_name_is_refused(self, register, name):
    with pytest.raises(ValueError, match=f"has a choice '{name}' already"):
      register(name, centered)
    register("new", centered)
    with pytest.raises(ValueError, match="has a choice 'new' already"):
      register("new", centered)


def test_the_registries_are_as_they_were():
  assert "new" not in validation._CHOICES["estimator.name"]
  assert not {"new", "centered", "less_value"} & set(advantages.ADVANTAGES)
  assert not {"new", "unclipped"} & set(policy_losses.POLICY_LOSSES)
  assert validation.CRITICS == {"gae"}


def load_config(name, preset=""):
  path = CONFIGS / f"{name}.py"
  spec = importlib.util.spec_from_file_location(f"config_{name}", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.get_config(preset)


def resolved(config):
  """Every key with its value, references followed."""
  config = config.copy_and_resolve_references()
  return {key: config_lib.get(config, key) for key in config_lib.keys(config)}


def differing(one, other):
  assert one.keys() == other.keys()
  return {key for key in one if one[key] != other[key]}


def described(made):
  """A recipe as plain values: functions by name and bound settings."""
  return {
    field.name: describe(getattr(made, field.name))
    for field in dataclasses.fields(made)
  }


def describe(part):
  if isinstance(part, functools.partial):
    bound = {k: describe(v) for k, v in part.keywords.items()}
    return (describe(part.func), tuple(map(describe, part.args)), bound)
  if isinstance(part, dict):
    return {k: describe(v) for k, v in part.items()}
  return part


# Each removes one part of VAPO: (its settings, what it changes in the recipe).
ABLATIONS = {
  "value pretraining": ({"value.pretrain_steps": 0}, set()),
  "decoupled GAE": (
    {
      "estimator.lambda_value": 0.95,
      "estimator.lambda_schedule": "constant",
    },
    {"advantages", "returns"},
  ),
  "length-adaptive GAE": (
    {"estimator.lambda_schedule": "constant"},
    {"advantages"},
  ),
  "clip-higher": ({"loss.clip_high": 0.2}, {"policy_loss"}),
  "token-level loss": (
    {"loss.mode": "seq-mean-token-mean"},
    {"loss_mode"},
  ),
  "positive example loss": (
    {"loss.nll_coefficient": 0.0},
    {"nll_coefficient", "terms"},
  ),
  "group sampling": (
    {"data.group_size": 1, "data.prompts_per_step": 32 * 16},
    set(),
  ),
}


class TestAblations:
  @pytest.mark.parametrize("name", ABLATIONS)
  def test_changes_nothing_else(self, name):
    changes, parts = ABLATIONS[name]
    vapo = load_config("vapo")
    ablated = load_config("vapo")
    ablated.update_from_flattened_dict(changes)
    config_lib.validate(ablated)
    assert differing(resolved(vapo), resolved(ablated)) == set(changes)
    one, other = (described(recipe.make_recipe(c)) for c in (vapo, ablated))
    assert differing(one, other) == parts
    # The same number of responses, updates and rows.
    assert config_lib.batch_size(ablated) == config_lib.batch_size(vapo)

  def test_constant_lambda_is_of_the_paper(self):
    assert resolved(load_config("vapo"))["estimator.lambda_policy"] == 0.95

  def test_together_they_leave_ppo(self):
    """Without its parts VAPO is PPO, up to PPO's own two habits."""
    config = load_config("vapo")
    for changes, _ in ABLATIONS.values():
      config.update_from_flattened_dict(changes)
    rest = differing(resolved(config), resolved(load_config("ppo")))
    assert rest == {"estimator.normalize", "loss.clip_value"}

  def test_vapo_is_the_defaults(self):
    default = config_lib.default_config()
    assert resolved(load_config("vapo")) == resolved(default)

  def test_tppo_is_vapo_in_windows(self):
    changed = differing(
      resolved(load_config("tppo")), resolved(load_config("vapo"))
    )
    assert changed == {"schedule.name", "schedule.window"}

  @pytest.mark.parametrize(
    ("name", "base", "keys"),
    [
      (
        "cispo",
        "dapo",
        {"loss.name", *{"schedule.dynamic_sampling", "reward.overlong_buffer"}},
      ),
      (
        "dr_grpo",
        "grpo",
        {"estimator.scale", "loss.mode", "loss.kl_coefficient"},
      ),
      ("reinforce_pp_baseline", "reinforce_pp", {"estimator.center"}),
      (
        "vc_ppo",
        "ppo",
        {
          "value.pretrain_steps",
          "estimator.lambda_value",
          "estimator.normalize",
          "loss.clip_value",
        },
      ),
    ],
  )
  def test_relatives_differ_in_what_their_papers_say(self, name, base, keys):
    one, other = (resolved(load_config(n)) for n in (name, base))
    assert differing(one, other) == keys
