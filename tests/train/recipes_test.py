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
import reference
import tiny_run

from jaxrl_llm import config as config_lib
from jaxrl_llm import estimators, losses, metrics, validation
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
      ("policy_masks", {"estimator__drop_pivot": True}),
      ("reference", {"loss__kl_coefficient": 0.1}),
      ("tempered", {"sampler__entropy_tau": 0.05}),
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

  def test_an_endless_horizon_is_a_constant_lambda_of_one(self):
    adaptive = make_recipe(estimator__alpha=float("inf"))
    constant = {"estimator__lambda_schedule": "constant"}
    made = make_recipe(estimator__lambda_policy=1.0, **constant)
    expected = make_experience(made)
    chex.assert_trees_all_equal(make_experience(adaptive), expected)
    other = make_experience(
      make_recipe(estimator__lambda_policy=0.9, **constant)
    )
    assert not np.array_equal(other.advantages, expected.advantages)

  @pytest.mark.parametrize("boundary", ["bootstrap", "zero"])
  def test_a_boundary_where_nothing_is_cut(self, boundary):
    chex.assert_trees_all_equal(
      make_experience(make_recipe(estimator__boundary=boundary)),
      make_experience(make_recipe()),
    )

  def test_infinite_bounds_are_none(self):
    rng = np.random.default_rng(13)
    logprobs, old, advantages = rng.normal(size=(3, 2, 40)).astype(np.float32)
    columns = {"old_logprobs": old, "advantages": advantages}
    ones = np.ones((2, 40), np.int32)

    def policy(dual_clip):
      made = make_recipe(loss__dual_clip=dual_clip)
      return jax.jit(made.policy_loss)(logprobs, columns, ones, ones > 0)

    def value(clip_value):
      made = make_recipe(loss__clip_value=clip_value)
      return jax.jit(made.value_loss)(logprobs, advantages, old)

    for loss, bound in ((policy, 1.5), (value, 0.2)):
      chex.assert_trees_all_equal(loss(float("inf")), loss(None))
      assert not np.array_equal(loss(bound).loss, loss(None).loss)

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


class TestHapo:
  """Its parts together, in the loss and in the sampler."""

  def inputs(self, seed=0):
    rng = np.random.default_rng(seed)
    old, advantages, moved = rng.normal(size=(3, 4, 40)).astype(np.float32)
    code = rng.uniform(-1, 1, (4, 40)).astype(np.float32)
    return old + 0.3 * moved, old, advantages, code

  def outputs(self, logprobs, old, advantages, code, name="hapo"):
    made = make_recipe(
      loss__name=name, loss__clip_high=0.2, loss__dual_clip=3.0
    )
    columns = {
      "old_logprobs": old,
      "advantages": advantages,
      "entropy_code": code,
    }
    ones = np.ones(old.shape, np.int32)

    def total(x):
      out = made.policy_loss(x, columns, ones, ones > 0)
      return out.loss.sum(), out

    return jax.jit(jax.grad(total, has_aux=True))(logprobs)

  def test_equals_reference(self):
    arrays = self.inputs()
    gradient, out = self.outputs(*arrays)
    slow = functools.partial(reference.hapo_loss, low=0.2, high=0.2, dual=3.0)
    expected = np.vectorize(slow)(*(x.astype(np.float64) for x in arrays))
    np.testing.assert_allclose(out.loss, expected, rtol=2e-5, atol=1e-6)
    # What the ratio decides about the advantage is not differentiated.
    free = ~np.asarray(out.clipped_high | out.clipped_low | out.dual_clipped)
    np.testing.assert_allclose(
      gradient, np.where(free, out.loss, 0.0), rtol=1e-5, atol=1e-6
    )
    assert free.any() and not free.all()

  def test_a_code_of_zero_is_the_clipped_loss(self):
    logprobs, old, advantages, code = self.inputs(1)
    arrays = logprobs, old, advantages, np.zeros_like(code)
    plain = self.outputs(*arrays, name="clip")
    chex.assert_trees_all_equal(self.outputs(*arrays), plain)
    changed = self.outputs(logprobs, old, advantages, code)
    assert not np.array_equal(changed[0], plain[0])

  def test_the_code_is_of_the_tokens_of_the_loss(self):
    rollout = make_rollout()
    made = make_recipe(loss__name="hapo")
    columns = make_experience(made).columns
    expected = reference.entropy_code(np.abs(noise(4)), rollout.mask, 0.8)
    np.testing.assert_allclose(columns["entropy_code"], expected, atol=2e-5)
    released = make_recipe(loss__name="hapo", loss__hapo_sign="released")
    np.testing.assert_allclose(
      make_experience(released).columns["entropy_code"],
      np.abs(expected),
      atol=2e-5,
    )

  def make_tempering(self, tau):
    sampler = tiny_run.make_config("none", sampler__entropy_tau=tau).sampler
    tempering = recipe.make_tempering(sampler)
    return tempering and jax.jit(tempering)

  def test_the_temperature_follows_the_batch_before(self):
    rng = np.random.default_rng(2)
    logits = 3.0 * rng.normal(size=(6, 19)).astype(np.float32)
    temperature = np.linspace(0.6, 1.4, 6, dtype=np.float32)
    before = np.abs(noise(14))
    mask = np.ones(before.shape, bool)
    statistics = estimators.entropy_statistics(before, mask)
    actual = self.make_tempering(0.05)(logits, temperature, statistics)
    # By hand, in float64.
    logs = np.sort(np.log(before.astype(np.float64)), axis=None)
    pivot = logs[int(np.ceil(0.8 * logs.size)) - 1]
    for i in range(6):
      scaled = logits[i].astype(np.float64) / temperature[i]
      law = np.exp(scaled - scaled.max())
      law /= law.sum()
      above = np.log(-np.sum(law * np.log(law))) - pivot
      code = above / abs((logs[-1] if above > 0 else logs[0]) - pivot)
      expected = temperature[i] * (1 + 0.05 * np.clip(code, -1, 1))
      np.testing.assert_allclose(actual[i], expected, rtol=1e-5)
    assert np.ptp(np.asarray(actual) / temperature) > 0.01

  def test_without_a_batch_before_it_stays_in_every_bit(self):
    logits = np.random.default_rng(3).normal(size=(6, 19)).astype(np.float32)
    temperature = np.linspace(0.6, 1.4, 6, dtype=np.float32)
    none = estimators.EntropyStatistics(*[np.float32(0.0)] * 4)
    actual = self.make_tempering(0.05)(logits, temperature, none)
    np.testing.assert_array_equal(actual, temperature)

  def test_without_tau_there_is_none(self):
    assert self.make_tempering(0.0) is None


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
